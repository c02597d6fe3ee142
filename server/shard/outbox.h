// Messages that wait to be written to one gRPC stream, by a thread of its own: whoever has one to
// send does not wait for the network.

#ifndef LMHEAD_SERVER_SHARD_OUTBOX_H_
#define LMHEAD_SERVER_SHARD_OUTBOX_H_

#include <functional>
#include <optional>
#include <queue>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lmhead {

// Thread-safe. Needs no bound: a rank has at most a few commands under way.
template <typename Message>
class Outbox {
 public:
  // `cancel` ends the stream; called at most once, by Cancel(), and never after Close().
  explicit Outbox(std::function<void()> cancel) : cancel_(std::move(cancel)) {}

  // Dropped when the outbox is closed.
  void Push(Message message) {
    absl::MutexLock lock(&mu_);
    if (!closed_) messages_.push(std::move(message));
  }

  // The next message; waits for it. None when the outbox is closed.
  std::optional<Message> Pop() {
    absl::MutexLock lock(&mu_);
    const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return closed_ || !messages_.empty();
    };
    mu_.Await(absl::Condition(&ready));
    if (closed_) return std::nullopt;
    std::optional<Message> message = std::move(messages_.front());
    messages_.pop();
    return message;
  }

  // Ends the stream; its owner then closes the outbox.
  void Cancel() {
    absl::MutexLock lock(&mu_);
    if (std::function<void()> cancel = std::exchange(cancel_, nullptr)) cancel();
  }

  // By the owner of the stream, when it ends.
  void Close() {
    absl::MutexLock lock(&mu_);
    closed_ = true;
    cancel_ = nullptr;
  }

 private:
  absl::Mutex mu_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mu_);
  std::queue<Message> messages_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_OUTBOX_H_
