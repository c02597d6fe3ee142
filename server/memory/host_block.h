// Host memory of the process's own, pinned where a GPU copies from and to it.
//
// Copies between a GPU and memory that is not pinned work too, but make the calling thread wait.

#ifndef LMHEAD_SERVER_MEMORY_HOST_BLOCK_H_
#define LMHEAD_SERVER_MEMORY_HOST_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

// One mapping, of zeros at first, aligned to a page.
class HostBlock {
 public:
  // RESOURCE_EXHAUSTED when the system has no room. REQUIRES: bytes > 0.
  static absl::StatusOr<std::unique_ptr<HostBlock>> Map(int64_t bytes);

  // Unpins and unmaps it. REQUIRES: no copy from or to it is under way.
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  // Pins it for all devices of the process; once. `device` is one that it uses, so that no other
  // gets a context; it becomes the calling thread's, here and in the destructor. Slow: the system
  // wires every page. RESOURCE_EXHAUSTED when the system refuses, for example by its limit on
  // locked memory; UNAVAILABLE when the device cannot be used. Built without CUDA, or on a machine
  // without a GPU, nothing is pinned and nothing fails: there is nobody to copy.
  absl::Status Pin(int device);

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  HostBlock(void* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  void* const data_;
  const int64_t size_bytes_;
  std::optional<int> pinned_for_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_HOST_BLOCK_H_
