// The seam between the step transaction and the hardware.
//
// A ComputeBackend holds one head: its weight (one vocab shard of it, or all), the gradient
// accumulators and the optimizer state, all carved at construction from one arena by the head's
// MemoryPlan. It knows tensors and streams; it knows nothing of steps, workers, retries or gRPC.
// CpuBackend and CudaBackend compute, one rank each; ShardGroup makes one backend of the ranks of a
// head, and of its replicas. All pass tests/conformance. Vocabulary ids are those of the whole
// head, on every rank.
//
// Thread-hostile: every method runs on the owning Executor's thread. Nothing here allocates device
// memory, nor large host memory, after construction.

#ifndef LMHEAD_SERVER_COMPUTE_BACKEND_H_
#define LMHEAD_SERVER_COMPUTE_BACKEND_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/loss_recipe.h"
#include "proto/types/tensor_view.h"

namespace lmhead {

// How far the backward pass goes.
enum class BackwardMode : uint8_t {
  kNone,             // Loss and per-token outputs only: schedule eval.
  kHidden,           // grad_hidden_states, no grad_weight: schedule frozen (or the head's own).
  kHiddenAndWeight,  // Also adds to grad_weight: the head's schedule, retain or recompute.
};

class ComputeBackend;

// One chunk's rows, in memory of its staging slot. Borrowed until the batch's completion runs.
struct ChunkRows {
  ConstMatrixView hidden_states;             // [num_tokens, hidden_size], host or pinned.
  std::span<const int32_t> targets;          // [num_tokens]
  std::span<const float> token_weights;      // [num_tokens], or empty.
  std::span<const float> token_temperature;  // [num_tokens], or empty.
  float grad_scale = 1.0f;
  // As the recipe asks, [num_tokens] each, or empty.
  std::span<const float> logprob_grad;
  std::span<const float> entropy_grad;
  std::span<const float> old_logprob;
  std::span<const float> advantage;
  std::span<const float> reference_logprob;
  std::span<const int32_t> teacher_topk_ids;     // [num_tokens, recipe.teacher_top_k()], or empty.
  std::span<const float> teacher_topk_logprobs;  // Likewise.
  ConstMatrixView teacher_hidden_states;         // [num_tokens, teacher's hidden_size], or null.

  // Outputs; a null pointer (or view) is not written: not wanted, or another rank's to write.
  MatrixView grad_hidden_states;  // [num_tokens, hidden_size]; may alias hidden_states.
  float* token_loss = nullptr;    // [num_tokens], like the three below.
  float* logprob = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  int32_t* argmax = nullptr;
  int32_t* topk_ids = nullptr;     // [num_tokens, outputs.top_k], by falling logits; among equals
  float* topk_logprobs = nullptr;  // the lowest id first. A masked token has log-probability -inf.
};

// Chunks that one launch computes together: same recipe, same wanted outputs, same mode.
struct BatchInput {
  const LossRecipe* recipe = nullptr;
  BackwardMode mode = BackwardMode::kNone;
  std::span<const ChunkRows> chunks;
  OutputSpec outputs;  // Wanted of every chunk; the same on every rank, whoever writes them.

  // The teacher's head, exactly when recipe.has_teacher_head(): of the same implementation, on the
  // same rank of the same group, used on the same thread. Only read.
  ComputeBackend* teacher = nullptr;

  // Only rank 0 has hidden states (and teacher's) in its chunks; the data of the others' views is
  // null, and they get the rows by a broadcast. False: every rank has them.
  bool broadcast_hidden_states = false;
};

// The scalars of a batch; outputs of the chunks have been written when it arrives.
struct BatchOutput {
  std::vector<LossSums> sums;  // One a chunk.
  StageTimings timings;        // Of the whole batch; queue_seconds is not filled in.
};

// One optimizer update. The trainer owns the schedule and the clipping and sends its numbers.
struct OptimizerUpdate {
  double learning_rate = 0.0;
  double grad_multiplier = 1.0;  // Multiplied into the accumulated gradient.
};

// Tensors that can be read row by row. Biases have one column. The first five are those of the API
// (lmhead.v1.TensorKind), the others are read and written by checkpoints alone: AdamW's moments, or
// SGD's momentum as the first of them.
enum class TensorKind : uint8_t {
  kWeight = 1,
  kBias = 2,
  kGradWeight = 3,
  kGradBias = 4,
  kMasterWeight = 5,
  kWeightExpAvg = 6,
  kWeightExpAvgSq = 7,
  kBiasExpAvg = 8,
  kBiasExpAvgSq = 9,
};

class ComputeBackend {
 public:
  using BatchDone = std::function<void(absl::StatusOr<BatchOutput>)>;

  ComputeBackend(const ComputeBackend&) = delete;
  ComputeBackend& operator=(const ComputeBackend&) = delete;
  virtual ~ComputeBackend() = default;

  // Runs forward and backward for one batch and, in mode kHiddenAndWeight, adds its weight gradient
  // to the accumulators. May return before the work is done; calls `done` exactly once, on any
  // thread. Batches may end in another order than that of the calls. Rows with a NaN or an infinity
  // in their hidden states contribute nothing, get zero gradients and zero outputs, and are
  // counted.
  //
  // REQUIRES: sum of rows in [1, plan.batch_tokens]; every target is ignore_index or in
  //     [0, vocab_size); spans are as long as the chunk has rows, or empty.
  // POSTCONDITION: on a non-OK `done` the accumulators are unusable until DiscardGradients(); the
  //     weight is unchanged.
  virtual void ComputeBatch(const BatchInput& input, BatchDone done) = 0;

  // Of a rank with peers: adds their accumulators to its own over the rows that it owns, and zeroes
  // its others. The sum over the replicas stays what it is, so that the call may be repeated, and
  // batches may follow. Waits for all batches. A failure leaves the accumulators unusable until
  // DiscardGradients().
  virtual absl::Status ReduceGradients() { return absl::OkStatus(); }

  // Sum of squares of grad_weight and grad_bias, in double precision; of a rank with peers over the
  // rows that it owns. Waits for all batches. REQUIRES: of a rank with peers: no gradient has been
  // added to any replica since ReduceGradients().
  virtual absl::StatusOr<double> GradSquaredNorm() = 0;

  // Applies the head's optimizer once with the accumulated gradient, then zeroes the accumulators.
  // Peers update the rows that they own, and give one another the new weight. Waits for all
  // batches. A failure poisons the backend: the weight may be half updated, so this call and every
  // later one returns the first error. REQUIRES: as GradSquaredNorm().
  virtual absl::Status ApplyUpdate(const OptimizerUpdate& update) = 0;

  // Zeroes the accumulators. Waits for all batches. Safe after any failed ComputeBatch().
  virtual absl::Status DiscardGradients() = 0;

  // Adds `rows`, float32 [n, hidden_size], to rows of grad_weight: to row_ids[i], or when row_ids
  // is empty to row_start + i. Of a shard group's rank: rows outside its range are left out. Waits
  // for all batches. FAILED_PRECONDITION for a head that is not trainable. REQUIRES: row ids are
  // distinct and in [0, vocab_size).
  virtual absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                   ConstMatrixView rows) = 0;

  // Writes rows [row_start, row_start + rows.rows) of a tensor, converting the dtype: of the weight
  // (which also sets the master weight), the bias, or one that checkpoints hold. Waits for all
  // batches.
  // REQUIRES: kind is none of the gradients; the rows and columns lie inside the tensor, and of a
  //     rank inside its range. Of a rank with peers, the rows of a moment are ones that it owns,
  //     and rows of the master weight that it does not own are left out.
  virtual absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) = 0;

  // Reads rows of a tensor into `rows`, whose dtype must be TensorDType(kind). Waits for all
  // batches. FAILED_PRECONDITION for a tensor that this head does not have. REQUIRES: of a rank
  // with peers, rows of the master weight and of the moments are ones that it owns.
  virtual absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) = 0;

  // OK while the head's state is whole and all of it can be reached. UNAVAILABLE: a rank is away
  // and may come back, nothing is lost. ABORTED, for good: part of the state is lost. A backend
  // whose state is all here has nothing to say.
  virtual absl::Status CheckState() { return absl::OkStatus(); }

  // Optimizer updates applied so far; a restored checkpoint sets it.
  virtual int64_t num_updates() const = 0;
  virtual void set_num_updates(int64_t num_updates) = 0;

 protected:
  ComputeBackend() = default;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_BACKEND_H_
