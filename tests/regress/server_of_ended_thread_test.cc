// A server that was started by a thread was killed when that thread had ended.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/local_server.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// Joined is not enough: the kernel sends the signals of a thread's end after that, and then takes
// the thread from this list.
bool IsGone(pid_t thread) {
  const std::string entry = absl::StrCat("/proc/self/task/", thread);
  for (const absl::Time deadline = absl::Now() + kPatience; absl::Now() < deadline;) {
    if (!std::filesystem::exists(entry)) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

TEST(ServerOfEndedThread, AServerOutlivesTheThreadThatStartedIt) {
  absl::StatusOr<std::unique_ptr<LocalServer>> server;
  pid_t id = 0;
  std::thread starter([&] {
    id = gettid();
    server = LocalServer::Start(PathBesideTest("lmhead"), {"--backend=" + TestBackend()});
  });
  starter.join();
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_TRUE(IsGone(id));
  const absl::StatusOr<int> code = (*server)->Stop();
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 0) << "the server did not live to be stopped";
}

}  // namespace
}  // namespace lmhead
