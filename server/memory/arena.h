// The one block of memory a head lives in, carved once by its MemoryPlan.
//
// Arena carves aligned pieces, each booked under a category in a MemoryAccount; after Seal() any
// further carve is a programming error (CHECK). Freed as a whole. MemoryAccount keeps live and peak
// bytes by category and in all, for the process and for the current step.

#ifndef LMHEAD_SERVER_MEMORY_ARENA_H_
#define LMHEAD_SERVER_MEMORY_ARENA_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Live and peak bytes. Thread-safe.
class MemoryAccount {
 public:
  struct Use {
    int64_t live_bytes = 0;
    int64_t peak_process_bytes = 0;
    int64_t peak_step_bytes = 0;
  };
  struct Snapshot {
    std::array<Use, kNumMemoryCategories> categories;
    Use total;  // Peaks of the sum, not sums of the peaks.
  };

  void Add(MemoryCategory category, int64_t bytes);
  void Subtract(MemoryCategory category, int64_t bytes);

  // The step scope starts anew: its peaks become the live bytes.
  void ResetStepPeaks();

  Snapshot Read() const;

 private:
  mutable absl::Mutex mu_;
  Snapshot state_ ABSL_GUARDED_BY(mu_);
};

// One block of host memory. Thread-compatible.
class HostArena {
 public:
  // Every piece starts at a multiple of this, and its size is rounded up to one. The memory plan
  // rounds the same way, so that the sum of pieces equals the plan.
  static constexpr int64_t kAlignment = 64;

  // Maps plan.TotalBytes() of zeroed memory. RESOURCE_EXHAUSTED when the system has no room.
  // `account` must outlive the arena.
  static absl::StatusOr<std::unique_ptr<HostArena>> Create(const MemoryPlan& plan,
                                                           MemoryAccount* account);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Carves `bytes` (0 gives nullptr) of `category`. Carving past the plan's bytes of that category,
  // or after Seal(), is a programming error and ends the process with a message.
  void* Carve(MemoryCategory category, int64_t bytes);

  template <typename T>
  T* CarveArray(MemoryCategory category, int64_t count) {
    return static_cast<T*>(Carve(category, count * static_cast<int64_t>(sizeof(T))));
  }

  // No carving from here on.
  void Seal();

 private:
  HostArena(const MemoryPlan& plan, MemoryAccount* account, std::byte* base, int64_t mapped_bytes);

  const MemoryPlan plan_;
  MemoryAccount* const account_;
  std::byte* const base_;
  const int64_t mapped_bytes_;
  int64_t offset_ = 0;
  std::array<int64_t, kNumMemoryCategories> carved_{};
  bool sealed_ = false;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_ARENA_H_
