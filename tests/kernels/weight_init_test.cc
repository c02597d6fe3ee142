#include "kernels/cpu/weight_init.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace lmhead::cpu {
namespace {

// Known answers of the Random123 distribution (kat_vectors, philox4x32, 10 rounds).
TEST(Philox4x32, GivesTheKnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(FillNormal, AnyRowsAreTheSameRowsOfTheWhole) {
  constexpr int64_t kRows = 19;
  constexpr int64_t kCols = 7;  // Not a multiple of the generator's four words.
  std::vector<float> whole(kRows * kCols);
  FillNormal(42, 0.02, 0, kRows, kCols, whole.data());
  std::vector<float> part(5 * kCols);
  FillNormal(42, 0.02, 11, 5, kCols, part.data());
  EXPECT_EQ(part, std::vector<float>(whole.begin() + 11 * kCols, whole.begin() + 16 * kCols));

  // The first columns do not depend on how many there are.
  std::vector<float> narrow(kRows * 5);
  FillNormal(42, 0.02, 0, kRows, 5, narrow.data());
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(narrow[row * 5 + c], whole[row * kCols + c]);
  }
}

TEST(FillNormal, SeedsDiffer) {
  std::vector<float> a(64), b(64), c(64);
  FillNormal(1, 1.0, 0, 8, 8, a.data());
  FillNormal(2, 1.0, 0, 8, 8, b.data());
  FillNormal((uint64_t{1} << 32) + 1, 1.0, 0, 8, 8, c.data());
  EXPECT_NE(a, b);
  EXPECT_NE(a, c);
}

TEST(FillNormal, HasTheMomentsOfANormalDistribution) {
  constexpr int64_t kCount = 512 * 512;
  std::vector<float> values(kCount);
  FillNormal(3, 2.0, 0, 512, 512, values.data());
  double mean = 0.0, second = 0.0, fourth = 0.0, neighbours = 0.0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double z = values[i] / 2.0;
    mean += z / kCount;
    second += z * z / kCount;
    fourth += z * z * z * z / kCount;
    if (i > 0) neighbours += z * values[i - 1] / 2.0 / kCount;
  }
  // Five standard errors of each moment.
  const double error = 5.0 / std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(mean, 0.0, error);
  EXPECT_NEAR(second, 1.0, error * std::sqrt(2.0));
  EXPECT_NEAR(fourth, 3.0, error * std::sqrt(96.0));
  EXPECT_NEAR(neighbours, 0.0, error);
}

}  // namespace
}  // namespace lmhead::cpu
