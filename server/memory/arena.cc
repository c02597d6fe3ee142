#include "server/memory/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "proto/types/limits.h"

namespace lmhead {
namespace {

// Below this a huge page cannot lie inside the block.
constexpr int64_t kHugePageBytes = 2 * kMiB;

void AddTo(MemoryAccount::Use* use, int64_t bytes) {
  use->live_bytes += bytes;
  use->peak_process_bytes = std::max(use->peak_process_bytes, use->live_bytes);
  use->peak_step_bytes = std::max(use->peak_step_bytes, use->live_bytes);
}

}  // namespace

void MemoryAccount::Add(MemoryCategory category, int64_t bytes) {
  LMHEAD_CHECK(bytes >= 0, absl::StrCat("got ", bytes));
  absl::MutexLock lock(&mu_);
  AddTo(&state_.categories[static_cast<size_t>(category)], bytes);
  AddTo(&state_.total, bytes);
}

void MemoryAccount::Subtract(MemoryCategory category, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  Use& use = state_.categories[static_cast<size_t>(category)];
  LMHEAD_CHECK(bytes >= 0 && bytes <= use.live_bytes,
               absl::StrCat(std::string(MemoryCategoryName(category)), ": got ", bytes, ", live ",
                            use.live_bytes));
  use.live_bytes -= bytes;
  state_.total.live_bytes -= bytes;
}

void MemoryAccount::ResetStepPeaks() {
  absl::MutexLock lock(&mu_);
  for (Use& use : state_.categories) use.peak_step_bytes = use.live_bytes;
  state_.total.peak_step_bytes = state_.total.live_bytes;
}

MemoryAccount::Snapshot MemoryAccount::Read() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

absl::StatusOr<std::unique_ptr<HostArena>> HostArena::Create(const MemoryPlan& plan,
                                                             MemoryAccount* account) {
  const int64_t bytes = plan.TotalBytes();
  LMHEAD_CHECK(bytes > 0, "an empty plan");
  void* const base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system gave no ", bytes, " bytes of memory (", std::strerror(errno),
                     "); free some, or lower --memory_limit_bytes. Wanted:\n", plan.Breakdown()));
  }
  // A hint: without huge pages the arena works as well, more slowly.
  if (bytes >= kHugePageBytes) madvise(base, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return std::unique_ptr<HostArena>(
      new HostArena(plan, account, static_cast<std::byte*>(base), bytes));
}

HostArena::HostArena(const MemoryPlan& plan, MemoryAccount* account, std::byte* base,
                     int64_t mapped_bytes)
    : plan_(plan), account_(account), base_(base), mapped_bytes_(mapped_bytes) {}

HostArena::~HostArena() {
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    account_->Subtract(static_cast<MemoryCategory>(i), carved_[i]);
  }
  munmap(base_, static_cast<size_t>(mapped_bytes_));
}

void* HostArena::Carve(MemoryCategory category, int64_t bytes) {
  const auto describe = [&] {
    return absl::StrCat("carving ", bytes, " bytes of ", std::string(MemoryCategoryName(category)),
                        ": ", carved_[static_cast<size_t>(category)], " of the plan's ",
                        plan_[category], " are carved");
  };
  LMHEAD_CHECK(!sealed_, describe());
  LMHEAD_CHECK(bytes >= 0, describe());
  if (bytes == 0) return nullptr;
  int64_t& carved = carved_[static_cast<size_t>(category)];
  LMHEAD_CHECK(bytes <= plan_[category] - carved, describe());
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  LMHEAD_CHECK(rounded <= plan_[category] - carved, describe());
  void* const piece = base_ + offset_;
  carved += rounded;
  offset_ += rounded;
  account_->Add(category, rounded);
  return piece;
}

void HostArena::Seal() { sealed_ = true; }

}  // namespace lmhead
