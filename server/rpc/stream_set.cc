#include "server/rpc/stream_set.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "server/rpc/chunk_stream.h"

namespace lmhead {
namespace {

// How often streams are checked for having stalled.
constexpr absl::Duration kWatchPeriod = absl::Milliseconds(250);

}  // namespace

StreamSet::StreamSet(int32_t max_streams, int32_t num_slots, int32_t num_threads)
    : max_streams_(max_streams), num_slots_(num_slots) {
  for (int32_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { PumpLoop(); });
  threads_.emplace_back([this] { WatchLoop(); });
}

StreamSet::~StreamSet() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  LMHEAD_CHECK(streams_.empty(), "streams are still open");
}

absl::Status StreamSet::Admit(std::shared_ptr<ChunkStream> stream) {
  absl::MutexLock lock(&mu_);
  if (!ended_.ok()) return ended_;
  if (static_cast<int32_t>(streams_.size()) < max_streams_ && NumReserved() < num_slots_) {
    streams_[stream.get()].stream = stream;
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(streams_.size(),
                   " ComputeLoss streams are open, and this server takes no more, so that each of "
                   "them can hold a staging slot; close one, use fewer connections a worker, or "
                   "start the server with more --staging_slots and --max_streams"));
}

int32_t StreamSet::NumReserved() const {
  int32_t num_slots = 0;
  for (const auto& [key, member] : streams_) num_slots += std::max(member.window, 1);
  return num_slots;
}

absl::StatusOr<int32_t> StreamSet::ReserveWindow(ChunkStream* stream, bool teacher_side,
                                                 int32_t wanted) {
  absl::MutexLock lock(&mu_);
  // A client may be gone while its `open` is being read.
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return absl::CancelledError("the stream is over");
  int32_t left_of_side = num_slots_ / 2;
  for (const auto& [key, member] : streams_) {
    if (member.teacher_side == teacher_side) left_of_side -= member.window;
  }
  // The stream's own slot is among those reserved already.
  const int32_t left = std::min(left_of_side, num_slots_ - NumReserved() + 1);
  if (left < 1) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "all staging slots for the ", teacher_side ? "teacher's" : "student's",
        " side of paired streams are taken, of ", num_slots_,
        " slots half; use fewer connections, or start the server with more --staging_slots"));
  }
  Member& member = found->second;
  member.teacher_side = teacher_side;
  member.window = std::clamp((left + 1) / 2, 1, std::max(wanted, 1));
  return member.window;
}

void StreamSet::Remove(ChunkStream* stream) {
  std::shared_ptr<ChunkStream> removed;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  removed = std::move(it->second.stream);
  streams_.erase(it);
}

void StreamSet::EndAll(const absl::Status& status) {
  std::vector<std::shared_ptr<ChunkStream>> streams;
  {
    absl::MutexLock lock(&mu_);
    ended_ = status;
    streams = List();
  }
  for (const std::shared_ptr<ChunkStream>& stream : streams) stream->End(status);
}

absl::Status StreamSet::ended() const {
  absl::MutexLock lock(&mu_);
  return ended_;
}

std::vector<std::shared_ptr<ChunkStream>> StreamSet::List() const {
  std::vector<std::shared_ptr<ChunkStream>> streams;
  for (const auto& [key, member] : streams_) streams.push_back(member.stream);
  return streams;
}

void StreamSet::Wake(std::shared_ptr<ChunkStream> stream) {
  absl::MutexLock lock(&mu_);
  woken_.push_back(std::move(stream));
}

int32_t StreamSet::num_open() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int32_t>(streams_.size());
}

void StreamSet::PumpLoop() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stopping_ || !woken_.empty();
  };
  for (;;) {
    std::shared_ptr<ChunkStream> stream;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&has_work));
      if (woken_.empty()) return;
      stream = std::move(woken_.front());
      woken_.pop_front();
    }
    stream->Pump();
  }
}

void StreamSet::WatchLoop() {
  for (;;) {
    std::vector<std::shared_ptr<ChunkStream>> streams;
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), kWatchPeriod)) return;
      streams = List();
    }
    for (const std::shared_ptr<ChunkStream>& stream : streams) stream->CheckStalled(absl::Now());
  }
}

}  // namespace lmhead
