#include "kernels/cpu/row_passes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference/reference.h"
#include "tests/conformance/compare.h"

namespace lmhead::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One row whose logits are given, walked in tiles of `tile_size` columns.
struct Walk {
  RowState row;
  RowOutputs outputs;
  std::vector<float> grad;
};

Walk WalkRow(const RowPasses& passes, const RowConfig& config, const RowState& inputs,
             std::vector<float> logits, int64_t tile_size) {
  Walk walk{.row = inputs};
  BeginRow(&walk.row);
  const auto for_each_tile = [&](auto&& body) {
    for (int64_t start = 0; start < config.vocab_size; start += tile_size) {
      body(VocabTile{start, std::min(tile_size, config.vocab_size - start)}, logits.data() + start);
    }
  };
  for_each_tile([&](VocabTile tile, float* z) {
    passes.transform(config, tile, walk.row, z);
    passes.accumulate(config, tile, z, &walk.row);
  });
  walk.outputs = FinishRow(config, {}, &walk.row);
  for_each_tile([&](VocabTile tile, float* z) { passes.grad(config, tile, walk.row, z); });
  walk.grad = std::move(logits);
  return walk;
}

// The oracle on the same logits: a hidden size of one, so that the weight is the logits.
reference::Result Expected(const RowConfig& config, const RowState& inputs,
                           const std::vector<float>& logits) {
  reference::Head head{.vocab_size = config.vocab_size,
                       .hidden_size = 1,
                       .weight = {logits.begin(), logits.end()},
                       .bias = std::vector<double>(logits.size(), 0.0),
                       .logit_scale = config.logit_scale,
                       .softcap = config.softcap};
  if (config.bias != nullptr) head.bias.assign(config.bias, config.bias + config.vocab_size);
  reference::Recipe recipe;
  recipe.label_smoothing = config.label_smoothing;
  recipe.z_loss = config.z_loss;
  if (config.class_weights != nullptr) {
    recipe.class_weights.assign(config.class_weights, config.class_weights + config.vocab_size);
  }
  const reference::Tokens tokens{.hidden_states = {1.0},
                                 .targets = {inputs.valid ? inputs.target : kDefaultIgnoreIndex},
                                 .token_weights = {inputs.coefficient},
                                 .token_temperature = {inputs.temperature}};
  return reference::ComputeLoss(head, recipe, tokens);
}

class RowPassesTest : public testing::TestWithParam<RowPasses> {
 protected:
  std::vector<float> Normals(int64_t count, float std, float mean = 0.0f) {
    std::normal_distribution<float> normal(mean, std);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  void ExpectEqualsOracle(const RowConfig& config, const RowState& inputs,
                          const std::vector<float>& logits, double tolerance = 5e-7) {
    const reference::Result want = Expected(config, inputs, logits);
    for (const int64_t tile_size : {int64_t{1}, int64_t{16}, int64_t{100}, config.vocab_size}) {
      SCOPED_TRACE(testing::Message() << "tiles of " << tile_size);
      const Walk got = WalkRow(GetParam(), config, inputs, logits, tile_size);
      const auto close = [&](double value, double wanted) {
        if (value == wanted) return;
        EXPECT_NEAR(value, wanted, tolerance * std::max(1.0, std::fabs(wanted)));
      };
      close(got.outputs.lse, want.lse[0]);
      close(got.outputs.logprob, want.logprob[0]);
      close(got.outputs.entropy, want.entropy[0]);
      close(got.outputs.cross_entropy + got.outputs.z_loss, want.token_loss[0]);
      EXPECT_LE(got.outputs.logprob, 0.0);
      EXPECT_EQ(got.row.stats.argmax, want.argmax[0]);
      EXPECT_LE(RelativeError(got.grad, want.grad_bias), tolerance);
    }
  }

  std::mt19937 random_{5};
};

TEST_P(RowPassesTest, PlainRowsOfEveryLength) {
  for (const int64_t length : {1, 2, 15, 16, 17, 31, 33, 257, 1009}) {
    SCOPED_TRACE(length);
    const RowConfig config{.vocab_size = length, .entropy = true};
    const RowState inputs{.target = static_cast<int32_t>(length / 2), .coefficient = 0.75f};
    ExpectEqualsOracle(config, inputs, Normals(length, 3.0f));
  }
}

TEST_P(RowPassesTest, EveryTransformAndTerm) {
  const std::vector<float> bias = Normals(257, 1.0f);
  const std::vector<float> class_weights = Normals(257, 0.1f, 1.0f);
  const RowState inputs{.target = 200, .temperature = 1.3f, .coefficient = -1.5f};
  RowConfig config{.vocab_size = 257, .entropy = true};
  ExpectEqualsOracle(config, inputs, Normals(257, 3.0f));
  config.bias = bias.data();
  ExpectEqualsOracle(config, inputs, Normals(257, 3.0f));
  config.logit_scale = 0.25f;
  ExpectEqualsOracle(config, inputs, Normals(257, 9.0f));
  config.softcap = 2.0f;
  ExpectEqualsOracle(config, inputs, Normals(257, 9.0f));
  config.label_smoothing = 0.1f;
  ExpectEqualsOracle(config, inputs, Normals(257, 9.0f));
  config.z_loss = 0.01f;
  ExpectEqualsOracle(config, inputs, Normals(257, 9.0f));
  config.class_weights = class_weights.data();
  ExpectEqualsOracle(config, inputs, Normals(257, 9.0f));
}

TEST_P(RowPassesTest, MaskedLogitsAndTilesAndRows) {
  std::vector<float> bias(257, 0.0f);
  std::fill(bias.begin(), bias.begin() + 120, -kInfinity);  // Whole tiles, the first ones too.
  for (size_t i = 150; i < bias.size(); i += 3) bias[i] = -kInfinity;
  RowConfig config{.vocab_size = 257, .bias = bias.data(), .entropy = true};
  RowState inputs{.target = 130, .coefficient = 1.0f};
  for (const float smoothing : {0.0f, 0.2f}) {
    for (const float softcap : {0.0f, 5.0f}) {
      config.label_smoothing = smoothing;
      config.softcap = softcap;
      ExpectEqualsOracle(config, inputs, Normals(257, 2.0f));
    }
  }
  inputs.target = 3;  // A masked target.
  config.softcap = 0.0f;
  ExpectEqualsOracle(config, inputs, Normals(257, 2.0f));
  std::fill(bias.begin(), bias.end(), -kInfinity);
  config.z_loss = 0.1f;
  ExpectEqualsOracle(config, inputs, Normals(257, 2.0f));
}

TEST_P(RowPassesTest, LargeLogitsAndOffsets) {
  const RowConfig config{.vocab_size = 257, .label_smoothing = 0.1f, .entropy = true};
  const RowState inputs{.target = 9, .coefficient = 1.0f};
  ExpectEqualsOracle(config, inputs, Normals(257, 1e4f));
  ExpectEqualsOracle(config, inputs, Normals(257, 1.0f, 4096.0f));
  ExpectEqualsOracle(config, inputs, Normals(257, 1.0f, -1e6f));
  std::vector<float> confident = Normals(257, 1.0f);
  confident[9] = 40.0f;
  ExpectEqualsOracle(config, inputs, confident);
}

TEST_P(RowPassesTest, ArgmaxIsTheLowestAmongEquals) {
  const RowConfig config{.vocab_size = 100};
  std::vector<float> logits(100, -2.0f);
  logits[37] = logits[38] = logits[90] = 1.0f;
  const Walk walk = WalkRow(GetParam(), config, {.target = 0}, logits, 16);
  EXPECT_EQ(walk.row.stats.argmax, 37);
  EXPECT_EQ(WalkRow(GetParam(), config, {}, std::vector<float>(100, 0.0f), 16).row.stats.argmax, 0);
}

TEST_P(RowPassesTest, RowsWithoutACoefficientHaveExactlyNoGradient) {
  const RowConfig config{.vocab_size = 33, .entropy = true};
  const std::vector<float> logits = Normals(33, 3.0f);
  const Walk ignored = WalkRow(GetParam(), config, {.target = -100, .valid = false}, logits, 16);
  EXPECT_EQ(ignored.grad, std::vector<float>(33, 0.0f));
  EXPECT_EQ(ignored.outputs.cross_entropy, 0.0);
  EXPECT_EQ(ignored.outputs.logprob, 0.0);
  EXPECT_GT(ignored.outputs.entropy, 0.0);
  const Walk broken = WalkRow(GetParam(), config, {.finite = false, .valid = false}, logits, 16);
  EXPECT_EQ(broken.outputs.lse, 0.0);
  EXPECT_EQ(broken.outputs.entropy, 0.0);
}

TEST_P(RowPassesTest, ATargetOutsideTheTilesIsNeverTouched) {
  const RowConfig config{.vocab_size = 33};
  for (const int32_t target :
       {-1, 33, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    RowState row{.target = target, .coefficient = 1.0f};
    BeginRow(&row);
    std::vector<float> logits = Normals(33, 1.0f);
    GetParam().accumulate(config, {0, 33}, logits.data(), &row);
    EXPECT_EQ(row.stats.target_logit, 0.0f);
    row.probability_factor = static_cast<float>(1.0 / row.stats.sum_exp);
    row.target_mass = 100.0f;
    GetParam().grad(config, {0, 33}, row, logits.data());
    double sum = 0.0;
    for (const float value : logits) sum += value;
    EXPECT_NEAR(sum, 1.0, 1e-5);
  }
}

TEST_P(RowPassesTest, ANanAmongTheLogitsShows) {
  const RowConfig config{.vocab_size = 33};
  std::vector<float> logits(33, -kInfinity);
  logits[20] = std::nanf("");
  EXPECT_TRUE(std::isnan(WalkRow(GetParam(), config, {.target = 1}, logits, 16).outputs.lse));
  logits = Normals(33, 1.0f);
  logits[20] = std::nanf("");
  EXPECT_TRUE(std::isnan(WalkRow(GetParam(), config, {.target = 1}, logits, 16).outputs.lse));
}

// Through two logits {0, x}: the gradient of the second is exp(x) / (1 + exp(x)).
TEST_P(RowPassesTest, ExponentialIsGoodToTwoUlp) {
  double worst = 0.0;
  for (float x = 0.0f; x > -80.0f; x -= 0.00173f) {
    RowState row{.target = 0, .coefficient = 1.0f};
    row.stats.logits_max = 0.0f;
    row.probability_factor = 1.0f;
    float logits[] = {x};
    GetParam().grad({.vocab_size = 2}, {1, 1}, row, logits);
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::exp2(std::floor(std::log2(want)) - 23);
    worst = std::max(worst, std::fabs(logits[0] - want) / ulp);
  }
  EXPECT_LE(worst, 2.0);
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_P(RowPassesTest, SoftcapIsGoodToThreeUlp) {
  double worst = 0.0;
  for (float x = -12.0f; x < 12.0f; x += 0.000711f) {
    float logits[] = {x};
    GetParam().transform({.vocab_size = 1, .softcap = 1.0f}, {0, 1}, {}, logits);
    const double want = std::tanh(static_cast<double>(x));
    const double ulp = std::exp2(std::floor(std::log2(std::fabs(want))) - 23);
    worst = std::max(worst, std::fabs(logits[0] - want) / ulp);
  }
  EXPECT_LE(worst, 3.0);
  RecordProperty("worst_ulp", std::to_string(worst));
}

INSTANTIATE_TEST_SUITE_P(All, RowPassesTest,
                         testing::ValuesIn(SupportedRowPasses().begin(),
                                           SupportedRowPasses().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace lmhead::cpu
