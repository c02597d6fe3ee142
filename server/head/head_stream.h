// What a ComputeLoss stream is to its head: chunks in, answers out, nothing of gRPC.
//
// A HeadStream validates every chunk before anything is touched, asks the step's ledger, queues the
// chunk at the executor and books the outcome. It is how a stream of a step and a stream without a
// step (evaluation) differ: in the ledger and in how far the backward pass goes.

#ifndef LMHEAD_SERVER_HEAD_HEAD_STREAM_H_
#define LMHEAD_SERVER_HEAD_HEAD_STREAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/dtype.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"
#include "server/compute/executor.h"
#include "server/head/step.h"

namespace lmhead {

class Head;

// What a stream is opened with (lmhead.v1.StreamOpen).
struct StreamSpec {
  uint64_t step = 0;  // 0: evaluation.
  std::string worker;
  uint64_t incarnation = 0;
  uint32_t stream_index = 0;
  DType hidden_dtype = DType::kFloat32;
  LossRecipe recipe;
  OutputSpec outputs;
};

// A chunk that has arrived in a staging slot, not validated yet. Everything lies in the slot and is
// borrowed until the chunk's `done` has run, or Submit has refused it.
struct ArrivedChunk {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  float grad_scale = 1.0f;
  uint64_t checksum = 0;               // Of its contents, for the ledger.
  std::span<std::byte> hidden_states;  // Overwritten with grad_hidden_states when that is wanted.
  std::span<const int32_t> targets;
  std::span<const float> token_weights;
  std::span<const float> token_temperature;
  std::span<std::byte> output_space;  // Per-token outputs go here; see OutputBytes.
};

// The answer; its spans lie in the chunk's slot.
struct ComputedChunk {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  bool duplicate = false;
  LossSums sums;
  StageTimings timings;
  std::span<const float> token_loss;
  std::span<const float> logprob;
  std::span<const float> lse;
  std::span<const float> entropy;
  std::span<const int32_t> argmax;
  std::span<const std::byte> grad_hidden_states;
};

// Bytes that ArrivedChunk::output_space must have, whatever outputs are wanted.
int64_t OutputBytes(int64_t num_tokens);

// Thread-compatible: one chunk is submitted at a time, in the order of the stream.
class HeadStream {
 public:
  using ChunkDone = std::function<void(absl::StatusOr<ComputedChunk>)>;

  ~HeadStream();  // Detaches.
  HeadStream(const HeadStream&) = delete;
  HeadStream& operator=(const HeadStream&) = delete;

  // Validates, asks the ledger and queues. OK: `done` is called exactly once, on any thread, maybe
  // before this returns, and must not block. Not OK: nothing has been touched, `done` is not
  // called. INVALID_ARGUMENT: the chunk's contents (what, where, got, wanted) or the ledger's
  // objection. FAILED_PRECONDITION, ABORTED, NOT_FOUND: the step or the head takes no chunks.
  absl::Status Submit(const ArrivedChunk& chunk, ChunkDone done);

  // The client has stated its number of chunks. See Step::EndWorker; without a step, always OK.
  absl::Status End(uint64_t num_chunks);

  // Distinct chunks of the worker that are counted; without a step, of this stream.
  uint64_t NumChunksCounted() const;

  // Gives the stream's place in the step free. Chunks on their way are counted all the same. Any
  // thread, also beside the other methods.
  void Detach();

  int64_t max_chunk_tokens() const { return max_chunk_tokens_; }
  Schedule schedule() const { return schedule_; }

 private:
  friend class Head;
  HeadStream(std::shared_ptr<Head> head, std::shared_ptr<Step> step, StreamSpec spec,
             int64_t max_chunk_tokens);

  absl::Status Validate(const ArrivedChunk& chunk) const;
  absl::Status ValidateTargets(const ArrivedChunk& chunk) const;
  // "chunk 7 of worker w0 in step 12 of head lm".
  std::string Where(uint64_t chunk_index) const;
  ChunkTask MakeTask(const ArrivedChunk& chunk, ChunkVerdict verdict, ComputedChunk* answer) const;

  const std::shared_ptr<Head> head_;
  const std::shared_ptr<Step> step_;  // Null for evaluation.
  const StreamSpec spec_;
  const std::shared_ptr<const LossRecipe> recipe_;
  const int64_t max_chunk_tokens_;
  const Schedule schedule_;
  const std::shared_ptr<std::atomic<uint64_t>> num_computed_;  // Of this stream.
  std::atomic<bool> attached_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_HEAD_STREAM_H_
