// Files in, decisions out: who a caller is, and how the files are followed.

#include "server/security/security.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/security/security_config.h"
#include "tests/util/certificates.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kToken[] = "a-token-that-nobody-guesses";

std::string Tokens(const std::string& name, const std::string& token) {
  return absl::StrCat(R"({"tokens": [{"name": ")", name, R"(", "sha256": ")", Sha256Hex(token),
                      R"("}]})");
}

std::string MonitorPolicy(const std::string& identity) {
  return absl::StrCat(R"({"identities": [{)", identity, R"(, "roles": ["monitor"]}]})");
}

// True once `done` is, which has a minute.
bool Eventually(const std::function<bool()>& done) {
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (!done()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return true;
}

class SecurityTest : public ::testing::Test {
 protected:
  SecurityTest() {
    const Leaf leaf = authority_.Issue({"DNS:head-0"});
    files_ = std::make_unique<SecretFolder>(
        SecretFolder::Files{{"tls.crt", leaf.cert_pem},
                            {"tls.key", leaf.key_pem},
                            {"ca.crt", authority_.cert_pem()},
                            {"tokens.json", Tokens("ci", kToken)},
                            {"policy.json", MonitorPolicy(R"("name": "trainer-0")")}});
    config_.tls_cert_file = files_->Path("tls.crt");
    config_.tls_key_file = files_->Path("tls.key");
  }

  std::unique_ptr<Security> Load() {
    auto security = Security::Load(config_);
    EXPECT_TRUE(security.ok()) << security.status();
    return security.ok() ? *std::move(security) : nullptr;
  }

  const TestAuthority authority_{"authority"};
  std::unique_ptr<SecretFolder> files_;
  SecurityConfig config_;
};

// --- The flags ---

TEST(IsLocalAddress, KnowsWhatOnlyThisMachineReaches) {
  for (const char* local :
       {"unix:/run/lmhead", "localhost:1", "127.0.0.1:50051", "127.8.9.10:0", "[::1]:50051"}) {
    EXPECT_TRUE(IsLocalAddress(local)) << local;
  }
  for (const char* open : {"0.0.0.0:50051", "[::]:50051", "10.0.0.1:1", "head-0:50051", ":50051",
                           "128.0.0.1:1", "127.0.0.1.example.org:1", "[::2]:1"}) {
    EXPECT_FALSE(IsLocalAddress(open)) << open;
  }
}

TEST(ValidateSecurityConfig, NamesTheFlagToChange) {
  const struct {
    SecurityConfig config;
    const char* listen;
    const char* says;  // Null: OK.
  } cases[] = {
      {{}, "127.0.0.1:0", nullptr},
      {{}, "unix:/tmp/x", nullptr},
      {{}, "0.0.0.0:50051", "--insecure"},
      {{.insecure = true}, "0.0.0.0:50051", nullptr},
      {{.tls_cert_file = "c"}, "0.0.0.0:1", "--tls_key_file"},
      {{.tls_key_file = "k"}, "0.0.0.0:1", "--tls_cert_file"},
      {{.tls_cert_file = "c", .tls_key_file = "k"}, "0.0.0.0:1", nullptr},
      {{.tls_cert_file = "c", .tls_key_file = "k", .insecure = true}, "0.0.0.0:1", "--insecure"},
      {{.tls_client_ca_file = "a"}, "127.0.0.1:0", "--tls_client_ca_file needs TLS"},
      {{.auth_token_file = "t"}, "127.0.0.1:0", "--auth_token_file needs TLS"},
      {{.auth_policy_file = "p"}, "127.0.0.1:0", "--auth_policy_file needs TLS"},
      {{.tls_cert_file = "c", .tls_key_file = "k", .auth_policy_file = "p"},
       "127.0.0.1:0",
       "needs identities"},
  };
  for (const auto& c : cases) {
    const absl::Status status = ValidateSecurityConfig(c.config, c.listen);
    EXPECT_EQ(status.ok(), c.says == nullptr) << status << " " << c.listen;
    if (c.says != nullptr) EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
}

// --- Start ---

TEST_F(SecurityTest, RefusesFilesThatAreWrongAtStart) {
  const absl::Time now = absl::Now();
  const Leaf other = authority_.Issue({"DNS:head-0"});
  const Leaf expired = authority_.Issue({"DNS:a"}, now - absl::Hours(2), now - absl::Hours(1));
  const struct {
    SecretFolder::Files files;
    const char* says;
  } cases[] = {
      {{{"tls.crt", "nonsense"}}, "--tls_cert_file"},
      {{{"tls.crt", ""}}, "empty"},
      {{{"tls.key", other.key_pem}}, "--tls_key_file"},
      {{{"tls.crt", expired.cert_pem}, {"tls.key", expired.key_pem}}, "expired"},
      {{{"ca.crt", "nonsense"}}, "--tls_client_ca_file"},
      {{{"tokens.json", "{"}}, "--auth_token_file"},
      {{{"policy.json", R"({"identity": []})"}}, "unknown key 'identity'"},
  };
  config_.tls_client_ca_file = files_->Path("ca.crt");
  config_.auth_token_file = files_->Path("tokens.json");
  config_.auth_policy_file = files_->Path("policy.json");
  const Leaf good = authority_.Issue({"DNS:head-0"});
  for (const auto& c : cases) {
    files_->Swap({{"tls.crt", good.cert_pem},
                  {"tls.key", good.key_pem},
                  {"ca.crt", authority_.cert_pem()},
                  {"tokens.json", Tokens("ci", kToken)},
                  {"policy.json", R"({"identities": []})"}});
    files_->Swap(c.files);
    const auto security = Security::Load(config_);
    ASSERT_FALSE(security.ok()) << c.says;
    EXPECT_THAT(std::string(security.status().message()), HasSubstr(c.says));
  }
  config_.tls_cert_file = "/no/such/file";
  EXPECT_THAT(std::string(Security::Load(config_).status().message()),
              HasSubstr("--tls_cert_file=/no/such/file: No such file"));
}

// --- Who ---

TEST_F(SecurityTest, WithoutIdentitiesEveryoneMayDoEverything) {
  const auto security = Load();
  const auto caller = security->Identify({});
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_EQ(caller->grant.roles, kAllRoles);
  EXPECT_TRUE(caller->grant.MaySpeakAs("w0"));
}

TEST_F(SecurityTest, WithoutAPolicyAVerifiedCertificateMayDoEverything) {
  config_.tls_client_ca_file = files_->Path("ca.crt");
  const auto security = Load();
  const auto caller = security->Identify({.certificate_names = {"x"}, .has_certificate = true});
  ASSERT_TRUE(caller.ok());
  EXPECT_EQ(caller->grant.roles, kAllRoles);
  EXPECT_EQ(caller->name, "x");
  EXPECT_EQ(security->Identify({}).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(SecurityTest, TokensAreKnownOrRefusedAndNeverShown) {
  config_.auth_token_file = files_->Path("tokens.json");
  const auto security = Load();
  const auto good = security->Identify({.authorization = absl::StrCat("Bearer ", kToken)});
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->name, "token ci");
  EXPECT_TRUE(security->Identify({.authorization = absl::StrCat("bearer ", kToken)}).ok());
  for (const std::string& header :
       {std::string("Bearer secretive"), std::string("Bearer "), std::string(kToken),
        std::string("Basic secretive"), std::string()}) {
    const absl::Status bad = security->Identify({.authorization = header}).status();
    EXPECT_EQ(bad.code(), absl::StatusCode::kUnauthenticated) << header;
    EXPECT_THAT(std::string(bad.message()), HasSubstr("--auth_token_file"));
    EXPECT_THAT(std::string(bad.message()), Not(HasSubstr("secretive")));
    EXPECT_THAT(std::string(bad.message()), Not(HasSubstr(kToken)));
  }
  EXPECT_EQ(security->Identify({}).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(SecurityTest, DenialsSayWhoCameWhatWasWantedAndWhichFile) {
  config_.tls_client_ca_file = files_->Path("ca.crt");
  config_.auth_policy_file = files_->Path("policy.json");
  const auto security = Load();
  const auto caller =
      security->Identify({.certificate_names = {"trainer-0"}, .has_certificate = true});
  ASSERT_TRUE(caller.ok());
  const absl::Status role =
      security->CheckRole(*caller, "BeginStep", static_cast<RoleSet>(Role::kTrunk));
  EXPECT_EQ(role.code(), absl::StatusCode::kPermissionDenied);
  for (const std::string& part :
       {std::string("trainer-0"), std::string("has role monitor"), std::string("wanted trunk"),
        std::string("BeginStep"), config_.auth_policy_file}) {
    EXPECT_THAT(std::string(role.message()), HasSubstr(part));
  }
  const absl::Status worker = security->CheckWorker(*caller, "ComputeLoss", "w7");
  EXPECT_EQ(worker.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(worker.message()), HasSubstr("worker w7"));
  const auto nameless = security->Identify({.has_certificate = true});
  ASSERT_TRUE(nameless.ok());
  EXPECT_EQ(nameless->grant.roles, 0);
}

// --- Changes ---

TEST_F(SecurityTest, FollowsASwapOfTheWholeFolder) {
  config_.tls_client_ca_file = files_->Path("ca.crt");
  config_.auth_token_file = files_->Path("tokens.json");
  config_.auth_policy_file = files_->Path("policy.json");
  const auto security = Load();
  const Leaf leaf = authority_.Issue({"DNS:head-0"});
  files_->Swap({{"tls.crt", leaf.cert_pem},
                {"tls.key", leaf.key_pem},
                {"tokens.json", Tokens("new", "another token")},
                {"policy.json", MonitorPolicy(R"("token": "new")")}});
  EXPECT_TRUE(Eventually([&] {
    const auto caller = security->Identify({.authorization = "Bearer another token"});
    return security->tls_identity()->cert_pem == leaf.cert_pem && caller.ok() &&
           caller->grant.roles == static_cast<RoleSet>(Role::kMonitor);
  }));
  EXPECT_EQ(security->tls_identity()->key_pem, leaf.key_pem);
  EXPECT_FALSE(security->Identify({.authorization = absl::StrCat("Bearer ", kToken)}).ok());
  EXPECT_EQ(security->num_reload_failures(), 0);
}

TEST_F(SecurityTest, KeepsTheLastGoodFilesWhenNewOnesAreBroken) {
  config_.tls_client_ca_file = files_->Path("ca.crt");
  config_.auth_policy_file = files_->Path("policy.json");
  const auto security = Load();
  const auto before = security->tls_identity();
  const Leaf other = authority_.Issue({"DNS:head-0"});
  files_->Swap({{"tls.key", other.key_pem}});  // Half an update.
  EXPECT_TRUE(Eventually([&] { return security->num_reload_failures() == 1; }));
  EXPECT_EQ(security->tls_identity(), before);
  files_->Swap({{"policy.json", R"({"identities": [{"name": "trainer-0", "roles": ["god"]}]})"}});
  EXPECT_TRUE(Eventually([&] { return security->num_reload_failures() == 2; }));
  const CallerFacts trainer = {.certificate_names = {"trainer-0"}, .has_certificate = true};
  EXPECT_EQ(security->Identify(trainer)->grant.roles, static_cast<RoleSet>(Role::kMonitor));
  // The other half comes: taken over, although the policy is still broken.
  files_->Swap({{"tls.crt", other.cert_pem}});
  EXPECT_TRUE(Eventually([&] { return security->tls_identity()->cert_pem == other.cert_pem; }));
  EXPECT_EQ(security->Identify(trainer)->grant.roles, static_cast<RoleSet>(Role::kMonitor));
}

TEST_F(SecurityTest, AFileThatIsGoneHoldsUpNoOther) {
  config_.tls_client_ca_file = files_->Path("ca.crt");
  config_.auth_token_file = files_->Path("tokens.json");
  config_.auth_policy_file = files_->Path("policy.json");
  const auto security = Load();
  const CallerFacts trainer = {.certificate_names = {"trainer-0"}, .has_certificate = true};
  ASSERT_EQ(security->Identify(trainer)->grant.roles, static_cast<RoleSet>(Role::kMonitor));
  // Who is taken out of the policy has lost his role, whatever became of the tokens.
  files_->Swap({{"tokens.json", ""}, {"policy.json", R"({"identities": []})"}});
  EXPECT_TRUE(Eventually([&] { return security->Identify(trainer)->grant.roles == 0; }));
  EXPECT_EQ(security->num_reload_failures(), 1);
  const auto by_token = security->Identify({.authorization = absl::StrCat("Bearer ", kToken)});
  EXPECT_TRUE(by_token.ok()) << by_token.status();
}

}  // namespace
}  // namespace lmhead
