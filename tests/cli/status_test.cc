// status against real servers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/local_server.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::unique_ptr<LocalServer> Serve(std::vector<std::string> flags) {
  flags.push_back("--backend=cpu");
  auto server = LocalServer::Start(PathBesideTest("lmhead"), flags);
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

CommandResult Status(const LocalServer& server, const std::string& flags = "") {
  return RunCommand(absl::StrCat("'", PathBesideTest("lmhead"),
                                 "' status --address=", server.address(), " ", flags, " 2>&1"));
}

TEST(StatusCommandTest, EveryRankIsShownWithItsReplica) {
  const auto server = Serve({"--ranks=4", "--replicas=2"});
  ASSERT_NE(server, nullptr);
  const CommandResult text = Status(*server);
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_THAT(
      text.output,
      AllOf(HasSubstr("\nrank 0 of replica 0: cpu, "), HasSubstr("\nrank 1 of replica 0: cpu, "),
            HasSubstr("\nrank 2 of replica 1: cpu, "), HasSubstr("\nrank 3 of replica 1: cpu, ")));
  // Of its memory too.
  EXPECT_THAT(text.output, HasSubstr("\nrank 3 of replica 1            live "));
  const CommandResult result = Status(*server, "--json");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  const nlohmann::json json =
      nlohmann::json::parse(result.output, nullptr, /*allow_exceptions=*/false);
  ASSERT_EQ(json["devices"].size(), 4u) << result.output;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(json["devices"][rank]["rank"], rank);
    EXPECT_EQ(json["devices"][rank]["replica"], rank / 2);
  }
}

// Ranks that are not there yet belong to a replica all the same.
TEST(StatusCommandTest, RanksOfFollowersAreShownWithTheirReplicas) {
  const auto server = Serve({"--ranks=2", "--replicas=2", "--local_ranks=1",
                             "--group_listen=127.0.0.1:0", "--collective_host=127.0.0.1"});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(Status(*server).output, AllOf(HasSubstr("\nrank 0 of replica 0: cpu, "),
                                            HasSubstr("\nrank 1 of replica 1: ")));
}

TEST(StatusCommandTest, WithOneReplicaNoneIsNamed) {
  const auto server = Serve({"--ranks=2"});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(
      Status(*server).output,
      AllOf(HasSubstr("\nrank 0: cpu, "), HasSubstr("\nrank 1: cpu, "), Not(HasSubstr("replica"))));
}

}  // namespace
}  // namespace lmhead
