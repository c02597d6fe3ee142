// Optimizer updates on float32 arrays in host memory, as torch computes them.
//
// AdamW is torch.optim.AdamW (Loshchilov and Hutter, 2019: weight decay apart from the gradient),
// SGD is torch.optim.SGD without dampening and Nesterov. Each is one pass over memory, vectorised
// and spread over the OpenMP threads; every element is computed on its own, so the result does not
// depend on the number of threads.

#ifndef LMHEAD_SERVER_OPTIMIZER_OPTIMIZER_H_
#define LMHEAD_SERVER_OPTIMIZER_OPTIMIZER_H_

#include <cstdint>

#include "proto/types/head_spec.h"

namespace lmhead {

// One parameter tensor and its state, `count` elements each.
struct ParameterArrays {
  int64_t count = 0;
  float* parameter = nullptr;   // The master weight where there is one.
  float* grad = nullptr;        // Set to zero by the update.
  float* exp_avg = nullptr;     // AdamW; the momentum buffer of SGD, null without momentum.
  float* exp_avg_sq = nullptr;  // AdamW.
  uint16_t* bfloat16_parameter = nullptr;  // When given, gets the updated parameter rounded.
};

// The numbers of one update.
struct UpdateNumbers {
  double learning_rate = 0.0;
  double grad_multiplier = 1.0;
  double weight_decay = 0.0;  // 0 for a tensor that does not decay.
  int64_t update_number = 1;  // 1 for the first update, for AdamW's bias correction.
};

// How many float32 arrays of the parameter's size the optimizer keeps: 2 for AdamW, 1 for SGD with
// momentum, else 0.
int32_t NumStateArrays(const OptimizerSpec& spec);

// Applies one update with grad_multiplier * grad and zeroes grad.
// REQUIRES: spec.kind is not kNone; the arrays that it needs are given, with zeroed state at first.
void ApplyOptimizer(const OptimizerSpec& spec, const UpdateNumbers& numbers,
                    const ParameterArrays& arrays);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_OPTIMIZER_OPTIMIZER_H_
