#include "server/shard/batch_buffers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/host_block.h"

namespace lmhead {
namespace {

// Blocks are whole multiples of this, so that batches of nearly the same size share them.
constexpr int64_t kGranularity = 1 << 20;

absl::StatusOr<std::unique_ptr<HostBlock>> MapBlock(std::optional<int> device, int64_t bytes) {
  absl::StatusOr<std::unique_ptr<HostBlock>> block = HostBlock::Map(bytes);
  absl::Status status = block.status();
  if (status.ok() && device.has_value()) status = (*block)->Pin(*device);
  if (status.ok()) return block;
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(
      absl::StrCat("a batch of ", bytes, " bytes: ", status.message(),
                   "; lower the leader's --batch_tokens or --chunk_bytes_max"));
}

}  // namespace

class BatchBuffers::Pool {
 public:
  explicit Pool(std::optional<int> device) : device_(device) {}

  absl::StatusOr<std::unique_ptr<HostBlock>> Take(int64_t bytes) {
    std::unique_ptr<HostBlock> too_small;  // Its memory goes before the new one is there.
    {
      absl::MutexLock lock(&mu_);
      const auto found =
          std::ranges::find_if(free_, [bytes](const std::unique_ptr<HostBlock>& block) {
            return block->size_bytes() >= bytes;
          });
      if (found != free_.end()) {
        std::unique_ptr<HostBlock> block = std::move(*found);
        free_.erase(found);
        return block;
      }
      if (!free_.empty()) {
        too_small = std::move(free_.back());
        free_.pop_back();
      }
    }
    too_small = nullptr;
    return MapBlock(device_, (bytes + kGranularity - 1) / kGranularity * kGranularity);
  }

  void Return(std::unique_ptr<HostBlock> block) {
    absl::MutexLock lock(&mu_);
    free_.push_back(std::move(block));
  }

 private:
  const std::optional<int> device_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<HostBlock>> free_ ABSL_GUARDED_BY(mu_);
};

// Gives the block back at its end.
class BatchBuffers::Lease {
 public:
  Lease(std::shared_ptr<Pool> pool, std::unique_ptr<HostBlock> block)
      : pool_(std::move(pool)), block_(std::move(block)) {}
  ~Lease() { pool_->Return(std::move(block_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::byte* data() const { return block_->data(); }

 private:
  const std::shared_ptr<Pool> pool_;
  std::unique_ptr<HostBlock> block_;
};

BatchBuffers::BatchBuffers(std::optional<int> device) : pool_(std::make_shared<Pool>(device)) {}

absl::StatusOr<std::shared_ptr<std::byte>> BatchBuffers::Take(int64_t bytes) {
  absl::StatusOr<std::unique_ptr<HostBlock>> block = pool_->Take(bytes);
  if (!block.ok()) return block.status();
  const auto lease = std::make_shared<Lease>(pool_, *std::move(block));
  return std::shared_ptr<std::byte>(lease, lease->data());
}

}  // namespace lmhead
