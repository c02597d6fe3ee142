// Conversions of matrices between dtypes in host memory, spread over the OpenMP threads.

#ifndef LMHEAD_KERNELS_CPU_CONVERT_H_
#define LMHEAD_KERNELS_CPU_CONVERT_H_

#include <cstdint>

#include "proto/types/tensor_view.h"

namespace lmhead::cpu {

// Copies `from` into `to`, converting element by element (dtype.h: round to nearest even).
// REQUIRES: equal shapes; the memory does not overlap.
void ConvertMatrix(ConstMatrixView from, MatrixView to);

// Converts one row to float32 on the calling thread. Returns whether every element is finite.
bool UpcastRow(DType dtype, const void* from, int64_t count, float* to);

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_CONVERT_H_
