// What the launchers share: the one place where a runtime dtype becomes a type.
// For the .cu files of this folder only.

#ifndef LMHEAD_KERNELS_LAUNCH_H_
#define LMHEAD_KERNELS_LAUNCH_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "proto/types/dtype.h"

namespace lmhead::kernels {

// Calls fn with a zero of the element type.
template <typename Fn>
cudaError_t DispatchDType(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kBFloat16:
      return fn(__nv_bfloat16{});
    case DType::kFloat16:
      return fn(__half{});
  }
  return cudaErrorInvalidValue;
}

// The same for logits, which are never float16.
template <typename Fn>
cudaError_t DispatchLogitsDType(DType dtype, Fn&& fn) {
  if (dtype == DType::kFloat32) return fn(float{});
  if (dtype == DType::kBFloat16) return fn(__nv_bfloat16{});
  return cudaErrorInvalidValue;
}

// Calls fn with std::true_type or std::false_type for each runtime flag, in order.
template <typename Fn>
cudaError_t DispatchBool(bool flag, Fn&& fn) {
  return flag ? fn(std::true_type{}) : fn(std::false_type{});
}

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_LAUNCH_H_
