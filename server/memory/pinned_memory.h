// Host memory that a GPU copies from and to without a detour.
//
// Copies between a GPU and ordinary memory work too, but make the calling thread wait. Built
// without CUDA, or on a machine without a GPU, nothing is pinned and nothing fails: there is nobody
// to copy.

#ifndef LMHEAD_SERVER_MEMORY_PINNED_MEMORY_H_
#define LMHEAD_SERVER_MEMORY_PINNED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

// Pins [data, data + bytes), for example a StagingPool's block, for all devices of the process.
// `device` is one that it uses, so that no other gets a context; it becomes the calling thread's.
// Slow: the system wires every page. RESOURCE_EXHAUSTED when the system refuses, for example by its
// limit on locked memory; UNAVAILABLE when the device cannot be used.
absl::Status PinHostMemory(int device, void* data, int64_t bytes);

// Undoes PinHostMemory(device, data); no copy may be under way. The device becomes the thread's.
void UnpinHostMemory(int device, void* data);

// A pinned block of the backend's own. Only where there is CUDA.
class PinnedBlock {
 public:
  static absl::StatusOr<std::unique_ptr<PinnedBlock>> Create(int64_t bytes);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  void* data() const { return data_; }

 private:
  explicit PinnedBlock(void* data) : data_(data) {}

  void* const data_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_PINNED_MEMORY_H_
