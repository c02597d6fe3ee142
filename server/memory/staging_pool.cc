#include "server/memory/staging_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

constexpr int64_t kSlotAlignment = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<StagingPool>> StagingPool::Create(int32_t num_slots,
                                                                 int64_t slot_bytes) {
  LMHEAD_CHECK(num_slots > 0 && slot_bytes > 0,
               absl::StrCat("got ", num_slots, " slots of ", slot_bytes, " bytes"));
  const int64_t rounded = (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  void* const base = mmap(nullptr, static_cast<size_t>(num_slots * rounded), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the system gave no memory for ", num_slots, " staging slots of ", rounded, " bytes (",
        std::strerror(errno), "); lower --staging_slots or --chunk_bytes_max"));
  }
  return std::unique_ptr<StagingPool>(
      new StagingPool(static_cast<std::byte*>(base), num_slots, rounded));
}

StagingPool::StagingPool(std::byte* base, int32_t num_slots, int64_t slot_bytes)
    : base_(base), slot_bytes_(slot_bytes), slots_(static_cast<size_t>(num_slots)) {
  for (int32_t i = num_slots - 1; i >= 0; --i) {
    slots_[i] = {base + i * slot_bytes, slot_bytes};
    free_.push_back(&slots_[i]);
  }
}

StagingPool::~StagingPool() {
  {
    absl::MutexLock lock(&mu_);
    LMHEAD_CHECK(waiters_.empty(), absl::StrCat(waiters_.size(), " streams still wait for a slot"));
    LMHEAD_CHECK(free_.size() == slots_.size(),
                 absl::StrCat(slots_.size() - free_.size(), " slots are still lent"));
  }
  munmap(base_, slots_.size() * static_cast<size_t>(slot_bytes_));
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
