// Device code of kernels/divergence_grad.h.

#ifndef LMHEAD_KERNELS_DEVICE_DIVERGENCE_GRAD_CUH_
#define LMHEAD_KERNELS_DEVICE_DIVERGENCE_GRAD_CUH_

#include <cstdint>

#include "kernels/device/grad_logits.cuh"
#include "kernels/device/jsd_sums.cuh"
#include "kernels/device/numeric.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

enum class DivergenceTerm { kForward, kReverse, kJsd, kOutsideTopk };

struct DivergenceGradArguments {
  PairSide student;
  PairSide teacher;
  int64_t row_stride;
  int32_t vocab_start;
  int32_t divergence_cols;
  float inverse_temperature;  // Of the divergence.
  float beta;
  bool cross_entropy;
  const float* class_weights;  // At the tile's first column, or null.
  const RowGrad* rows;
  const RowDivergenceGrad* divergence_rows;
};

// The divergence's part of one element, u and v at the temperature of the divergence. A masked u
// has none.
template <typename T, DivergenceTerm kTerm>
__device__ __forceinline__ float DivergencePart(float u, float v, float beta,
                                                const RowDivergenceGrad& grad) {
  const float du = u - grad.student_max;
  const float p = Exp<T>(du) * grad.student_scale;
  if constexpr (kTerm == DivergenceTerm::kOutsideTopk) return p;
  const float dv = v - grad.teacher_max;
  if constexpr (kTerm == DivergenceTerm::kForward) return p - Exp<T>(dv) * grad.teacher_scale;
  if constexpr (kTerm == DivergenceTerm::kReverse) {
    // Infinite where p is not 0: then the row has no gradient.
    return v == MinusInfinity() ? 0.0f : p * ((du - dv) + grad.offset);
  }
  return p * (grad.offset - LogMixtureOverP<T>((dv - du) + grad.log_ratio, beta));
}

// The cross entropy's part of one element, except at the target.
template <typename T>
__device__ __forceinline__ float CrossEntropyPart(float z, float class_weight,
                                                  const RowGrad& grad) {
  return Exp<T>(z - grad.logits_max) * grad.prob_scale - class_weight * grad.uniform_grad;
}

// One block a row.
template <typename T, DivergenceTerm kTerm, bool kTransform>
__global__ void __launch_bounds__(kGradThreads, 2)
    DivergenceGradKernel(DivergenceGradArguments args) {
  constexpr bool kTeacher = kTerm != DivergenceTerm::kOutsideTopk;
  constexpr int kCount = Vector<T>::kCount;
  const int64_t row = blockIdx.x;  // 64-bit: row * row_stride exceeds 2^31.
  const RowGrad grad = args.rows[row];
  // Values before a temperature: the two parts have one each.
  const SideReader<T, true> student(args.student, row * args.row_stride, 1.0f);
  const SideReader<T, true> teacher(args.teacher, kTeacher ? row * args.row_stride : 0,
                                    args.inverse_temperature);
  T* const logits = const_cast<T*>(student.logits);
  if (grad.is_zero) {
    ZeroRow(logits, student.cols);
    return;
  }
  const RowDivergenceGrad divergence = args.divergence_rows[row];
  const int32_t target = grad.target - args.vocab_start;  // Signed: may lie in another tile.

  const auto element = [&](float z0, float v, int32_t col) {
    FinalLogit logit = {z0 * student.logit_scale, 1.0f};  // Before any temperature.
    if constexpr (kTransform) {
      logit = Transform<T>(z0, student.logit_scale, student.softcap, student.inverse_softcap, 1.0f);
    }
    float dz = 0.0f;
    if (logit.z != MinusInfinity()) {
      if (col < args.divergence_cols) {
        dz = DivergencePart<T, kTerm>(logit.z * args.inverse_temperature, v, args.beta, divergence);
      }
      if (args.cross_entropy && col != target) {
        const float w = args.class_weights != nullptr ? args.class_weights[col] : 1.0f;
        dz += CrossEntropyPart<T>(logit.z * grad.inverse_temperature, w, grad);
      }
      if (kTransform) dz *= logit.softcap_derivative;
    }
    // The target's cross-entropy part was finished with the row's loss.
    if (args.cross_entropy && col == target) dz += grad.target_grad;
    return dz;
  };

  constexpr int32_t kStep = kGradThreads * kCount;
  for (int32_t start = threadIdx.x * kCount; start < student.cols; start += kStep * kGradUnroll) {
    Vector<T> raw[kGradUnroll], raw_v[kGradUnroll];
#pragma unroll
    for (int i = 0; i < kGradUnroll; ++i) {
      student.Load(start + i * kStep, &raw[i]);
      if constexpr (kTeacher) teacher.Load(start + i * kStep, &raw_v[i]);
    }
#pragma unroll
    for (int i = 0; i < kGradUnroll; ++i) {
      const int32_t col = start + i * kStep;
      if (col >= student.cols) break;
      float v[kCount] = {};
      if constexpr (kTeacher) {
        if constexpr (kTransform) {
          teacher.Values(raw_v[i], col, v);
        } else {
          const float scale = teacher.logit_scale * args.inverse_temperature;
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            v[k] = col + k < teacher.cols ? ToFloat(raw_v[i].values[k]) * scale : MinusInfinity();
          }
        }
      }
      Vector<T> out;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        out.values[k] = FromFloat<T>(element(ToFloat(raw[i].values[k]), v[k], col + k));
      }
      out.Store(logits + col);
    }
  }
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_DIVERGENCE_GRAD_CUH_
