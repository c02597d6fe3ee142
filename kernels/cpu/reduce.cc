#include "kernels/cpu/reduce.h"

#include <omp.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace lmhead::cpu {

void AddColumnSums(const float* matrix, int64_t rows, int64_t cols, float* sums) {
  constexpr int64_t kColumns = 64;  // Four cache lines of a row; one thread's work.
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < cols; start += kColumns) {
    const int64_t size = std::min(kColumns, cols - start);
    double partial[kColumns] = {};
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = matrix + row * cols + start;
      for (int64_t c = 0; c < size; ++c) partial[c] += static_cast<double>(from[c]);
    }
    for (int64_t c = 0; c < size; ++c) sums[start + c] += static_cast<float>(partial[c]);
  }
}

double SquaredNorm(const float* values, int64_t count) {
  constexpr int64_t kBlock = int64_t{1} << 16;
  constexpr int64_t kLanes = 16;
  std::vector<double> blocks(static_cast<size_t>((count + kBlock - 1) / kBlock));
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, count);
    double lanes[kLanes] = {};
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double value = values[i + lane];
        lanes[lane] += value * value;
      }
    }
    for (; i < stop; ++i) lanes[0] += static_cast<double>(values[i]) * values[i];
    blocks[static_cast<size_t>(start / kBlock)] = std::accumulate(lanes, lanes + kLanes, 0.0);
  }
  return std::accumulate(blocks.begin(), blocks.end(), 0.0);
}

}  // namespace lmhead::cpu
