#include "kernels/device/fill_noise.cuh"
#include "kernels/fill_noise.h"
#include "kernels/launch.h"

namespace lmhead::kernels {

cudaError_t LaunchFillNoise(MatrixView matrix, float scale, uint32_t seed, cudaStream_t stream) {
  return DispatchLogitsDType(matrix.dtype, [&](auto zero) {
    device::FillNoiseKernel<<<1024, 256, 0, stream>>>(static_cast<decltype(zero)*>(matrix.data),
                                                      matrix.rows * matrix.cols, scale, seed);
    return cudaGetLastError();
  });
}

}  // namespace lmhead::kernels
