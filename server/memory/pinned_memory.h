// What HostBlock asks of CUDA.

#ifndef LMHEAD_SERVER_MEMORY_PINNED_MEMORY_H_
#define LMHEAD_SERVER_MEMORY_PINNED_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace lmhead {

// Pins [data, data + bytes) as HostBlock::Pin() says.
absl::Status PinHostMemory(int device, void* data, int64_t bytes);

// Undoes PinHostMemory(device, data); no copy may be under way.
void UnpinHostMemory(int device, void* data);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_PINNED_MEMORY_H_
