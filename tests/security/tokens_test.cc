#include "server/security/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string File(const std::string& name, const std::string& digest) {
  return absl::StrCat(R"({"tokens": [{"name": ")", name, R"(", "sha256": ")", digest, R"("}]})");
}

TEST(Sha256Hex, IsWhatSha256sumPrints) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(TokenSet, KnowsATokenByItsDigestOnly) {
  const auto tokens = TokenSet::Parse(File("ci", Sha256Hex("very secret")));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->NameOf("very secret"), "ci");
  EXPECT_EQ(tokens->NameOf("very secret "), std::nullopt);
  EXPECT_EQ(tokens->NameOf(""), std::nullopt);
  EXPECT_EQ(tokens->NameOf(Sha256Hex("very secret")), std::nullopt);
}

TEST(TokenSet, SaysWhatIsWrongWithoutShowingWhatMayBeAToken) {
  const std::string digest = Sha256Hex("x");
  const struct {
    std::string json;
    const char* says;
  } cases[] = {
      {R"({"token": []})", "unknown key 'token'"},
      {R"({"tokens": 1})", "no array"},
      {File("", digest), "name"},
      {File("ci", "hunter2-hunter2"), "tokens[0] (ci)"},
      {R"({"tokens": [{"name": "ci", "sha256": ")" + digest + R"(", "roles": []}]})",
       "unknown key 'roles'"},
      {R"({"tokens": [{"name": "a", "sha256": ")" + digest + R"("}, {"name": "b", "sha256": ")" +
           digest + R"("}]})",
       "tokens[1] (b)"},
  };
  for (const auto& c : cases) {
    const auto tokens = TokenSet::Parse(c.json);
    ASSERT_FALSE(tokens.ok()) << c.json;
    EXPECT_THAT(std::string(tokens.status().message()), HasSubstr(c.says)) << c.json;
    EXPECT_THAT(std::string(tokens.status().message()), Not(HasSubstr("hunter2")));
  }
}

}  // namespace
}  // namespace lmhead
