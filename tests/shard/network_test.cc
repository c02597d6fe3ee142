// Two hosts: a server and its follower in network namespaces of their own, with a cable that is
// pulled. Needs root and iproute2.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/service_fixture.h"
#include "tests/shard/shard_processes.h"
#include "tests/util/paths.h"

namespace lmhead::shard {
namespace {

using e2e::HeadShape;
using e2e::Rows;
using ::testing::HasSubstr;

bool Run(const std::string& command) {
  return std::system(absl::StrCat(command, " 2>/dev/null").c_str()) == 0;
}

// Of every line that says "not ready", why.
std::vector<std::string> ReasonsIn(const std::string& log) {
  std::vector<std::string> reasons;
  const std::vector<std::string> parts = absl::StrSplit(log, "not ready: ");
  for (size_t i = 1; i < parts.size(); ++i) {
    reasons.push_back(parts[i].substr(0, parts[i].find('\n')));
  }
  return reasons;
}

// Two namespaces joined by a pair of virtual interfaces.
class TwoHosts {
 public:
  TwoHosts()
      : leader_(absl::StrCat("lmhead-a-", getpid())),
        follower_(absl::StrCat("lmhead-b-", getpid())),
        folder_(std::filesystem::temp_directory_path() / leader_) {
    const std::string cable = absl::StrCat("lm", getpid());
    there_ = geteuid() == 0 && Run("ip netns add " + leader_) && Run("ip netns add " + follower_) &&
             Run(absl::StrCat("ip link add ", cable, "a netns ", leader_, " type veth peer name ",
                              cable, "b netns ", follower_)) &&
             Set(leader_, absl::StrCat(cable, "a"), "10.77.0.1") &&
             Set(follower_, absl::StrCat(cable, "b"), "10.77.0.2");
    cable_ = absl::StrCat(cable, "b");
    std::filesystem::create_directories(folder_);
  }
  ~TwoHosts() {
    Run("ip netns del " + leader_);
    Run("ip netns del " + follower_);
    std::filesystem::remove_all(folder_);
  }

  bool there() const { return there_; }
  const std::filesystem::path& folder() const { return folder_; }
  std::vector<std::string> OnFollower() const {
    return {"ip", "netns", "exec", follower_, e2e::LmheadBinary()};
  }
  // A program that is `lmhead` on the leader's host.
  std::string LeaderBinary() const {
    std::string path = folder_ / "lmhead";
    std::ofstream(path) << "#!/bin/sh\nexec ip netns exec " << leader_ << " " << e2e::LmheadBinary()
                        << " \"$@\"\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  bool SetCable(const char* state) const {
    return Run(absl::StrCat("ip -n ", follower_, " link set ", cable_, " ", state));
  }
  // The interface that connections of the leader's host to itself take.
  bool SetLeadersLoopback(const char* state) const {
    return Run(absl::StrCat("ip -n ", leader_, " link set lo ", state));
  }

 private:
  static bool Set(const std::string& space, const std::string& link, const std::string& address) {
    return Run(absl::StrCat("ip -n ", space, " addr add ", address, "/24 dev ", link)) &&
           Run(absl::StrCat("ip -n ", space, " link set ", link, " up")) &&
           Run(absl::StrCat("ip -n ", space, " link set lo up"));
  }

  const std::string leader_;
  const std::string follower_;
  const std::filesystem::path folder_;
  std::string cable_;
  bool there_ = false;
};

void AwaitReady(const std::string& address, bool wanted) {
  const absl::Time deadline = absl::Now() + absl::Seconds(90);
  while (IsServing(address, "readiness") != wanted) {
    ASSERT_LT(absl::Now(), deadline) << "readiness did not become " << wanted;
    absl::SleepFor(absl::Milliseconds(50));
  }
}

// A step of one worker with 200 rows.
void Train(Client* client, const HeadShape& shape, uint64_t step) {
  std::vector<Rows> rows = {e2e::MakeRows(shape, 200, step, 0)};
  LMHEAD_ASSERT_OK(e2e::RunStep(client, {&client, 1}, shape, step, {}, &rows));
}

TEST(ShardNetworkTest, ACableThatIsPulledEndsTheStepAndBringsTheGroupBackWhenItIsPutIn) {
  const TwoHosts hosts;
  if (!hosts.there()) GTEST_SKIP() << "needs root and network namespaces (ip netns)";
  const std::string socket = absl::StrCat("unix:", (hosts.folder() / "lmhead.sock").string());
  std::vector<std::string> flags = FlagsOf({2, 1, 1}, "10.77.0.1");
  flags.insert(flags.end(),
               {absl::StrCat("--backend=", TestBackend()), absl::StrCat("--listen=", socket),
                "--insecure", absl::StrCat("--collective_timeout_seconds=", kTimeoutSeconds)});
  auto server = LocalServer::Start(hosts.LeaderBinary(), flags);
  LMHEAD_ASSERT_OK(server);
  FollowerChild follower(hosts.OnFollower(), (*server)->group_address(), 1);
  AwaitReady(socket, true);
  const auto client = e2e::ConnectTo(socket);
  const HeadShape shape;
  LMHEAD_ASSERT_OK(e2e::CreateHead(client.get(), shape));
  ASSERT_NO_FATAL_FAILURE(Train(client.get(), shape, 1));

  auto incarnation = e2e::BeginStep(client.get(), shape, 2, 1);
  LMHEAD_ASSERT_OK(incarnation);
  ASSERT_TRUE(hosts.SetCable("down"));
  Rows second = e2e::MakeRows(shape, 200, 2, 0);
  const auto fed = e2e::Feed(client.get(), shape, 2, *incarnation, e2e::WorkerName(0), {}, &second);
  ASSERT_FALSE(fed.ok());
  EXPECT_THAT(std::string(fed.status().message()), HasSubstr("rank 1"));
  AwaitReady(socket, false);
  LMHEAD_ASSERT_OK(e2e::AbortStep(client.get(), shape, 2, *incarnation));

  ASSERT_TRUE(hosts.SetCable("up"));
  AwaitReady(socket, true);
  ASSERT_NO_FATAL_FAILURE(Train(client.get(), shape, 2));
  e2e::OracleTrainer oracle(shape);
  for (uint64_t step = 1; step <= 2; ++step) {
    const std::vector<Rows> wanted = {e2e::MakeRows(shape, 200, step, 0)};
    oracle.Step(wanted, step);
  }
  const auto weight = e2e::ReadTensor(client.get(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
}

// Nobody but the server itself asks for their connections: there are no followers.
TEST(ShardNetworkTest, RanksOfOneProcessThatCouldNotBeConnectedAreWhenTheNetworkIsUp) {
  const TwoHosts hosts;
  if (!hosts.there()) GTEST_SKIP() << "needs root and network namespaces (ip netns)";
  ASSERT_TRUE(hosts.SetLeadersLoopback("down"));
  const std::string socket = absl::StrCat("unix:", (hosts.folder() / "lmhead.sock").string());
  std::vector<std::string> flags = FlagsOf({2, 2, 1});
  flags.insert(flags.end(), {absl::StrCat("--backend=", TestBackend()), "--collective=gloo",
                             "--collective_host=10.77.0.1", absl::StrCat("--listen=", socket),
                             "--insecure", "--metrics_listen=", "--collective_timeout_seconds=2"});
  auto server = LocalServer::Start(hosts.LeaderBinary(), flags);
  LMHEAD_ASSERT_OK(server);
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (ReasonsIn((*server)->Log()).empty()) {
    ASSERT_LT(absl::Now(), deadline) << (*server)->Log();
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_FALSE(IsServing(socket, "readiness"));
  // Further tries fail for the same few reasons: either rank may be the one that gives up first.
  absl::SleepFor(absl::Seconds(12));
  const std::vector<std::string> reasons = ReasonsIn((*server)->Log());
  const std::set<std::string> different(reasons.begin(), reasons.end());
  EXPECT_EQ(reasons.size(), different.size()) << (*server)->Log();
  EXPECT_THAT(reasons.front(), HasSubstr("the ranks could not be connected"));

  ASSERT_TRUE(hosts.SetLeadersLoopback("up"));
  AwaitReady(socket, true);
  const auto client = e2e::ConnectTo(socket);
  const HeadShape shape;
  LMHEAD_ASSERT_OK(e2e::CreateHead(client.get(), shape));
  ASSERT_NO_FATAL_FAILURE(Train(client.get(), shape, 1));
}

}  // namespace
}  // namespace lmhead::shard
