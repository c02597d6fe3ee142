#include "kernels/cpu/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace lmhead::cpu {
namespace {

// More than one block, and not a multiple of it.
constexpr int64_t kRows = 7;
constexpr int64_t kCols = 701;

std::vector<float> Values() {
  std::vector<float> values(kRows * kCols);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i)) * std::exp2(static_cast<float>(i % 23) - 12.0f);
  }
  return values;
}

uint16_t Narrow(DType dtype, float value) {
  return dtype == DType::kBFloat16 ? FloatToBFloat16(value) : FloatToFloat16(value);
}

float Widen(DType dtype, uint16_t bits) {
  return dtype == DType::kBFloat16 ? BFloat16ToFloat(bits) : Float16ToFloat(bits);
}

TEST(ConvertMatrix, ConvertsEveryElementAsTheScalarFunctionsDo) {
  const std::vector<float> values = Values();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint16_t> narrow(values.size());
    ConvertMatrix({values.data(), kRows, kCols, DType::kFloat32},
                  {narrow.data(), kRows, kCols, dtype});
    std::vector<float> wide(values.size());
    ConvertMatrix({narrow.data(), kRows, kCols, dtype},
                  {wide.data(), kRows, kCols, DType::kFloat32});
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(narrow[i], Narrow(dtype, values[i])) << i;
      ASSERT_EQ(wide[i], Widen(dtype, narrow[i])) << i;
    }
  }
}

TEST(ConvertMatrix, GoesBetweenTheNarrowTypesThroughFloat32) {
  const std::vector<float> values = Values();
  std::vector<uint16_t> halves(values.size());
  ConvertMatrix({values.data(), kRows, kCols, DType::kFloat32},
                {halves.data(), kRows, kCols, DType::kFloat16});
  std::vector<uint16_t> bfloats(values.size());
  ConvertMatrix({halves.data(), kRows, kCols, DType::kFloat16},
                {bfloats.data(), kRows, kCols, DType::kBFloat16});
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(bfloats[i], FloatToBFloat16(Float16ToFloat(halves[i]))) << i;
  }
}

TEST(ConvertMatrix, CopiesEqualTypes) {
  const std::vector<float> values = Values();
  std::vector<float> copy(values.size());
  ConvertMatrix({values.data(), kRows, kCols, DType::kFloat32},
                {copy.data(), kRows, kCols, DType::kFloat32});
  EXPECT_EQ(copy, values);
}

TEST(UpcastRow, FindsWhatIsNotFiniteInEveryPosition) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (size_t position = 0; position < 37; ++position) {
      for (const float bad : {infinity, -infinity, std::nanf("")}) {
        std::vector<uint16_t> row(37, Narrow(dtype, 1000.0f));
        std::vector<float> wide(37);
        EXPECT_TRUE(UpcastRow(dtype, row.data(), 37, wide.data()));
        EXPECT_EQ(wide[position], Widen(dtype, row[position]));
        row[position] = Narrow(dtype, bad);
        EXPECT_FALSE(UpcastRow(dtype, row.data(), 37, wide.data())) << position << " " << bad;
      }
    }
  }
  const float largest[] = {std::numeric_limits<float>::max(), -0.0f};
  float wide[2];
  EXPECT_TRUE(UpcastRow(DType::kFloat32, largest, 2, wide));
}

}  // namespace
}  // namespace lmhead::cpu
