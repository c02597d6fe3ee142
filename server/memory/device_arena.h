// The one block of device memory a head lives in, carved once by its MemoryPlan: HostArena's twin.
//
// One cudaMalloc for all; pieces are booked under a category in a MemoryAccount; after Seal() any
// further carve is a programming error (CHECK). Freed as a whole.

#ifndef LMHEAD_SERVER_MEMORY_DEVICE_ARENA_H_
#define LMHEAD_SERVER_MEMORY_DEVICE_ARENA_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Thread-compatible.
class DeviceArena {
 public:
  // Allocates plan.TotalBytes() of zeroed memory on `device`. RESOURCE_EXHAUSTED when the device
  // has no room, with what it has. `account` must outlive the arena.
  static absl::StatusOr<std::unique_ptr<DeviceArena>> Create(const MemoryPlan& plan,
                                                             MemoryAccount* account, int device);
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // Carves `bytes` (0 gives nullptr) of `category`, aligned to kDeviceAlignment. Carving past the
  // plan's bytes of that category, or after Seal(), ends the process with a message.
  void* Carve(MemoryCategory category, int64_t bytes);

  // No carving from here on.
  void Seal() { sealed_ = true; }

 private:
  DeviceArena(const MemoryPlan& plan, MemoryAccount* account, int device, std::byte* base)
      : plan_(plan), account_(account), device_(device), base_(base) {}

  const MemoryPlan plan_;
  MemoryAccount* const account_;
  const int device_;
  std::byte* const base_;
  int64_t offset_ = 0;
  std::array<int64_t, kNumMemoryCategories> carved_{};
  bool sealed_ = false;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_DEVICE_ARENA_H_
