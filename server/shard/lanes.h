// The lanes of one Follow call, at either end: several connections that carry the arrays of batches
// in parts. One with TLS, or over a network, may carry less than a GPU computes.
//
//   1. The owner sends the arrays of a command, and says where those that come have their places.
//   2. A lane that has nothing to send takes the next part of the oldest command, whichever it is:
//      a slow connection carries fewer parts.
//   3. A part that comes before its command is known waits, and its lane with it: nothing is kept
//      that has no place yet.
//
// Parts are copied: at the sender from the owner's memory into the message, at the receiver from
// the message to its place. So memory that was given is free again when Forget() or Close() has
// returned, in the time that a part takes to copy, whatever gRPC still holds: a connection to a
// peer that hangs may hold messages until it is given up.
//
// Threads: lanes run on gRPC's callback threads; one thread here wakes those that have waited.

#ifndef LMHEAD_SERVER_SHARD_LANES_H_
#define LMHEAD_SERVER_SHARD_LANES_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/wire/lane_codec.h"

namespace lmhead {

// One connection, as the lanes see it. Thread-safe; calls after its end do nothing.
class Lane {
 public:
  virtual ~Lane() = default;

  // There is a part to send. REQUIRES: NextPart() has answered that there was none.
  virtual void Write() = 0;
  // The part that waited has its place now. REQUIRES: TakePart() has answered false.
  virtual void Read() = 0;
  // Ends the connection.
  virtual void End() = 0;

  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

 protected:
  Lane() = default;
};

// Thread-safe. Commands are numbered in the order of their first Send() or Expect().
class Lanes {
 public:
  // By the number of LanePart.array; empty ones are left out.
  using Arrays = std::vector<std::span<const std::byte>>;
  using Places = std::vector<std::span<std::byte>>;

  // `on_lost` is told of the first lane that is lost, on any thread; it must not block, nor close
  // the lanes.
  Lanes(int32_t num_lanes, std::function<void()> on_lost);
  ~Lanes();  // REQUIRES: Close() has returned.
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  int32_t num_lanes() const { return num_lanes_; }

  // --- For the owner ---

  // `keep` is held as long as the arrays are read; null when they stay until the command is
  // forgotten.
  void Send(uint64_t command, Arrays arrays, std::shared_ptr<const void> keep);

  // Where the arrays of the command go. `arrived` is called once, on any thread, with OK when they
  // are whole, or with an error when the lanes are closed; a call that Forget() comes too late for
  // may be under way when that returns. REQUIRES: they are not all empty.
  void Expect(uint64_t command, Places places,
              std::function<void(const absl::Status& status)> arrived);

  // The memory of the command is not touched any more, and its parts that still come are dropped.
  // Waits for what is being copied.
  void Forget(uint64_t command);

  // Tells all lanes to end, and forgets all commands. A second call returns at once, before the
  // first may have. Not from a lane.
  void Close(const absl::Status& reason);

  // After Close(): waits until the lanes have ended, which takes as long as gRPC takes to give up a
  // connection that hangs. Not from a gRPC callback: lanes die here, and may take the last of
  // gRPC's callback threads along.
  void AwaitEnd();

  // All lanes are there.
  bool complete() const;
  // Why a lane was lost; OK while none was.
  absl::Status loss() const;

  // --- For the lanes ---

  // Whether all are there now. FAILED_PRECONDITION when they were already, UNAVAILABLE when they
  // are closed. The lane is kept until AwaitEnd().
  absl::StatusOr<bool> Add(std::shared_ptr<Lane> lane);
  // A lane that was added does nothing more.
  void Leave();

  // A lane has ended, with a reason.
  void Lose(const absl::Status& reason);

  // What the lane sends next. None: the lane's Write() is called when there is something.
  std::optional<grpc::ByteBuffer> NextPart(const std::shared_ptr<Lane>& lane);

  // Copies a part that has come to its place. False: its command is not known yet, and the lane's
  // Read() is called when it is. INVALID_ARGUMENT when the part has no such place.
  absl::StatusOr<bool> TakePart(const std::shared_ptr<Lane>& lane, grpc::ByteBuffer* message);

 private:
  struct Outgoing {
    Arrays arrays;
    std::shared_ptr<const void> keep;
    uint32_t array = 0;  // The next part: where it starts.
    size_t offset = 0;
    int32_t num_copying = 0;

    // Passes arrays that are sent. Whether a part is left.
    bool HasPart();
  };
  struct Incoming {
    Places places;
    std::function<void(const absl::Status&)> arrived;  // Null: being forgotten.
    uint64_t unclaimed_bytes = 0;                      // Of no part that has come.
    uint64_t missing_bytes = 0;                        // Not copied yet.
    int32_t num_copying = 0;
  };
  using OutgoingMap = std::map<uint64_t, Outgoing>;
  using Parked = std::pair<uint64_t, std::shared_ptr<Lane>>;

  void Wake();
  OutgoingMap::iterator FindPart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The first whose command is known.
  std::vector<Parked>::iterator FindParked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool CanWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::span<std::byte>> ClaimPlace(const LanePartReader& part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int32_t num_lanes_;
  const std::function<void()> on_lost_;
  mutable absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;    // Close() was called,
  bool all_told_ ABSL_GUARDED_BY(mu_) = false;  // and has told everybody.
  absl::Status loss_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mu_);
  int32_t num_open_ ABSL_GUARDED_BY(mu_) = 0;  // Of these, those that have not left.
  std::vector<std::shared_ptr<Lane>> idle_ ABSL_GUARDED_BY(mu_);  // With nothing to send.
  std::vector<Parked> parked_ ABSL_GUARDED_BY(mu_);  // By the command that they wait for.
  OutgoingMap outgoing_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Incoming> incoming_ ABSL_GUARDED_BY(mu_);
  uint64_t last_known_ ABSL_GUARDED_BY(mu_) = 0;  // Command that was expected or forgotten.
  std::thread waker_;                             // Last: starts when everything else is there.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_LANES_H_
