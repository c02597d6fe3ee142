// The products of logits with a bias: bfloat16 results are the sum rounded once.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/compute/cublaslt_gemm.h"
#include "tests/kernels/gpu_util.h"

namespace lmhead {
namespace {

using kernels::Decode;
using kernels::DeviceArray;
using kernels::Encode;
using kernels::Normal;

// Sums of a few integers are exact in float32, so that only the roundings to bfloat16 tell.
std::vector<double> Integers(int64_t count, double std, uint32_t seed) {
  std::vector<double> values = Normal(count, std, seed);
  for (double& value : values) value = std::round(value);
  return values;
}

int64_t CountDifferent(int64_t rows, int64_t cols, int64_t hidden_size) {
  const int64_t stride = (cols + 63) / 64 * 64;
  const std::vector<double> hidden = Integers(rows * hidden_size, 12.0, 1);
  const std::vector<double> weight = Integers(cols * hidden_size, 12.0, 2);
  const std::vector<double> bias =
      Decode(Encode(Normal(cols, 60.0, 3), DType::kBFloat16), DType::kBFloat16);
  const DeviceArray<std::byte> device_hidden(Encode(hidden, DType::kBFloat16));
  const DeviceArray<std::byte> device_weight(Encode(weight, DType::kBFloat16));
  const DeviceArray<std::byte> device_bias(Encode(bias, DType::kBFloat16));
  const DeviceArray<std::byte> logits(std::vector<std::byte>(rows * stride * 2));
  const DeviceArray<std::byte> workspace(std::vector<std::byte>(size_t{8} << 20));
  const auto gemm = HeadGemm::Create({.hidden_size = hidden_size,
                                      .logits_stride = stride,
                                      .workspace = workspace.data(),
                                      .workspace_bytes = int64_t{8} << 20});
  EXPECT_TRUE(gemm.ok()) << gemm.status();
  const absl::Status status = (*gemm)->Run({.rows = rows,
                                            .cols = cols,
                                            .hidden = device_hidden.data(),
                                            .weight = device_weight.data(),
                                            .logits = logits.data(),
                                            .bias = device_bias.data()},
                                           nullptr);
  EXPECT_TRUE(status.ok()) << status;
  const std::vector<double> got = Decode(logits.Read(), DType::kBFloat16);
  int64_t num_different = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      double sum = bias[col];
      for (int64_t h = 0; h < hidden_size; ++h) {
        sum += hidden[row * hidden_size + h] * weight[col * hidden_size + h];
      }
      const double once = BFloat16ToFloat(FloatToBFloat16(static_cast<float>(sum)));
      if (got[row * stride + col] != once) ++num_different;
    }
  }
  return num_different;
}

TEST(CudaHeadGemmTest, TheBiasIsAddedBeforeTheOneRounding) {
  if (!kernels::HasGpu()) GTEST_SKIP() << "no GPU";
  for (const int64_t rows : {1, 7, 24, 128}) {
    for (const int64_t cols : {3, 37, 64, 131, 257, 1000, 1009, 2048}) {
      for (const int64_t hidden_size : {1, 3, 8, 16, 29, 64, 72}) {
        EXPECT_EQ(CountDifferent(rows, cols, hidden_size), 0)
            << absl::StrCat(rows, " rows, ", cols, " columns, hidden_size ", hidden_size);
      }
    }
  }
}

}  // namespace
}  // namespace lmhead
