// StepWriter: rows in, loss and gradients out, over one or more ComputeLoss streams.
//
// It borrows the caller's rows (nothing is copied to send), cuts them into chunks of about
// chunk_bytes, keeps at most max_inflight_chunks without a result on each connection, and writes
// the gradients straight from the wire into the caller's memory. A broken connection is opened
// again and the chunks without a result are sent again: the server's ledger counts each once. When
// the server has restarted meanwhile (another incarnation) the writer fails with ABORTED and the
// step must begin again.
//
// The teacher's program of a paired stream (recipe.distillation.paired_stream) uses a StepWriter as
// well, with spec.teacher_side: it sends teacher_hidden_states alone, under the worker's name and
// the same chunk indices. The two programs must cut alike: equal spec.chunk_tokens, and Submit
// calls of as many rows in the same order.

#ifndef LMHEAD_CLIENT_CPP_STEP_WRITER_H_
#define LMHEAD_CLIENT_CPP_STEP_WRITER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lmhead/v1/loss.pb.h"
#include "proto/types/limits.h"
#include "proto/types/loss_recipe.h"
#include "proto/types/tensor_view.h"

namespace lmhead {

struct WriterSpec {
  std::string head;
  uint64_t step = 0;  // 0: evaluation, no gradient is kept.
  std::string worker;
  uint64_t incarnation = 0;
  DType hidden_dtype = DType::kFloat32;
  v1::LossRecipe recipe;
  v1::OutputSpec outputs;     // None on the teacher's side.
  bool teacher_side = false;  // hidden_dtype and recipe are those of the student's side even so.

  int num_connections = 1;      // TCP connections, each with one stream; 1 to kStreamsPerWorkerMax.
  int max_inflight_chunks = 4;  // On each; the server's own bound wins when it is lower.
  // What a message may carry beside per-token fields: hidden states and teacher hidden states,
  // top-k arrays and outputs; rounded down to whole rows.
  int64_t chunk_bytes = kClientChunkBytes;
  // Rows of a message instead, when they fit chunk_bytes; the server's bound wins when it is lower.
  // 0: as chunk_bytes says. Needed on both sides of a paired stream.
  int64_t chunk_tokens = 0;
  bool send_checksums = true;  // The server verifies each chunk against it.
};

// Rows and the places for their results. All of it is borrowed until Wait() returns for the ticket
// (or Finish(), Cancel() or the destructor returns): gRPC may hold the rows longer than it takes to
// send them, so those calls wait for it. Outputs must not overlap inputs, nor each other. After an
// error the outputs are undefined.
struct LossRows {
  ConstMatrixView hidden_states;             // [num_tokens, hidden_size], spec.hidden_dtype.
  std::span<const int32_t> targets;          // [num_tokens]
  std::span<const float> token_weights;      // [num_tokens] when the recipe says so, else empty.
  std::span<const float> token_temperature;  // Likewise.
  float grad_scale = 1.0f;

  // Policy of coefficients: [num_tokens], else empty.
  std::span<const float> logprob_grad;
  std::span<const float> entropy_grad;
  // Clipped policy: [num_tokens], else empty; the last only with a reference_kl_coefficient.
  std::span<const float> old_logprob;
  std::span<const float> advantage;
  std::span<const float> reference_logprob;
  // Top-k distillation: [num_tokens, distillation.top_k], else empty.
  std::span<const int32_t> teacher_topk_ids;
  std::span<const float> teacher_topk_logprobs;
  // Distillation from a teacher head: [num_tokens, the teacher's hidden_size] in
  // distillation.teacher_hidden_dtype; of a paired stream on the teacher's side alone, which sets
  // nothing else.
  ConstMatrixView teacher_hidden_states;

  // Outputs; each is set exactly when spec.outputs asks for it.
  MatrixView grad_hidden_states;  // Like hidden_states.
  float* token_loss = nullptr;    // [num_tokens], like the four below.
  float* logprob = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  int32_t* argmax = nullptr;
  int32_t* topk_ids = nullptr;  // [num_tokens, outputs.top_k], like the one below.
  float* topk_logprobs = nullptr;

  // Rows, whichever side sends them.
  int64_t num_tokens() const {
    return hidden_states.rows != 0 ? hidden_states.rows : teacher_hidden_states.rows;
  }
};

struct LossResult {
  LossSums sums;  // Zero on the teacher's side.
  int64_t num_chunks = 0;
  int64_t num_duplicates = 0;  // Chunks the server had counted before.
  StageTimings timings;        // Sums over the chunks.
};

// One worker's streams of one step. Thread-safe.
class StepWriter {
 public:
  ~StepWriter();  // Cancels what is still open.
  StepWriter(const StepWriter&) = delete;
  StepWriter& operator=(const StepWriter&) = delete;

  // Cuts and sends rows. Blocks while the window is full. Returns a ticket for Wait. Validates
  // shapes and dtypes against the spec before anything is sent (INVALID_ARGUMENT). After an error
  // the rows are the caller's again.
  absl::StatusOr<uint64_t> Submit(const LossRows& rows);

  // Blocks until every chunk of the ticket has its result. The error names the chunk that failed.
  // After an error every later call returns that error. Once a ticket: INVALID_ARGUMENT when it is
  // unknown or has been waited for.
  absl::StatusOr<LossResult> Wait(uint64_t ticket);

  // Submit and Wait.
  absl::StatusOr<LossResult> Compute(const LossRows& rows);

  // Waits for everything submitted, tells the server this worker's chunk count on each stream and
  // closes them. Returns that count. No Submit afterwards; tickets can still be waited for.
  // FAILED_PRECONDITION when the server has counted more chunks of this worker than the writer
  // sent: an earlier writer of the same worker sent others, and the step must be aborted.
  absl::StatusOr<uint64_t> Finish();

  // Ends all streams at once; pending calls return CANCELLED. Returns when nothing submitted is
  // borrowed any more, which takes until the connection has dropped it: at once with a server that
  // runs, at most the keepalive timeout (limits.h) with one that has frozen. No effect after a
  // successful Finish.
  void Cancel();

 private:
  friend class Client;
  friend class LossStream;
  class Impl;
  explicit StepWriter(std::shared_ptr<Impl> impl);

  const std::shared_ptr<Impl> impl_;  // Shared with the calls that are still open.
};

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_STEP_WRITER_H_
