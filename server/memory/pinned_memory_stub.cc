// server/memory/pinned_memory.h of a build without CUDA.

#include "server/memory/pinned_memory.h"

namespace lmhead {

absl::Status PinHostMemory(int device, void* data, int64_t bytes) { return absl::OkStatus(); }

void UnpinHostMemory(int device, void* data) {}

absl::StatusOr<std::unique_ptr<PinnedBlock>> PinnedBlock::Create(int64_t bytes) {
  return absl::UnimplementedError("this binary was built without CUDA");
}

PinnedBlock::~PinnedBlock() = default;

}  // namespace lmhead
