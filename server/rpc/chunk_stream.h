// One ComputeLoss stream: gRPC's callbacks on one side, a HeadStream on the other.
//
// The server's side of the protocol (loss.proto):
//   wait for `open`, answer `opened`; then, for every chunk: lend a staging slot, read, decode into
//   the slot, submit, and write the answer around the slot's memory; after `end` and the last
//   answer write `ended`; when the client has half-closed, finish.
//
// Whatever happens, events only change the state under the lock and call Pump(). Pump alone starts
// gRPC operations, one thread at a time, so: at most one read and one write are outstanding, Finish
// is called exactly once and never beside a write, and nothing is started after Finish.
//
// A chunk keeps its slot from StartRead until gRPC has released the answer's memory, which is later
// than OnWriteDone. A stream that is over keeps slots only for what the executor still computes:
// accepted chunks are counted even when nobody waits for the answer. On paired streams a chunk also
// keeps its slot while it waits for its other side: so many of the slots are reserved for the
// stream as its client was told that it may have chunks without an answer.

#ifndef LMHEAD_SERVER_RPC_CHUNK_STREAM_H_
#define LMHEAD_SERVER_RPC_CHUNK_STREAM_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "lmhead/v1/loss.pb.h"
#include "proto/wire/chunk_codec.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/head/head_registry.h"
#include "server/head/head_stream.h"
#include "server/logging/logging.h"
#include "server/memory/staging_pool.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_guard.h"
#include "server/rpc/stream_set.h"

namespace lmhead {

// What all streams share. Everything outlives them.
struct StreamEnvironment {
  HeadRegistry* heads = nullptr;
  StagingPool* slots = nullptr;
  StreamSet* streams = nullptr;
  Metrics* metrics = nullptr;
  const CallGuard* guard = nullptr;
  CheckpointStore* checkpoints = nullptr;  // Null when the server keeps none.
  uint64_t incarnation = 0;
  int32_t max_inflight_chunks = 0;
  // How long a client may take to send `open`, to take an answer, or to half-close after `ended`.
  absl::Duration stall_timeout;
};

// Bytes of a staging slot: room for every array of a chunk, and for its outputs.
int64_t StagingSlotBytes(int64_t chunk_bytes_max);

class ChunkStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          public std::enable_shared_from_this<ChunkStream> {
 public:
  // Starts a stream and returns its reactor, which keeps itself alive until OnDone and until every
  // chunk it has submitted is computed.
  static ChunkStream* Start(grpc::CallbackServerContext* context, const StreamEnvironment& env);
  ~ChunkStream() override;

  // Starts every gRPC operation that is due. Any thread that holds no lock; never blocks.
  void Pump();

  // Ends the stream with an error, dropping answers.
  void End(const absl::Status& status);

  // Ends the stream when its client has kept it waiting for longer than the stall timeout.
  void CheckStalled(absl::Time now);

  // gRPC's reactions.
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Phase : uint8_t { kOpening, kChunks, kEnded };
  enum class Reading : uint8_t { kIdle, kAwaitingSlot, kStarted, kClosed };
  enum class Action : uint8_t {
    kNone,
    kReleaseSlots,
    kAcquireSlot,
    kRead,
    kWrite,
    kCancel,
    kFinish
  };

  // A chunk between its arrival and its answer's write.
  struct Pending {
    StagingSlot* slot = nullptr;
    std::optional<absl::StatusOr<ComputedChunk>> answer;
  };

  ChunkStream(grpc::CallbackServerContext* context, const StreamEnvironment& env);

  // What Pump does next; the state is changed as if it had been done.
  Action NextAction() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Action NextWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The chunk whose answer is to be written next; end() while there is none.
  std::map<uint64_t, Pending>::iterator NextAnswer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Action NextRead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Action StartFinish(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Perform(Action action) ABSL_LOCKS_EXCLUDED(mu_);
  void AcquireSlot();
  void Write();
  void FinishStream();

  // Whether the caller may open such a stream now.
  absl::Status CheckOpen(const v1::StreamOpen& open) const;

  // What a message does. Run in OnReadDone, beside no other read.
  absl::Status HandleOpen();
  absl::Status HandleChunkOrEnd(HeadStream& head_stream, StagingSlot* slot);
  absl::Status HandleChunk(HeadStream& head_stream, const DecodedChunk& decoded, StagingSlot* slot);

  void SlotReady(StagingSlot* slot);
  void AnswerReady(uint64_t sequence, absl::StatusOr<ComputedChunk> answer);

  // Ends the stream with an error: at once, or after the answers that are still to come.
  void Fail(const absl::Status& status, bool after_answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsOver() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return finished_ || (failure_.has_value() && !failure_waits_);
  }
  // Has Pump called soon, from a thread that must not start gRPC operations.
  void WakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  grpc::CallbackServerContext* const context_;
  const StreamEnvironment env_;
  const Call call_;
  std::shared_ptr<ChunkStream> self_;  // Until OnDone.

  // Of the operations under way. Touched by Pump when it starts one, by its reaction afterwards.
  grpc::ByteBuffer read_message_;
  grpc::ByteBuffer write_message_;
  Pending outgoing_;                         // The chunk of the next write, when it is one.
  std::optional<grpc::ByteBuffer> control_;  // Or the message of the next write.
  grpc::Status final_status_;

  absl::Mutex mu_;
  bool pumping_ ABSL_GUARDED_BY(mu_) = false;  // A thread is in Pump and will see every change.
  std::shared_ptr<HeadStream> head_stream_ ABSL_GUARDED_BY(mu_);            // Made by `open`.
  std::string name_ ABSL_GUARDED_BY(mu_) = "a stream that was not opened";  // For the log.
  LogFields log_fields_ ABSL_GUARDED_BY(mu_);

  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kOpening;
  int32_t window_ ABSL_GUARDED_BY(mu_) = 0;  // Chunks without an answer; beyond, it is not read.
  Reading reading_ ABSL_GUARDED_BY(mu_) = Reading::kIdle;
  StagingSlot* read_slot_ ABSL_GUARDED_BY(mu_) = nullptr;  // Lent for the next or current read.
  uint64_t slot_wait_ ABSL_GUARDED_BY(mu_) = 0;            // Id of the last wait for one.
  std::vector<StagingSlot*> spare_slots_ ABSL_GUARDED_BY(mu_);  // To be given back.

  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mu_);  // By sequence number of arrival.
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<grpc::ByteBuffer> opened_
      ABSL_GUARDED_BY(mu_);  // Answer to `open`, not written yet.
  bool ended_written_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time write_started_ ABSL_GUARDED_BY(mu_);
  absl::Time stalled_after_ ABSL_GUARDED_BY(mu_);  // The client's turn ends then.

  std::optional<absl::Status> failure_ ABSL_GUARDED_BY(mu_);
  bool failure_waits_ ABSL_GUARDED_BY(mu_) = false;  // For the answers still to come.
  bool cancel_ ABSL_GUARDED_BY(mu_) = false;         // TryCancel is due.
  bool finished_ ABSL_GUARDED_BY(mu_) = false;       // Finish was, or is about to be, called.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_CHUNK_STREAM_H_
