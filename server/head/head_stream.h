// What a ComputeLoss stream is to its head: chunks in, answers out, nothing of gRPC.
//
// A HeadStream validates every chunk before anything is touched, asks the step's ledger, queues the
// chunk at the executor and books the outcome. The sides of a paired stream wait for each other in
// between (pairing.h). It is how a stream of a step and a stream without a
// step (evaluation) differ: in the ledger and in how far the backward pass goes.

#ifndef LMHEAD_SERVER_HEAD_HEAD_STREAM_H_
#define LMHEAD_SERVER_HEAD_HEAD_STREAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"
#include "server/compute/executor.h"
#include "server/head/chunk.h"
#include "server/head/chunk_check.h"
#include "server/head/pairing.h"
#include "server/head/step.h"

namespace lmhead {

class Head;

// Bytes that ArrivedChunk::output_space must have, whatever outputs are wanted but top-k ones, of
// which it needs room for `top_k`.
int64_t OutputBytes(int64_t num_tokens, int32_t top_k);

// Thread-compatible: one chunk is submitted at a time, in the order of the stream.
class HeadStream : public std::enable_shared_from_this<HeadStream> {
 public:
  ~HeadStream();  // Detaches.
  HeadStream(const HeadStream&) = delete;
  HeadStream& operator=(const HeadStream&) = delete;

  // Validates, asks the ledger and queues. OK: `done` is called exactly once, on any thread, maybe
  // before this returns, and must not block. Not OK: nothing has been touched, `done` is not
  // called. INVALID_ARGUMENT: the chunk's contents (what, where, got, wanted) or the ledger's
  // objection. FAILED_PRECONDITION, ABORTED, NOT_FOUND: the step or the head takes no chunks. A
  // side of a paired stream waits for the other one; what then goes wrong is told to both.
  absl::Status Submit(const ArrivedChunk& chunk, ChunkDone done);

  // The client has the result of a chunk (lmhead.v1.ResultReceived). INVALID_ARGUMENT unless this
  // is the student's side of a paired stream.
  absl::Status Received(uint64_t chunk_index);

  // The client has stated its number of chunks, and has all its results. See Step::EndWorker;
  // without a step, always OK.
  absl::Status End(uint64_t num_chunks);

  // Gives up sides of chunks that have waited for the other side for too long.
  void ExpireUnpaired(absl::Time now);

  // Distinct chunks of the worker that are counted, on the teacher's side of a paired stream those
  // with a teacher's side; without a step, of this stream.
  uint64_t NumChunksCounted() const;

  // Gives the stream's place in the step free. Chunks on their way are counted all the same. Any
  // thread, also beside the other methods.
  void Detach();

  StreamSide side() const { return spec_.side(); }
  int64_t max_chunk_tokens() const { return shape_.max_chunk_tokens; }
  Schedule schedule() const { return schedule_; }

 private:
  friend class Head;
  HeadStream(std::shared_ptr<Head> head, std::shared_ptr<Head> teacher, std::shared_ptr<Step> step,
             StreamSpec spec, const ChunkShape& shape);

  // "chunk 7 of worker w0 in step 12 of head lm".
  std::string Where(uint64_t chunk_index) const;
  ChunkTask MakeTask(const ArrivedChunk& chunk, ChunkVerdict verdict, ComputedChunk* answer) const;

  // Asks the ledger and queues a chunk that has all its parts; `teacher` is its other side, null
  // for a whole one. `done` as in Submit().
  absl::Status Compute(const ArrivedChunk& chunk, const ArrivedChunk* teacher, ChunkDone done);

  // --- Paired streams; see pairing.h ---

  absl::Status SubmitHalf(const ArrivedChunk& chunk, ChunkDone done);
  // Acts on what an offer came to, `mine` being the side that is being submitted, if any: its
  // errors are returned, not told.
  static absl::Status Settle(Pairing::Offered offered, Pairing::StreamId mine);
  static absl::Status ComputeMatch(Pairing::Match match, Pairing::StreamId mine);
  absl::Status CheckSidesAgree(const Pairing::Half& student, const Pairing::Half& teacher) const;

  const std::shared_ptr<Head> head_;
  const std::shared_ptr<Head> teacher_;  // Null without a teacher head.
  const std::shared_ptr<Step> step_;     // Null for evaluation.
  const StreamSpec spec_;
  const std::shared_ptr<const LossRecipe> recipe_;
  const ChunkShape shape_;
  const Schedule schedule_;
  const std::shared_ptr<std::atomic<uint64_t>> num_computed_;  // Of this stream.
  uint64_t student_id_ = 0;           // Among the teacher's students; set by Head::OpenStream.
  Pairing::StreamId pairing_id_ = 0;  // Likewise, of a paired stream.
  std::atomic<bool> attached_{true};
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_HEAD_STREAM_H_
