// Optimizer updates on float32 arrays in device memory, as torch computes them.
//
// AdamW is torch.optim.AdamW (Loshchilov and Hutter, 2019: weight decay apart from the gradient),
// SGD is torch.optim.SGD without dampening and Nesterov. One pass over memory.
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_OPTIMIZER_UPDATE_H_
#define LMHEAD_KERNELS_OPTIMIZER_UPDATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "proto/types/head_spec.h"

namespace lmhead::kernels {

// One parameter tensor and its state, `count` elements each.
struct DeviceParameter {
  int64_t count = 0;
  float* parameter = nullptr;          // The master weight where there is one.
  float* grad = nullptr;               // Set to zero by the update.
  float* exp_avg = nullptr;            // AdamW; the momentum buffer of SGD, null without momentum.
  float* exp_avg_sq = nullptr;         // AdamW.
  void* bfloat16_parameter = nullptr;  // When given, gets the updated parameter rounded.
};

// The numbers of one update.
struct DeviceUpdate {
  double learning_rate = 0.0;
  double grad_multiplier = 1.0;
  double weight_decay = 0.0;  // 0 for a tensor that does not decay.
  int64_t update_number = 1;  // 1 for the first update, for AdamW's bias correction.
};

// Applies one update with grad_multiplier * grad and zeroes grad.
// REQUIRES: spec.kind is not kNone; the arrays that it needs are given, with zeroed state at first.
cudaError_t LaunchOptimizerUpdate(const OptimizerSpec& spec, const DeviceUpdate& update,
                                  const DeviceParameter& parameter, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_OPTIMIZER_UPDATE_H_
