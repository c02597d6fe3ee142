// Host buffers that chunks live in from the wire to the answer: one slot a chunk in flight.
//
// The number of slots is the server's bound on chunks; a stream that holds no slot does not read,
// so HTTP/2 flow control pushes back to the worker (DESIGN: admission). All slots are allocated at
// start (pinned when there is a GPU) and live until the pool dies.

#ifndef LMHEAD_SERVER_MEMORY_STAGING_POOL_H_
#define LMHEAD_SERVER_MEMORY_STAGING_POOL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/host_block.h"

namespace lmhead {

// Borrowed buffer; give it back with StagingPool::Release.
struct StagingSlot {
  std::byte* data = nullptr;  // 64-byte aligned.
  int64_t size_bytes = 0;
};

// Thread-safe. Never blocks: Release may run in a gRPC destroy callback.
class StagingPool {
 public:
  using SlotReady = std::function<void(StagingSlot*)>;

  // Allocates num_slots buffers of slot_bytes, one block, pinned for `device` if there is one.
  // RESOURCE_EXHAUSTED when the system has no room, or does not pin it; see HostBlock::Pin().
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(
      int32_t num_slots, int64_t slot_bytes, std::optional<int> device = std::nullopt);
  ~StagingPool();  // REQUIRES: every slot has been released, no waiter is left.
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Lends a slot: calls `ready` at once when one is free, else from the Release that frees one, in
  // order of the calls. `ready` runs without locks held and must not block. Returns an id for
  // CancelWait; 0 when `ready` has run already.
  uint64_t Acquire(SlotReady ready);

  // Takes back a waiting Acquire. False when its `ready` has been or is being called.
  bool CancelWait(uint64_t wait_id);

  // Returns a slot.
  void Release(StagingSlot* slot);

  int64_t size_bytes() const { return block_->size_bytes(); }  // Of all slots.
  int32_t num_slots() const { return static_cast<int32_t>(slots_.size()); }
  int64_t slot_bytes() const { return slot_bytes_; }
  int32_t num_lent() const;     // In-flight chunks.
  int32_t num_waiting() const;  // Streams under back pressure.

 private:
  struct Waiter {
    uint64_t id;
    SlotReady ready;
  };

  StagingPool(std::unique_ptr<HostBlock> block, int32_t num_slots, int64_t slot_bytes);

  const std::unique_ptr<HostBlock> block_;
  const int64_t slot_bytes_;
  std::vector<StagingSlot> slots_;
  mutable absl::Mutex mu_;
  std::vector<StagingSlot*> free_ ABSL_GUARDED_BY(mu_);
  std::deque<Waiter> waiters_ ABSL_GUARDED_BY(mu_);
  uint64_t next_wait_id_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_STAGING_POOL_H_
