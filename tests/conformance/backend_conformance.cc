#include "tests/conformance/backend_conformance.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "bench/golden_case.h"
#include "kernels/reference/compare.h"
#include "kernels/reference/reference.h"
#include "proto/types/check.h"
#include "tests/conformance/compare.h"
#include "tests/util/golden_paths.h"

namespace lmhead {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Tiny, ragged, prime, and wider than a vocabulary tile of the CPU backend (1024 columns).
constexpr Shape kShapes[] = {{1, 8, 5}, {7, 16, 37}, {64, 32, 257}, {33, 48, 1009}, {24, 16, 2053}};
constexpr Shape kRagged = {24, 16, 2053};

const LossRecipe kPlain;

bool IsTrainable(Schedule schedule) {
  return schedule == Schedule::kRetain || schedule == Schedule::kRecompute;
}

// Sums of vectors of equal length.
std::vector<double> Sum(const std::vector<reference::Result>& results,
                        std::vector<double> reference::Result::*member) {
  std::vector<double> sum((results[0].*member).size());
  for (const reference::Result& result : results) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += (result.*member)[i];
  }
  return sum;
}

// `magnitude` is that of the terms of the sums of losses: of both signs, they may cancel. `plain`
// are the yardstick's sums, of which twice the error is allowed, too; or null.
void ExpectSums(const LossSums& got, const LossSums& want, double tolerance, double magnitude,
                const LossSums* plain) {
  EXPECT_EQ(got.num_tokens, want.num_tokens);
  EXPECT_EQ(got.num_valid_tokens, want.num_valid_tokens);
  EXPECT_EQ(got.num_nonfinite_rows, want.num_nonfinite_rows);
  const auto near = [&](double LossSums::*sum, double least, const char* what) {
    const double wanted = want.*sum;
    if (got.*sum == wanted) return;  // Infinities too.
    const double of_plain = plain != nullptr ? 2.0 * std::fabs(plain->*sum - wanted) : 0.0;
    EXPECT_NEAR(got.*sum, wanted,
                std::max(of_plain, tolerance * std::max(least, std::fabs(wanted))))
        << what;
  };
  const double least = std::max(1.0, magnitude);
  near(&LossSums::loss_sum, least, "loss_sum");
  near(&LossSums::cross_entropy_sum, least, "cross_entropy_sum");
  near(&LossSums::z_loss_sum, 1.0, "z_loss_sum");
  near(&LossSums::weight_sum, 1.0, "weight_sum");
  near(&LossSums::entropy_sum, 1.0, "entropy_sum");
  near(&LossSums::divergence_sum, least, "divergence_sum");
  near(&LossSums::policy_sum, least, "policy_sum");
  near(&LossSums::dropped_teacher_mass_sum, 1.0, "dropped_teacher_mass_sum");
  near(&LossSums::old_policy_kl_sum, 1.0, "old_policy_kl_sum");
}

// The chunk with its hidden states rounded, as a bfloat16 head takes them.
ChunkData InDType(ChunkData chunk, DType dtype) {
  chunk.hidden_states = RoundedTo(dtype, chunk.hidden_states);
  chunk.teacher_hidden_states = RoundedTo(dtype, chunk.teacher_hidden_states);
  return chunk;
}

// Of what is finite.
double SumOfMagnitudes(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) sum += std::fabs(value);
  }
  return sum;
}

template <typename T>
bool AllZero(const std::vector<T>& values) {
  return std::all_of(values.begin(), values.end(), [](T value) { return value == T{0}; });
}

template <typename T>
void Append(std::vector<T>* to, const std::vector<T>& from) {
  to->insert(to->end(), from.begin(), from.end());
}

}  // namespace

// --- The fixture -------------------------------------------------------------------------------

std::vector<ConformanceCase> CasesOf(const BackendUnderTest& backend, DType bfloat16_head_logits) {
  std::vector<ConformanceCase> cases;
  for (const Schedule schedule :
       {Schedule::kEval, Schedule::kFrozen, Schedule::kRetain, Schedule::kRecompute}) {
    for (const DType weight : {DType::kFloat32, DType::kBFloat16}) {
      for (const DType hidden : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        if (backend.is_group() && hidden != weight) continue;
        cases.push_back(
            {.backend = backend,
             .schedule = schedule,
             .weight_dtype = weight,
             .hidden_dtype = hidden,
             .logits_dtype = weight == DType::kBFloat16 ? bfloat16_head_logits : DType::kFloat32});
      }
    }
  }
  return cases;
}

std::vector<ConformanceCase> TrainingCasesOf(const BackendUnderTest& backend,
                                             DType bfloat16_head_logits) {
  std::vector<ConformanceCase> cases = CasesOf(backend, bfloat16_head_logits);
  std::erase_if(cases, [](const ConformanceCase& c) { return !IsTrainable(c.schedule); });
  return cases;
}

void PrintTo(const ConformanceCase& c, std::ostream* out) {
  *out << c.backend.name << " " << ScheduleName(c.schedule) << ", weight "
       << DTypeName(c.weight_dtype) << ", hidden " << DTypeName(c.hidden_dtype) << ", "
       << c.backend.num_ranks << " ranks, " << c.backend.num_replicas << " replicas";
}

std::string CaseName(const testing::TestParamInfo<ConformanceCase>& info) {
  const ConformanceCase& c = info.param;
  const int32_t num_replicas = c.backend.num_replicas;
  return absl::StrCat(std::string(ScheduleName(c.schedule)), "_weight_",
                      std::string(DTypeName(c.weight_dtype)), "_hidden_",
                      std::string(DTypeName(c.hidden_dtype)),
                      c.backend.is_group() ? absl::StrCat("_ranks_", c.backend.num_ranks) : "",
                      num_replicas > 1 ? absl::StrCat("_replicas_", num_replicas) : "");
}

std::vector<GoldenConformanceCase> GoldenCasesOf(const BackendUnderTest& backend,
                                                 DType bfloat16_head_logits) {
  std::vector<GoldenConformanceCase> cases;
  for (const ConformanceCase& c : CasesOf(backend, bfloat16_head_logits)) {
    if (c.hidden_dtype != DType::kFloat32 && !backend.is_group()) continue;
    for (const std::string& path : GoldenPaths()) cases.push_back({c, path});
  }
  return cases;
}

std::string GoldenCaseName(const testing::TestParamInfo<GoldenConformanceCase>& info) {
  return absl::StrCat(CaseName({info.param.conformance, 0}), "_", GoldenTestName(info.param.path));
}

HeadSpec BackendConformance::Spec(const Shape& shape) const {
  const bool trainable = IsTrainable(GetParam().schedule);
  return {.name = "lm",
          .vocab_size = shape.vocab_size,
          .hidden_size = shape.hidden_size,
          .weight_dtype = GetParam().weight_dtype,
          .trainable = trainable,
          .optimizer = {.kind = trainable ? OptimizerKind::kSgd : OptimizerKind::kNone},
          .schedule = GetParam().schedule,
          .batch_tokens = 128};
}

std::unique_ptr<Rig> BackendConformance::MakeRig(const HeadSpec& spec) {
  auto rig = std::make_unique<Rig>(GetParam().backend, spec, GetParam().hidden_dtype);
  const float std = 2.0f / std::sqrt(static_cast<float>(spec.hidden_size));
  rig->Write(TensorKind::kWeight,
             RoundedTo(spec.weight_dtype, Normals(spec.vocab_size * spec.hidden_size, std)));
  if (spec.has_bias) rig->Write(TensorKind::kBias, Normals(spec.vocab_size, 0.5f));
  return rig;
}

ChunkData BackendConformance::MakeChunk(const HeadSpec& spec, int64_t num_tokens) {
  ChunkData chunk;
  chunk.hidden_states =
      RoundedTo(GetParam().hidden_dtype, Normals(num_tokens * spec.hidden_size, 1.0f));
  std::uniform_int_distribution<int32_t> target(0, static_cast<int32_t>(spec.vocab_size) - 1);
  for (int64_t i = 0; i < num_tokens; ++i) {
    chunk.targets.push_back(i % 5 == 3 ? kDefaultIgnoreIndex : target(random_));
  }
  chunk.token_weights = Uniforms(num_tokens, 0.0f, 2.0f);
  chunk.grad_scale = 1.5f;
  return chunk;
}

ChunkData BackendConformance::MakeChunk(Rig* rig, const LossRecipe& recipe, int64_t num_tokens) {
  ChunkData chunk = MakeChunk(rig->spec(), num_tokens);
  if (recipe.has_teacher_head()) {
    chunk.teacher_hidden_states =
        RoundedTo(recipe.distillation->teacher_hidden_dtype,
                  Normals(num_tokens * rig->teacher()->spec().hidden_size, 1.0f));
  }
  if (recipe.teacher_top_k() > 0) AddTopkTeacher(rig->spec(), recipe.teacher_top_k(), &chunk);
  if (recipe.policy.has_value()) AddPolicyArrays(rig, recipe, &chunk);
  return chunk;
}

// Distinct ids from a random place on; together 0.9 of the teacher's mass.
void BackendConformance::AddTopkTeacher(const HeadSpec& spec, int32_t top_k, ChunkData* chunk) {
  std::uniform_int_distribution<int64_t> start(0, spec.vocab_size - 1);
  for (int64_t token = 0; token < chunk->num_tokens(); ++token) {
    const int64_t first = start(random_);
    std::vector<float> mass = Uniforms(top_k, 0.1f, 1.0f);
    const float sum = std::accumulate(mass.begin(), mass.end(), 0.0f);
    for (int32_t k = 0; k < top_k; ++k) {  // 7 divides no vocabulary here.
      chunk->teacher_topk_ids.push_back(static_cast<int32_t>((first + 7 * k) % spec.vocab_size));
      chunk->teacher_topk_logprobs.push_back(std::log(0.9f * mass[k] / sum));
    }
  }
}

// Ratios far from where a clip begins.
void BackendConformance::AddPolicyArrays(Rig* rig, const LossRecipe& recipe, ChunkData* chunk) {
  const int64_t num_tokens = chunk->num_tokens();
  if (recipe.policy->kind == PolicyKind::kCoefficients) {
    chunk->logprob_grad = Normals(num_tokens, 1.0f);
    chunk->entropy_grad = Normals(num_tokens, 0.2f);
    return;
  }
  chunk->advantage = Normals(num_tokens, 1.0f);
  LossRecipe plain;
  plain.temperature = recipe.temperature;
  const std::vector<double> logprob = rig->Expected(plain, *chunk).logprob;
  constexpr float kLogRatios[] = {-1.5f, -0.5f, -0.05f, 0.0f, 0.05f, 0.5f, 1.5f};
  for (int64_t token = 0; token < num_tokens; ++token) {
    const auto near = static_cast<float>(logprob[token]);
    chunk->old_logprob.push_back(near - kLogRatios[token % 7]);
    if (recipe.policy->reference_kl_coefficient == 0.0f) continue;
    chunk->reference_logprob.push_back(near + 0.3f * static_cast<float>(token % 5 - 2));
  }
}

void BackendConformance::AddTeacher(Rig* rig, int64_t vocab_size) {
  const HeadSpec spec = {.name = "teacher",
                         .vocab_size = vocab_size,
                         .hidden_size = rig->spec().teacher_hidden_size,
                         .weight_dtype = GetParam().weight_dtype,
                         .has_bias = true,
                         .logit_scale = 0.75f,
                         .softcap = 6.0f,
                         .schedule = Schedule::kEval,
                         .batch_tokens = rig->spec().batch_tokens,
                         .partition_vocab_size = rig->spec().partition_vocab_size};
  HeadUnderTest& teacher = rig->AddTeacher(spec);
  const float std = 2.0f / std::sqrt(static_cast<float>(spec.hidden_size));
  teacher.Write(TensorKind::kWeight,
                RoundedTo(spec.weight_dtype, Normals(vocab_size * spec.hidden_size, std)));
  teacher.Write(TensorKind::kBias, Normals(vocab_size, 0.5f));
}

std::vector<float> BackendConformance::Normals(int64_t count, float std) {
  std::normal_distribution<float> normal(0.0f, std);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random_);
  return values;
}

std::vector<float> BackendConformance::Uniforms(int64_t count, float low, float high) {
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(random_);
  return values;
}

// What logits of bfloat16 do to a divergence or to the probability of a certain token depends on
// the inputs: there the yardstick says what is allowed, where that is more than the table.
double BackendConformance::LimitOf(double tolerance, const std::vector<double>& want,
                                   const std::vector<double>& plain) const {
  if (GetParam().logits_dtype == DType::kFloat32 || plain.empty()) return tolerance;
  return std::max(tolerance, 2.0 * RelativeError(plain, want));
}

void BackendConformance::ExpectAnswer(const ChunkAnswer& answer, const reference::Result& want,
                                      double largest_logit, const reference::Result& plain) {
  const Tolerances& tolerances = GetParam().tolerances();
  const double rounding = RoundingOfLogits(largest_logit);
  const double token_tolerance = tolerances.token_outputs + rounding;
  const double of_loss = LimitOf(token_tolerance, want.token_loss, plain.token_loss);
  EXPECT_LE(RelativeError(answer.token_loss, want.token_loss), of_loss);
  EXPECT_LE(RelativeError(answer.logprob, want.logprob),
            LimitOf(token_tolerance, want.logprob, plain.logprob));
  EXPECT_LE(RelativeError(answer.lse, want.lse), LimitOf(token_tolerance, want.lse, plain.lse));
  const double of_entropy = LimitOf(token_tolerance, want.entropy, plain.entropy);
  EXPECT_LE(RelativeError(answer.entropy, want.entropy), of_entropy);
  if (GetParam().logits_dtype == DType::kFloat32) {
    EXPECT_EQ(answer.argmax, want.argmax);
    EXPECT_EQ(answer.sums.num_correct, want.sums.num_correct);
    EXPECT_EQ(answer.sums.num_clipped, want.sums.num_clipped);
  }
  ExpectSums(answer.sums, want.sums, std::max(of_loss, of_entropy),
             SumOfMagnitudes(want.token_loss), plain.token_loss.empty() ? nullptr : &plain.sums);
  for (const float logprob : answer.logprob) EXPECT_LE(logprob, 0.0f);
  if (answer.grad_hidden_states.empty()) return;
  const double of_grad =
      tolerances.grad_hidden_states + RoundingOf(GetParam().hidden_dtype) + rounding;
  EXPECT_LE(RelativeError(answer.grad_hidden_states, want.grad_hidden_states),
            LimitOf(of_grad, want.grad_hidden_states, plain.grad_hidden_states));
}

void BackendConformance::ExpectTopk(Rig* rig, const LossRecipe& recipe, const ChunkData& chunk,
                                    const ChunkAnswer& answer, const reference::Result& want,
                                    double tolerance) {
  EXPECT_LE(RelativeError(answer.topk_logprobs, want.topk_logprobs), tolerance);
  if (rig->top_k() == 0) return;
  EXPECT_LE(
      RelativeError(rig->ExpectedLogProbs(recipe, chunk, answer.topk_ids), want.topk_logprobs),
      tolerance);
}

void BackendConformance::ExpectGradWeight(Rig* rig, const std::vector<reference::Result>& wants,
                                          double largest_logit,
                                          const std::vector<reference::Result>& plains) {
  const double tolerance = GetParam().tolerances().grad_weight + RoundingOfLogits(largest_logit);
  const auto expect = [&](TensorKind kind, std::vector<double> reference::Result::*member) {
    const std::vector<double> want = Sum(wants, member);
    const std::vector<double> plain = plains.empty() ? std::vector<double>() : Sum(plains, member);
    EXPECT_LE(RelativeError(rig->Read(kind), want), LimitOf(tolerance, want, plain));
  };
  expect(TensorKind::kGradWeight, &reference::Result::grad_weight);
  if (rig->spec().has_bias) expect(TensorKind::kGradBias, &reference::Result::grad_bias);
}

void BackendConformance::ExpectBatch(Rig* rig, const LossRecipe& recipe,
                                     const std::vector<ChunkData>& chunks, double largest_logit) {
  const std::vector<ChunkAnswer> answers = rig->Run(recipe, chunks);
  ASSERT_EQ(answers.size(), chunks.size());
  std::vector<reference::Result> wants, plains;
  for (size_t i = 0; i < chunks.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("chunk ", i));
    wants.push_back(rig->Expected(recipe, chunks[i]));
    plains.emplace_back();
    if (GetParam().logits_dtype != DType::kFloat32) {
      plains[i] = rig->PlainDense(recipe, InDType(chunks[i], DType::kBFloat16), DType::kBFloat16);
    }
    ExpectAnswer(answers[i], wants[i], largest_logit, plains[i]);
    const double tolerance =
        GetParam().tolerances().token_outputs + RoundingOfLogits(largest_logit);
    ExpectTopk(rig, recipe, chunks[i], answers[i], wants[i],
               LimitOf(tolerance, wants[i].topk_logprobs, plains[i].topk_logprobs));
  }
  if (!rig->accumulates()) return;
  if (GetParam().logits_dtype == DType::kFloat32) plains.clear();
  ExpectGradWeight(rig, wants, largest_logit, plains);
}

// --- Against the oracle ------------------------------------------------------------------------

TEST_P(BackendConformance, EveryShape) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(absl::StrCat(shape.num_tokens, "x", shape.hidden_size, "x", shape.vocab_size));
    HeadSpec spec = Spec(shape);
    for (const bool has_bias : {false, true}) {
      spec.has_bias = has_bias;
      const auto rig = MakeRig(spec);
      ExpectBatch(rig.get(), kPlain, {MakeChunk(spec, shape.num_tokens)});
    }
  }
}

TEST_P(BackendConformance, EveryNumberOfRows) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.batch_tokens = 21;
  for (int64_t rows = 1; rows <= spec.batch_tokens; ++rows) {
    SCOPED_TRACE(rows);
    const auto rig = MakeRig(spec);
    ExpectBatch(rig.get(), kPlain, {MakeChunk(spec, rows)});
  }
}

TEST_P(BackendConformance, NeverWorseThanTwiceDense) {
  for (const Shape& shape : {Shape{64, 32, 257}, Shape{33, 48, 1009}, Shape{40, 64, 1499}}) {
    SCOPED_TRACE(absl::StrCat(shape.num_tokens, "x", shape.hidden_size, "x", shape.vocab_size));
    const HeadSpec spec = Spec(shape);
    const auto rig = MakeRig(spec);
    const ChunkData chunk = MakeChunk(spec, shape.num_tokens);
    const reference::Result want = rig->Expected(kPlain, chunk);
    const reference::Result dense = rig->PlainDense(kPlain, chunk, GetParam().logits_dtype);
    const ChunkAnswer answer = rig->Run(kPlain, {chunk})[0];
    EXPECT_LE(MaxError(answer.lse, want.lse), 2 * MaxError(dense.lse, want.lse));
    EXPECT_LE(MaxError(answer.logprob, want.logprob), 2 * MaxError(dense.logprob, want.logprob));
    if (GetParam().schedule == Schedule::kEval) continue;
    const auto dense_grad = reference::RoundedTo(GetParam().hidden_dtype, dense.grad_hidden_states);
    EXPECT_LE(MaxError(answer.grad_hidden_states, want.grad_hidden_states),
              2 * MaxError(dense_grad, want.grad_hidden_states));
    if (!rig->accumulates()) continue;
    EXPECT_LE(MaxError(rig->Read(TensorKind::kGradWeight), want.grad_weight),
              2 * MaxError(dense.grad_weight, want.grad_weight));
  }
}

TEST_P(BackendConformance, ChunksOfABatchKeepTheirOwnSumsAndScales) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  std::vector<ChunkData> chunks;
  for (const int64_t rows : {1, 17, 1, 1, 30, 2}) {
    chunks.push_back(MakeChunk(spec, rows));
    chunks.back().grad_scale = 0.25f * static_cast<float>(chunks.size());
  }
  chunks[1].token_weights.clear();
  ExpectBatch(rig.get(), kPlain, chunks);
}

TEST_P(BackendConformance, EveryFieldOfTheRecipe) {
  HeadSpec spec = Spec(kRagged);
  std::vector<LossRecipe> recipes(7);
  recipes[0].label_smoothing = 0.1f;
  recipes[1].z_loss = 0.01f;
  recipes[2].class_weights = Uniforms(spec.vocab_size, 0.25f, 2.0f);
  recipes[3].temperature = 0.7f;
  recipes[4].ignore_index = 5;
  recipes[5] = recipes[2];
  recipes[5].label_smoothing = 0.2f;
  recipes[6] = recipes[5];
  recipes[6].z_loss = 0.001f;
  recipes[6].temperature = 1.3f;
  for (const bool transformed : {false, true}) {
    spec.has_bias = transformed;
    spec.logit_scale = transformed ? 0.5f : 1.0f;
    spec.softcap = transformed ? 3.0f : 0.0f;
    for (size_t i = 0; i < recipes.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("recipe ", i, transformed ? ", transformed" : ""));
      const auto rig = MakeRig(spec);
      ChunkData chunk = MakeChunk(spec, kRagged.num_tokens);
      const int32_t ignore_index = recipes[i].ignore_index;
      std::replace(chunk.targets.begin(), chunk.targets.end(), kDefaultIgnoreIndex, ignore_index);
      ExpectBatch(rig.get(), recipes[i], {chunk});
    }
  }
}

TEST_P(BackendConformance, TemperatureOfEachToken) {
  const HeadSpec spec = Spec(kRagged);
  const auto rig = MakeRig(spec);
  ChunkData chunk = MakeChunk(spec, kRagged.num_tokens);
  chunk.token_temperature = Uniforms(kRagged.num_tokens, 0.5f, 2.0f);
  LossRecipe recipe;
  recipe.per_token_temperature = true;
  ExpectBatch(rig.get(), recipe, {chunk});
}

// --- Traps -------------------------------------------------------------------------------------

TEST_P(BackendConformance, AllIgnoredRowsContributeExactlyNothing) {
  const HeadSpec spec = Spec(kRagged);
  const auto rig = MakeRig(spec);
  std::vector<float> before;
  if (rig->accumulates()) {
    rig->Run(kPlain, {MakeChunk(spec, 5)});
    before = rig->Read(TensorKind::kGradWeight);
  }
  ChunkData chunk = MakeChunk(spec, 9);
  chunk.targets.assign(9, kDefaultIgnoreIndex);
  const ChunkAnswer answer = rig->Run(kPlain, {chunk})[0];
  ExpectAnswer(answer, rig->Expected(kPlain, chunk));
  EXPECT_EQ(answer.sums.loss_sum, 0.0);
  EXPECT_EQ(answer.sums.num_valid_tokens, 0);
  EXPECT_EQ(answer.sums.num_tokens, 9);
  EXPECT_TRUE(AllZero(answer.token_loss));
  EXPECT_TRUE(AllZero(answer.logprob));
  EXPECT_TRUE(AllZero(answer.grad_hidden_states));
  if (rig->accumulates()) {
    EXPECT_EQ(rig->Read(TensorKind::kGradWeight), before);
  }
}

TEST_P(BackendConformance, ConfidentRows) {
  const HeadSpec spec = Spec({12, 32, 1009});
  const auto rig = MakeRig(spec);
  const std::vector<float> weight = rig->Read(TensorKind::kWeight);
  ChunkData chunk = MakeChunk(spec, 12);
  for (int64_t row = 0; row < 12; ++row) {  // Ever more of the target's own direction.
    const int32_t target = static_cast<int32_t>(80 * row + 3);
    chunk.targets[row] = target;
    for (int64_t h = 0; h < 32; ++h) {
      chunk.hidden_states[row * 32 + h] = static_cast<float>(row) * 0.5f * weight[target * 32 + h];
    }
  }
  chunk.hidden_states = RoundedTo(GetParam().hidden_dtype, chunk.hidden_states);
  ExpectBatch(rig.get(), kPlain, {chunk}, /*largest_logit=*/30.0);
}

TEST_P(BackendConformance, LogitsOfTenThousand) {
  const HeadSpec spec = Spec({12, 32, 1009});
  const auto rig = MakeRig(spec);
  ChunkData chunk = MakeChunk(spec, 12);
  for (float& value : chunk.hidden_states) value *= 2048.0f;  // Exact in every dtype.
  ExpectBatch(rig.get(), kPlain, {chunk}, /*largest_logit=*/1e4);
}

TEST_P(BackendConformance, ACommonOffsetChangesNothing) {
  if (GetParam().logits_dtype == DType::kBFloat16) GTEST_SKIP() << "the offset is the rounding";
  HeadSpec spec = Spec({12, 32, 1009});
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  rig->Write(TensorKind::kBias, std::vector<float>(1009, 4096.0f));
  LossRecipe recipe;
  recipe.label_smoothing = 0.1f;
  ExpectBatch(rig.get(), recipe, {MakeChunk(spec, 12)}, /*largest_logit=*/4096.0);
}

TEST_P(BackendConformance, MaskedTokensAndWholeMaskedTiles) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  for (const float softcap : {0.0f, 5.0f}) {
    spec.softcap = softcap;
    const auto rig = MakeRig(spec);
    std::vector<float> bias = Normals(spec.vocab_size, 0.5f);
    std::fill(bias.begin(), bias.begin() + 1500, -kInfinity);
    for (size_t i = 1600; i < bias.size(); i += 4) bias[i] = -kInfinity;
    rig->Write(TensorKind::kBias, bias);
    ChunkData chunk = MakeChunk(spec, kRagged.num_tokens);
    std::fill(chunk.targets.begin(), chunk.targets.end(), 1555);
    LossRecipe recipe;
    ExpectBatch(rig.get(), recipe, {chunk});
    ASSERT_TRUE(rig->backend().DiscardGradients().ok());
    recipe.label_smoothing = 0.1f;
    ExpectBatch(rig.get(), recipe, {chunk});
    ASSERT_TRUE(rig->backend().DiscardGradients().ok());
    chunk.targets[4] = 2;  // A masked target: infinite loss, finite gradients.
    ExpectBatch(rig.get(), kPlain, {chunk});
  }
}

TEST_P(BackendConformance, EveryTokenMasked) {
  HeadSpec spec = Spec({5, 8, 37});
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  rig->Write(TensorKind::kBias, std::vector<float>(37, -kInfinity));
  LossRecipe recipe;
  recipe.z_loss = 0.1f;
  recipe.label_smoothing = 0.1f;
  ExpectBatch(rig.get(), recipe, {MakeChunk(spec, 5)});
}

TEST_P(BackendConformance, RowsThatAreNotFiniteContributeNothing) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  const auto clean_rig = MakeRig(spec);
  clean_rig->Write(TensorKind::kWeight, rig->Read(TensorKind::kWeight));
  clean_rig->Write(TensorKind::kBias, rig->Read(TensorKind::kBias));

  ChunkData chunk = MakeChunk(spec, 20);
  ChunkData clean = chunk;
  const std::pair<int64_t, float> bad[] = {{0, kNan}, {3, kInfinity}, {7, -kInfinity}, {19, kNan}};
  for (const auto& [row, value] : bad) {
    chunk.hidden_states[row * spec.hidden_size + row % spec.hidden_size] = value;
    clean.targets[row] = kDefaultIgnoreIndex;
  }
  const ChunkAnswer answer = rig->Run(kPlain, {chunk})[0];
  ExpectAnswer(answer, rig->Expected(kPlain, chunk));
  EXPECT_EQ(answer.sums.num_nonfinite_rows, 4);
  const ChunkAnswer clean_answer = clean_rig->Run(kPlain, {clean})[0];
  EXPECT_EQ(answer.sums.loss_sum, clean_answer.sums.loss_sum);
  EXPECT_EQ(answer.token_loss, clean_answer.token_loss);
  EXPECT_EQ(answer.grad_hidden_states, clean_answer.grad_hidden_states);
  for (const auto& [row, value] : bad) {
    EXPECT_EQ(answer.lse[row], 0.0f);
    EXPECT_EQ(answer.entropy[row], 0.0f);
    EXPECT_EQ(answer.argmax[row], 0);
  }
  if (!rig->accumulates()) return;
  EXPECT_LE(
      RelativeError(rig->Read(TensorKind::kGradWeight), clean_rig->Read(TensorKind::kGradWeight)),
      1e-6);
}

// --- Accumulation ------------------------------------------------------------------------------

TEST_P(TrainingConformance, ManyChunksAccumulateWithoutLoss) {
  HeadSpec spec = Spec({0, 16, 131});
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  std::vector<reference::Result> wants;
  for (int i = 0; i < 200; ++i) {
    std::vector<ChunkData> chunks = {MakeChunk(spec, 1 + i % 7)};
    if (i % 3 == 0) chunks.push_back(MakeChunk(spec, 1));
    rig->Run(kPlain, chunks);
    for (const ChunkData& chunk : chunks) wants.push_back(rig->Expected(kPlain, chunk));
  }
  ExpectGradWeight(rig.get(), wants);
  const absl::StatusOr<double> norm = rig->backend().GradSquaredNorm();
  ASSERT_TRUE(norm.ok());
  double want = 0.0;
  for (const double g : Sum(wants, &reference::Result::grad_weight)) want += g * g;
  for (const double g : Sum(wants, &reference::Result::grad_bias)) want += g * g;
  EXPECT_NEAR(*norm, want, 4 * GetParam().tolerances().grad_weight * want);
}

TEST_P(TrainingConformance, ModesWithoutWeightGradientAnswerAlikeAndKeepNothing) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  const ChunkData chunk = MakeChunk(spec, 20);
  const ChunkAnswer first = rig->Run(kPlain, {chunk})[0];
  const std::vector<float> grad_weight = rig->Read(TensorKind::kGradWeight);
  const std::vector<float> grad_bias = rig->Read(TensorKind::kGradBias);
  const auto duplicate = rig->Run(kPlain, BackwardMode::kHidden, {chunk});
  ASSERT_TRUE(duplicate.ok()) << duplicate.status();
  EXPECT_EQ((*duplicate)[0].grad_hidden_states, first.grad_hidden_states);
  EXPECT_EQ((*duplicate)[0].token_loss, first.token_loss);
  EXPECT_EQ((*duplicate)[0].sums, first.sums);
  const auto evaluated = rig->Run(kPlain, BackwardMode::kNone, {chunk});
  ASSERT_TRUE(evaluated.ok()) << evaluated.status();
  EXPECT_EQ((*evaluated)[0].sums, first.sums);
  EXPECT_EQ(rig->Read(TensorKind::kGradWeight), grad_weight);
  EXPECT_EQ(rig->Read(TensorKind::kGradBias), grad_bias);
}

TEST_P(TrainingConformance, DiscardedGradientsAreGone) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  rig->Run(kPlain, {MakeChunk(spec, 20)});
  ASSERT_TRUE(rig->backend().DiscardGradients().ok());
  EXPECT_TRUE(AllZero(rig->Read(TensorKind::kGradWeight)));
  EXPECT_TRUE(AllZero(rig->Read(TensorKind::kGradBias)));
  EXPECT_EQ(*rig->backend().GradSquaredNorm(), 0.0);
  ExpectBatch(rig.get(), kPlain, {MakeChunk(spec, 20)});
}

TEST_P(TrainingConformance, TwentyUpdatesFollowTheOptimizer) {
  const OptimizerSpec optimizers[] = {
      {.kind = OptimizerKind::kAdamW, .weight_decay = 0.1},
      {.kind = OptimizerKind::kAdamW, .beta1 = 0.8, .beta2 = 0.9, .decay_bias = true},
      {.kind = OptimizerKind::kSgd, .weight_decay = 0.1},
      {.kind = OptimizerKind::kSgd, .weight_decay = 0.1, .momentum = 0.9, .decay_bias = true}};
  for (const OptimizerSpec& optimizer : optimizers) {
    HeadSpec spec = Spec({0, 16, 131});
    spec.has_bias = true;
    spec.optimizer = optimizer;
    const auto rig = MakeRig(spec);
    const auto doubles = [&](TensorKind kind) {
      const std::vector<float> values = rig->Read(kind);
      return std::vector<double>(values.begin(), values.end());
    };
    std::vector<double> weight = doubles(TensorKind::kMasterWeight);
    std::vector<double> bias = doubles(TensorKind::kBias);
    reference::OptimizerState weight_state, bias_state;
    for (int step = 1; step <= 20; ++step) {
      rig->Run(kPlain, {MakeChunk(spec, 24)});
      const double learning_rate = 0.01 / step;
      reference::ApplyUpdate(optimizer, optimizer.weight_decay, learning_rate, 1.0 / 24,
                             doubles(TensorKind::kGradWeight), weight, &weight_state);
      reference::ApplyUpdate(optimizer, optimizer.decay_bias ? optimizer.weight_decay : 0.0,
                             learning_rate, 1.0 / 24, doubles(TensorKind::kGradBias), bias,
                             &bias_state);
      const absl::Status status =
          rig->backend().ApplyUpdate({.learning_rate = learning_rate, .grad_multiplier = 1.0 / 24});
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(rig->backend().num_updates(), step);
      EXPECT_TRUE(AllZero(rig->Read(TensorKind::kGradWeight)));
    }
    const std::vector<float> master = rig->Read(TensorKind::kMasterWeight);
    EXPECT_LE(RelativeError(master, weight), kParameterTolerance);
    EXPECT_LE(RelativeError(rig->Read(TensorKind::kBias), bias), kParameterTolerance);
    EXPECT_EQ(rig->Read(TensorKind::kWeight), RoundedTo(spec.weight_dtype, master));
  }
}

// --- Tensors and the contract ------------------------------------------------------------------

TEST_P(BackendConformance, RowsOfTensorsAreReadAndWrittenInRanges) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  std::vector<float> want = rig->Read(TensorKind::kWeight);
  const std::vector<float> rows = {1, -2, 3, -4, 5, -6, 7, -8, 9, 10, 11, 12, 13, 14, 15, 16};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const std::vector<std::byte> packed = Pack(rows, dtype);
    for (const int64_t start : {0, 11, 35}) {
      ASSERT_TRUE(
          rig->backend().WriteRows(TensorKind::kWeight, start, {packed.data(), 2, 8, dtype}).ok());
      std::copy(rows.begin(), rows.end(), want.begin() + start * 8);
    }
    EXPECT_EQ(rig->Read(TensorKind::kWeight), want);
  }
  std::vector<std::byte> one_row(8 * BytesPerElement(spec.weight_dtype));
  ASSERT_TRUE(rig->backend()
                  .ReadRows(TensorKind::kWeight, 12, {one_row.data(), 1, 8, spec.weight_dtype})
                  .ok());
  EXPECT_EQ(Unpack(one_row, spec.weight_dtype), std::vector<float>(rows.begin() + 8, rows.end()));
  const float bias[] = {2.5f, -kInfinity};
  ASSERT_TRUE(rig->backend().WriteRows(TensorKind::kBias, 35, {bias, 2, 1, DType::kFloat32}).ok());
  EXPECT_THAT(rig->Read(TensorKind::kBias)[35], 2.5f);
  EXPECT_THAT(rig->Read(TensorKind::kBias)[36], -kInfinity);
}

TEST_P(TrainingConformance, AMasterWeightTakesTheValuesGiven) {
  const HeadSpec spec = Spec({0, 8, 37});
  const auto rig = MakeRig(spec);
  const std::vector<float> values = Normals(37 * 8, 1.0f);
  rig->Write(TensorKind::kWeight, values);
  EXPECT_EQ(rig->Read(TensorKind::kMasterWeight), values);
  EXPECT_EQ(rig->Read(TensorKind::kWeight), RoundedTo(spec.weight_dtype, values));
}

TEST_P(BackendConformance, TensorsThatAreNotThereAndRowsOutsideAreRefused) {
  const HeadSpec spec = Spec({0, 8, 37});
  const auto rig = MakeRig(spec);
  ComputeBackend& backend = rig->backend();
  std::vector<float> rows(37 * 8);
  const auto read = [&](TensorKind kind, int64_t start, int64_t count, int64_t cols, DType dtype) {
    return backend.ReadRows(kind, start, {rows.data(), count, cols, dtype}).code();
  };
  using absl::StatusCode;
  const DType dtype = spec.weight_dtype;
  EXPECT_EQ(read(TensorKind::kBias, 0, 1, 1, DType::kFloat32), StatusCode::kFailedPrecondition);
  EXPECT_EQ(read(TensorKind::kWeight, 36, 2, 8, dtype), StatusCode::kInvalidArgument);
  EXPECT_EQ(read(TensorKind::kWeight, -1, 2, 8, dtype), StatusCode::kInvalidArgument);
  EXPECT_EQ(read(TensorKind::kWeight, 0, 2, 7, dtype), StatusCode::kInvalidArgument);
  EXPECT_EQ(read(TensorKind::kWeight, 0, 2, 8, DType::kFloat16), StatusCode::kInvalidArgument);
  if (!IsTrainable(GetParam().schedule)) {
    EXPECT_EQ(read(TensorKind::kGradWeight, 0, 1, 8, DType::kFloat32),
              StatusCode::kFailedPrecondition);
  }
}

TEST_P(BackendConformance, BadBatchesAreRefusedAndLeaveNothingBehind) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.batch_tokens = 8;
  const auto rig = MakeRig(spec);
  const auto code_of = [&](const std::vector<ChunkData>& chunks, BackwardMode mode) {
    return rig->Run(kPlain, mode, chunks).status().code();
  };
  using absl::StatusCode;
  ChunkData outside = MakeChunk(spec, 4);
  outside.targets[2] = 37;
  EXPECT_EQ(code_of({MakeChunk(spec, 2), outside}, rig->mode()), StatusCode::kInvalidArgument);
  outside.targets[2] = -1;
  EXPECT_EQ(code_of({outside}, rig->mode()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({MakeChunk(spec, 5), MakeChunk(spec, 4)}, rig->mode()),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({}, rig->mode()), StatusCode::kInvalidArgument);
  if (!rig->accumulates()) {
    EXPECT_EQ(code_of({MakeChunk(spec, 4)}, BackwardMode::kHiddenAndWeight),
              StatusCode::kFailedPrecondition);
  }
  if (GetParam().schedule == Schedule::kEval) {
    EXPECT_EQ(code_of({MakeChunk(spec, 4)}, BackwardMode::kHidden),
              StatusCode::kFailedPrecondition);
  }
  ExpectBatch(rig.get(), kPlain, {MakeChunk(spec, 8)});  // And grad_weight is of this batch alone.
}

TEST_P(BackendConformance, EqualCallsGiveEqualBits) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  spec.optimizer.momentum = IsTrainable(GetParam().schedule) ? 0.9 : 0.0;
  spec.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.3, .seed = 5};
  std::vector<std::vector<float>> runs;
  for (int run = 0; run < 2; ++run) {
    random_.seed(99);
    Rig rig(GetParam().backend, spec, GetParam().hidden_dtype);
    std::vector<float> bits;
    for (int step = 0; step < 3; ++step) {
      for (const ChunkAnswer& answer :
           rig.Run(kPlain, {MakeChunk(spec, 31), MakeChunk(spec, 1), MakeChunk(spec, 50)})) {
        Append(&bits, answer.grad_hidden_states);
        Append(&bits, answer.token_loss);
        Append(&bits, answer.entropy);
      }
      if (!rig.accumulates()) continue;
      Append(&bits, rig.Read(TensorKind::kGradWeight));
      Append(&bits, rig.Read(TensorKind::kGradBias));
      ASSERT_TRUE(rig.backend().ApplyUpdate({.learning_rate = 0.1}).ok());
    }
    Append(&bits, rig.Read(TensorKind::kWeight));
    runs.push_back(std::move(bits));
  }
  EXPECT_TRUE(runs[0] == runs[1]);
}

TEST_P(BackendConformance, GradientsMayOverwriteTheirHiddenStates) {
  HeadSpec spec = Spec(kRagged);
  spec.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.3, .seed = 5};
  const std::vector<ChunkData> chunks = {MakeChunk(spec, 31), MakeChunk(spec, 1)};
  std::vector<std::vector<float>> grads, grad_weights;
  for (const bool in_place : {false, true}) {
    Rig rig(GetParam().backend, spec, GetParam().hidden_dtype);
    rig.set_in_place(in_place);
    grads.emplace_back();
    for (const ChunkAnswer& answer : rig.Run(kPlain, chunks)) {
      Append(&grads.back(), answer.grad_hidden_states);
    }
    if (rig.accumulates()) grad_weights.push_back(rig.Read(TensorKind::kGradWeight));
  }
  EXPECT_EQ(grads[0], grads[1]);
  if (!grad_weights.empty()) {
    EXPECT_EQ(grad_weights[0], grad_weights[1]);
  }
}

TEST_P(BackendConformance, WeightInitFillsTheWholeWeight) {
  HeadSpec spec = Spec({0, 16, 2053});
  spec.batch_tokens = 100;
  {
    Rig zeros(GetParam().backend, spec, GetParam().hidden_dtype);
    EXPECT_TRUE(AllZero(zeros.Read(TensorKind::kWeight)));
  }
  spec.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.5, .seed = 5};
  Rig rig(GetParam().backend, spec, GetParam().hidden_dtype);
  const std::vector<float> weight = rig.Read(TensorKind::kWeight);
  const double count = static_cast<double>(weight.size());
  const double square =
      std::inner_product(weight.begin(), weight.end(), weight.begin(), 0.0) / count;
  EXPECT_NEAR(square, 0.25, 5 * 0.25 * std::sqrt(2 / count));

  HeadSpec smaller = spec;  // A function of seed, row and column alone.
  smaller.vocab_size = 300;
  smaller.batch_tokens = 7;
  Rig part(GetParam().backend, smaller, GetParam().hidden_dtype);
  EXPECT_EQ(part.Read(TensorKind::kWeight),
            std::vector<float>(weight.begin(), weight.begin() + 300 * 16));
}

TEST_P(BackendConformance, LivesInItsPlan) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  const auto rig = MakeRig(spec);
  HeadUnderTest& head = rig->head();
  const int32_t num_ranks = GetParam().backend.num_ranks * GetParam().backend.num_replicas;
  const auto expect_plan = [&] {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const MemoryAccount::Snapshot use = head.account(rank).Read();
      for (int i = 0; i < kNumMemoryCategories; ++i) {
        EXPECT_EQ(use.categories[i].live_bytes, head.plan().bytes[i])
            << MemoryCategoryName(static_cast<MemoryCategory>(i)) << " of rank " << rank;
      }
      EXPECT_EQ(use.total.live_bytes, head.plan().TotalBytes());
      if (num_ranks > 1) continue;  // The peak is that of all heads before.
      EXPECT_EQ(use.total.peak_process_bytes, head.plan().TotalBytes());
    }
  };
  expect_plan();
  for (const int64_t rows : {1, 40, 128}) rig->Run(kPlain, {MakeChunk(spec, rows)});
  expect_plan();
}

// --- Golden cases ------------------------------------------------------------------------------

namespace {

HeadSpec SpecOf(const ConformanceCase& c, const reference::Head& head) {
  return {.name = "golden",
          .vocab_size = head.vocab_size,
          .hidden_size = head.hidden_size,
          .weight_dtype = c.weight_dtype,
          .has_bias = !head.bias.empty(),
          .logit_scale = static_cast<float>(head.logit_scale),
          .softcap = static_cast<float>(head.softcap),
          .schedule = c.schedule};
}

void Load(const reference::Head& values, HeadUnderTest* head) {
  head->Write(TensorKind::kWeight, bench::ToFloat(values.weight));
  if (!values.bias.empty()) head->Write(TensorKind::kBias, bench::ToFloat(values.bias));
}

// The backend with the case's head in it, and its teacher's.
std::unique_ptr<Rig> RigOf(const ConformanceCase& c, const bench::GoldenCase& golden) {
  HeadSpec spec = SpecOf(c, golden.head);
  spec.trainable = IsTrainable(c.schedule);
  spec.optimizer.kind = spec.trainable ? OptimizerKind::kSgd : OptimizerKind::kNone;
  if (golden.teacher.has_value()) spec.teacher_hidden_size = golden.teacher->hidden_size;
  if (golden.recipe.distillation.has_value()) spec.top_k_max = golden.recipe.distillation->top_k;
  auto rig = std::make_unique<Rig>(c.backend, spec, c.hidden_dtype);
  Load(golden.head, &rig->head());
  if (!golden.teacher.has_value()) return rig;
  HeadSpec teacher_spec = SpecOf(c, *golden.teacher);
  teacher_spec.schedule = Schedule::kEval;
  Load(*golden.teacher, &rig->AddTeacher(teacher_spec));
  return rig;
}

// What the backend gives for the case, without what its schedule does not give.
reference::Outputs AnswerOf(const bench::GoldenCase& golden, const ConformanceCase& c, Rig* rig) {
  const reference::Tokens& tokens = golden.tokens;
  const ChunkAnswer answer =
      rig->Run(bench::RecipeOf(golden, "teacher", c.hidden_dtype),
               {{.hidden_states = bench::ToFloat(tokens.hidden_states),
                 .targets = tokens.targets,
                 .token_weights = bench::ToFloat(tokens.token_weights),
                 .token_temperature = bench::ToFloat(tokens.token_temperature),
                 .logprob_grad = bench::ToFloat(tokens.logprob_grad),
                 .entropy_grad = bench::ToFloat(tokens.entropy_grad),
                 .teacher_topk_ids = tokens.teacher_topk_ids,
                 .teacher_topk_logprobs = bench::ToFloat(tokens.teacher_topk_logprobs),
                 .teacher_hidden_states = bench::ToFloat(tokens.teacher_hidden_states)}})[0];
  reference::Outputs outputs;
  const auto add = [&](const char* name, const auto& values) {
    if (!values.empty()) outputs[name].assign(values.begin(), values.end());
  };
  add("token_loss", answer.token_loss);
  add("logprob", answer.logprob);
  add("lse", answer.lse);
  add("entropy", answer.entropy);
  add("argmax", answer.argmax);
  add("grad_hidden_states", answer.grad_hidden_states);
  outputs["loss_sum"] = {answer.sums.loss_sum};
  outputs["num_valid_tokens"] = {static_cast<double>(answer.sums.num_valid_tokens)};
  if (!rig->accumulates()) return outputs;
  add("grad_weight", rig->Read(TensorKind::kGradWeight));
  if (rig->spec().has_bias) add("grad_bias", rig->Read(TensorKind::kGradBias));
  return outputs;
}

// For a backend that holds logits in bfloat16: the rule of kernels/reference/compare.h.
void ExpectWithinTwiceDense(const bench::GoldenCase& golden, const reference::Outputs& answer) {
  const reference::Outputs plain = PlainOutputs(golden.head, golden.recipe, golden.tokens,
                                                DType::kBFloat16, golden.teacher_head());
  for (const auto& [name, got] : answer) {
    const reference::OutputError error = reference::CompareOutput(
        name, got, golden.expected.at(name), plain.at(name), DType::kBFloat16);
    EXPECT_TRUE(error.Passed()) << name << ": relative " << error.rel << ", limit "
                                << error.rel_limit << "; largest " << error.max_abs << ", limit "
                                << error.max_abs_limit;
  }
}

void ExpectWithinTolerances(const bench::GoldenCase& golden, const reference::Outputs& answer,
                            const ConformanceCase& c) {
  const Tolerances& tolerances = c.tolerances();
  const double rounding = RoundingOfLogits(LargestMagnitude(golden.expected.at("lse")));
  for (const auto& [name, got] : answer) {
    SCOPED_TRACE(name);
    const std::vector<double>& want = golden.expected.at(name);
    if (name == "argmax" || name == "num_valid_tokens") {
      EXPECT_EQ(got, want);
    } else if (name == "loss_sum") {
      EXPECT_NEAR(got[0], want[0],
                  (tolerances.token_outputs + rounding) * std::max(1.0, std::fabs(want[0])));
    } else if (name == "grad_hidden_states") {
      EXPECT_LE(RelativeError(got, want),
                tolerances.grad_hidden_states + RoundingOf(c.hidden_dtype) + rounding);
    } else if (name == "grad_weight" || name == "grad_bias") {
      EXPECT_LE(RelativeError(got, want), tolerances.grad_weight + rounding);
    } else {
      EXPECT_LE(RelativeError(got, want), tolerances.token_outputs + rounding);
    }
  }
}

}  // namespace

TEST_P(GoldenConformance, EqualsTorch) {
  const ConformanceCase& c = GetParam().conformance;
  const absl::StatusOr<bench::GoldenCase> golden = bench::LoadGoldenCase(GetParam().path);
  ASSERT_TRUE(golden.ok()) << golden.status();
  const reference::Outputs answer = AnswerOf(*golden, c, RigOf(c, *golden).get());
  if (c.logits_dtype == DType::kBFloat16) {
    ExpectWithinTwiceDense(*golden, answer);
  } else {
    ExpectWithinTolerances(*golden, answer, c);
  }
}

}  // namespace lmhead
