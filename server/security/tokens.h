// The bearer tokens that a server knows, by their SHA-256: the token file holds no token.
//
//   {"tokens": [{"name": "grafana", "sha256": "9f86d081…"}]}
//
// A token is any text such as `openssl rand -hex 32` makes; its digest is
// `printf %s TOKEN | sha256sum`. Names are what the policy file and the log call them by.

#ifndef LMHEAD_SERVER_SECURITY_TOKENS_H_
#define LMHEAD_SERVER_SECURITY_TOKENS_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace lmhead {

// Hexadecimal, lower case.
std::string Sha256Hex(std::string_view bytes);

// Thread-safe: it does not change.
class TokenSet {
 public:
  // INVALID_ARGUMENT saying which entry is wrong; an unknown key, a name or a digest that is there
  // twice are.
  static absl::StatusOr<TokenSet> Parse(std::string_view json);

  // The name of a token; nothing when it is not known.
  std::optional<std::string> NameOf(std::string_view token) const;

  // Whether a token of that name is known.
  bool HasName(std::string_view name) const;

  size_t size() const { return names_.size(); }

 private:
  std::map<std::string, std::string, std::less<>> names_;  // By digest: a look-up tells no token.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_TOKENS_H_
