#include "client/cpp/local_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A shell script in the place of the server.
class LocalServerTest : public testing::Test {
 protected:
  std::string Script(const std::string& body) {
    std::string path = directory_.Path("server");
    std::ofstream(path) << "#!/bin/sh\n"
                           "for flag in \"$@\"; do\n"
                           "  case $flag in --ready_file=*) ready=${flag#--ready_file=};; esac\n"
                           "done\n"
                        << body;
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }

  static constexpr char kGetReady[] =
      "echo '{\"address\":\"127.0.0.1:1\",\"metrics_address\":\"127.0.0.1:2\",\"pid\":3}' "
      "> $ready.new\n"
      "mv $ready.new $ready\n";

  const TemporaryFolder directory_;
};

TEST_F(LocalServerTest, ReadsTheAddressesAndPassesTheFlags) {
  const std::string script = Script(std::string("echo \"$@\"\n") + kGetReady + "exec sleep 1000\n");
  const auto server = LocalServer::Start(script, {"--backend=cpu"});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->address(), "127.0.0.1:1");
  EXPECT_EQ((*server)->metrics_address(), "127.0.0.1:2");
  EXPECT_THAT((*server)->Log(),
              AllOf(HasSubstr("serve --listen=127.0.0.1:0"),
                    HasSubstr("--metrics_listen=127.0.0.1:0"), HasSubstr("--backend=cpu")));
  const auto code = (*server)->Stop();
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 128 + SIGTERM);
  EXPECT_TRUE(absl::IsFailedPrecondition((*server)->Stop().status()));
}

TEST_F(LocalServerTest, StopReturnsTheExitCode) {
  const std::string script = Script(std::string("trap 'kill $child; exit 7' TERM\n") +
                                    "sleep 1000 &\nchild=$!\n" + kGetReady + "wait\n");
  const auto server = LocalServer::Start(script, {});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto code = (*server)->Stop();
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 7);
}

TEST_F(LocalServerTest, AServerThatEndsEarlyIsAnErrorWithItsLog) {
  const std::string script = Script("echo the port is taken >&2\nexit 3\n");
  const auto server = LocalServer::Start(script, {});
  EXPECT_TRUE(absl::IsUnavailable(server.status())) << server.status();
  EXPECT_THAT(std::string(server.status().message()),
              AllOf(HasSubstr("exit code 3"), HasSubstr("the port is taken")));
}

TEST_F(LocalServerTest, AServerThatIsNeverReadyIsKilled) {
  const std::string script = Script("echo thinking\nexec sleep 1000\n");
  const auto server = LocalServer::Start(script, {}, absl::Milliseconds(500));
  EXPECT_TRUE(absl::IsDeadlineExceeded(server.status())) << server.status();
}

TEST_F(LocalServerTest, AServerThatIgnoresSigtermIsKilled) {
  const std::string script =
      Script(std::string("trap '' TERM\n") + kGetReady + "exec sleep 1000\n");
  const auto server = LocalServer::Start(script, {});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(absl::IsDeadlineExceeded((*server)->Stop(absl::Milliseconds(200)).status()));
  EXPECT_EQ((*server)->pid(), -1);
}

TEST_F(LocalServerTest, AMissingBinaryIsNotFound) {
  const auto server = LocalServer::Start(directory_.Path("nothing"), {});
  EXPECT_TRUE(absl::IsNotFound(server.status())) << server.status();
}

}  // namespace
}  // namespace lmhead
