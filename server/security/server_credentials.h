// gRPC's server credentials over the TLS identity of a Security: each new connection gets the files
// that are in force at its handshake.

#ifndef LMHEAD_SERVER_SECURITY_SERVER_CREDENTIALS_H_
#define LMHEAD_SERVER_SECURITY_SERVER_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/security/security.h"

namespace lmhead {

// Plaintext when `security` has no TLS. For any number of ports and servers; the caller holds them
// for as long as those live (gRPC does not), and `security` longer.
std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const Security* security);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_SERVER_CREDENTIALS_H_
