// Ends steps whose workers have gone silent, and steps that take too long: one thread that looks at
// every head now and then.

#ifndef LMHEAD_SERVER_HEAD_STEP_WATCHDOG_H_
#define LMHEAD_SERVER_HEAD_STEP_WATCHDOG_H_

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/head/head_registry.h"
#include "server/head/step.h"

namespace lmhead {

class StepWatchdog {
 public:
  // Looks four times a lease or timeout, at least once a second. Does nothing when both are off.
  // `heads` outlives it.
  StepWatchdog(HeadRegistry* heads, const StepLimits& limits);
  ~StepWatchdog();  // Waits for an abort that is under way.
  StepWatchdog(const StepWatchdog&) = delete;
  StepWatchdog& operator=(const StepWatchdog&) = delete;

 private:
  void WatchLoop();

  HeadRegistry* const heads_;
  const StepLimits limits_;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_STEP_WATCHDOG_H_
