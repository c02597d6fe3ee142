#include "server/security/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr char kPolicy[] = R"({
  "identities": [
    {"name": "spiffe://example.org/trunk", "roles": ["trunk"], "workers": ["w0", "trunk-*"]},
    {"name": "ops.example.org", "roles": ["admin", "monitor"]},
    {"token": "grafana", "roles": ["monitor"]},
    {"name": "node-1.example.org", "roles": ["shard"]}
  ]
})";

Identity Certificate(const std::string& name) { return {Identity::Kind::kCertificate, name}; }
Identity Token(const std::string& name) { return {Identity::Kind::kToken, name}; }

TEST(Policy, GivesEachIdentityWhatItIsListedWith) {
  const auto policy = Policy::Parse(kPolicy);
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->size(), 4u);
  const Grant trunk = policy->GrantOf({Certificate("spiffe://example.org/trunk")});
  EXPECT_TRUE(trunk.MayBe(Role::kTrunk));
  EXPECT_FALSE(trunk.MayBe(Role::kAdmin));
  EXPECT_TRUE(trunk.MaySpeakAs("w0"));
  EXPECT_TRUE(trunk.MaySpeakAs("trunk-17"));
  EXPECT_FALSE(trunk.MaySpeakAs("w01"));
  EXPECT_FALSE(trunk.MaySpeakAs("xtrunk-1"));
  const Grant ops = policy->GrantOf({Certificate("ops.example.org")});
  EXPECT_EQ(ops.roles, Role::kAdmin | Role::kMonitor);
  EXPECT_FALSE(ops.MaySpeakAs("w0"));
  EXPECT_EQ(policy->GrantOf({Certificate("node-1.example.org")}).roles,
            static_cast<RoleSet>(Role::kShard));
}

TEST(Policy, DeniesByDefault) {
  const auto policy = Policy::Parse(kPolicy);
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ(policy->GrantOf({}).roles, 0);
  EXPECT_EQ(policy->GrantOf({Certificate("OPS.example.org")}).roles, 0);
  EXPECT_EQ(policy->GrantOf({Certificate("ops.example.org.evil.com")}).roles, 0);
  // A token is not a certificate of the same name, nor the other way round.
  EXPECT_EQ(policy->GrantOf({Certificate("grafana")}).roles, 0);
  EXPECT_EQ(policy->GrantOf({Token("ops.example.org")}).roles, 0);
  EXPECT_EQ(Policy::Parse(R"({"identities": []})")->GrantOf({Token("grafana")}).roles, 0);
}

TEST(Policy, AddsUpTheIdentitiesOfOneCaller) {
  const auto policy = Policy::Parse(kPolicy);
  ASSERT_TRUE(policy.ok());
  const Grant both = policy->GrantOf({Certificate("spiffe://example.org/trunk"), Token("grafana")});
  EXPECT_EQ(both.roles, Role::kTrunk | Role::kMonitor);
  EXPECT_TRUE(both.MaySpeakAs("w0"));
}

TEST(Policy, SaysWhatIsWrongAndWhere) {
  const struct {
    const char* json;
    const char* says;
  } cases[] = {
      {"{\n\"identities\": [\n}", "line 3"},
      {"[]", "object"},
      {R"({"identities": [], "defaults": 1})", "unknown key 'defaults'"},
      {R"({"identities": [], "identities": []})", "'identities' is there twice"},
      {R"({})", "identities is missing"},
      {R"({"identities": {}})", "identities is no array"},
      {R"({"identities": [7]})", "identities[0]"},
      {R"({"identities": [{"name": "a", "roles": ["admin"], "role": "x"}]})", "unknown key 'role'"},
      {R"({"identities": [{"roles": ["admin"]}]})", "neither"},
      {R"({"identities": [{"name": "a", "token": "b", "roles": ["admin"]}]})", "both"},
      {R"({"identities": [{"name": "", "roles": ["admin"]}]})", "name"},
      {R"({"identities": [{"name": "a"}]})", "roles is missing"},
      {R"({"identities": [{"name": "a", "roles": []}]})", "roles is empty"},
      {R"({"identities": [{"name": "a", "roles": ["root"]}]})", "'root'"},
      {R"({"identities": [{"name": "a", "roles": ["trunk"]}]})", "needs `workers`"},
      {R"({"identities": [{"name": "a", "roles": ["trunk"], "workers": []}]})", "workers is empty"},
      {R"({"identities": [{"name": "a", "roles": ["trunk"], "workers": [""]}]})", "workers has"},
      {R"({"identities": [{"name": "a", "roles": ["admin"], "workers": ["*"]}]})", "role trunk"},
      {R"({"identities": [{"name": "a", "roles": ["admin"]}, {"name": "a", "roles": ["admin"]}]})",
       "identities[1] (a): is listed twice"},
  };
  for (const auto& c : cases) {
    const auto policy = Policy::Parse(c.json);
    ASSERT_FALSE(policy.ok()) << c.json;
    EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(policy.status().message()), HasSubstr(c.says)) << c.json;
  }
}

TEST(MatchesPattern, TakesStarsForAnyRun) {
  const struct {
    const char* pattern;
    const char* text;
    bool matches;
  } cases[] = {
      {"w0", "w0", true},    {"w0", "w00", false},     {"w0", "", false},
      {"*", "", true},       {"*", "anything", true},  {"a*", "a", true},
      {"a*", "ba", false},   {"*a", "aba", true},      {"*a", "ab", false},
      {"a*c", "abbc", true}, {"a*b*c", "aXbYc", true}, {"a*b*c", "acb", false},
      {"*ab*", "aab", true}, {"**", "x", true},        {"", "", true},
      {"", "x", false},      {"w.0", "wx0", false},    {"a*aab", "aaaab", true},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(MatchesPattern(c.pattern, c.text), c.matches) << c.pattern << " " << c.text;
  }
}

TEST(RoleNames, ReadAsAList) {
  EXPECT_EQ(RoleNames(0, "or"), "none");
  EXPECT_EQ(RoleNames(static_cast<RoleSet>(Role::kAdmin), "or"), "admin");
  EXPECT_EQ(RoleNames(kAllRoles, "or"), "trunk or admin or monitor or shard");
}

}  // namespace
}  // namespace lmhead
