// gRPC's channel credentials of a ClientCredentials.

#ifndef LMHEAD_CLIENT_CPP_CHANNEL_CREDENTIALS_H_
#define LMHEAD_CLIENT_CPP_CHANNEL_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/credentials.h"

namespace lmhead {

// What every channel of a client is made with.
struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string server_name;  // Empty: the address's host.
  bool tls = false;
};

// INVALID_ARGUMENT when fields do not fit each other or a file cannot be read, naming it.
absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const ClientCredentials& credentials);

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_CHANNEL_CREDENTIALS_H_
