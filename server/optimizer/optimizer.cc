#include "server/optimizer/optimizer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "proto/types/check.h"
#include "proto/types/dtype.h"

namespace lmhead {
namespace {

// Elements that one thread updates at a time: few enough to stay in its first-level cache between
// the update, the rounding and the clearing of the gradient.
constexpr int64_t kBlock = 1024;

// Constants of an update in float32, worked out in double as torch does. Averages move by
// 1 - beta times the difference: beta itself, rounded to float32, would drift from its value with
// every step.
struct AdamWNumbers {
  float grad_multiplier, keep, one_minus_beta1, one_minus_beta2, step_size;
  float inverse_correction2_sqrt, eps;
};

AdamWNumbers NumbersOfAdamW(const OptimizerSpec& spec, const UpdateNumbers& numbers) {
  const auto update = static_cast<double>(numbers.update_number);
  const double correction1 = 1.0 - std::pow(spec.beta1, update);
  const double correction2 = 1.0 - std::pow(spec.beta2, update);
  return {.grad_multiplier = static_cast<float>(numbers.grad_multiplier),
          .keep = static_cast<float>(1.0 - numbers.learning_rate * numbers.weight_decay),
          .one_minus_beta1 = static_cast<float>(1.0 - spec.beta1),
          .one_minus_beta2 = static_cast<float>(1.0 - spec.beta2),
          .step_size = static_cast<float>(numbers.learning_rate / correction1),
          .inverse_correction2_sqrt = static_cast<float>(1.0 / std::sqrt(correction2)),
          .eps = static_cast<float>(spec.eps)};
}

void AdamWBlock(const AdamWNumbers& n, int64_t count, float* __restrict parameter,
                const float* __restrict grad, float* __restrict exp_avg,
                float* __restrict exp_avg_sq) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * n.grad_multiplier;
    const float avg = exp_avg[i] + (g - exp_avg[i]) * n.one_minus_beta1;
    const float avg_sq = exp_avg_sq[i] + (g * g - exp_avg_sq[i]) * n.one_minus_beta2;
    const float denominator = std::sqrt(avg_sq) * n.inverse_correction2_sqrt + n.eps;
    parameter[i] = parameter[i] * n.keep - n.step_size * (avg / denominator);
    exp_avg[i] = avg;
    exp_avg_sq[i] = avg_sq;
  }
}

struct SgdNumbers {
  float grad_multiplier, weight_decay, momentum, learning_rate;
};

void SgdBlock(const SgdNumbers& n, int64_t count, float* __restrict parameter,
              const float* __restrict grad) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * n.grad_multiplier + parameter[i] * n.weight_decay;
    parameter[i] -= n.learning_rate * g;
  }
}

void MomentumBlock(const SgdNumbers& n, int64_t count, float* __restrict parameter,
                   const float* __restrict grad, float* __restrict buffer) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i] * n.grad_multiplier + parameter[i] * n.weight_decay;
    buffer[i] = buffer[i] * n.momentum + g;
    parameter[i] -= n.learning_rate * buffer[i];
  }
}

// Runs update(start, size) block by block, then rounds the block and clears its gradient.
template <typename Update>
void ForEachBlock(const ParameterArrays& arrays, Update&& update) {
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < arrays.count; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, arrays.count);
    update(start, stop - start);
    if (arrays.bfloat16_parameter != nullptr) {
      for (int64_t i = start; i < stop; ++i) {
        arrays.bfloat16_parameter[i] = FloatToBFloat16(arrays.parameter[i]);
      }
    }
    std::fill(arrays.grad + start, arrays.grad + stop, 0.0f);
  }
}

void ApplyAdamW(const OptimizerSpec& spec, const UpdateNumbers& numbers,
                const ParameterArrays& arrays) {
  const AdamWNumbers n = NumbersOfAdamW(spec, numbers);
  ForEachBlock(arrays, [&](int64_t start, int64_t size) {
    AdamWBlock(n, size, arrays.parameter + start, arrays.grad + start, arrays.exp_avg + start,
               arrays.exp_avg_sq + start);
  });
}

void ApplySgd(const OptimizerSpec& spec, const UpdateNumbers& numbers,
              const ParameterArrays& arrays) {
  const SgdNumbers n{.grad_multiplier = static_cast<float>(numbers.grad_multiplier),
                     .weight_decay = static_cast<float>(numbers.weight_decay),
                     .momentum = static_cast<float>(spec.momentum),
                     .learning_rate = static_cast<float>(numbers.learning_rate)};
  ForEachBlock(arrays, [&](int64_t start, int64_t size) {
    if (arrays.exp_avg != nullptr) {
      MomentumBlock(n, size, arrays.parameter + start, arrays.grad + start, arrays.exp_avg + start);
    } else {
      SgdBlock(n, size, arrays.parameter + start, arrays.grad + start);
    }
  });
}

}  // namespace

int32_t NumStateArrays(const OptimizerSpec& spec) {
  switch (spec.kind) {
    case OptimizerKind::kNone:
      return 0;
    case OptimizerKind::kAdamW:
      return 2;
    case OptimizerKind::kSgd:
      return spec.momentum > 0.0 ? 1 : 0;
  }
  return 0;
}

void ApplyOptimizer(const OptimizerSpec& spec, const UpdateNumbers& numbers,
                    const ParameterArrays& arrays) {
  LMHEAD_CHECK(spec.kind != OptimizerKind::kNone, "a head without an optimizer has no update");
  LMHEAD_CHECK(numbers.update_number >= 1, "updates count from 1");
  if (spec.kind == OptimizerKind::kAdamW) {
    ApplyAdamW(spec, numbers, arrays);
  } else {
    ApplySgd(spec, numbers, arrays);
  }
}

}  // namespace lmhead
