// Memory for the arrays of batches that a leader sends, used again from batch to batch: a new block
// costs the system's time for every page, and more when it is pinned.

#ifndef LMHEAD_SERVER_SHARD_BATCH_BUFFERS_H_
#define LMHEAD_SERVER_SHARD_BATCH_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"

namespace lmhead {

// Thread-safe.
class BatchBuffers {
 public:
  // Pinned for this device; none: not pinned.
  explicit BatchBuffers(std::optional<int> device);

  // At least `bytes`, aligned to a page, contents undefined. Comes back when the last pointer is
  // gone, which may be after the BatchBuffers. RESOURCE_EXHAUSTED when the system has no room, or
  // does not pin it.
  absl::StatusOr<std::shared_ptr<std::byte>> Take(int64_t bytes);

 private:
  class Pool;
  class Lease;
  const std::shared_ptr<Pool> pool_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_BATCH_BUFFERS_H_
