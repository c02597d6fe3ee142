// A lane as a gRPC stream: what the server's and the client's reactor have in common.
//
// At most one write and one read are under way, and none is started after the stream has been let
// go, which happens once and never beside a write.

#ifndef LMHEAD_SERVER_SHARD_LANE_STREAM_H_
#define LMHEAD_SERVER_SHARD_LANE_STREAM_H_

#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/shard/lanes.h"

namespace lmhead {

// Reactor is grpc::ServerBidiReactor or grpc::ClientBidiReactor of ByteBuffers. Keeps itself alive
// until the derived class's OnDone calls Done(); lanes that it was added to keep it until their
// AwaitEnd().
template <typename Reactor>
class LaneStream : public Reactor, public Lane {
 public:
  void Write() final {
    if (!Enter()) return;
    if (std::optional<grpc::ByteBuffer> part = lanes_->NextPart(self_)) {
      StartWriting(*part);  // Leaves in OnWriteDone.
    } else {
      Leave();
    }
  }

  void Read() final {
    if (!Enter()) return;
    const absl::StatusOr<bool> taken = Take(&incoming_);
    if (taken.ok() && *taken) StartReading();
    Leave();
    if (!taken.ok()) Fail(taken.status());
  }

  void End() final { Stop(/*cancel=*/true); }

  void OnWriteDone(bool ok) final {
    outgoing_.Clear();
    Leave();
    if (ok) Write();  // Otherwise reads fail as well, and say more.
  }

  void OnReadDone(bool ok) final { ok ? Read() : ReadsAreOver(); }

 protected:
  // `lanes` may come later, before the first Write().
  explicit LaneStream(std::shared_ptr<Lanes> lanes) : lanes_(std::move(lanes)) {}

  // Both: the stream has begun. `self` owns it.
  void SetSelf(std::shared_ptr<Lane> self) { self_ = std::move(self); }
  void SetLanes(std::shared_ptr<Lanes> lanes) { lanes_ = std::move(lanes); }
  const std::shared_ptr<Lane>& self() const { return self_; }
  Lanes* lanes() const { return lanes_.get(); }

  // What a message does; false when it waits and Read() will be called again.
  virtual absl::StatusOr<bool> Take(grpc::ByteBuffer* message) {
    return lanes_->TakePart(self_, message);
  }
  // The other end sends nothing more.
  virtual void ReadsAreOver() = 0;
  // Ends the call; its reactions still come.
  virtual void CancelCall() = 0;
  // No operation will follow: Finish or RemoveHold.
  virtual void LetGo() = 0;

  // REQUIRES: no other write is under way.
  void StartWriting(const grpc::ByteBuffer& message) {
    outgoing_ = message;
    this->StartWrite(&outgoing_);
  }
  void StartReading() {
    incoming_.Clear();
    this->StartRead(&incoming_);
  }

  // Between them the stream is not let go. Enter() answers whether it still runs.
  bool Enter() {
    absl::MutexLock lock(&mu_);
    if (over_) return false;
    ++num_inside_;
    return true;
  }
  void Leave() {
    {
      absl::MutexLock lock(&mu_);
      if (--num_inside_ > 0 || !over_) return;
    }
    LetGo();
  }

  void Stop(bool cancel) {
    {
      absl::MutexLock lock(&mu_);
      if (std::exchange(over_, true)) return;
      if (cancel) CancelCall();
      if (num_inside_ > 0) return;
    }
    LetGo();
  }

  // Something is wrong with the lane, not with the call.
  void Fail(const absl::Status& reason) {
    if (lanes_ != nullptr) lanes_->Lose(reason);
    Stop(/*cancel=*/true);
  }

  // The last thing that a reactor does; *this may be gone then.
  void Done() {
    Lanes* lanes = nullptr;
    std::shared_ptr<Lane> self;  // Dropped without the lock, which goes with it.
    {
      // Behind the reactions that ran on other threads.
      absl::MutexLock lock(&mu_);
      lanes = lanes_.get();
      self = std::move(self_);
    }
    self = nullptr;
    if (lanes != nullptr) lanes->Leave();
  }

 private:
  std::shared_ptr<Lanes> lanes_;
  std::shared_ptr<Lane> self_;
  grpc::ByteBuffer outgoing_;  // Held until OnWriteDone.
  grpc::ByteBuffer incoming_;
  absl::Mutex mu_;
  int num_inside_ ABSL_GUARDED_BY(mu_) = 0;  // A write under way counts.
  bool over_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_LANE_STREAM_H_
