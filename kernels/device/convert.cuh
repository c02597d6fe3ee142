// Device code of kernels/convert.h.

#ifndef LMHEAD_KERNELS_DEVICE_CONVERT_CUH_
#define LMHEAD_KERNELS_DEVICE_CONVERT_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"

namespace lmhead::kernels::device {

// Four elements, loaded and stored at once where both arrays are aligned for it.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T values[4];
};

template <typename T>
__device__ __forceinline__ bool QuadAligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Quad<T>) == 0;
}

// Converts `count` elements, shared among `num_threads` threads; calls `see` with each result.
template <typename In, typename Out, typename See>
__device__ __forceinline__ void ConvertElements(const In* from, Out* to, int64_t count,
                                                int64_t thread, int64_t num_threads, See&& see) {
  int64_t num_quads = QuadAligned(from) && QuadAligned(to) ? count / 4 : 0;
  for (int64_t quad = thread; quad < num_quads; quad += num_threads) {
    const Quad<In> in = reinterpret_cast<const Quad<In>*>(from)[quad];
    Quad<Out> out;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      out.values[k] = FromFloat<Out>(ToFloat(in.values[k]));
      see(out.values[k]);
    }
    reinterpret_cast<Quad<Out>*>(to)[quad] = out;
  }
  for (int64_t i = num_quads * 4 + thread; i < count; i += num_threads) {
    to[i] = FromFloat<Out>(ToFloat(from[i]));
    see(to[i]);
  }
}

template <typename In, typename Out>
__global__ void ConvertKernel(const In* from, Out* to, int64_t count) {
  ConvertElements(from, to, count, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                  static_cast<int64_t>(gridDim.x) * blockDim.x, [](Out) {});
}

// One block a row.
template <typename In, typename Out>
__global__ void ConvertColumnsKernel(const In* from, int64_t from_stride, Out* to,
                                     int64_t to_stride, int64_t num_cols) {
  const int64_t row = blockIdx.x;
  ConvertElements(from + row * from_stride, to + row * to_stride, num_cols, threadIdx.x, blockDim.x,
                  [](Out) {});
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_CONVERT_CUH_
