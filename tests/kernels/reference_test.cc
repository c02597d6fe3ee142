#include "kernels/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "bench/golden_case.h"
#include "kernels/reference/compare.h"
#include "tests/conformance/compare.h"
#include "tests/util/golden_paths.h"

namespace lmhead::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Float64 against float64: only the order of sums differs.
constexpr double kTolerance = 1e-12;

class GoldenReference : public testing::TestWithParam<std::string> {};

TEST_P(GoldenReference, EqualsTorch) {
  const absl::StatusOr<bench::GoldenCase> golden = bench::LoadGoldenCase(GetParam());
  ASSERT_TRUE(golden.ok()) << golden.status();
  const Result result =
      ComputeLoss(golden->head, golden->recipe, golden->tokens, golden->teacher_head());
  const Outputs outputs = OutputsOf(result);
  ASSERT_EQ(outputs.size(), golden->expected.size());
  // torch's exp(z - lse) carries the rounding of lse, and lse - sum p z multiplies it by lse.
  const double lse = LargestMagnitude(golden->expected.at("lse"));
  const double entropy_tolerance = kTolerance + 0x1p-53 * lse * lse;
  for (const auto& [name, want] : golden->expected) {
    SCOPED_TRACE(name);
    const std::vector<double>& got = outputs.at(name);
    if (name == "argmax" || name == "num_valid_tokens") {
      EXPECT_EQ(got, want);
    } else if (name == "loss_sum") {
      EXPECT_NEAR(got[0], want[0], kTolerance * std::max(1.0, want[0]));
    } else {
      EXPECT_LE(RelativeError(got, want), name == "entropy" ? entropy_tolerance : kTolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GoldenReference, testing::ValuesIn(GoldenPaths()),
                         [](const auto& info) { return GoldenTestName(info.param); });

TEST(GoldenCases, AreThere) { EXPECT_EQ(GoldenPaths().size(), 31u); }

std::vector<double> Normals(size_t count, double std, std::mt19937* random) {
  std::normal_distribution<double> normal(0.0, std);
  std::vector<double> values(count);
  for (double& value : values) value = normal(*random);
  return values;
}

// A head of 11 words and 3 hidden columns with everything switched on.
struct Problem {
  Head head{.vocab_size = 11, .hidden_size = 3, .logit_scale = 0.7, .softcap = 4.0};
  Recipe recipe;
  Tokens tokens;

  Problem() {
    std::mt19937 random(7);
    head.weight = Normals(33, 1.0, &random);
    head.bias = Normals(11, 1.0, &random);
    recipe.label_smoothing = 0.2;
    recipe.z_loss = 0.01;
    recipe.class_weights = Normals(11, 0.2, &random);
    for (double& weight : recipe.class_weights) weight += 1.0;
    tokens.hidden_states = Normals(12, 1.0, &random);
    tokens.targets = {4, -100, 0, 10};
    tokens.token_weights = {0.5, 3.0, 1.5, 0.0};
    tokens.token_temperature = {1.0, 0.5, 2.0, 1.3};
    tokens.grad_scale = 2.5;
  }

  double Objective() const {
    return tokens.grad_scale * ComputeLoss(head, recipe, tokens).sums.loss_sum;
  }
};

// Central difference of the objective with respect to *value.
double Slope(Problem* problem, double* value) {
  constexpr double kStep = 1e-6;
  const double saved = *value;
  *value = saved + kStep;
  const double above = problem->Objective();
  *value = saved - kStep;
  const double below = problem->Objective();
  *value = saved;
  return (above - below) / (2 * kStep);
}

void ExpectGradientsAreSlopes(Problem* problem) {
  const Result result = ComputeLoss(problem->head, problem->recipe, problem->tokens);
  for (size_t i = 0; i < problem->head.weight.size(); ++i) {
    EXPECT_NEAR(result.grad_weight[i], Slope(problem, &problem->head.weight[i]), 1e-7) << i;
  }
  for (size_t i = 0; i < problem->head.bias.size(); ++i) {
    if (std::isinf(problem->head.bias[i])) continue;
    EXPECT_NEAR(result.grad_bias[i], Slope(problem, &problem->head.bias[i]), 1e-7) << i;
  }
  for (size_t i = 0; i < problem->tokens.hidden_states.size(); ++i) {
    EXPECT_NEAR(result.grad_hidden_states[i], Slope(problem, &problem->tokens.hidden_states[i]),
                1e-7)
        << i;
  }
}

TEST(Reference, GradientsAreSlopesOfTheLoss) {
  Problem problem;
  ExpectGradientsAreSlopes(&problem);
}

TEST(Reference, GradientsAreSlopesWithMaskedLogits) {
  Problem problem;
  problem.head.bias[2] = -kInfinity;
  problem.head.bias[7] = -kInfinity;
  ExpectGradientsAreSlopes(&problem);
  problem.head.softcap = 0.0;
  ExpectGradientsAreSlopes(&problem);
  const Result result = ComputeLoss(problem.head, problem.recipe, problem.tokens);
  EXPECT_EQ(result.grad_bias[2], 0.0);
  EXPECT_TRUE(std::isfinite(result.sums.loss_sum));
}

TEST(Reference, SmoothingAroundMaskedLogitsDoesNotSeeACommonOffset) {
  Problem problem;
  problem.head.softcap = 0.0;
  problem.recipe.z_loss = 0.0;
  problem.head.bias[2] = -kInfinity;
  const double before = problem.Objective();
  for (double& bias : problem.head.bias) bias += 1000.0;
  EXPECT_NEAR(problem.Objective(), before, 1e-9 * std::fabs(before));
}

TEST(Reference, AMaskedTargetHasInfiniteLossAndFiniteGradients) {
  Problem problem;
  problem.head.bias[4] = -kInfinity;
  const Result result = ComputeLoss(problem.head, problem.recipe, problem.tokens);
  EXPECT_EQ(result.logprob[0], -kInfinity);
  EXPECT_EQ(result.token_loss[0], kInfinity);
  for (const double grad : result.grad_weight) EXPECT_TRUE(std::isfinite(grad));
}

TEST(Reference, ARowWithoutUnmaskedLogitsHasNoGradient) {
  Problem problem;
  problem.head.bias.assign(11, -kInfinity);
  const Result result = ComputeLoss(problem.head, problem.recipe, problem.tokens);
  EXPECT_EQ(result.lse[0], -kInfinity);
  EXPECT_EQ(result.entropy[0], 0.0);
  EXPECT_EQ(result.argmax[0], 0);
  EXPECT_EQ(LargestMagnitude(result.grad_weight), 0.0);
  EXPECT_EQ(LargestMagnitude(result.grad_hidden_states), 0.0);
}

TEST(Reference, RowsThatAreNotFiniteAreCountedAndLeftOut) {
  Problem problem;
  problem.tokens.hidden_states[1] = std::nan("");
  problem.tokens.hidden_states[3] = kInfinity;  // An ignored row.
  const Result result = ComputeLoss(problem.head, problem.recipe, problem.tokens);
  EXPECT_EQ(result.sums.num_nonfinite_rows, 2);
  EXPECT_EQ(result.sums.num_valid_tokens, 2);
  EXPECT_EQ(result.sums.num_tokens, 4);
  EXPECT_EQ(result.lse[0], 0.0);
  EXPECT_EQ(result.token_loss[0], 0.0);
  EXPECT_EQ(result.grad_hidden_states[0], 0.0);
  for (const double grad : result.grad_weight) EXPECT_TRUE(std::isfinite(grad));
}

TEST(Reference, UpcastIsExact) {
  const float floats[] = {1.0f, -0.1f};
  const uint16_t bfloats[] = {FloatToBFloat16(1.5f), FloatToBFloat16(-3.0f)};
  const uint16_t halves[] = {FloatToFloat16(0.5f), FloatToFloat16(6e-8f)};
  EXPECT_EQ(Upcast({floats, 2, 1, DType::kFloat32}), (std::vector<double>{1.0, -0.1f}));
  EXPECT_EQ(Upcast({bfloats, 1, 2, DType::kBFloat16}), (std::vector<double>{1.5, -3.0}));
  EXPECT_EQ(Upcast({halves, 1, 2, DType::kFloat16}), (std::vector<double>{0.5, 0x1p-24}));
}

// Three steps worked out by torch's documented formulas with exact decimals.
TEST(ReferenceOptimizer, SgdWithMomentumAndDecay) {
  const OptimizerSpec spec{.kind = OptimizerKind::kSgd, .momentum = 0.5};
  std::vector<double> parameter = {1.0};
  OptimizerState state;
  ApplyUpdate(spec, /*weight_decay=*/0.25, /*learning_rate=*/0.5, /*grad_multiplier=*/0.5,
              std::vector<double>{2.0}, parameter, &state);
  EXPECT_DOUBLE_EQ(parameter[0], 0.375);  // g = 1 + 0.25, buffer = 1.25
  ApplyUpdate(spec, 0.25, 0.5, 0.5, std::vector<double>{-1.0}, parameter, &state);
  EXPECT_DOUBLE_EQ(parameter[0], 0.265625);  // g = -0.5 + 0.09375, buffer = 0.625 - 0.40625
}

TEST(ReferenceOptimizer, FirstAdamWStepHasTheSizeOfTheLearningRate) {
  const OptimizerSpec spec{.kind = OptimizerKind::kAdamW, .eps = 1e-12};
  std::vector<double> parameter = {1.0, 1.0};
  OptimizerState state;
  ApplyUpdate(spec, /*weight_decay=*/0.1, /*learning_rate=*/0.01, /*grad_multiplier=*/3.0,
              std::vector<double>{5.0, -0.002}, parameter, &state);
  EXPECT_NEAR(parameter[0], 0.999 - 0.01, 1e-10);
  EXPECT_NEAR(parameter[1], 0.999 + 0.01, 1e-10);
}

// beta1 = beta2 = 0: each step divides the gradient by its own magnitude.
TEST(ReferenceOptimizer, AdamWWithoutMemoryTakesSignSteps) {
  const OptimizerSpec spec{.kind = OptimizerKind::kAdamW, .beta1 = 0.0, .beta2 = 0.0, .eps = 1.0};
  std::vector<double> parameter = {0.0};
  OptimizerState state;
  for (const double grad : {1.0, -3.0}) {
    ApplyUpdate(spec, 0.0, 1.0, 1.0, std::vector<double>{grad}, parameter, &state);
  }
  EXPECT_DOUBLE_EQ(parameter[0], -1.0 / 2.0 + 3.0 / 4.0);
}

}  // namespace
}  // namespace lmhead::reference
