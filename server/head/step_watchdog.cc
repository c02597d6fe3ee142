#include "server/head/step_watchdog.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr absl::Duration kPeriodMax = absl::Seconds(1);
constexpr absl::Duration kPeriodMin = absl::Milliseconds(10);

absl::Duration Period(const StepLimits& limits) {
  absl::Duration period = kPeriodMax;
  for (const absl::Duration limit : {limits.worker_lease, limits.step_timeout}) {
    if (limit > absl::ZeroDuration()) period = std::min(period, limit / 4);
  }
  return std::max(period, kPeriodMin);
}

}  // namespace

StepWatchdog::StepWatchdog(HeadRegistry* heads, const StepLimits& limits)
    : heads_(heads), limits_(limits) {
  if (limits.worker_lease <= absl::ZeroDuration() && limits.step_timeout <= absl::ZeroDuration()) {
    return;
  }
  thread_ = std::thread([this] { WatchLoop(); });
}

StepWatchdog::~StepWatchdog() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void StepWatchdog::WatchLoop() {
  const absl::Duration period = Period(limits_);
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), period)) return;
    }
    for (const std::shared_ptr<Head>& head : heads_->List()) {
      const std::optional<std::string> ended = head->AbortOverdueStep(absl::Now(), limits_);
      if (ended.has_value()) spdlog::warn("head {}: aborted {}", head->spec().name, *ended);
    }
  }
}

}  // namespace lmhead
