#include "kernels/cpu/reduce.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <vector>

namespace lmhead::cpu {
namespace {

TEST(SquaredNorm, IsExactWhereFloat32WouldNotBe) {
  // 2^24 + 1 ones: a float32 sum of squares stops at 2^24.
  const std::vector<float> ones((size_t{1} << 24) + 1, 1.0f);
  EXPECT_EQ(SquaredNorm(ones.data(), static_cast<int64_t>(ones.size())), 16777217.0);
  const float values[] = {3.0f, -4.0f};
  EXPECT_EQ(SquaredNorm(values, 2), 25.0);
  EXPECT_EQ(SquaredNorm(values, 0), 0.0);
}

TEST(SquaredNorm, DoesNotDependOnTheNumberOfThreads) {
  std::vector<float> values(300001);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  const int saved = omp_get_max_threads();
  omp_set_num_threads(1);
  const double one = SquaredNorm(values.data(), static_cast<int64_t>(values.size()));
  omp_set_num_threads(4);
  const double four = SquaredNorm(values.data(), static_cast<int64_t>(values.size()));
  omp_set_num_threads(saved);
  EXPECT_EQ(one, four);
}

TEST(AddColumnSums, AddsEveryRowToEveryColumn) {
  constexpr int64_t kRows = 13;
  constexpr int64_t kCols = 131;
  std::vector<float> matrix(kRows * kCols);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<float>(i % 29) - 7.0f;
  std::vector<float> sums(kCols, 0.5f);
  AddColumnSums(matrix.data(), kRows, kCols, sums.data());
  for (int64_t c = 0; c < kCols; ++c) {
    double want = 0.5;
    for (int64_t r = 0; r < kRows; ++r) want += matrix[r * kCols + c];
    EXPECT_EQ(sums[c], want) << c;
  }
}

}  // namespace
}  // namespace lmhead::cpu
