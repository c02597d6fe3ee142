#include "server/memory/host_block.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/memory/pinned_memory.h"

namespace lmhead {

absl::StatusOr<std::unique_ptr<HostBlock>> HostBlock::Map(int64_t bytes) {
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("the system gave no memory for ", bytes,
                                                     " bytes (", std::strerror(errno), ")"));
  }
  return std::unique_ptr<HostBlock>(new HostBlock(data, bytes));
}

HostBlock::~HostBlock() {
  if (pinned_for_.has_value()) UnpinHostMemory(*pinned_for_, data_);
  munmap(data_, static_cast<size_t>(size_bytes_));
}

absl::Status HostBlock::Pin(int device) {
  absl::Status status = PinHostMemory(device, data_, size_bytes_);
  if (status.ok()) pinned_for_ = device;
  return status;
}

}  // namespace lmhead
