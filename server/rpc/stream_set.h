// The ComputeLoss streams that are open: how many may be, who pumps them, and which have stalled.
//
// Answers become ready on the executor's thread and slots become free in callbacks deep inside
// gRPC; neither may start gRPC operations itself (a write may spend a millisecond in the socket, a
// callback may hold gRPC's locks). They wake the stream instead, and a thread of this set pumps it.

#ifndef LMHEAD_SERVER_RPC_STREAM_SET_H_
#define LMHEAD_SERVER_RPC_STREAM_SET_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lmhead {

class ChunkStream;

// Thread-safe.
class StreamSet {
 public:
  // At most max_streams at once; each is woken by one of num_threads threads. A stream needs one of
  // num_slots staging slots to make progress, and paired ones reserve more.
  StreamSet(int32_t max_streams, int32_t num_slots, int32_t num_threads);
  ~StreamSet();  // REQUIRES: no stream is left.
  StreamSet(const StreamSet&) = delete;
  StreamSet& operator=(const StreamSet&) = delete;

  // Takes a stream in, until it is about to finish. RESOURCE_EXHAUSTED when there are max_streams.
  absl::Status Admit(std::shared_ptr<ChunkStream> stream);
  void Remove(ChunkStream* stream);

  // Reserves slots for a side of a paired stream, whose chunks wait in them for the other side: at
  // most `wanted`, at least 1, and half of what is left, so that the next stream finds some, too.
  // All streams of one side together get at most half of the slots, so that neither side starves
  // the other, and nobody the streams that are not paired. Held until Remove. RESOURCE_EXHAUSTED
  // when none is left, CANCELLED for a stream that was removed. Called once a stream.
  absl::StatusOr<int32_t> ReserveWindow(ChunkStream* stream, bool teacher_side, int32_t wanted);

  // Ends every stream with `status` and refuses new ones with it.
  void EndAll(const absl::Status& status);
  // OK until EndAll; then what it was told.
  absl::Status ended() const;

  // Has a thread call stream->Pump() soon.
  void Wake(std::shared_ptr<ChunkStream> stream);

  int32_t num_open() const;
  int32_t max_streams() const { return max_streams_; }

 private:
  void PumpLoop();
  void WatchLoop();
  std::vector<std::shared_ptr<ChunkStream>> List() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  struct Member {
    std::shared_ptr<ChunkStream> stream;
    int32_t window = 0;  // As reserved; 0 of a stream that is not paired.
    bool teacher_side = false;
  };
  // Slots that the streams hold while nothing else goes on.
  int32_t NumReserved() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int32_t max_streams_;
  const int32_t num_slots_;
  mutable absl::Mutex mu_;
  std::unordered_map<ChunkStream*, Member> streams_ ABSL_GUARDED_BY(mu_);
  std::deque<std::shared_ptr<ChunkStream>> woken_ ABSL_GUARDED_BY(mu_);
  absl::Status ended_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // Last: they start when everything else is there.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_STREAM_SET_H_
