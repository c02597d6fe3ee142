// Sums over matrices in host memory, in an order that does not depend on the number of threads.

#ifndef LMHEAD_KERNELS_CPU_REDUCE_H_
#define LMHEAD_KERNELS_CPU_REDUCE_H_

#include <cstdint>

namespace lmhead::cpu {

// sums[c] += sum over rows r of matrix[r, c]; the rows are added in double precision.
void AddColumnSums(const float* matrix, int64_t rows, int64_t cols, float* sums);

// Sum of squares in double precision.
double SquaredNorm(const float* values, int64_t count);

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_REDUCE_H_
