#include "tests/conformance/random_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/reference/plain_dense.h"

namespace lmhead {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<double> ToDouble(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

class Generator {
 public:
  Generator(uint64_t seed, DType weight_dtype, DType hidden_dtype)
      : random_(seed), weight_dtype_(weight_dtype), hidden_dtype_(hidden_dtype) {}

  RandomProblem Make();

 private:
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>(0.0, 1.0)(random_) < probability;
  }
  float Uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(random_);
  }
  int64_t Integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Integer(0, static_cast<int64_t>(values.size()) - 1)];
  }
  std::vector<float> Normals(int64_t count, float std);
  std::vector<float> Uniforms(int64_t count, float low, float high);

  RandomHead MakeHead(int64_t vocab_size);
  void MaskSome(RandomHead* head);
  void AddCrossEntropy(RandomProblem* problem);
  void AddDistillation(RandomProblem* problem);
  void AddTeacherHead(RandomProblem* problem);
  void AddPolicy(RandomProblem* problem);
  ChunkData MakeChunk(const RandomProblem& problem, int64_t num_tokens);
  std::vector<int32_t> Targets(const RandomProblem& problem, int64_t num_tokens);
  void AddTopkTeacher(const RandomProblem& problem, ChunkData* chunk);
  void AddPolicyArrays(const RandomProblem& problem, ChunkData* chunk);
  void BreakSome(const RandomProblem& problem, ChunkData* chunk);

  std::mt19937_64 random_;
  const DType weight_dtype_;
  const DType hidden_dtype_;
  float magnitude_ = 1.0f;  // Of the logits, about.
};

std::vector<float> Generator::Normals(int64_t count, float std) {
  std::normal_distribution<float> normal(0.0f, std);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random_);
  return values;
}

std::vector<float> Generator::Uniforms(int64_t count, float low, float high) {
  std::vector<float> values(count);
  for (float& value : values) value = Uniform(low, high);
  return values;
}

RandomHead Generator::MakeHead(int64_t vocab_size) {
  RandomHead head;
  head.spec = {.name = "lm",
               .vocab_size = vocab_size,
               .hidden_size = OneOf<int64_t>({1, 3, 8, 16, 29, 64}),
               .weight_dtype = weight_dtype_,
               .has_bias = Chance(0.5),
               .batch_tokens = 128};
  if (Chance(0.3)) head.spec.logit_scale = Uniform(0.25f, 1.5f);
  if (Chance(0.3)) head.spec.softcap = Uniform(2.0f, 8.0f);
  const float std = 1.0f / std::sqrt(static_cast<float>(head.spec.hidden_size));
  head.weight = RoundedTo(weight_dtype_, Normals(vocab_size * head.spec.hidden_size, std));
  if (head.spec.has_bias) head.bias = Normals(vocab_size, 0.5f);
  return head;
}

// Leaves at least one id.
void Generator::MaskSome(RandomHead* head) {
  const int64_t vocab_size = head->spec.vocab_size;
  if (head->bias.empty() || vocab_size < 5) return;
  const int64_t kept = Integer(0, vocab_size - 1);
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (i != kept && Chance(0.2)) head->bias[i] = -kInfinity;
  }
  if (vocab_size > 2000) std::fill(head->bias.begin(), head->bias.begin() + 1100, -kInfinity);
  head->bias[kept] = 0.0f;
}

void Generator::AddCrossEntropy(RandomProblem* problem) {
  LossRecipe& recipe = problem->recipe;
  if (Chance(0.4)) recipe.label_smoothing = OneOf({0.05f, 0.1f, 0.3f});
  if (Chance(0.3)) recipe.z_loss = OneOf({1e-4f, 1e-2f});
  if (Chance(0.3)) recipe.class_weights = Uniforms(problem->head.spec.vocab_size, 0.25f, 2.0f);
}

void Generator::AddTeacherHead(RandomProblem* problem) {
  DistillationSpec& spec = *problem->recipe.distillation;
  const int64_t vocab_size = problem->head.spec.vocab_size;
  int64_t teacher_vocab_size = vocab_size;
  if (Chance(0.4) && vocab_size >= 5) {
    const bool larger = Chance(0.5);
    teacher_vocab_size = larger ? vocab_size + Integer(1, 40) : vocab_size - Integer(1, 3);
    const bool pad_is_finite = spec.divergence == Divergence::kJsd ||
                               larger == (spec.divergence == Divergence::kReverseKl);
    spec.vocabulary =
        pad_is_finite && Chance(0.5) ? TeacherVocabulary::kPad : TeacherVocabulary::kCommon;
  }
  problem->teacher = MakeHead(teacher_vocab_size);
  HeadSpec& teacher = problem->teacher->spec;
  teacher.name = "teacher";
  teacher.schedule = Schedule::kEval;
  problem->head.spec.teacher_hidden_size = teacher.hidden_size + (Chance(0.3) ? 5 : 0);
  if (teacher_vocab_size == vocab_size) return;
  const int64_t partition = std::max(vocab_size, teacher_vocab_size);
  problem->head.spec.partition_vocab_size = teacher.partition_vocab_size = partition;
}

void Generator::AddDistillation(RandomProblem* problem) {
  DistillationSpec& spec = problem->recipe.distillation.emplace();
  const int64_t vocab_size = problem->head.spec.vocab_size;
  spec.divergence = OneOf({Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd,
                           Divergence::kTopkForwardKl});
  if (Chance(0.5)) spec.kl_temperature = Uniform(0.5f, 3.0f);
  spec.scale_by_temperature_squared = Chance(0.5);
  spec.divergence_weight = Chance(0.5) ? 1.0f : Uniform(0.1f, 2.0f);
  spec.teacher_hidden_dtype = hidden_dtype_;
  if (spec.divergence == Divergence::kJsd) spec.jsd_beta = Uniform(0.05f, 0.95f);
  if (Chance(0.5)) {
    spec.cross_entropy_weight = Uniform(0.1f, 1.0f);
    AddCrossEntropy(problem);
  }
  if (spec.divergence != Divergence::kTopkForwardKl) {
    AddTeacherHead(problem);
    // Masks of one side that the other lacks make a KL infinite; JSD takes any.
    if (spec.divergence != Divergence::kReverseKl && Chance(0.3)) MaskSome(&*problem->teacher);
    if (spec.divergence != Divergence::kForwardKl && Chance(0.3)) MaskSome(&problem->head);
    return;
  }
  spec.teacher_hidden_dtype = DType::kFloat32;
  spec.topk_mass = OneOf({TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail});
  spec.top_k = static_cast<int32_t>(Integer(1, std::min<int64_t>(vocab_size, 9)));
}

void Generator::AddPolicy(RandomProblem* problem) {
  PolicySpec& spec = problem->recipe.policy.emplace();
  if (Chance(0.4)) return;
  spec.kind = PolicyKind::kClipped;
  spec.clip_low = OneOf({0.0f, 0.2f});
  spec.clip_high = OneOf({0.0f, 0.2f, 0.28f});
  if (Chance(0.5)) spec.entropy_coefficient = Uniform(0.001f, 0.1f);
  if (Chance(0.5)) spec.reference_kl_coefficient = Uniform(0.01f, 0.2f);
  if (Chance(0.4)) spec.dual_clip = 3.0f;
}

std::vector<int32_t> Generator::Targets(const RandomProblem& problem, int64_t num_tokens) {
  const std::vector<float>& bias = problem.head.bias;
  const double ignored = OneOf({0.0, 0.2, 0.2, 1.0});
  std::vector<int32_t> targets(num_tokens);
  for (int32_t& target : targets) {
    do {
      target = static_cast<int32_t>(Integer(0, problem.head.spec.vocab_size - 1));
    } while (!bias.empty() && bias[target] == -kInfinity);
    if (Chance(ignored)) target = problem.recipe.ignore_index;
  }
  return targets;
}

// A teacher's k likeliest ids, in any order; sometimes a shorter list.
void Generator::AddTopkTeacher(const RandomProblem& problem, ChunkData* chunk) {
  const int32_t top_k = problem.recipe.teacher_top_k();
  const int64_t vocab_size = problem.head.spec.vocab_size;
  for (int64_t token = 0; token < chunk->num_tokens(); ++token) {
    const std::vector<float> logits = Normals(vocab_size, 2.0f);
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    std::vector<int32_t> order(vocab_size);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                      [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    const bool shorter = top_k > 1 && Chance(0.2);
    std::shuffle(order.begin(), order.begin() + top_k, random_);
    for (int32_t k = 0; k < top_k; ++k) {
      chunk->teacher_topk_ids.push_back(order[k]);
      const auto logprob = static_cast<float>(logits[order[k]] - std::log(sum));
      chunk->teacher_topk_logprobs.push_back(shorter && k + 1 == top_k ? -kInfinity : logprob);
    }
  }
}

void Generator::AddPolicyArrays(const RandomProblem& problem, ChunkData* chunk) {
  const PolicySpec& spec = *problem.recipe.policy;
  const int64_t num_tokens = chunk->num_tokens();
  if (spec.kind == PolicyKind::kCoefficients) {
    chunk->logprob_grad = Normals(num_tokens, 1.0f);
    chunk->entropy_grad = Normals(num_tokens, 0.1f);
  } else {
    chunk->advantage = Normals(num_tokens, 1.0f);
    reference::Recipe plain;  // For the log-probabilities alone.
    plain.ignore_index = problem.recipe.ignore_index;
    plain.temperature = problem.recipe.temperature;
    const std::vector<double> logprob =
        reference::ComputeLoss(problem.head.ToReference(), plain, TokensOf(*chunk)).logprob;
    for (int64_t token = 0; token < num_tokens; ++token) {
      const auto near = static_cast<float>(logprob[token]);
      // Far from the clips at 0, 0.2 and 0.28 and at ratio 3, so that a rounding decides nothing.
      chunk->old_logprob.push_back(near - OneOf({-1.5f, -0.6f, -0.1f, 0.1f, 0.7f, 1.5f}));
      if (spec.reference_kl_coefficient == 0.0f) continue;
      chunk->reference_logprob.push_back(near + Uniform(-2.0f, 2.0f));
    }
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (chunk->targets[token] != problem.recipe.ignore_index) continue;
    for (std::vector<float>* values :
         {&chunk->logprob_grad, &chunk->entropy_grad, &chunk->old_logprob, &chunk->advantage,
          &chunk->reference_logprob}) {
      if (!values->empty()) (*values)[token] = OneOf({0.0f, kNan});  // Nobody's.
    }
  }
}

// Puts a NaN or an infinity into some row.
void Generator::BreakSome(const RandomProblem& problem, ChunkData* chunk) {
  if (!Chance(0.15)) return;
  const bool of_teacher = !chunk->teacher_hidden_states.empty() && Chance(0.5);
  std::vector<float>& values = of_teacher ? chunk->teacher_hidden_states : chunk->hidden_states;
  values[Integer(0, static_cast<int64_t>(values.size()) - 1)] =
      OneOf({kNan, kInfinity, -kInfinity});
}

ChunkData Generator::MakeChunk(const RandomProblem& problem, int64_t num_tokens) {
  const int64_t hidden_size = problem.head.spec.hidden_size;
  ChunkData chunk;
  chunk.hidden_states = RoundedTo(hidden_dtype_, Normals(num_tokens * hidden_size, magnitude_));
  chunk.targets = Targets(problem, num_tokens);
  chunk.grad_scale = OneOf({1.0f, 0.125f, 2.5f});
  if (problem.recipe.token_weights) {
    chunk.token_weights = Uniforms(num_tokens, 0.0f, 2.0f);
    if (Chance(0.5)) chunk.token_weights[0] = 0.0f;
  }
  if (problem.recipe.per_token_temperature) {
    chunk.token_temperature = Uniforms(num_tokens, 0.5f, 2.0f);
  }
  if (problem.teacher.has_value()) {
    chunk.teacher_hidden_states = RoundedTo(
        hidden_dtype_, Normals(num_tokens * problem.teacher->spec.hidden_size, magnitude_));
  }
  if (problem.recipe.teacher_top_k() > 0) AddTopkTeacher(problem, &chunk);
  if (problem.recipe.policy.has_value()) AddPolicyArrays(problem, &chunk);
  BreakSome(problem, &chunk);
  return chunk;
}

RandomProblem Generator::Make() {
  magnitude_ = OneOf({0.1f, 1.0f, 1.0f, 1.0f, 4.0f, 16.0f, 2048.0f});
  const int64_t vocab_size = Chance(0.2) ? OneOf<int64_t>({1009, 1031, 2053})
                                         : OneOf<int64_t>({2, 3, 5, 31, 37, 131, 257});
  RandomProblem problem;
  problem.head = MakeHead(vocab_size);
  LossRecipe& recipe = problem.recipe;
  if (Chance(0.3)) recipe.ignore_index = static_cast<int32_t>(OneOf<int64_t>({-1, 0, vocab_size}));
  if (Chance(0.3)) recipe.temperature = Uniform(0.5f, 2.0f);
  recipe.per_token_temperature = Chance(0.2);
  recipe.token_weights = Chance(0.5);
  switch (Integer(0, 4)) {
    case 0:
      AddCrossEntropy(&problem);
      if (Chance(0.4)) MaskSome(&problem.head);
      break;
    case 1:
      AddPolicy(&problem);
      if (Chance(0.4)) MaskSome(&problem.head);
      break;
    default:
      AddDistillation(&problem);
  }
  problem.top_k =
      static_cast<int32_t>(Chance(0.5) ? Integer(1, std::min<int64_t>(vocab_size, 8)) : int64_t{0});
  problem.head.spec.top_k_max = std::max(problem.top_k, recipe.teacher_top_k());
  const int64_t num_chunks = Integer(1, 3);
  for (int64_t i = 0; i < num_chunks; ++i) {
    problem.chunks.push_back(MakeChunk(problem, OneOf<int64_t>({1, 1, 2, 7, 13})));
  }
  return problem;
}

}  // namespace

reference::Head RandomHead::ToReference() const {
  return {.vocab_size = spec.vocab_size,
          .hidden_size = spec.hidden_size,
          .weight = ToDouble(weight),
          .bias = ToDouble(bias),
          .logit_scale = spec.logit_scale,
          .softcap = spec.softcap};
}

std::optional<reference::Head> RandomProblem::TeacherHead() const {
  if (!teacher.has_value()) return std::nullopt;
  return teacher->ToReference();
}

reference::Result RandomProblem::Expected(const ChunkData& chunk) const {
  const std::optional<reference::Head> teacher_head = TeacherHead();
  return reference::ComputeLoss(head.ToReference(), reference::Recipe(recipe), TokensOf(chunk),
                                teacher_head.has_value() ? &*teacher_head : nullptr, top_k);
}

reference::Result RandomProblem::PlainDense(const ChunkData& chunk, DType logits_dtype) const {
  const std::optional<reference::Head> teacher_head = TeacherHead();
  return reference::ComputePlainDense(head.ToReference(), reference::Recipe(recipe),
                                      TokensOf(chunk), logits_dtype,
                                      teacher_head.has_value() ? &*teacher_head : nullptr, top_k);
}

std::string RandomProblem::Describe() const {
  const HeadSpec& spec = head.spec;
  std::string text = absl::StrCat("head ", spec.vocab_size, " x ", spec.hidden_size,
                                  spec.has_bias ? " with bias" : "", ", scale ", spec.logit_scale,
                                  ", softcap ", spec.softcap, "; temperature ", recipe.temperature,
                                  recipe.per_token_temperature ? " or the token's" : "");
  if (recipe.policy.has_value()) {
    absl::StrAppend(&text, "; policy kind ", static_cast<int>(recipe.policy->kind), ", clip ",
                    recipe.policy->clip_low, " ", recipe.policy->clip_high, ", dual ",
                    recipe.policy->dual_clip, ", entropy ", recipe.policy->entropy_coefficient,
                    ", reference ", recipe.policy->reference_kl_coefficient);
  } else {
    absl::StrAppend(&text, "; smoothing ", recipe.label_smoothing, ", z-loss ", recipe.z_loss,
                    recipe.class_weights.empty() ? "" : ", class weights");
  }
  if (recipe.distillation.has_value()) {
    const DistillationSpec& d = *recipe.distillation;
    absl::StrAppend(&text, "; divergence ", static_cast<int>(d.divergence), ", temperature ",
                    d.kl_temperature, ", weights ", d.cross_entropy_weight, " ",
                    d.divergence_weight, ", beta ", d.jsd_beta, ", vocabulary ",
                    static_cast<int>(d.vocabulary), ", top k ", d.top_k, ", mass ",
                    static_cast<int>(d.topk_mass));
  }
  if (teacher.has_value()) {
    absl::StrAppend(&text, "; teacher ", teacher->spec.vocab_size, " x ",
                    teacher->spec.hidden_size);
  }
  absl::StrAppend(&text, "; top-k outputs ", top_k, "; rows");
  for (const ChunkData& chunk : chunks) absl::StrAppend(&text, " ", chunk.num_tokens());
  return text;
}

double RandomProblem::LeastTemperature() const {
  double least = recipe.temperature;
  if (recipe.distillation.has_value()) {
    least = std::min<double>(least, recipe.distillation->kl_temperature);
  }
  for (const ChunkData& chunk : chunks) {
    for (const float value : chunk.token_temperature) least = std::min<double>(least, value);
  }
  return least;
}

double RandomProblem::LargestLogit() const {
  double largest = 0.0;
  const auto look = [&](const RandomHead& of, const std::vector<float>& hidden_states) {
    const int64_t cols = of.spec.hidden_size;
    for (size_t start = 0; start + cols <= hidden_states.size(); start += cols) {
      for (int64_t j = 0; j < of.spec.vocab_size; ++j) {
        double sum = 0.0;  // Of magnitudes: each is rounded on its own.
        for (int64_t h = 0; h < cols; ++h) {
          sum += std::fabs(hidden_states[start + h] * of.weight[j * cols + h]);
        }
        if (std::isfinite(sum)) largest = std::max(largest, sum * std::fabs(of.spec.logit_scale));
      }
    }
  };
  for (const ChunkData& chunk : chunks) {
    look(head, chunk.hidden_states);
    if (teacher.has_value()) look(*teacher, chunk.teacher_hidden_states);
  }
  return largest / LeastTemperature();
}

double RandomProblem::SizeOf(const std::string& output) const {
  double num_tokens = 0.0;
  double grad_scale = 0.0;
  double hidden_squares = 0.0;
  for (const ChunkData& chunk : chunks) {
    num_tokens += static_cast<double>(chunk.num_tokens());
    grad_scale = std::max<double>(grad_scale, chunk.grad_scale);
    for (const float value : chunk.hidden_states) {
      if (std::isfinite(value)) hidden_squares += static_cast<double>(value) * value;
    }
  }
  if (!output.starts_with("grad")) return std::sqrt(num_tokens);
  const double derivative = grad_scale * std::fabs(head.spec.logit_scale) / LeastTemperature();
  if (output == "grad_weight") return derivative * std::sqrt(hidden_squares);
  return derivative * std::sqrt(num_tokens);  // Rows of the weight have norms of about 1.
}

RandomProblem MakeRandomProblem(uint64_t seed, DType weight_dtype, DType hidden_dtype) {
  return Generator(seed, weight_dtype, hidden_dtype).Make();
}

}  // namespace lmhead
