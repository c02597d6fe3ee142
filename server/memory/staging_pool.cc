#include "server/memory/staging_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

constexpr int64_t kSlotAlignment = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<StagingPool>> StagingPool::Create(int32_t num_slots,
                                                                 int64_t slot_bytes,
                                                                 std::optional<int> device) {
  LMHEAD_CHECK(num_slots > 0 && slot_bytes > 0,
               absl::StrCat("got ", num_slots, " slots of ", slot_bytes, " bytes"));
  const int64_t rounded = (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  absl::StatusOr<std::unique_ptr<HostBlock>> block = HostBlock::Map(num_slots * rounded);
  absl::Status status = block.status();
  if (status.ok() && device.has_value()) status = (*block)->Pin(*device);
  if (absl::IsResourceExhausted(status)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(num_slots, " staging slots of ", rounded, " bytes: ", status.message(),
                     "; lower --staging_slots or --chunk_bytes_max"));
  }
  if (!status.ok()) return status;
  return std::unique_ptr<StagingPool>(new StagingPool(*std::move(block), num_slots, rounded));
}

StagingPool::StagingPool(std::unique_ptr<HostBlock> block, int32_t num_slots, int64_t slot_bytes)
    : block_(std::move(block)), slot_bytes_(slot_bytes), slots_(static_cast<size_t>(num_slots)) {
  for (int32_t i = num_slots - 1; i >= 0; --i) {
    slots_[i] = {block_->data() + i * slot_bytes, slot_bytes};
    free_.push_back(&slots_[i]);
  }
}

StagingPool::~StagingPool() {
  absl::MutexLock lock(&mu_);
  LMHEAD_CHECK(waiters_.empty(), absl::StrCat(waiters_.size(), " streams still wait for a slot"));
  LMHEAD_CHECK(free_.size() == slots_.size(),
               absl::StrCat(slots_.size() - free_.size(), " slots are still lent"));
}

uint64_t StagingPool::Acquire(SlotReady ready) {
  StagingSlot* slot = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (free_.empty()) {
      const uint64_t id = next_wait_id_++;
      waiters_.push_back({id, std::move(ready)});
      return id;
    }
    // Nobody waits while a slot is free. The last one returned is the likeliest to be cached.
    slot = free_.back();
    free_.pop_back();
  }
  ready(slot);
  return 0;
}

bool StagingPool::CancelWait(uint64_t wait_id) {
  SlotReady cancelled;  // Destroyed without the lock: what it captures may come back here.
  {
    absl::MutexLock lock(&mu_);
    const auto found = std::find_if(waiters_.begin(), waiters_.end(),
                                    [&](const Waiter& waiter) { return waiter.id == wait_id; });
    if (found == waiters_.end()) return false;
    cancelled = std::move(found->ready);
    waiters_.erase(found);
  }
  return true;
}

void StagingPool::Release(StagingSlot* slot) {
  SlotReady ready;
  {
    absl::MutexLock lock(&mu_);
    LMHEAD_CHECK(slot >= slots_.data() && slot < slots_.data() + slots_.size(),
                 "a slot of another pool");
    LMHEAD_CHECK(std::find(free_.begin(), free_.end(), slot) == free_.end(), "released twice");
    if (waiters_.empty()) {
      free_.push_back(slot);
      return;
    }
    ready = std::move(waiters_.front().ready);
    waiters_.pop_front();
  }
  ready(slot);
}

int32_t StagingPool::num_lent() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int32_t>(slots_.size() - free_.size());
}

int32_t StagingPool::num_waiting() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int32_t>(waiters_.size());
}

}  // namespace lmhead
