// Device code of kernels/grad_logits.h.

#ifndef LMHEAD_KERNELS_DEVICE_GRAD_LOGITS_CUH_
#define LMHEAD_KERNELS_DEVICE_GRAD_LOGITS_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

constexpr int kGradThreads = 512;
constexpr int kGradUnroll = 2;  // Vectors in flight a thread.

// What there is besides the probabilities.
enum class GradTerm { kNone, kClassWeights, kEntropy };

struct GradLogitsArguments {
  void* logits;
  int64_t row_stride;
  int32_t cols;
  int32_t vocab_start;
  const RowGrad* rows;
  const float* class_weights;  // At the tile's first column, or null.
  float logit_scale;
  float softcap;
};

template <typename T>
__device__ __forceinline__ void ZeroRow(T* logits, int32_t cols) {
  Vector<T> zeros;
#pragma unroll
  for (int k = 0; k < Vector<T>::kCount; ++k) zeros.values[k] = FromFloat<T>(0.0f);
  for (int32_t col = threadIdx.x * Vector<T>::kCount; col < cols;
       col += kGradThreads * Vector<T>::kCount) {
    zeros.Store(logits + col);
  }
}

// One block a row.
template <typename T, bool kTransform, GradTerm kTerm>
__global__ void __launch_bounds__(kGradThreads, 2) GradLogitsKernel(GradLogitsArguments args) {
  constexpr int kCount = Vector<T>::kCount;
  const int64_t row = blockIdx.x;  // 64-bit: row * row_stride exceeds 2^31.
  T* const logits = static_cast<T*>(args.logits) + row * args.row_stride;
  const RowGrad grad = args.rows[row];
  if (grad.is_zero) {
    ZeroRow(logits, args.cols);
    return;
  }
  const float inverse_softcap = args.softcap != 0.0f ? 1.0f / args.softcap : 0.0f;
  const float logit_scale = args.logit_scale * (kTransform ? 1.0f : grad.inverse_temperature);
  const int32_t target = grad.target - args.vocab_start;  // Signed: may lie in another tile.

  const auto element = [&](float z0, int32_t col) {
    FinalLogit logit = {z0 * logit_scale, 1.0f};
    if constexpr (kTransform) {
      logit =
          Transform<T>(z0, logit_scale, args.softcap, inverse_softcap, grad.inverse_temperature);
    }
    if (logit.z == MinusInfinity()) return 0.0f;
    const float d = logit.z - grad.logits_max;
    float prob_scale = grad.prob_scale;
    if constexpr (kTerm == GradTerm::kEntropy) {
      prob_scale += grad.entropy_scale * fmaxf(d, -kFloatMax);
    }
    const float w = kTerm == GradTerm::kClassWeights ? args.class_weights[col] : 1.0f;
    const float dz = Exp<T>(d) * prob_scale - w * grad.uniform_grad;
    return kTransform ? dz * logit.softcap_derivative : dz;
  };

  constexpr int32_t kStep = kGradThreads * kCount;
  for (int32_t start = threadIdx.x * kCount; start < args.cols; start += kStep * kGradUnroll) {
    Vector<T> raw[kGradUnroll];
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (start + u * kStep < args.cols) raw[u] = Vector<T>::Load(logits + start + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      const int32_t col = start + u * kStep;
      if (col >= args.cols) break;
      Vector<T> out;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        out.values[k] = FromFloat<T>(element(ToFloat(raw[u].values[k]), col + k));
      }
      // The target's gradient was finished with the row's loss; this thread owns its vector.
      if (col <= target && target < col + kCount) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (col + k == target) out.values[k] = FromFloat<T>(grad.target_grad);
        }
      }
      out.Store(logits + col);
    }
  }
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_GRAD_LOGITS_CUH_
