// Device code of kernels/fill_noise.h.

#ifndef LMHEAD_KERNELS_DEVICE_FILL_NOISE_CUH_
#define LMHEAD_KERNELS_DEVICE_FILL_NOISE_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"

namespace lmhead::kernels::device {

// The finaliser of MurmurHash3.
__device__ __forceinline__ uint32_t MixBits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

template <typename T>
__global__ void FillNoiseKernel(T* values, int64_t count, float scale, uint32_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const auto bits = static_cast<int32_t>(MixBits(static_cast<uint32_t>(i) ^ MixBits(seed)));
    values[i] = FromFloat<T>(static_cast<float>(bits) * 0x1p-31f * scale);
  }
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_FILL_NOISE_CUH_
