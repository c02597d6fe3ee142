#include "server/rpc/method_roles.h"

#include <utility>

namespace lmhead {
namespace {

constexpr RoleSet kTrunk = static_cast<RoleSet>(Role::kTrunk);
constexpr RoleSet kAdmin = static_cast<RoleSet>(Role::kAdmin);
constexpr RoleSet kShard = static_cast<RoleSet>(Role::kShard);
constexpr RoleSet kClients = Role::kTrunk | Role::kAdmin | Role::kMonitor;

constexpr std::pair<std::string_view, RoleSet> kRoles[] = {
    // Every client asks it when it connects.
    {"GetServerInfo", kClients},
    {"CreateHead", kAdmin},
    {"GetHead", kClients},
    {"ListHeads", kClients},
    {"DeleteHead", kAdmin},
    {"LoadWeights", kAdmin},
    {"ReadWeights", kTrunk},
    {"BeginStep", kTrunk},
    {"ComputeLoss", kTrunk},
    {"PrepareStep", kTrunk},
    {"CommitStep", kTrunk},
    // An operator gives up a step whose trainers are gone.
    {"AbortStep", Role::kTrunk | Role::kAdmin},
    {"AccumulateWeightGradient", kTrunk},
    {"SaveCheckpoint", kAdmin},
    {"RestoreCheckpoint", kAdmin},
    {"EstimateMemory", Role::kMonitor | Role::kAdmin},
    // At --group_listen. An admin's certificate makes nobody a rank.
    {"Follow", kShard},
    {"Lane", kShard},
    {"SetRendezvous", kShard},
    {"GetRendezvous", kShard},
};

}  // namespace

RoleSet RolesOf(std::string_view method) {
  for (const auto& [name, roles] : kRoles) {
    if (name == method) return roles;
  }
  return 0;
}

}  // namespace lmhead
