// Where everything of a head on a GPU lies: the one list of device buffers.
//
// The memory plan adds up their sizes, the CUDA backend carves them from its DeviceArena: both by
// LayOutCuda, so that they cannot differ. Knows sizes only: no CUDA.

#ifndef LMHEAD_SERVER_MEMORY_CUDA_LAYOUT_H_
#define LMHEAD_SERVER_MEMORY_CUDA_LAYOUT_H_

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "proto/types/head_spec.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Every device buffer starts at a multiple of this; sizes are rounded up to one.
inline constexpr int64_t kDeviceAlignment = 256;

// Batches a CUDA backend has under way: one uploading, one computing, one downloading.
inline constexpr int32_t kCudaBatchesInFlight = 3;

// Bytes a row of what the row kernels keep (kernels/row_types.h).
inline constexpr int64_t kRowInputBytes = 16;
inline constexpr int64_t kRowLossBytes = 32;
inline constexpr int64_t kRowStatsBytes = 48;
inline constexpr int64_t kRowGradBytes = 32;

// Partial sums of the gradient norm, and the result.
inline constexpr int64_t kNormPartials = 1024;

// A float32 parameter's gradient and optimizer state; null for what the head does not have.
struct CudaParameter {
  float* grad = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
};

// Device buffers of one batch in flight.
struct CudaBatchBuffers {
  // [batch_tokens, hidden_size] of up to 4 bytes: hidden states as they arrived, and later the
  // gradient as it leaves.
  void* rows = nullptr;
  void* row_inputs = nullptr;
  void* row_losses = nullptr;
};

struct CudaBuffers {
  void* weight = nullptr;          // [shard_size, hidden_size], the head's dtype.
  float* bias = nullptr;           // [shard_size]
  void* rounded_bias = nullptr;    // [shard_size], of a bfloat16 head with a bias.
  float* master_weight = nullptr;  // Of a trainable bfloat16 head.
  CudaParameter weight_state;
  CudaParameter bias_state;
  void* logits = nullptr;        // [batch_tokens, CudaLogitsStride], the head's dtype.
  void* hidden = nullptr;        // [batch_tokens, hidden_size], the head's dtype.
  float* grad_hidden = nullptr;  // [batch_tokens, hidden_size]
  void* row_stats = nullptr;
  void* row_grads = nullptr;
  uint8_t* nonfinite = nullptr;    // [batch_tokens]
  float* class_weights = nullptr;  // [vocab_size]
  double* norm_partials = nullptr;
  double* norm = nullptr;
  void* workspace = nullptr;  // Of cuBLASLt.
  std::array<CudaBatchBuffers, kCudaBatchesInFlight> batches;
};

// Bytes of the cuBLASLt workspace.
inline constexpr int64_t kCudaWorkspaceBytes = int64_t{32} << 20;

// Elements from one row of logits to the next: vocab_tile rounded up, so that rows are aligned.
int64_t CudaLogitsStride(const MemoryPlan& plan);

// Calls carve(category, bytes) for every buffer of the head, in the order of CudaBuffers.
// `plan` has its schedule, batch_tokens, vocab_tile and shard_size set.
CudaBuffers LayOutCuda(const HeadSpec& spec, const MemoryPlan& plan,
                       absl::FunctionRef<void*(MemoryCategory, int64_t)> carve);

// Fills in plan->vocab_tile and plan->bytes. `plan` has its schedule, batch_tokens and shard_size.
//
// Retain and frozen keep the logits of a batch over the whole shard. Recompute and eval keep one
// tile: at most a quarter of that, and at most kCudaTileBytesMax.
void PlanCuda(const HeadSpec& spec, MemoryPlan* plan);
inline constexpr int64_t kCudaTileBytesMax = int64_t{256} << 20;

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_CUDA_LAYOUT_H_
