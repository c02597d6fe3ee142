#include "kernels/cpu/weight_init.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lmhead::cpu {
namespace {

constexpr int kRounds = 10;

// Two normal numbers from two random words.
std::array<double, 2> BoxMuller(uint32_t word0, uint32_t word1) {
  const double u0 = (word0 + 0.5) * 0x1p-32;
  const double angle = 2.0 * std::numbers::pi * ((word1 + 0.5) * 0x1p-32);
  const double radius = std::sqrt(-2.0 * std::log(u0));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

std::array<double, 4> NormalsOf(uint64_t seed, int64_t row, int64_t column_group) {
  const std::array<uint32_t, 4> words =
      Philox4x32({static_cast<uint32_t>(column_group), 0, static_cast<uint32_t>(row),
                  static_cast<uint32_t>(row >> 32)},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const auto first = BoxMuller(words[0], words[1]);
  const auto second = BoxMuller(words[2], words[3]);
  return {first[0], first[1], second[0], second[1]};
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

void FillNormal(uint64_t seed, double std, int64_t row_start, int64_t num_rows, int64_t cols,
                float* weight) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t column = 0; column < cols; column += 4) {
      const auto normals = NormalsOf(seed, row_start + row, column / 4);
      const int64_t size = std::min<int64_t>(4, cols - column);
      for (int64_t i = 0; i < size; ++i) {
        weight[row * cols + column + i] = static_cast<float>(std * normals[i]);
      }
    }
  }
}

}  // namespace lmhead::cpu
