// Which identity has which role: the policy file.
//
//   {"identities": [
//     {"name": "spiffe://example.org/ns/train/sa/trunk", "roles": ["trunk"], "workers":
//     ["trunk-*"]},
//     {"name": "ops.example.org", "roles": ["admin", "monitor"]},
//     {"token": "grafana", "roles": ["monitor"]},
//     {"name": "gpu-node-1.example.org", "roles": ["shard"]}]}
//
// `name` is a DNS name, a URI or a SPIFFE id among the subject alternative names of the client's
// certificate, compared exactly; `token` is a name of the token file. `workers` are the names that
// a trunk may speak as, where `*` stands for any run of characters; it belongs to role trunk, and
// ["*"] allows every name. Who is not listed may do nothing. A caller with several identities (two
// names, or a certificate and a token) has what each of them has.

#ifndef LMHEAD_SERVER_SECURITY_POLICY_H_
#define LMHEAD_SERVER_SECURITY_POLICY_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

enum class Role : uint8_t {
  kTrunk = 1,    // Feeds steps and reads weights.
  kAdmin = 2,    // Creates and deletes heads, loads weights, checkpoints.
  kMonitor = 4,  // Looks.
  kShard = 8,    // Holds ranks of the server: sees every weight and hidden state.
};

// A set of roles.
using RoleSet = uint8_t;
constexpr RoleSet operator|(Role a, Role b) {
  return static_cast<RoleSet>(static_cast<RoleSet>(a) | static_cast<RoleSet>(b));
}
constexpr RoleSet operator|(RoleSet a, Role b) {
  return static_cast<RoleSet>(a | static_cast<RoleSet>(b));
}
inline constexpr RoleSet kAllRoles = Role::kTrunk | Role::kAdmin | Role::kMonitor | Role::kShard;

// "admin or trunk"; "none" of none.
std::string RoleNames(RoleSet roles, std::string_view conjunction);

// What an identity may do.
struct Grant {
  RoleSet roles = 0;
  std::vector<std::string> workers;  // Patterns.

  bool MayBe(Role role) const { return (roles & static_cast<RoleSet>(role)) != 0; }
  // Whether one of the patterns fits the name.
  bool MaySpeakAs(std::string_view worker) const;
  void Add(const Grant& other);
};

// Everything: what a caller has when there is no policy.
Grant FullGrant();

// Whether `pattern`, with `*` for any run of characters, fits the whole of `text`.
bool MatchesPattern(std::string_view pattern, std::string_view text);

// An identity of a caller.
struct Identity {
  enum class Kind : uint8_t { kCertificate, kToken };
  Kind kind = Kind::kCertificate;
  std::string name;

  friend auto operator<=>(const Identity&, const Identity&) = default;
};

// Thread-safe: it does not change.
class Policy {
 public:
  // INVALID_ARGUMENT saying where in the text and what is wrong with it; a key that is not known is
  // refused, so that a misspelt restriction does not vanish.
  static absl::StatusOr<Policy> Parse(std::string_view json);

  // The sum of what the identities have; nothing for those that are not listed.
  Grant GrantOf(const std::vector<Identity>& identities) const;

  // All that are listed.
  std::vector<Identity> Identities() const;

  size_t size() const { return grants_.size(); }

 private:
  std::map<Identity, Grant> grants_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_POLICY_H_
