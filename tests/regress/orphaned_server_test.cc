// A demo that was killed left its server running for ever.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/child_process.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The process that the demo says it has started; 0 when it does not say so in time.
pid_t ServerOfDemo(const std::string& log) {
  constexpr std::string_view kBefore = "(process ";
  for (const absl::Time deadline = absl::Now() + kPatience; absl::Now() < deadline;) {
    const std::string output = ReadFile(log);
    const size_t at = output.find(kBefore);
    if (at != std::string::npos) return std::atoi(output.c_str() + at + kBefore.size());
    absl::SleepFor(absl::Milliseconds(20));
  }
  return 0;
}

// The signal that ended the child; 0 when it did not end in time, or by itself.
int AwaitSignal(pid_t child) {
  for (const absl::Time deadline = absl::Now() + kPatience; absl::Now() < deadline;) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child)
      return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return 0;
}

TEST(OrphanedServer, AServerEndsWithTheDemoThatWasKilled) {
  const TemporaryFolder folder;
  const std::string text = folder.Path("text");
  for (int i = 0; i < 500; ++i) {
    std::ofstream(text, std::ios::app) << "the server keeps the weight of the head , number " << i
                                       << " of the words that it has seen .\n";
  }
  // The demo's own children become ours when it is gone, so that their end can be waited for.
  ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  const std::string log = folder.Path("log");
  const auto demo = SpawnChild({PathBesideTest("lmhead"), "demo", absl::StrCat("--text=", text),
                                absl::StrCat("--backend=", TestBackend()), "--steps=1000000"},
                               log);
  ASSERT_TRUE(demo.ok()) << demo.status();
  const pid_t server = ServerOfDemo(log);
  EXPECT_GT(server, 0) << ReadFile(log);
  kill(*demo, SIGKILL);
  ASSERT_EQ(waitpid(*demo, nullptr, 0), *demo);
  if (server > 0) {
    const int signal = AwaitSignal(server);
    EXPECT_EQ(signal, SIGKILL) << "the server has outlived the demo";
    if (signal == 0) kill(server, SIGKILL);
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}

}  // namespace
}  // namespace lmhead
