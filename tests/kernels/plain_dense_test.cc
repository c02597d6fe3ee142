#include "kernels/reference/plain_dense.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bench/golden_case.h"
#include "kernels/reference/compare.h"
#include "tests/conformance/compare.h"
#include "tests/util/golden_paths.h"

namespace lmhead::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Values that bfloat16 holds.
std::vector<double> Normals(size_t count, double std, std::mt19937* random) {
  std::normal_distribution<double> normal(0.0, std);
  std::vector<double> values(count);
  for (double& value : values) value = normal(*random);
  return RoundedTo(DType::kBFloat16, values);
}

// Every option at once: also ignored, weightless and not finite rows, and masked logits.
struct Problem {
  static constexpr int64_t kVocab = 101, kHidden = 24, kTokens = 12;
  Head head{.vocab_size = kVocab, .hidden_size = kHidden, .logit_scale = 0.75, .softcap = 4.0};
  Recipe recipe;
  Tokens tokens;

  Problem() {
    std::mt19937 random(11);
    head.weight = Normals(kVocab * kHidden, 0.4, &random);
    head.bias = Normals(kVocab, 0.5, &random);
    head.bias[17] = head.bias[90] = -kInfinity;
    recipe.label_smoothing = 0.125;
    recipe.z_loss = 0.015625;
    recipe.class_weights = Normals(kVocab, 0.2, &random);
    for (double& weight : recipe.class_weights) weight += 1.5;
    tokens.hidden_states = Normals(kTokens * kHidden, 1.0, &random);
    tokens.hidden_states[9 * kHidden + 3] = std::nan("");
    for (int64_t i = 0; i < kTokens; ++i) {
      tokens.targets.push_back(i % 5 == 3 ? -100 : static_cast<int32_t>(7 * i));
      tokens.token_weights.push_back(0.25 * static_cast<double>(i));
      tokens.token_temperature.push_back(0.5 + 0.125 * static_cast<double>(i));
    }
    tokens.grad_scale = 2.5;
  }

  Outputs Oracle() const { return OutputsOf(ComputeLoss(head, recipe, tokens)); }
  Outputs Plain(DType dtype) const {
    return OutputsOf(ComputePlainDense(head, recipe, tokens, dtype));
  }
};

void ExpectEqualCounts(const LossSums& got, const LossSums& want) {
  EXPECT_EQ(got.num_tokens, want.num_tokens);
  EXPECT_EQ(got.num_valid_tokens, want.num_valid_tokens);
  EXPECT_EQ(got.num_nonfinite_rows, want.num_nonfinite_rows);
  EXPECT_EQ(got.num_correct, want.num_correct);
}

TEST(PlainDense, IsTheOracleButForRoundingsOfFloat32) {
  const Problem problem;
  const Outputs oracle = problem.Oracle();
  const Outputs plain = problem.Plain(DType::kFloat32);
  ASSERT_EQ(plain.size(), oracle.size());
  for (const auto& [name, want] : oracle) {
    EXPECT_LE(RelativeError(plain.at(name), want), 1e-6) << name;
  }
  EXPECT_EQ(plain.at("argmax"), oracle.at("argmax"));
}

TEST(PlainDense, SumsAreTheOracles) {
  const Problem problem;
  const LossSums want = ComputeLoss(problem.head, problem.recipe, problem.tokens).sums;
  const LossSums got =
      ComputePlainDense(problem.head, problem.recipe, problem.tokens, DType::kFloat32).sums;
  ExpectEqualCounts(got, want);
  EXPECT_NEAR(got.loss_sum, want.loss_sum, 1e-6 * want.loss_sum);
  EXPECT_NEAR(got.cross_entropy_sum, want.cross_entropy_sum, 1e-6 * want.cross_entropy_sum);
  EXPECT_NEAR(got.z_loss_sum, want.z_loss_sum, 1e-6 * want.z_loss_sum);
  EXPECT_NEAR(got.weight_sum, want.weight_sum, 1e-6 * want.weight_sum);
  EXPECT_NEAR(got.entropy_sum, want.entropy_sum, 1e-6 * want.entropy_sum);
}

// One rounding to 8 significant bits is 2^-9 of a value at most; exp makes the absolute rounding of
// a logit of up to 8 relative.
TEST(PlainDense, BFloat16DiffersByItsRoundings) {
  const Problem problem;
  const Outputs oracle = problem.Oracle();
  const Outputs plain = problem.Plain(DType::kBFloat16);
  for (const std::string name : {"grad_hidden_states", "grad_weight", "grad_bias", "token_loss"}) {
    EXPECT_GT(RelativeError(plain.at(name), oracle.at(name)), 0x1p-13) << name;
    EXPECT_LT(RelativeError(plain.at(name), oracle.at(name)), 0x1p-7) << name;
  }
}

TEST(PlainDense, MaskedTargetsAndRowsAreTheOracles) {
  Problem problem;
  problem.head.bias[0] = -kInfinity;  // Row 0's target.
  problem.tokens.token_weights[0] = 1.0;
  const Outputs plain = problem.Plain(DType::kFloat32);
  EXPECT_EQ(plain.at("token_loss")[0], kInfinity);
  EXPECT_EQ(plain.at("logprob")[0], -kInfinity);
  EXPECT_EQ(plain.at("loss_sum")[0], kInfinity);
  for (const char* name : {"grad_weight", "grad_hidden_states", "grad_bias"}) {
    EXPECT_LE(RelativeError(plain.at(name), problem.Oracle().at(name)), 1e-6) << name;
  }
  problem.head.bias.assign(Problem::kVocab, -kInfinity);
  EXPECT_EQ(problem.Plain(DType::kFloat32), problem.Oracle());
}

// Float32 is near the stored results of every golden case.
TEST(PlainDense, AgreesWithTorch) {
  for (const std::string& path : GoldenPaths()) {
    SCOPED_TRACE(path);
    const bench::GoldenCase golden = bench::LoadGoldenCase(path).value();
    const Outputs plain = PlainOutputs(golden.head, golden.recipe, golden.tokens, DType::kFloat32,
                                       golden.teacher_head());
    for (const auto& [name, exact] : golden.expected) {
      // The largest offset, 4096, leaves 2^-12 of absolute precision to the logits.
      EXPECT_LE(CompareOutput(name, plain.at(name), exact, exact, DType::kFloat32).rel,
                golden.name == "ce_large_offset" ? 1e-3 : 2e-5)
          << name;
    }
  }
}

}  // namespace
}  // namespace lmhead::reference
