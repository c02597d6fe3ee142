// StepWriter: rows in, loss and gradients out, over one or more ComputeLoss streams.
//
// It borrows the caller's rows (nothing is copied to send), cuts them into chunks of about
// chunk_bytes, keeps at most max_inflight_chunks without a result on each connection, and writes
// the gradients straight from the wire into the caller's memory. A broken connection is opened
// again and the chunks without a result are sent again: the server's ledger counts each once. When
// the server has restarted meanwhile (another incarnation) the writer fails with ABORTED and the
// step must begin again.

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
  v1::OutputSpec outputs;

  int num_connections = 1;      // TCP connections, each with one stream; 1 to kStreamsPerWorkerMax.
  int max_inflight_chunks = 4;  // On each; the server's own bound wins when it is lower.
  int64_t chunk_bytes =
      kClientChunkBytes;       // hidden_states of a message, rounded down to whole rows.
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

  MatrixView
      grad_hidden_states;       // Set exactly when outputs.grad_hidden_states; like hidden_states.
  float* token_loss = nullptr;  // Set exactly when asked for in `outputs`, like the four below.
  float* logprob = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  int32_t* argmax = nullptr;
};

struct LossResult {
  LossSums sums;
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
