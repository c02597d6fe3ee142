// server/memory/pinned_memory.h of a build without CUDA.

#include "server/memory/pinned_memory.h"

namespace lmhead {

absl::Status PinHostMemory(int device, void* data, int64_t bytes) { return absl::OkStatus(); }

void UnpinHostMemory(int device, void* data) {}

}  // namespace lmhead
