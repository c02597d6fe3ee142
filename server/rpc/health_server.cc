#include "server/rpc/health_server.h"

#include <grpcpp/server_builder.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "proto/wire/reflection.h"
#include "server/rpc/health_service.h"

namespace lmhead {
namespace {

constexpr int kMessageBytesMax = 4 * static_cast<int>(kKiB);
constexpr int kConcurrentCallsMax = 16;  // Of one connection.

}  // namespace

HealthServer::HealthServer() : service_(std::make_unique<HealthService>()) {}

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const std::string& listen) {
  std::unique_ptr<HealthServer> health(new HealthServer());
  grpc::ServerBuilder builder;
  LeaveReflectionAway(&builder);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kConcurrentCallsMax);
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &health->port_);
  builder.RegisterService(health->service_.get());
  health->server_ = builder.BuildAndStart();
  if (health->server_ != nullptr) return health;
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", listen,
                   ": the address is in use or is not this machine's; choose "
                   "another --health_listen (port 0 takes a free one)"));
}

HealthServer::~HealthServer() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void HealthServer::SetReady(bool ready) { service_->SetReady(ready); }

}  // namespace lmhead
