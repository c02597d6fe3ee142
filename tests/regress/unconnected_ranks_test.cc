// Ranks of one process that could not be connected at once never were: nobody asked again.

#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/shard/rank_group.h"

namespace lmhead {
namespace {

TEST(UnconnectedRanksTest, AreAskedForUntilTheyAreConnected) {
  const auto hardware = ChooseHardware(BackendChoice::kCpu, {}, 2);
  ASSERT_TRUE(hardware.ok()) << hardware.status();
  absl::Mutex mu;
  int times_asked = 0;
  const auto asked_twice = [&] { return times_asked >= 2; };
  bool ready = false;
  const auto is_ready = [&] { return ready; };
  RankGroup* asking = nullptr;
  const auto group = RankGroup::Start(
      *hardware, {.config = {.num_ranks = 2, .num_local = 2, .collective_host = "127.0.0.1"},
                  .request_connect =
                      [&] {
                        absl::MutexLock lock(&mu);
                        // The first tries fail: they are not made.
                        if (++times_asked > 2 && asking != nullptr) asking->Connect().IgnoreError();
                      },
                  .on_ready =
                      [&](bool is_now) {
                        ready = is_now;  // Within Connect(), with the lock held.
                      }});
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_FALSE((*group)->ready());
  absl::MutexLock lock(&mu);
  asking = group->get();
  EXPECT_TRUE(mu.AwaitWithTimeout(absl::Condition(&asked_twice), absl::Seconds(60)));
  EXPECT_TRUE(mu.AwaitWithTimeout(absl::Condition(&is_ready), absl::Seconds(60)));
}

}  // namespace
}  // namespace lmhead
