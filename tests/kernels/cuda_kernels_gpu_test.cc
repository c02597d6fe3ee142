// The GPU kernels alone, without the matrix products between them, against the oracle: a head whose
// weight is the identity has its hidden states as logits.
//
// These are also what compute-sanitizer's racecheck runs over: it cannot run cuBLASLt's kernels.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/column_sums.h"
#include "kernels/convert.h"
#include "kernels/grad_logits.h"
#include "kernels/hidden_rows.h"
#include "kernels/optimizer_update.h"
#include "kernels/reference/reference.h"
#include "kernels/row_types.h"
#include "kernels/shard_stats.h"
#include "kernels/squared_norm.h"
#include "kernels/token_loss.h"
#include "tests/kernels/gpu_util.h"

namespace lmhead::kernels {
namespace {

struct LossCase {
  DType dtype;
  int64_t num_rows, vocab_size, first_tile;  // The rest of the vocabulary is the second tile.
  bool every_option;
};

std::string CaseName(const ::testing::TestParamInfo<LossCase>& info) {
  const LossCase& c = info.param;
  return absl::StrCat(std::string(DTypeName(c.dtype)), "_", c.num_rows, "x", c.vocab_size, "_",
                      c.first_tile, c.every_option ? "_every_option" : "");
}

class CudaKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU";
  }
};

class CudaLossTest : public CudaKernelsTest, public ::testing::WithParamInterface<LossCase> {
 protected:
  // Logits of one tile, as a matrix product leaves them: rows padded to 16 bytes.
  struct Tile {
    VocabTile columns;
    int64_t stride;
    std::optional<DeviceArray<std::byte>> logits;
    MatrixView View(int64_t rows, DType dtype) const {
      return {logits->data(), rows, stride, dtype};
    }
  };

  void MakeInputs() {
    const LossCase& c = GetParam();
    head_ = {.vocab_size = c.vocab_size, .hidden_size = c.vocab_size};
    head_.weight.assign(c.vocab_size * c.vocab_size, 0.0);
    for (int64_t j = 0; j < c.vocab_size; ++j) head_.weight[j * c.vocab_size + j] = 1.0;
    head_.bias.assign(c.vocab_size, 0.0);
    head_.bias[c.vocab_size / 2] = kMasked;
    tokens_.hidden_states =
        Decode(Encode(Normal(c.num_rows * c.vocab_size, 3.0, 11), c.dtype), c.dtype);
    for (int64_t row = 0; row < c.num_rows; ++row) {
      const bool ignored = row % 5 == 3;
      tokens_.targets.push_back(ignored ? kDefaultIgnoreIndex
                                        : static_cast<int32_t>((row * 7 + 1) % c.vocab_size));
      if (tokens_.targets.back() == c.vocab_size / 2) ++tokens_.targets.back();
      tokens_.token_weights.push_back(0.5 + 0.25 * static_cast<double>(row % 4));
    }
    if (!c.every_option) return;
    head_.logit_scale = 0.5;
    head_.softcap = 4.0;
    recipe_.temperature = 1.25;
    recipe_.label_smoothing = 0.125;
    recipe_.z_loss = 0.0078125;
    for (int64_t j = 0; j < c.vocab_size; ++j) {
      recipe_.class_weights.push_back(0.5 + 0.125 * static_cast<double>(j % 8));
    }
  }

  void MakeTile(int64_t start, int64_t stop, Tile* tile) {
    const LossCase& c = GetParam();
    const int64_t per_16_bytes = 16 / BytesPerElement(c.dtype);
    tile->columns = {.start = start, .cols = stop - start};
    tile->stride = (stop - start + per_16_bytes - 1) / per_16_bytes * per_16_bytes;
    std::vector<double> padded(c.num_rows * tile->stride, 1e4);  // Padding must count for nothing.
    for (int64_t row = 0; row < c.num_rows; ++row) {
      for (int64_t j = start; j < stop; ++j) {
        padded[row * tile->stride + j - start] =
            head_.bias[j] == kMasked ? kMasked : tokens_.hidden_states[row * c.vocab_size + j];
      }
    }
    tile->logits.emplace(Encode(padded, c.dtype));
  }

  std::vector<RowInput> RowInputs() const {
    std::vector<RowInput> rows;
    for (size_t row = 0; row < tokens_.targets.size(); ++row) {
      rows.push_back({.target = tokens_.targets[row] < 0 ? -1 : tokens_.targets[row],
                      .grad_coefficient = static_cast<float>(tokens_.token_weights[row]),
                      .inverse_temperature = static_cast<float>(1.0 / recipe_.temperature)});
    }
    return rows;
  }

  reference::Head head_;
  reference::Recipe recipe_;
  reference::Tokens tokens_;
};

TEST_P(CudaLossTest, StatisticsLossesAndGradientsAreTheOracles) {
  const LossCase& c = GetParam();
  MakeInputs();
  const reference::Result want = reference::ComputeLoss(head_, recipe_, tokens_);
  Tile tiles[2];
  MakeTile(0, c.first_tile, &tiles[0]);
  MakeTile(c.first_tile, c.vocab_size, &tiles[1]);

  // Class weights may be read to the next 32 bytes past their end.
  std::vector<float> weights(recipe_.class_weights.begin(), recipe_.class_weights.end());
  weights.resize(c.vocab_size + 8, 0.0f);
  const DeviceArray<float> class_weights(weights);
  const float* const device_weights =
      recipe_.class_weights.empty() ? nullptr : class_weights.data();
  const DeviceArray<RowInput> rows(RowInputs());
  const DeviceArray<RowStats> stats(std::vector<RowStats>(c.num_rows));
  const DeviceArray<uint8_t> nonfinite(std::vector<uint8_t>(c.num_rows, 0));
  const DeviceArray<RowLoss> losses(std::vector<RowLoss>(c.num_rows));
  const DeviceArray<RowGrad> grads(std::vector<RowGrad>(c.num_rows));
  const LogitTransform transform = {static_cast<float>(head_.logit_scale),
                                    static_cast<float>(head_.softcap)};
  for (int i = 0; i < 2; ++i) {
    Check(LaunchShardStats(tiles[i].View(c.num_rows, c.dtype), tiles[i].columns, rows.data(),
                           {.transform = transform,
                            .class_weights = device_weights,
                            .entropy = true,
                            .smoothing = recipe_.label_smoothing > 0.0,
                            .merge = i > 0},
                           stats.data(), nullptr));
  }
  Check(LaunchTokenLoss(c.num_rows, rows.data(), stats.data(), nonfinite.data(),
                        {.label_smoothing = static_cast<float>(recipe_.label_smoothing),
                         .z_loss = static_cast<float>(recipe_.z_loss),
                         .class_weights = device_weights,
                         .vocab_size = c.vocab_size,
                         .logit_scale = transform.logit_scale,
                         .softcap = transform.softcap,
                         .entropy = true},
                        losses.data(), grads.data(), nullptr));
  std::vector<double> token_loss, lse, entropy;
  std::vector<int32_t> argmax;
  for (const RowLoss& loss : losses.Read()) {
    token_loss.push_back(static_cast<double>(loss.cross_entropy) + loss.z_loss);
    lse.push_back(loss.lse);
    entropy.push_back(loss.entropy);
    argmax.push_back(loss.argmax);
  }
  EXPECT_LT(RelativeError(token_loss, want.token_loss), 2e-6);
  EXPECT_LT(RelativeError(lse, want.lse), 2e-6);
  EXPECT_LT(RelativeError(entropy, want.entropy), 2e-6);
  EXPECT_EQ(argmax, want.argmax);

  std::vector<double> grad_logits(c.num_rows * c.vocab_size), grad_bias(c.vocab_size);
  for (Tile& tile : tiles) {
    const MatrixView view = tile.View(c.num_rows, c.dtype);
    const float* const smoothing_weights = recipe_.label_smoothing > 0.0 ? device_weights : nullptr;
    Check(LaunchGradLogits(view, tile.columns, grads.data(), transform, smoothing_weights,
                           /*entropy=*/false, nullptr));
    const DeviceArray<float> sums(std::vector<float>(tile.columns.cols, 0.0f));
    Check(LaunchAddColumnSums(view, tile.columns.cols, sums.data(), nullptr));
    const std::vector<double> grad = Decode(tile.logits->Read(), c.dtype);
    const std::vector<float> column_sums = sums.Read();
    for (int64_t j = 0; j < tile.columns.cols; ++j) {
      grad_bias[tile.columns.start + j] = column_sums[j];
      for (int64_t row = 0; row < c.num_rows; ++row) {
        grad_logits[row * c.vocab_size + tile.columns.start + j] = grad[row * tile.stride + j];
      }
    }
  }
  const double rounding = c.dtype == DType::kBFloat16 ? 0x1p-8 : 4e-6;
  EXPECT_LT(RelativeError(grad_logits, want.grad_hidden_states), rounding);
  EXPECT_LT(RelativeError(grad_bias, want.grad_bias), rounding);
}

INSTANTIATE_TEST_SUITE_P(All, CudaLossTest,
                         ::testing::Values(LossCase{DType::kFloat32, 1, 5, 4, false},
                                           LossCase{DType::kBFloat16, 1, 13, 8, false},
                                           LossCase{DType::kFloat32, 7, 257, 128, false},
                                           LossCase{DType::kBFloat16, 7, 257, 128, false},
                                           LossCase{DType::kFloat32, 7, 257, 128, true},
                                           LossCase{DType::kBFloat16, 7, 257, 128, true},
                                           LossCase{DType::kFloat32, 33, 1009, 504, true},
                                           LossCase{DType::kBFloat16, 33, 1009, 504, true}),
                         CaseName);

TEST_F(CudaKernelsTest, HiddenRowsAreConvertedAndThoseNotFiniteAreZeroedAndFlagged) {
  constexpr int64_t kRows = 9, kCols = 101;
  std::vector<double> values = Normal(kRows * kCols, 1.0, 3);
  values[4 * kCols + 7] = std::numeric_limits<double>::quiet_NaN();
  values[8 * kCols + 100] = HUGE_VAL;
  for (const DType from : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType to : {DType::kFloat32, DType::kBFloat16}) {
      const DeviceArray<std::byte> source(Encode(values, from));
      const DeviceArray<std::byte> target(
          std::vector<std::byte>(kRows * kCols * BytesPerElement(to), std::byte{0x55}));
      const DeviceArray<uint8_t> flags(std::vector<uint8_t>(kRows, 7));
      Check(LaunchLoadHiddenRows({source.data(), kRows, kCols, from},
                                 {target.data(), kRows, kCols, to}, /*keep_flags=*/false,
                                 flags.data(), nullptr));
      std::vector<double> want = Decode(Encode(values, from), from);
      for (const int64_t bad : {4, 8}) {
        std::fill_n(want.begin() + bad * kCols, kCols, 0.0);
      }
      EXPECT_EQ(Decode(target.Read(), to), Decode(Encode(want, to), to));
      EXPECT_EQ(flags.Read(), (std::vector<uint8_t>{0, 0, 0, 0, 1, 0, 0, 0, 1}));
    }
  }
}

TEST_F(CudaKernelsTest, ConvertRoundsToNearest) {
  const std::vector<double> values = Normal(1003, 10.0, 5);
  const DeviceArray<std::byte> source(Encode(values, DType::kFloat32));
  for (const DType to : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const DeviceArray<std::byte> target(
        std::vector<std::byte>(values.size() * BytesPerElement(to), std::byte{0x55}));
    Check(LaunchConvert({source.data(), 1, 1003, DType::kFloat32}, {target.data(), 1, 1003, to},
                        nullptr));
    EXPECT_EQ(target.Read(), Encode(values, to));
  }
}

TEST_F(CudaKernelsTest, SquaredNormIsTheSumInDoublePrecision) {
  for (const int64_t count : {1, 1000, 1 << 20}) {
    const std::vector<double> values =
        Decode(Encode(Normal(count, 1.0, 9), DType::kFloat32), DType::kFloat32);
    const std::vector<float> floats(values.begin(), values.end());
    double want = 0.5;
    for (const double value : values) want += value * value;
    const DeviceArray<float> device(floats);
    const DeviceArray<double> partials(std::vector<double>(kSquaredNormBlocks, 0.0));
    const DeviceArray<double> result(std::vector<double>{0.5});
    Check(LaunchSquaredNorm(device.data(), count, /*add=*/true, partials.data(), result.data(),
                            nullptr));
    EXPECT_NEAR(result.Read()[0], want, 1e-12 * want) << count;
  }
}

TEST_F(CudaKernelsTest, OptimizersFollowTheOracle) {
  constexpr int64_t kCount = 1003;
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSgd}) {
    OptimizerSpec spec{.kind = kind};
    if (kind == OptimizerKind::kSgd) spec.momentum = 0.9;
    std::vector<double> want = Normal(kCount, 1.0, 21);
    const DeviceArray<float> parameter(std::vector<float>(want.begin(), want.end()));
    const DeviceArray<float> exp_avg(std::vector<float>(kCount, 0.0f));
    const DeviceArray<float> exp_avg_sq(std::vector<float>(kCount, 0.0f));
    const DeviceArray<uint16_t> narrow(std::vector<uint16_t>(kCount, 0));
    reference::OptimizerState state;
    for (int64_t update = 1; update <= 5; ++update) {
      const std::vector<double> grad_values =
          Decode(Encode(Normal(kCount, 1.0, 30 + update), DType::kFloat32), DType::kFloat32);
      const DeviceArray<float> grad(std::vector<float>(grad_values.begin(), grad_values.end()));
      reference::ApplyUpdate(spec, 0.01, 0.1, 0.5, grad_values, want, &state);
      Check(LaunchOptimizerUpdate(spec,
                                  {.learning_rate = 0.1,
                                   .grad_multiplier = 0.5,
                                   .weight_decay = 0.01,
                                   .update_number = update},
                                  {.count = kCount,
                                   .parameter = parameter.data(),
                                   .grad = grad.data(),
                                   .exp_avg = exp_avg.data(),
                                   .exp_avg_sq = exp_avg_sq.data(),
                                   .bfloat16_parameter = narrow.data()},
                                  nullptr));
      EXPECT_EQ(grad.Read(), std::vector<float>(kCount, 0.0f));
    }
    const std::vector<float> got = parameter.Read();
    EXPECT_LT(RelativeError({got.begin(), got.end()}, want), 1e-6);
    const std::vector<uint16_t> rounded = narrow.Read();
    for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(rounded[i], FloatToBFloat16(got[i])) << i;
  }
}

}  // namespace
}  // namespace lmhead::kernels
