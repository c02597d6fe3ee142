#include "server/shard/batch_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/pinned_memory.h"

namespace lmhead {
namespace {

// Blocks are whole multiples of this, so that batches of nearly the same size share them.
constexpr int64_t kGranularity = 1 << 20;

constexpr char kRemedy[] = " lower the leader's --batch_tokens or --chunk_bytes_max";

// A mapping of the process.
class Block {
 public:
  static absl::StatusOr<std::unique_ptr<Block>> Create(std::optional<int> device, int64_t bytes) {
    void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("the system gave no memory for a batch of ",
                                                       bytes, " bytes (", std::strerror(errno),
                                                       ");", kRemedy));
    }
    std::unique_ptr<Block> block(new Block(data, bytes));
    if (!device.has_value()) return block;
    const absl::Status status = PinHostMemory(*device, data, bytes);
    if (absl::IsResourceExhausted(status)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a batch of ", bytes, " bytes: ", status.message(), " or", kRemedy));
    }
    if (!status.ok()) return status;
    block->pinned_for_ = device;
    return block;
  }
  ~Block() {
    if (pinned_for_.has_value()) UnpinHostMemory(*pinned_for_, data_);
    munmap(data_, static_cast<size_t>(bytes_));
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  Block(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  void* const data_;
  const int64_t bytes_;
  std::optional<int> pinned_for_;
};

}  // namespace

class BatchBuffers::Pool {
 public:
  explicit Pool(std::optional<int> device) : device_(device) {}

  absl::StatusOr<std::unique_ptr<Block>> Take(int64_t bytes) {
    std::unique_ptr<Block> too_small;  // Its memory goes before the new one is there.
    {
      absl::MutexLock lock(&mu_);
      const auto found = std::ranges::find_if(
          free_, [bytes](const std::unique_ptr<Block>& block) { return block->bytes() >= bytes; });
      if (found != free_.end()) {
        std::unique_ptr<Block> block = std::move(*found);
        free_.erase(found);
        return block;
      }
      if (!free_.empty()) {
        too_small = std::move(free_.back());
        free_.pop_back();
      }
    }
    too_small = nullptr;
    return Block::Create(device_, (bytes + kGranularity - 1) / kGranularity * kGranularity);
  }

  void Return(std::unique_ptr<Block> block) {
    absl::MutexLock lock(&mu_);
    free_.push_back(std::move(block));
  }

 private:
  const std::optional<int> device_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Block>> free_ ABSL_GUARDED_BY(mu_);
};

// Gives the block back at its end.
class BatchBuffers::Lease {
 public:
  Lease(std::shared_ptr<Pool> pool, std::unique_ptr<Block> block)
      : pool_(std::move(pool)), block_(std::move(block)) {}
  ~Lease() { pool_->Return(std::move(block_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::byte* data() const { return block_->data(); }

 private:
  const std::shared_ptr<Pool> pool_;
  std::unique_ptr<Block> block_;
};

BatchBuffers::BatchBuffers(std::optional<int> device) : pool_(std::make_shared<Pool>(device)) {}

absl::StatusOr<std::shared_ptr<std::byte>> BatchBuffers::Take(int64_t bytes) {
  absl::StatusOr<std::unique_ptr<Block>> block = pool_->Take(bytes);
  if (!block.ok()) return block.status();
  const auto lease = std::make_shared<Lease>(pool_, *std::move(block));
  return std::shared_ptr<std::byte>(lease, lease->data());
}

}  // namespace lmhead
