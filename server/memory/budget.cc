#include "server/memory/budget.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/check.h"
#include "proto/types/limits.h"

namespace lmhead {
namespace {

// Holders named in an error; the largest ones.
constexpr size_t kHoldersShown = 8;

std::string InGib(int64_t bytes) {
  return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1024.0 * kMiB));
}

}  // namespace

absl::StatusOr<MemoryPlan> MemoryBudget::Reserve(const HeadSpec& spec, const PlanOptions& options) {
  absl::MutexLock lock(&mu_);
  LMHEAD_CHECK(!reservations_.contains(spec.name), spec.name);
  PlanOptions within = options;
  within.budget_bytes = std::max<int64_t>(limit_bytes_ - reserved_bytes_, 0);
  absl::StatusOr<MemoryPlan> plan = PlanHead(spec, within);
  if (!plan.ok()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(plan.status().message(), "\n", Holders(),
                     ". Delete a head, lower batch_tokens, choose schedule ",
                     spec.trainable ? "recompute" : "eval (no gradient)",
                     ", or raise --memory_limit_bytes if the machine has more"));
  }
  reservations_.emplace(spec.name, plan->TotalBytes());
  reserved_bytes_ += plan->TotalBytes();
  return plan;
}

void MemoryBudget::Release(std::string_view head) {
  absl::MutexLock lock(&mu_);
  const auto found = reservations_.find(head);
  LMHEAD_CHECK(found != reservations_.end(), std::string(head));
  reserved_bytes_ -= found->second;
  reservations_.erase(found);
}

int64_t MemoryBudget::reserved_bytes() const {
  absl::MutexLock lock(&mu_);
  return reserved_bytes_;
}

int64_t MemoryBudget::available_bytes() const {
  absl::MutexLock lock(&mu_);
  return std::max<int64_t>(limit_bytes_ - reserved_bytes_, 0);
}

std::string MemoryBudget::Holders() const {
  std::string text = absl::StrCat("limit ", InGib(limit_bytes_), " (", limit_bytes_, " bytes); ");
  if (reservations_.empty()) return absl::StrCat(text, "no other head holds any");
  std::vector<std::pair<std::string, int64_t>> holders(reservations_.begin(), reservations_.end());
  std::stable_sort(holders.begin(), holders.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  absl::StrAppend(&text, "other heads hold ", InGib(reserved_bytes_), ":");
  for (size_t i = 0; i < std::min(holders.size(), kHoldersShown); ++i) {
    absl::StrAppend(&text, i == 0 ? " " : ", ", holders[i].first, " ", InGib(holders[i].second));
  }
  if (holders.size() > kHoldersShown) {
    absl::StrAppend(&text, " and ", holders.size() - kHoldersShown, " smaller ones");
  }
  return text;
}

}  // namespace lmhead
