// Device code of kernels/optimizer_update.h.

#ifndef LMHEAD_KERNELS_DEVICE_OPTIMIZER_UPDATE_CUH_
#define LMHEAD_KERNELS_DEVICE_OPTIMIZER_UPDATE_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/optimizer_update.h"

namespace lmhead::kernels::device {

// The constants of one AdamW update, worked out on the host in double.
struct AdamWRule {
  float grad_multiplier;
  float decay;  // 1 - learning_rate * weight_decay
  float one_minus_beta1;
  float one_minus_beta2;
  float step_size;           // learning_rate / (1 - beta1^n)
  float inverse_sqrt_bias2;  // 1 / sqrt(1 - beta2^n)
  float eps;

  __device__ __forceinline__ float Update(const DeviceParameter& p, int64_t i) const {
    const float grad = grad_multiplier * p.grad[i];
    // By 1 - beta towards the new value: two rounded factors need not sum to one.
    float exp_avg = p.exp_avg[i];
    float exp_avg_sq = p.exp_avg_sq[i];
    exp_avg += one_minus_beta1 * (grad - exp_avg);
    exp_avg_sq += one_minus_beta2 * (grad * grad - exp_avg_sq);
    p.exp_avg[i] = exp_avg;
    p.exp_avg_sq[i] = exp_avg_sq;
    const float denominator = sqrtf(exp_avg_sq) * inverse_sqrt_bias2 + eps;
    return decay * p.parameter[i] - step_size * (exp_avg / denominator);
  }
};

struct SgdRule {
  float grad_multiplier;
  float weight_decay;
  float momentum;
  float learning_rate;

  __device__ __forceinline__ float Update(const DeviceParameter& p, int64_t i) const {
    float step = grad_multiplier * p.grad[i] + weight_decay * p.parameter[i];
    if (p.exp_avg != nullptr) {
      step += momentum * p.exp_avg[i];
      p.exp_avg[i] = step;
    }
    return p.parameter[i] - learning_rate * step;
  }
};

template <typename Rule>
__global__ void OptimizerUpdateKernel(Rule rule, DeviceParameter p) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const float updated = rule.Update(p, i);
    p.parameter[i] = updated;
    p.grad[i] = 0.0f;
    if (p.bfloat16_parameter != nullptr) {
      static_cast<__nv_bfloat16*>(p.bfloat16_parameter)[i] = FromFloat<__nv_bfloat16>(updated);
    }
  }
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_OPTIMIZER_UPDATE_CUH_
