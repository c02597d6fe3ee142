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
  bool ready = false;
  RankGroup* asking = nullptr;
  RankGroup::Options options;
  options.config.num_ranks = 2;
  options.config.num_local = 2;
  options.config.collective_host = "127.0.0.1";
  options.request_connect = [&] {  // As if the first tries failed.
    absl::MutexLock lock(&mu);
    if (++times_asked > 2 && asking != nullptr) asking->Connect().IgnoreError();
  };
  options.on_ready = [&](bool is_ready) { ready = is_ready; };  // Within Connect().
  const auto group = RankGroup::Start(*hardware, options);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_FALSE((*group)->ready());
  absl::MutexLock lock(&mu);
  asking = group->get();
  EXPECT_TRUE(mu.AwaitWithTimeout(absl::Condition(&ready), absl::Seconds(60)));
  EXPECT_GT(times_asked, 2);
}

}  // namespace
}  // namespace lmhead
