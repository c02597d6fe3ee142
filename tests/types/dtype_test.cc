#include "proto/types/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace lmhead {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(DTypeTest, EveryBFloat16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = BFloat16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToBFloat16(value), bits);
    }
  }
}

TEST(DTypeTest, EveryFloat16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = Float16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToFloat16(value), bits);
    }
  }
}

TEST(DTypeTest, Float16ValuesAreWhatTheFormatSays) {
  EXPECT_EQ(Float16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(Float16ToFloat(0xc000), -2.0f);
  EXPECT_EQ(Float16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(Float16ToFloat(0x0400), 0x1p-14f);  // Smallest normal.
  EXPECT_EQ(Float16ToFloat(0x0001), 0x1p-24f);  // Smallest subnormal.
  EXPECT_EQ(Float16ToFloat(0x7c00), kInf);
  EXPECT_EQ(FloatToFloat16(65520.0f), 0x7c00);  // Halfway to the next power rounds to infinity.
  EXPECT_EQ(FloatToFloat16(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToFloat16(0x1p-25f), 0x0000);  // Halfway to the smallest subnormal: even is zero.
  EXPECT_EQ(FloatToFloat16(0x1.8p-25f), 0x0001);
}

// The nearest representable value, found by looking at both neighbours; ties go to the even one.
template <typename ToFloat, typename FromFloat>
void ExpectNearest(float value, ToFloat to_float, FromFloat from_float) {
  const uint16_t got = from_float(value);
  const double error = std::fabs(static_cast<double>(to_float(got)) - value);
  for (const int step : {-1, 1}) {
    const uint16_t other = static_cast<uint16_t>(got + step);
    const float neighbour = to_float(other);
    if (!std::isfinite(neighbour) || std::signbit(neighbour) != std::signbit(value)) continue;
    const double other_error = std::fabs(static_cast<double>(neighbour) - value);
    EXPECT_LE(error, other_error) << value;
    if (error == other_error) {
      EXPECT_EQ(got % 2, 0) << value;
    }
  }
}

TEST(DTypeTest, NarrowingRoundsToNearestEven) {
  std::mt19937 generator(7);
  std::uniform_real_distribution<float> exponent(-26.0f, 15.0f);
  std::uniform_real_distribution<float> mantissa(1.0f, 2.0f);
  for (int i = 0; i < 100000; ++i) {
    const float value = std::ldexp(mantissa(generator), static_cast<int>(exponent(generator)));
    ExpectNearest(i % 2 ? value : -value, Float16ToFloat, FloatToFloat16);
    ExpectNearest(i % 2 ? value : -value, BFloat16ToFloat, FloatToBFloat16);
  }
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // Tie, even below.
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // Tie, even above.
}

TEST(DTypeTest, NarrowingKeepsNanAndInfinity) {
  const float nan_with_low_payload = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(nan_with_low_payload))));
  EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(nan_with_low_payload))));
  EXPECT_EQ(BFloat16ToFloat(FloatToBFloat16(-kInf)), -kInf);
  EXPECT_EQ(Float16ToFloat(FloatToFloat16(kInf)), kInf);
  EXPECT_EQ(BFloat16ToFloat(FloatToBFloat16(std::numeric_limits<float>::max())), kInf);
}

}  // namespace
}  // namespace lmhead
