// Pseudo-random values for timing matrix products: on zeros or constants they run at another speed.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_FILL_NOISE_H_
#define LMHEAD_KERNELS_FILL_NOISE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// Fills `matrix` (float32 or bfloat16) with values spread evenly over [-scale, scale), a function
// of seed and index.
cudaError_t LaunchFillNoise(MatrixView matrix, float scale, uint32_t seed, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_FILL_NOISE_H_
