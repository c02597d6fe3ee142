// Element conversions, 16-byte vectors, block reductions and the logit transform: device code that
// several kernels share.

#ifndef LMHEAD_KERNELS_DEVICE_NUMERIC_CUH_
#define LMHEAD_KERNELS_DEVICE_NUMERIC_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lmhead::kernels::device {

constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

constexpr float kFloatMax = 3.402823466e38f;

__device__ __forceinline__ float MinusInfinity() { return __int_as_float(0xff800000); }

// kCount elements that one thread loads or stores as 16 bytes.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];

  __device__ __forceinline__ static Vector Load(const T* from) {
    Vector vector;
    *reinterpret_cast<uint4*>(&vector) = *reinterpret_cast<const uint4*>(from);
    return vector;
  }
  __device__ __forceinline__ void Store(T* to) const {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(this);
  }
};

// exp(x), for logits of type T: the fast one (2 ulp and |x| * 2^-24) where the logits are bfloat16.
template <typename T>
__device__ __forceinline__ float Exp(float x) {
  if constexpr (sizeof(T) == 2) {
    return __expf(x);
  } else {
    return expf(x);
  }
}

// exp(x * scale), where scale is the same for many x.
template <typename T>
__device__ __forceinline__ float ExpScaled(float x, float scale) {
  if constexpr (sizeof(T) == 2) {
    constexpr float kLog2E = 1.4426950408889634f;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * (scale * kLog2E)));
    return result;
  } else {
    return expf(x * scale);
  }
}

// softcap * tanh(x / softcap) divided by softcap. For bfloat16 logits by the fast exponential: its
// error, below 1e-6 of the cap, is far below the rounding of the logit itself.
template <typename T>
__device__ __forceinline__ float SoftcapTanh(float x) {
  if constexpr (sizeof(T) == 2) {
    return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
  } else {
    return tanhf(x);
  }
}

// The final logit of one element, and the derivative of its softcap.
struct FinalLogit {
  float z;
  float softcap_derivative;  // 1 - tanh^2; 1 without softcap.
};

template <typename T>
__device__ __forceinline__ FinalLogit Transform(float z0, float logit_scale, float softcap,
                                                float inverse_softcap, float inverse_temperature) {
  if (z0 == MinusInfinity()) return {MinusInfinity(), 0.0f};  // Masked, whatever follows.
  const float z1 = z0 * logit_scale;
  if (softcap == 0.0f) return {z1 * inverse_temperature, 1.0f};
  const float t = SoftcapTanh<T>(z1 * inverse_softcap);
  return {softcap * t * inverse_temperature, 1.0f - t * t};
}

// Sum over the block, the same order of additions in every run; valid in thread 0.
// `scratch` has one element a warp.
template <typename T>
__device__ __forceinline__ T BlockSum(T value, T* scratch) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(kWholeWarp, value, offset);
  }
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T sum = T(0);
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarpSize; ++warp)
      sum += scratch[warp];
  }
  return sum;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_NUMERIC_CUH_
