#include "client/cpp/child_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ChildProcessTest : public testing::Test {
 protected:
  // What the program has written when it has ended.
  std::string OutputOf(const std::vector<std::string>& arguments) {
    const auto child = SpawnChild(arguments, log_path_);
    EXPECT_TRUE(child.ok()) << child.status();
    int status = -1;
    if (child.ok()) waitpid(*child, &status, 0);
    EXPECT_EQ(status, 0);
    std::ostringstream text;
    text << std::ifstream(log_path_).rdbuf();
    return text.str();
  }

  const TemporaryFolder folder_;
  const std::string log_path_ = folder_.Path("log");
};

TEST_F(ChildProcessTest, TheChildIsThisProcessesOwn) {
  EXPECT_EQ(OutputOf({"sh", "-c", "echo $PPID"}), std::to_string(getpid()) + "\n");
}

TEST_F(ChildProcessTest, TheChildBlocksTheSignalsThatItsCallerBlocks) {
  const std::vector<std::string> show = {"grep", "SigBlk", "/proc/self/status"};
  sigset_t some, before;
  sigemptyset(&some);
  sigaddset(&some, SIGUSR1);
  pthread_sigmask(SIG_SETMASK, &some, &before);
  EXPECT_EQ(OutputOf(show), "SigBlk:\t0000000000000200\n");
  sigset_t after;
  pthread_sigmask(SIG_SETMASK, &before, &after);
  EXPECT_EQ(sigismember(&after, SIGUSR1), 1);
  EXPECT_EQ(sigismember(&after, SIGUSR2), 0);
}

TEST_F(ChildProcessTest, AMissingProgramIsNotFoundAndNamed) {
  const auto child = SpawnChild({"/none/program"}, log_path_);
  EXPECT_TRUE(absl::IsNotFound(child.status())) << child.status();
  EXPECT_THAT(std::string(child.status().message()),
              AllOf(HasSubstr("/none/program"), HasSubstr("No such file")));
}

}  // namespace
}  // namespace lmhead
