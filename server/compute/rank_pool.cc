#include "server/compute/rank_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "proto/types/check.h"

namespace lmhead {

RankPool::RankPool(std::vector<std::unique_ptr<Rank>> ranks, const Options& options)
    : ranks_(std::move(ranks)), options_(options), loads_(options.num_replicas) {
  LMHEAD_CHECK(ranks_.size() >= 2, absl::StrCat("got ", ranks_.size(), " ranks"));
  LMHEAD_CHECK(options.num_replicas >= 1 && num_ranks() % options.num_replicas == 0,
               absl::StrCat(num_ranks(), " ranks in ", options.num_replicas, " replicas"));
}

RankPool::~RankPool() { Fail(generation(), 0, absl::CancelledError("the server ends")); }

absl::Status RankPool::CheckPresent() const {
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    if (ranks_[rank]->session() == 0) {
      const absl::Status reason = failure();
      return absl::UnavailableError(
          absl::StrCat(NameOf(rank), " is away", reason.ok() ? "" : " since the last failure: ",
                       reason.message(), "; it has to be started (lmhead follow) or continued"));
    }
  }
  return absl::OkStatus();
}

absl::Status RankPool::Connect() {
  absl::MutexLock connect(&connect_mu_);
  if (connected()) return absl::OkStatus();
  if (absl::Status status = CheckPresent(); !status.ok()) return status;
  uint64_t generation = 0;
  auto store = std::make_shared<InProcessStore>();
  {
    absl::MutexLock lock(&mu_);
    generation = ++generation_;
    store_ = store;
    failure_ = absl::OkStatus();
  }
  absl::BlockingCounter pending(num_ranks());
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    ranks_[rank]->Connect(generation, store.get(),
                          [this, generation, rank, &pending](const absl::Status& status) {
                            if (!status.ok()) Fail(generation, rank, status);
                            pending.DecrementCount();
                          });
  }
  pending.Wait();
  {
    absl::MutexLock lock(&mu_);
    store_ = nullptr;
    connected_ = failure_.ok();
    if (!connected_) {
      return absl::UnavailableError(
          absl::StrCat("the ranks could not be connected: ", failure_.message()));
    }
  }
  if (options_.on_change) options_.on_change(true);
  return absl::OkStatus();
}

bool RankPool::connected() const {
  absl::MutexLock lock(&mu_);
  return connected_;
}

uint64_t RankPool::generation() const {
  absl::MutexLock lock(&mu_);
  return generation_;
}

absl::Status RankPool::failure() const {
  absl::MutexLock lock(&mu_);
  return failure_;
}

std::shared_ptr<InProcessStore> RankPool::store(uint64_t generation) const {
  absl::MutexLock lock(&mu_);
  return generation == generation_ ? store_ : nullptr;
}

void RankPool::Fail(uint64_t generation, int32_t rank, const absl::Status& error) {
  const absl::Status named(error.code(), absl::StrCat(NameOf(rank), ": ", error.message()));
  bool was_connected = false;
  {
    // Held over the aborts, so that none of them hits the next generation.
    absl::MutexLock lock(&mu_);
    if (generation != generation_ || !failure_.ok() || (!connected_ && store_ == nullptr)) return;
    was_connected = std::exchange(connected_, false);
    failure_ = named;
    if (store_ != nullptr) store_->Close(named);
    for (const std::unique_ptr<Rank>& each : ranks_) each->Abort(named);
  }
  if (was_connected && options_.on_change) options_.on_change(false);
}

int32_t RankPool::StartWork(int64_t num_tokens) {
  absl::MutexLock lock(&load_mu_);
  const auto before = [](const Load& a, const Load& b) {
    return std::pair(a.tokens_under_way, a.total.num_tokens) <
           std::pair(b.tokens_under_way, b.total.num_tokens);
  };
  const auto chosen = std::min_element(loads_.begin(), loads_.end(), before);
  chosen->tokens_under_way += num_tokens;
  chosen->total.num_tokens += num_tokens;
  ++chosen->total.num_batches;
  return static_cast<int32_t>(chosen - loads_.begin());
}

void RankPool::FinishWork(int32_t replica, int64_t num_tokens) {
  absl::MutexLock lock(&load_mu_);
  loads_[replica].tokens_under_way -= num_tokens;
}

RankPool::ReplicaWork RankPool::work(int32_t replica) const {
  absl::MutexLock lock(&load_mu_);
  return loads_[replica].total;
}

HeadId RankPool::AddHead() {
  absl::MutexLock lock(&mu_);
  heads_.insert(++last_head_);
  return last_head_;
}

void RankPool::RemoveHead(HeadId head) {
  absl::MutexLock lock(&mu_);
  heads_.erase(head);
}

std::vector<HeadId> RankPool::heads() const {
  absl::MutexLock lock(&mu_);
  return {heads_.begin(), heads_.end()};
}

}  // namespace lmhead
