// Sum of squares of a float32 array, in double precision and in the same order in every run.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_SQUARED_NORM_H_
#define LMHEAD_KERNELS_SQUARED_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lmhead::kernels {

inline constexpr int kSquaredNormBlocks = 1024;

// *result = (add ? *result : 0) + sum of values[i]^2. `partials` has kSquaredNormBlocks elements.
cudaError_t LaunchSquaredNorm(const float* values, int64_t count, bool add, double* partials,
                              double* result, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_SQUARED_NORM_H_
