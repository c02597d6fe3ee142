// Where a server listens: host:port, or unix:/path where gRPC is spoken.

#ifndef LMHEAD_SERVER_CONFIG_LISTEN_ADDRESS_H_
#define LMHEAD_SERVER_CONFIG_LISTEN_ADDRESS_H_

#include <string>

#include "absl/status/status.h"

namespace lmhead {

// INVALID_ARGUMENT naming the flag unless the address is host:port with a port of 0 to 65535. gRPC
// itself takes others: it listens at port 443 when none is given, and leaves the upper bits of a
// large one away.
absl::Status CheckHostPort(const char* flag, const std::string& address);

// Likewise; a Unix socket whose path is short enough is good, too.
absl::Status CheckListenAddress(const char* flag, const std::string& address);

// UNAVAILABLE when a process answers at the Unix socket of `address`. gRPC would take the path away
// from it: it could not be reached any more. OK for other addresses and sockets left behind.
absl::Status CheckSocketIsFree(const char* flag, const std::string& address);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CONFIG_LISTEN_ADDRESS_H_
