// Who may hold a rank: followers with certificates, right and wrong ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/e2e/service_fixture.h"
#include "tests/shard/shard_processes.h"
#include "tests/util/certificates.h"

namespace lmhead::shard {
namespace {

using e2e::HeadShape;
using e2e::Rows;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr absl::Duration kPatience = absl::Seconds(60);

constexpr char kPolicy[] = R"({"identities": [
  {"name": "ops.example.org", "roles": ["admin", "trunk"], "workers": ["*"]},
  {"name": "node-1.example.org", "roles": ["shard"]}]})";

// A leader that demands certificates and waits for rank 1.
class ShardSecurityTest : public ::testing::Test {
 protected:
  ShardSecurityTest() : files_(MakeFiles()) {
    std::vector<std::string> flags = FlagsOf({2, 1, 1});
    flags.insert(flags.end(),
                 {Flag("tls_cert_file", "leader.crt"), Flag("tls_key_file", "leader.key"),
                  Flag("tls_client_ca_file", "ca.crt"), Flag("auth_policy_file", "policy.json"),
                  "--health_listen=127.0.0.1:0",
                  absl::StrCat("--collective_timeout_seconds=", kTimeoutSeconds)});
    server_ = e2e::StartServer(flags);
    auto client = Client::Connect(server_->address(),
                                  {.max_attempts = 1,
                                   .credentials = {.tls_ca_file = files_.Path("ca.crt"),
                                                   .tls_cert_file = files_.Path("ops.crt"),
                                                   .tls_key_file = files_.Path("ops.key")}});
    EXPECT_TRUE(client.ok()) << client.status();
    if (client.ok()) client_ = *std::move(client);
  }

  // What the processes of these tests read.
  static SecretFolder::Files MakeFiles() {
    const TestAuthority ours("ours");
    const TestAuthority theirs("theirs");
    SecretFolder::Files files = {
        {"ca.crt", ours.cert_pem()}, {"theirs.crt", theirs.cert_pem()}, {"policy.json", kPolicy}};
    const auto add = [&files](const std::string& name, const Leaf& leaf) {
      files[name + ".crt"] = leaf.cert_pem;
      files[name + ".key"] = leaf.key_pem;
    };
    add("leader", ours.Issue({"DNS:localhost", "IP:127.0.0.1"}));
    add("ops", ours.Issue({"DNS:ops.example.org"}));
    add("node", ours.Issue({"DNS:node-1.example.org"}));
    add("their-node", theirs.Issue({"DNS:node-1.example.org"}));
    return files;
  }

  std::string Flag(const std::string& flag, const std::string& file) const {
    return absl::StrCat("--", flag, "=", files_.Path(file));
  }
  std::vector<std::string> CertificateFlags(const std::string& name) const {
    return {Flag("tls_cert_file", name + ".crt"), Flag("tls_key_file", name + ".key")};
  }

  std::unique_ptr<FollowerChild> StartFollower(const std::string& ca,
                                               std::vector<std::string> flags) const {
    flags.push_back(Flag("tls_ca_file", ca));
    return std::make_unique<FollowerChild>(std::vector<std::string>{e2e::LmheadBinary()},
                                           server_->group_address(), 1, flags);
  }

  bool ready() const { return IsServing(server_->health_address(), "readiness"); }

  // The follower is told `why` and what to do about it, the leader's log has the reason, and
  // nothing but the rank is missing.
  void ExpectRefused(FollowerChild& follower, const std::vector<std::string>& why,
                     const std::string& leader_says) {
    const auto all_said = [&] {
      const std::string log = follower.Log();
      return server_->Log().find(leader_says) != std::string::npos &&
             std::all_of(why.begin(), why.end(), [&log](const std::string& part) {
               return log.find(part) != std::string::npos;
             });
    };
    const absl::Time deadline = absl::Now() + kPatience;
    while (!all_said() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(20));
    for (const std::string& part : why) EXPECT_THAT(follower.Log(), HasSubstr(part));
    EXPECT_THAT(server_->Log(), HasSubstr(leader_says));
    EXPECT_EQ(follower.Wait(absl::Milliseconds(100)), std::nullopt) << follower.Log();
    EXPECT_FALSE(ready());
    ASSERT_NE(client_, nullptr);
    const absl::Status refused = e2e::CreateHead(client_.get(), HeadShape());
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1 is away"));
  }

  const SecretFolder files_;
  std::unique_ptr<LocalServer> server_;
  std::unique_ptr<Client> client_;
};

TEST_F(ShardSecurityTest, AFollowerWithTheRightCertificateIsARank) {
  const auto follower = StartFollower("ca.crt", CertificateFlags("node"));
  const absl::Time deadline = absl::Now() + kPatience;
  while (!ready()) {
    ASSERT_LT(absl::Now(), deadline) << server_->Log() << follower->Log();
    absl::SleepFor(absl::Milliseconds(20));
  }
  ASSERT_NE(client_, nullptr);
  const HeadShape shape;
  LMHEAD_ASSERT_OK(e2e::CreateHead(client_.get(), shape));
  std::vector<Rows> rows = {e2e::MakeRows(shape, 100, 1, 0)};
  Client* const workers[] = {client_.get()};
  LMHEAD_ASSERT_OK(e2e::RunStep(client_.get(), workers, shape, 1, {}, &rows));
  e2e::OracleTrainer oracle(shape);
  oracle.Step(rows, 1);
  const auto weight = e2e::ReadTensor(client_.get(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
}

TEST_F(ShardSecurityTest, AFollowerThatDoesNotTrustTheLeaderSaysSo) {
  std::vector<std::string> flags = CertificateFlags("node");
  flags.push_back("--log_format=json");
  const auto follower = StartFollower("theirs.crt", flags);
  // The leader sees no more than a connection that ended.
  ExpectRefused(*follower, {"certificate verify failed", "--tls_ca_file"}, "rank 1 is away");
  // Also of gRPC's own lines, each is an object.
  EXPECT_THAT(follower->Log(), HasSubstr("gRPC: "));
  for (const auto& line : absl::StrSplit(follower->Log(), '\n', absl::SkipEmpty())) {
    EXPECT_THAT(std::string(line), AllOf(StartsWith("{"), EndsWith("}")));
  }
}

TEST_F(ShardSecurityTest, AFollowerWithoutACertificateIsRefused) {
  const auto follower = StartFollower("ca.crt", {});
  ExpectRefused(*follower, {"--tls_cert_file"}, "andshake");
}

TEST_F(ShardSecurityTest, AFollowerWithACertificateOfOthersIsRefused) {
  const auto follower = StartFollower("ca.crt", CertificateFlags("their-node"));
  ExpectRefused(*follower, {"--tls_cert_file"}, "andshake");
}

TEST_F(ShardSecurityTest, AFollowerThatMayNotBeARankIsToldWhoMay) {
  const auto follower = StartFollower("ca.crt", CertificateFlags("ops"));
  ExpectRefused(*follower,
                {"Follow: ops.example.org has role trunk and admin", "wanted shard", "policy.json"},
                "Follow from ");
}

TEST_F(ShardSecurityTest, AFollowerWithoutTlsIsRefused) {
  FollowerChild follower({e2e::LmheadBinary()}, server_->group_address(), 1);
  ExpectRefused(follower, {"--tls_ca_file"}, "andshake");
}

}  // namespace
}  // namespace lmhead::shard
