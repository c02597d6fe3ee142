#include "server/security/tokens.h"

#include <openssl/sha.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/security/json_file.h"

namespace lmhead {

std::string Sha256Hex(std::string_view bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString(
      {reinterpret_cast<const char*>(digest), static_cast<size_t>(SHA256_DIGEST_LENGTH)});
}

absl::StatusOr<TokenSet> TokenSet::Parse(std::string_view text) {
  absl::StatusOr<nlohmann::json> file = ParseJsonObject(text);
  if (!file.ok()) return file.status();
  if (absl::Status status = CheckKeys(*file, "", {"tokens"}); !status.ok()) return status;
  absl::StatusOr<nlohmann::json> entries = ArrayAt(*file, "", "tokens");
  if (!entries.ok()) return entries.status();
  TokenSet tokens;
  std::set<std::string> names;
  for (size_t i = 0; i < entries->size(); ++i) {
    const nlohmann::json& entry = (*entries)[i];
    const std::string where = absl::StrCat("tokens[", i, "]");
    if (absl::Status known = CheckKeys(entry, where, {"name", "sha256"}); !known.ok()) return known;
    absl::StatusOr<std::string> name = StringAt(entry, where, "name");
    if (!name.ok()) return name.status();
    absl::StatusOr<std::string> digest = StringAt(entry, where, "sha256");
    if (!digest.ok()) return digest.status();
    absl::AsciiStrToLower(&*digest);
    if (digest->size() != 2 * SHA256_DIGEST_LENGTH ||
        digest->find_first_not_of("0123456789abcdef") != std::string::npos) {
      // Not shown: it may be the token itself.
      return absl::InvalidArgumentError(
          absl::StrCat(where, " (", *name,
                       "): sha256 is not 64 hexadecimal digits; it is what `printf %s TOKEN "
                       "| sha256sum` prints"));
    }
    if (!names.insert(*name).second || !tokens.names_.emplace(*digest, *name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, " (", *name, "): this name or this digest is there twice"));
    }
  }
  return tokens;
}

bool TokenSet::HasName(std::string_view name) const {
  return std::any_of(names_.begin(), names_.end(),
                     [name](const auto& entry) { return entry.second == name; });
}

std::optional<std::string> TokenSet::NameOf(std::string_view token) const {
  const auto found = names_.find(Sha256Hex(token));
  if (found == names_.end()) return std::nullopt;
  return found->second;
}

}  // namespace lmhead
