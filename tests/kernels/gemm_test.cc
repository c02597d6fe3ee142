#include "kernels/cpu/gemm.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/conformance/compare.h"

namespace lmhead::cpu {
namespace {

constexpr int64_t kScratchBytes = int64_t{4} << 20;

struct Operands {
  Gemm::Shape shape;
  std::vector<float> hidden, weight, logits;

  explicit Operands(Gemm::Shape s) : shape(s) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (auto [values, count] :
         {std::pair{&hidden, s.rows * s.hidden_size}, std::pair{&weight, s.cols * s.hidden_size},
          std::pair{&logits, s.rows * s.cols}}) {
      values->resize(count);
      for (float& value : *values) value = normal(random);
    }
  }
};

// result[i, j] = start[i, j] + sum over l of left(i, l) right(l, j), in double.
template <typename Left, typename Right>
std::vector<double> Product(int64_t m, int64_t n, int64_t k, double start, Left left, Right right) {
  std::vector<double> result(m * n, start);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      for (int64_t j = 0; j < n; ++j) result[i * n + j] += left(i, l) * right(l, j);
    }
  }
  return result;
}

class GemmTest : public testing::TestWithParam<Gemm::Shape> {
 protected:
  GemmTest() : gemm_(scratch_.data(), kScratchBytes) {}

  std::vector<std::byte> scratch_{kScratchBytes + 64};
  Gemm gemm_;
};

TEST_P(GemmTest, ThreeProductsEqualTheirDefinitions) {
  const Operands in(GetParam());
  const auto [rows, cols, hidden_size] = in.shape;
  const auto hidden = [&](int64_t i, int64_t j) -> double {
    return in.hidden[i * hidden_size + j];
  };
  const auto weight = [&](int64_t i, int64_t j) -> double {
    return in.weight[i * hidden_size + j];
  };
  const auto grad = [&](int64_t i, int64_t j) -> double { return in.logits[i * cols + j]; };
  const auto weight_t = [&](int64_t i, int64_t j) { return weight(j, i); };
  const auto grad_t = [&](int64_t i, int64_t j) { return grad(j, i); };

  std::vector<float> logits(rows * cols, -1.0f);
  ASSERT_TRUE(gemm_.Logits(in.shape, in.hidden.data(), in.weight.data(), logits.data()).ok());
  EXPECT_LE(RelativeError(logits, Product(rows, cols, hidden_size, 0.0, hidden, weight_t)), 1e-6);

  std::vector<float> grad_hidden(rows * hidden_size, 1.0f);
  ASSERT_TRUE(
      gemm_.AddGradHidden(in.shape, in.logits.data(), in.weight.data(), grad_hidden.data()).ok());
  EXPECT_LE(RelativeError(grad_hidden, Product(rows, hidden_size, cols, 1.0, grad, weight)), 1e-6);

  std::vector<float> grad_weight(cols * hidden_size, 2.0f);
  ASSERT_TRUE(
      gemm_.AddGradWeight(in.shape, in.logits.data(), in.hidden.data(), grad_weight.data()).ok());
  EXPECT_LE(RelativeError(grad_weight, Product(cols, hidden_size, rows, 2.0, grad_t, hidden)),
            1e-6);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         testing::Values(Gemm::Shape{1, 5, 8}, Gemm::Shape{7, 37, 16},
                                         Gemm::Shape{64, 257, 32}, Gemm::Shape{33, 1009, 48},
                                         Gemm::Shape{8, 17, 2500}));  // Pieces without AVX-512.

TEST(PaddedRows, CoversTheRowsWithFewShapes) {
  for (const int64_t max_rows : {1, 7, 100, 1024}) {
    std::vector<int64_t> shapes;
    for (int64_t rows = 1; rows <= max_rows; ++rows) {
      const int64_t padded = PaddedRows(rows, max_rows);
      ASSERT_GE(padded, rows);
      ASSERT_LE(padded, max_rows);
      ASSERT_LE(padded, rows + std::max<int64_t>(rows / 4, 7));
      if (shapes.empty() || shapes.back() != padded) shapes.push_back(padded);
    }
    EXPECT_LE(shapes.size(), 32u);
  }
}

}  // namespace
}  // namespace lmhead::cpu
