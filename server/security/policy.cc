#include "server/security/policy.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/security/json_file.h"

namespace lmhead {
namespace {

constexpr std::array<std::pair<std::string_view, Role>, 4> kRoleNames = {
    {{"trunk", Role::kTrunk},
     {"admin", Role::kAdmin},
     {"monitor", Role::kMonitor},
     {"shard", Role::kShard}}};

absl::StatusOr<Role> ParseRole(const nlohmann::json& value, const std::string& where) {
  const std::string name = value.is_string() ? value.get<std::string>() : value.dump();
  for (const auto& [known, role] : kRoleNames) {
    if (value.is_string() && name == known) return role;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": role is '", name, "', wanted trunk, admin, monitor or shard"));
}

absl::StatusOr<Identity> ParseIdentity(const nlohmann::json& entry, const std::string& where) {
  if (entry.contains("name") == entry.contains("token")) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": wanted either `name` (of a certificate) or `token` (of the token file), got ",
        entry.contains("name") ? "both" : "neither"));
  }
  const bool is_token = entry.contains("token");
  absl::StatusOr<std::string> name = StringAt(entry, where, is_token ? "token" : "name");
  if (!name.ok()) return name.status();
  return Identity{is_token ? Identity::Kind::kToken : Identity::Kind::kCertificate,
                  *std::move(name)};
}

absl::StatusOr<Grant> ParseGrant(const nlohmann::json& entry, const std::string& where) {
  Grant grant;
  absl::StatusOr<nlohmann::json> roles = ArrayAt(entry, where, "roles");
  if (!roles.ok()) return roles.status();
  for (const nlohmann::json& value : *roles) {
    absl::StatusOr<Role> role = ParseRole(value, where);
    if (!role.ok()) return role.status();
    grant.roles = grant.roles | *role;
  }
  if (grant.roles == 0) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": roles is empty, wanted at least one"));
  }
  if (grant.MayBe(Role::kTrunk) != entry.contains("workers")) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, grant.MayBe(Role::kTrunk)
                   ? ": role trunk needs `workers`, the names it may speak as; [\"*\"] allows all"
                   : ": has `workers`, which belong to role trunk"));
  }
  if (!grant.MayBe(Role::kTrunk)) return grant;
  absl::StatusOr<nlohmann::json> workers = ArrayAt(entry, where, "workers");
  if (!workers.ok()) return workers.status();
  for (const nlohmann::json& pattern : *workers) {
    if (!pattern.is_string() || pattern.get_ref<const std::string&>().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": workers has ", pattern.dump(), ", wanted names or patterns"));
    }
    grant.workers.push_back(pattern.get<std::string>());
  }
  if (grant.workers.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": workers is empty, wanted at least one name or pattern"));
  }
  return grant;
}

}  // namespace

std::string RoleNames(RoleSet roles, std::string_view conjunction) {
  std::vector<std::string> names;
  for (const auto& [name, role] : kRoleNames) {
    if ((roles & static_cast<RoleSet>(role)) != 0) names.emplace_back(name);
  }
  if (names.empty()) return "none";
  return absl::StrJoin(names, absl::StrCat(" ", std::string(conjunction), " "));
}

bool MatchesPattern(std::string_view pattern, std::string_view text) {
  // On a mismatch the last star takes one character more, which is enough: earlier stars need not
  // change once a later one has been reached.
  size_t p = 0;
  size_t t = 0;
  std::optional<size_t> star;
  size_t star_end = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_end = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star.has_value()) {
      p = *star + 1;
      t = ++star_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

bool Grant::MaySpeakAs(std::string_view worker) const {
  return std::any_of(workers.begin(), workers.end(),
                     [&](const std::string& pattern) { return MatchesPattern(pattern, worker); });
}

void Grant::Add(const Grant& other) {
  roles = static_cast<RoleSet>(roles | other.roles);
  workers.insert(workers.end(), other.workers.begin(), other.workers.end());
}

Grant FullGrant() { return {.roles = kAllRoles, .workers = {"*"}}; }

absl::StatusOr<Policy> Policy::Parse(std::string_view text) {
  absl::StatusOr<nlohmann::json> file = ParseJsonObject(text);
  if (!file.ok()) return file.status();
  if (absl::Status status = CheckKeys(*file, "", {"identities"}); !status.ok()) return status;
  absl::StatusOr<nlohmann::json> entries = ArrayAt(*file, "", "identities");
  if (!entries.ok()) return entries.status();
  Policy policy;
  for (size_t i = 0; i < entries->size(); ++i) {
    const nlohmann::json& entry = (*entries)[i];
    std::string where = absl::StrCat("identities[", i, "]");
    absl::Status known = CheckKeys(entry, where, {"name", "token", "roles", "workers"});
    if (!known.ok()) return known;
    absl::StatusOr<Identity> identity = ParseIdentity(entry, where);
    if (!identity.ok()) return identity.status();
    absl::StrAppend(&where, " (", identity->name, ")");
    absl::StatusOr<Grant> grant = ParseGrant(entry, where);
    if (!grant.ok()) return grant.status();
    if (!policy.grants_.emplace(*identity, *grant).second) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": is listed twice"));
    }
  }
  return policy;
}

std::vector<Identity> Policy::Identities() const {
  std::vector<Identity> identities;
  for (const auto& [identity, unused] : grants_) identities.push_back(identity);
  return identities;
}

Grant Policy::GrantOf(const std::vector<Identity>& identities) const {
  Grant sum;
  for (const Identity& identity : identities) {
    if (const auto found = grants_.find(identity); found != grants_.end()) sum.Add(found->second);
  }
  return sum;
}

}  // namespace lmhead
