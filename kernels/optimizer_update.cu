#include <algorithm>
#include <cmath>

#include "kernels/device/optimizer_update.cuh"
#include "kernels/launch.h"
#include "kernels/optimizer_update.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = 8192;

device::AdamWRule MakeAdamW(const OptimizerSpec& spec, const DeviceUpdate& update) {
  const double n = static_cast<double>(update.update_number);
  device::AdamWRule rule;
  rule.grad_multiplier = static_cast<float>(update.grad_multiplier);
  rule.decay = static_cast<float>(1.0 - update.learning_rate * update.weight_decay);
  rule.one_minus_beta1 = static_cast<float>(1.0 - spec.beta1);
  rule.one_minus_beta2 = static_cast<float>(1.0 - spec.beta2);
  rule.step_size = static_cast<float>(update.learning_rate / (1.0 - std::pow(spec.beta1, n)));
  rule.inverse_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(spec.beta2, n)));
  rule.eps = static_cast<float>(spec.eps);
  return rule;
}

device::SgdRule MakeSgd(const OptimizerSpec& spec, const DeviceUpdate& update) {
  return {static_cast<float>(update.grad_multiplier), static_cast<float>(update.weight_decay),
          static_cast<float>(spec.momentum), static_cast<float>(update.learning_rate)};
}

}  // namespace

cudaError_t LaunchOptimizerUpdate(const OptimizerSpec& spec, const DeviceUpdate& update,
                                  const DeviceParameter& parameter, cudaStream_t stream) {
  if (parameter.count == 0) return cudaSuccess;
  const auto blocks =
      static_cast<unsigned>(std::min(kBlocksMax, CeilDiv(parameter.count, kThreads)));
  switch (spec.kind) {
    case OptimizerKind::kAdamW:
      device::OptimizerUpdateKernel<<<blocks, kThreads, 0, stream>>>(MakeAdamW(spec, update),
                                                                     parameter);
      return cudaGetLastError();
    case OptimizerKind::kSgd:
      device::OptimizerUpdateKernel<<<blocks, kThreads, 0, stream>>>(MakeSgd(spec, update),
                                                                     parameter);
      return cudaGetLastError();
    case OptimizerKind::kNone:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace lmhead::kernels
