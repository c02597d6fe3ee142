#include "server/optimizer/optimizer.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <ostream>
#include <random>
#include <vector>

#include "kernels/reference/reference.h"
#include "proto/types/dtype.h"
#include "tests/conformance/compare.h"
#include "tests/conformance/tolerances.h"

namespace lmhead {
namespace {

// Several blocks of the update and a ragged end.
constexpr int64_t kCount = 5003;

struct Arrays {
  std::vector<float> parameter, grad, exp_avg, exp_avg_sq;
  std::vector<uint16_t> rounded;

  explicit Arrays(int64_t count)
      : parameter(count), grad(count), exp_avg(count), exp_avg_sq(count), rounded(count) {}

  ParameterArrays View(const OptimizerSpec& spec) {
    const int32_t num_state_arrays = NumStateArrays(spec);
    return {.count = static_cast<int64_t>(parameter.size()),
            .parameter = parameter.data(),
            .grad = grad.data(),
            .exp_avg = num_state_arrays >= 1 ? exp_avg.data() : nullptr,
            .exp_avg_sq = num_state_arrays >= 2 ? exp_avg_sq.data() : nullptr,
            .bfloat16_parameter = rounded.data()};
  }
};

std::vector<float> Normals(int64_t count, float std, std::mt19937* random) {
  std::normal_distribution<float> normal(0.0f, std);
  std::vector<float> values(count);
  for (float& value : values) value = normal(*random);
  return values;
}

struct Case {
  const char* name;
  OptimizerSpec spec;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class OptimizerTest : public testing::TestWithParam<Case> {};

TEST_P(OptimizerTest, FollowsTheOracleOverManySteps) {
  const OptimizerSpec& spec = GetParam().spec;
  std::mt19937 random(3);
  Arrays arrays(kCount);
  arrays.parameter = Normals(kCount, 0.5f, &random);
  std::vector<double> want(arrays.parameter.begin(), arrays.parameter.end());
  reference::OptimizerState state;
  for (int step = 1; step <= 100; ++step) {
    // Gradients over many orders of magnitude, and exact zeros.
    const std::vector<float> scale = Normals(kCount, 3.0f, &random);
    arrays.grad = Normals(kCount, 1.0f, &random);
    for (int64_t i = 0; i < kCount; ++i) {
      arrays.grad[i] *= i % 17 == 0 ? 0.0f : std::exp2(2.0f * scale[i]);
    }
    const UpdateNumbers numbers{.learning_rate = 0.01 / std::sqrt(step),
                                .grad_multiplier = 1.0 / 3.0,
                                .weight_decay = spec.weight_decay,
                                .update_number = step};
    const std::vector<double> grad(arrays.grad.begin(), arrays.grad.end());
    reference::ApplyUpdate(spec, spec.weight_decay, numbers.learning_rate, numbers.grad_multiplier,
                           grad, want, &state);
    ApplyOptimizer(spec, numbers, arrays.View(spec));
    ASSERT_EQ(arrays.grad, std::vector<float>(kCount, 0.0f));
  }
  EXPECT_LE(RelativeError(arrays.parameter, want), kParameterTolerance);
  if (NumStateArrays(spec) >= 1) {
    EXPECT_LE(RelativeError(arrays.exp_avg, state.exp_avg), kParameterTolerance);
  }
  if (NumStateArrays(spec) >= 2) {
    EXPECT_LE(RelativeError(arrays.exp_avg_sq, state.exp_avg_sq), kParameterTolerance);
  }
  for (int64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(arrays.rounded[i], FloatToBFloat16(arrays.parameter[i])) << i;
  }
}

TEST_P(OptimizerTest, DoesNotDependOnTheNumberOfThreads) {
  const OptimizerSpec& spec = GetParam().spec;
  std::vector<std::vector<float>> results;
  const int saved = omp_get_max_threads();
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    std::mt19937 random(3);
    Arrays arrays(kCount);
    arrays.parameter = Normals(kCount, 0.5f, &random);
    for (int step = 1; step <= 3; ++step) {
      arrays.grad = Normals(kCount, 1.0f, &random);
      ApplyOptimizer(spec, {.learning_rate = 0.1, .weight_decay = 0.1, .update_number = step},
                     arrays.View(spec));
    }
    results.push_back(arrays.parameter);
  }
  omp_set_num_threads(saved);
  EXPECT_EQ(results[0], results[1]);
}

INSTANTIATE_TEST_SUITE_P(
    All, OptimizerTest,
    testing::Values(Case{"adamw", {.kind = OptimizerKind::kAdamW}},
                    Case{"adamw_decay", {.kind = OptimizerKind::kAdamW, .weight_decay = 0.1}},
                    Case{"adamw_betas",
                         {.kind = OptimizerKind::kAdamW, .beta1 = 0.5, .beta2 = 0.95, .eps = 1e-3}},
                    Case{"sgd", {.kind = OptimizerKind::kSgd}},
                    Case{"sgd_decay", {.kind = OptimizerKind::kSgd, .weight_decay = 0.1}},
                    Case{"momentum",
                         {.kind = OptimizerKind::kSgd, .weight_decay = 0.1, .momentum = 0.9}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ApplyOptimizer, ADecoupledDecayIsNotScaledByTheGradientStatistics) {
  const OptimizerSpec spec{.kind = OptimizerKind::kAdamW, .weight_decay = 0.5};
  Arrays arrays(1);
  arrays.parameter = {2.0f};
  ApplyOptimizer(spec, {.learning_rate = 0.1, .weight_decay = 0.5}, arrays.View(spec));
  EXPECT_FLOAT_EQ(arrays.parameter[0], 2.0f * 0.95f);  // No gradient: the decay alone.
}

TEST(ApplyOptimizer, AParameterThatDoesNotDecayStaysWithoutGradient) {
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSgd}) {
    const OptimizerSpec spec{.kind = kind, .weight_decay = 0.5};
    Arrays arrays(3);
    arrays.parameter = {2.0f, -1.0f, 0.0f};
    const std::vector<float> before = arrays.parameter;
    ApplyOptimizer(spec, {.learning_rate = 0.1, .weight_decay = 0.0}, arrays.View(spec));
    EXPECT_EQ(arrays.parameter, before);
  }
}

TEST(NumStateArrays, CountsWhatTheOptimizerKeeps) {
  EXPECT_EQ(NumStateArrays({.kind = OptimizerKind::kNone}), 0);
  EXPECT_EQ(NumStateArrays({.kind = OptimizerKind::kAdamW}), 2);
  EXPECT_EQ(NumStateArrays({.kind = OptimizerKind::kSgd}), 0);
  EXPECT_EQ(NumStateArrays({.kind = OptimizerKind::kSgd, .momentum = 0.9}), 1);
}

}  // namespace
}  // namespace lmhead
