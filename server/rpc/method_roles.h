// Which role each method of lmhead.v1.LmHeadService and ShardService wants: the one table. A method
// that is not in it is open to nobody.

#ifndef LMHEAD_SERVER_RPC_METHOD_ROLES_H_
#define LMHEAD_SERVER_RPC_METHOD_ROLES_H_

#include <string_view>

#include "server/security/policy.h"

namespace lmhead {

// The roles that may call `method` ("BeginStep"); none of a method that is not known.
RoleSet RolesOf(std::string_view method);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_METHOD_ROLES_H_
