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
inline constexpr int64_t kRowPolicyBytes = 32;
inline constexpr int64_t kRowLossBytes = 64;
inline constexpr int64_t kRowStatsBytes = 48;
inline constexpr int64_t kPairStatsBytes = 32;
inline constexpr int64_t kTopkStatsBytes = 32;
inline constexpr int64_t kRowGradBytes = 32;
inline constexpr int64_t kRowDivergenceGradBytes = 32;
inline constexpr int64_t kTopkEntryBytes = 8;

// Partial sums of the gradient norm, and the result.
inline constexpr int64_t kNormPartials = 1024;

// A float32 parameter's gradient, of the whole shard, and optimizer state, of the owned rows; null
// for what the head does not have.
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
  void* row_policies = nullptr;
  void* row_losses = nullptr;
  void* teacher_rows = nullptr;         // [batch_tokens, teacher_hidden_size], likewise.
  int32_t* teacher_topk_ids = nullptr;  // [batch_tokens, top_k_max], like the next three.
  float* teacher_topk_logprobs = nullptr;
  int32_t* topk_ids = nullptr;
  float* topk_logprobs = nullptr;
};

struct CudaBuffers {
  void* weight = nullptr;          // [shard_size, hidden_size], the head's dtype.
  float* bias = nullptr;           // [shard_size]
  void* rounded_bias = nullptr;    // [shard_size], of a bfloat16 head with a bias.
  float* master_weight = nullptr;  // [owned_rows, hidden_size], of a trainable bfloat16 head.
  CudaParameter weight_state;
  CudaParameter bias_state;
  void* logits = nullptr;        // [batch_tokens, CudaLogitsStride], the head's dtype.
  void* hidden = nullptr;        // [batch_tokens, hidden_size], the head's dtype.
  float* grad_hidden = nullptr;  // [batch_tokens, hidden_size]
  // RowStats of a batch, right behind them its PairStats or, of a top-k teacher, another RowStats:
  // together what ranks exchange.
  void* row_stats = nullptr;
  void* row_grads = nullptr;

  // With a teacher_hidden_size.
  void* teacher_logits = nullptr;  // As `logits`.
  void* teacher_hidden = nullptr;  // [batch_tokens, teacher_hidden_size] of up to 4 bytes.
  float* jsd_sums = nullptr;       // [batch_tokens, 2]
  // With a top_k_max.
  float* topk_values = nullptr;  // [batch_tokens, top_k_max]
  void* topk_stats = nullptr;
  void* topk_entries = nullptr;  // [batch_tokens, top_k_max]
  // With either.
  void* divergence_grads = nullptr;
  // With several ranks: what all of them sent.
  void* gathered = nullptr;

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

// Bytes of the largest array that ranks exchange at once, on one rank.
int64_t CudaExchangedBytes(const HeadSpec& spec, const MemoryPlan& plan);

// Calls carve(category, bytes) for every buffer of the head; those that it has no use for have no
// bytes. `plan` has its schedule, num_ranks, batch_tokens, vocab_tile, shard_size and owned_rows
// set.
CudaBuffers LayOutCuda(const HeadSpec& spec, const MemoryPlan& plan,
                       absl::FunctionRef<void*(MemoryCategory, int64_t)> carve);

// Fills in plan->vocab_tile and plan->bytes. `plan` has its schedule, num_ranks, batch_tokens,
// shard_size and owned_rows.
//
// Retain and frozen keep the logits of a batch over the whole shard. Recompute and eval keep one
// tile: at most a quarter of that, and at most kCudaTileBytesMax.
void PlanCuda(const HeadSpec& spec, MemoryPlan* plan);
inline constexpr int64_t kCudaTileBytesMax = int64_t{256} << 20;

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_CUDA_LAYOUT_H_
