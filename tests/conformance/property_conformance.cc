#include "tests/conformance/property_conformance.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/reference/compare.h"
#include "tests/conformance/random_problem.h"
#include "tests/conformance/tolerances.h"

namespace lmhead {
namespace {

using reference::Outputs;

constexpr uint64_t kRuns = 30;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  uint64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

double Norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

template <typename Values>
void Append(const std::string& name, const Values& values, Outputs* outputs) {
  (*outputs)[name].insert((*outputs)[name].end(), values.begin(), values.end());
}

// Per-token outputs of a chunk, behind those of the chunks before it.
template <typename Answer>
void AppendTokens(const Answer& answer, Outputs* outputs) {
  Append("token_loss", answer.token_loss, outputs);
  Append("logprob", answer.logprob, outputs);
  Append("lse", answer.lse, outputs);
  Append("entropy", answer.entropy, outputs);
  Append("topk_logprobs", answer.topk_logprobs, outputs);
  Append("grad_hidden_states", answer.grad_hidden_states, outputs);
}

void AddTo(const std::string& name, const std::vector<double>& values, Outputs* outputs) {
  std::vector<double>& sum = (*outputs)[name];
  sum.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
}

// What the oracle, or plain dense arithmetic, says of a whole batch.
struct Wanted {
  Outputs outputs;
  std::vector<LossSums> sums;  // One a chunk.

  // `largest` are the log-probabilities of the argmax.
  void Add(const reference::Result& result, const std::vector<double>& largest) {
    AppendTokens(result, &outputs);
    Append("logprob of argmax", largest, &outputs);
    AddTo("grad_weight", result.grad_weight, &outputs);
    AddTo("grad_bias", result.grad_bias, &outputs);
    sums.push_back(result.sums);
  }
};

// The parts of a sum that carry a loss or a probability.
std::map<std::string, double> NumbersOf(const LossSums& sums) {
  return {{"loss_sum", sums.loss_sum},
          {"weight_sum", sums.weight_sum},
          {"cross_entropy_sum", sums.cross_entropy_sum},
          {"z_loss_sum", sums.z_loss_sum},
          {"entropy_sum", sums.entropy_sum},
          {"divergence_sum", sums.divergence_sum},
          {"policy_sum", sums.policy_sum},
          {"dropped_teacher_mass_sum", sums.dropped_teacher_mass_sum},
          {"old_policy_kl_sum", sums.old_policy_kl_sum}};
}

// One problem with its right answers.
class Property {
 public:
  Property(const PropertyCase& property_case, uint64_t seed);

  const RandomProblem& problem() const { return problem_; }

  // Runs the batch and compares everything.
  void Expect(const BackendUnderTest& backend, Schedule schedule) const;

 private:
  std::unique_ptr<Rig> MakeRig(const BackendUnderTest& backend, Schedule schedule) const;
  double ToleranceOf(const std::string& name) const;
  void ExpectOutput(const std::string& name, std::vector<double> got) const;
  void ExpectSums(size_t chunk, const LossSums& got) const;
  int64_t CountCorrect(const ChunkData& chunk, const ChunkAnswer& answer) const;

  const PropertyCase& case_;
  const RandomProblem problem_;
  const double rounding_;
  Wanted exact_;
  Wanted plain_;
  std::vector<std::vector<double>> logprobs_;  // Of the whole vocabulary, one a chunk.
};

Property::Property(const PropertyCase& property_case, uint64_t seed)
    : case_(property_case),
      problem_(MakeRandomProblem(seed, case_.weight_dtype, case_.hidden_dtype)),
      rounding_(RoundingOfLogits(problem_.LargestLogit())) {
  for (const ChunkData& chunk : problem_.chunks) {
    logprobs_.push_back(reference::AllLogProbs(
        problem_.head.ToReference(), reference::Recipe(problem_.recipe), TokensOf(chunk)));
    const reference::Result exact = problem_.Expected(chunk);
    reference::Result plain = problem_.PlainDense(chunk, case_.logits_dtype);
    plain.grad_hidden_states = reference::RoundedTo(case_.hidden_dtype, plain.grad_hidden_states);
    exact_.Add(exact, AtIds(logprobs_.back(), chunk, exact.argmax));
    plain_.Add(plain, AtIds(logprobs_.back(), chunk, plain.argmax));
  }
}

std::unique_ptr<Rig> Property::MakeRig(const BackendUnderTest& backend, Schedule schedule) const {
  HeadSpec spec = problem_.head.spec;
  spec.schedule = schedule;
  spec.trainable = schedule == Schedule::kRetain || schedule == Schedule::kRecompute;
  spec.optimizer.kind = spec.trainable ? OptimizerKind::kSgd : OptimizerKind::kNone;
  auto rig = std::make_unique<Rig>(backend, spec, case_.hidden_dtype);
  rig->set_top_k(problem_.top_k);
  rig->Write(TensorKind::kWeight, problem_.head.weight);
  if (spec.has_bias) rig->Write(TensorKind::kBias, problem_.head.bias);
  if (!problem_.teacher.has_value()) return rig;
  HeadUnderTest& teacher = rig->AddTeacher(problem_.teacher->spec);
  teacher.Write(TensorKind::kWeight, problem_.teacher->weight);
  if (teacher.spec().has_bias) teacher.Write(TensorKind::kBias, problem_.teacher->bias);
  return rig;
}

double Property::ToleranceOf(const std::string& name) const {
  const Tolerances& table =
      case_.logits_dtype == DType::kBFloat16 ? kBFloat16Logits : kFloat32Logits;
  if (name == "grad_hidden_states") {
    return table.grad_hidden_states + RoundingOf(case_.hidden_dtype) + rounding_;
  }
  if (name.starts_with("grad")) return table.grad_weight + rounding_;
  return table.token_outputs + rounding_;
}

// The larger of what the table and what twice the yardstick's error allow.
void Property::ExpectOutput(const std::string& name, std::vector<double> got) const {
  std::vector<double> exact = exact_.outputs.at(name);
  std::vector<double> plain = plain_.outputs.at(name);
  ASSERT_EQ(got.size(), exact.size()) << name;
  for (size_t i = 0; i < exact.size(); ++i) {
    if (!std::isinf(exact[i])) continue;
    EXPECT_EQ(got[i], exact[i]) << name << "[" << i << "]";
    got[i] = exact[i] = plain[i] = 0.0;
  }
  const reference::OutputError error =
      reference::CompareOutput(name, got, exact, plain, case_.logits_dtype);
  const double norm = Norm(exact);
  const double size = std::max(norm, problem_.SizeOf(name));
  const double difference = norm > 0.0 ? error.rel * norm : error.rel;
  EXPECT_LE(difference, std::max(error.rel_limit * norm, ToleranceOf(name) * size))
      << name << " of norm " << norm << ": plain dense arithmetic is off by "
      << error.plain_rel * norm << "; largest difference " << error.max_abs;
}

// Parts of a loss may cancel, so their errors are measured by the sizes of what is summed.
void Property::ExpectSums(size_t chunk, const LossSums& got) const {
  const LossSums& exact = exact_.sums[chunk];
  const LossSums& plain = plain_.sums[chunk];
  EXPECT_EQ(got.num_tokens, exact.num_tokens);
  EXPECT_EQ(got.num_valid_tokens, exact.num_valid_tokens);
  EXPECT_EQ(got.num_nonfinite_rows, exact.num_nonfinite_rows);
  if (case_.logits_dtype == DType::kFloat32) {
    EXPECT_EQ(got.num_clipped, exact.num_clipped);
  }
  double size = static_cast<double>(exact.num_valid_tokens);
  for (const auto& [name, value] : NumbersOf(exact)) {
    if (std::isfinite(value)) size = std::max(size, std::fabs(value));
  }
  for (const double loss : exact_.outputs.at("token_loss")) {
    if (std::isfinite(loss)) size += 2.0 * std::fabs(loss);  // Token weights are at most 2.
  }
  const std::map<std::string, double> wants = NumbersOf(exact);
  const std::map<std::string, double> plains = NumbersOf(plain);
  for (const auto& [name, value] : NumbersOf(got)) {
    const double want = wants.at(name);
    if (value == want) continue;  // Infinities, too.
    EXPECT_LE(std::fabs(value - want),
              2.0 * std::fabs(plains.at(name) - want) + ToleranceOf(name) * size)
        << name << " is " << value << ", wanted " << want;
  }
}

void Property::Expect(const BackendUnderTest& backend, Schedule schedule) const {
  const auto rig = MakeRig(backend, schedule);
  const absl::StatusOr<std::vector<ChunkAnswer>> answers =
      rig->Run(problem_.recipe, rig->mode(), problem_.chunks);
  ASSERT_TRUE(answers.ok()) << answers.status();
  Outputs got;
  std::vector<double> topk_ids;
  for (size_t i = 0; i < answers->size(); ++i) {
    const ChunkAnswer& answer = (*answers)[i];
    const ChunkData& chunk = problem_.chunks[i];
    AppendTokens(answer, &got);
    Append("logprob of argmax", AtIds(logprobs_[i], chunk, answer.argmax), &got);
    const std::vector<double> of_ids = AtIds(logprobs_[i], chunk, answer.topk_ids);
    topk_ids.insert(topk_ids.end(), of_ids.begin(), of_ids.end());
    SCOPED_TRACE(absl::StrCat("chunk ", i));
    ExpectSums(i, answer.sums);
    EXPECT_EQ(answer.sums.num_correct, CountCorrect(chunk, answer));
  }
  if (rig->accumulates()) {
    Append("grad_weight", rig->Read(TensorKind::kGradWeight), &got);
    if (rig->spec().has_bias) Append("grad_bias", rig->Read(TensorKind::kGradBias), &got);
  }
  if (rig->mode() == BackwardMode::kNone) got.erase("grad_hidden_states");
  for (const auto& [name, values] : got) ExpectOutput(name, values);
  // Whichever of two nearly equal ids comes first, the ids are those of the log-probabilities.
  ExpectOutput("topk_logprobs", topk_ids);
}

int64_t Property::CountCorrect(const ChunkData& chunk, const ChunkAnswer& answer) const {
  int64_t count = 0;
  for (size_t row = 0; row < chunk.targets.size(); ++row) {
    if (chunk.targets[row] == problem_.recipe.ignore_index || !IsFiniteRow(chunk, row)) continue;
    count += answer.argmax[row] == chunk.targets[row] ? 1 : 0;
  }
  return count;
}

// Rounding a logit to bfloat16 moves a ratio of probabilities beyond any comparison.
bool IsComparable(const PropertyCase& c, const RandomProblem& problem) {
  const bool has_ratios =
      problem.recipe.policy.has_value() && problem.recipe.policy->kind == PolicyKind::kClipped;
  return c.logits_dtype == DType::kFloat32 || !has_ratios || problem.LargestLogit() < 16.0;
}

}  // namespace

std::vector<PropertyCase> PropertyCasesOf(const std::vector<BackendUnderTest>& backends,
                                          DType bfloat16_head_logits) {
  std::vector<PropertyCase> cases;
  for (const DType weight : {DType::kFloat32, DType::kBFloat16}) {
    const DType logits = weight == DType::kBFloat16 ? bfloat16_head_logits : DType::kFloat32;
    for (const DType hidden : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (logits == DType::kBFloat16 && hidden != DType::kBFloat16) continue;
      cases.push_back({backends, weight, hidden, logits});
    }
  }
  return cases;
}

std::string PropertyName(const testing::TestParamInfo<PropertyCase>& info) {
  return absl::StrCat("weight_", std::string(DTypeName(info.param.weight_dtype)), "_hidden_",
                      std::string(DTypeName(info.param.hidden_dtype)));
}

void PrintTo(const PropertyCase& c, std::ostream* out) {
  *out << "weight " << DTypeName(c.weight_dtype) << ", hidden " << DTypeName(c.hidden_dtype);
}

TEST_P(PropertyConformance, RandomProblems) {
  const uint64_t first = FromEnvironment("LMHEAD_TEST_SEED", 1);
  const uint64_t runs = FromEnvironment("LMHEAD_TEST_RUNS", kRuns);
  for (uint64_t seed = first; seed < first + runs; ++seed) {
    const Property property(GetParam(), seed);
    if (!IsComparable(GetParam(), property.problem())) continue;
    SCOPED_TRACE(absl::StrCat("LMHEAD_TEST_SEED=", seed, ": ", property.problem().Describe()));
    for (const BackendUnderTest& backend : GetParam().backends) {
      for (const Schedule schedule :
           {Schedule::kEval, Schedule::kFrozen, Schedule::kRetain, Schedule::kRecompute}) {
        SCOPED_TRACE(absl::StrCat(backend.name, ", ", backend.num_ranks, " ranks, ",
                                  std::string(ScheduleName(schedule))));
        property.Expect(backend, schedule);
      }
    }
    if (HasFailure()) return;  // One seed is enough to look at.
  }
}

}  // namespace lmhead
