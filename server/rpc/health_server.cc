#include "server/rpc/health_server.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "proto/types/limits.h"
#include "proto/wire/reflection.h"
#include "proto/wire/status.h"

namespace lmhead {
namespace {

constexpr int kMessageBytesMax = 4 * static_cast<int>(kKiB);
constexpr int kConcurrentCallsMax = 16;  // Of one connection.

}  // namespace

// Synchronous: it runs on threads of this server, not on those that all callback services share.
class HealthServer::Service final : public grpc::health::v1::Health::Service {
 public:
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    const std::string& name = request->service();
    if (name != "liveness" && name != "readiness" && !name.empty()) {
      return ToGrpcStatus(
          absl::NotFoundError(absl::StrCat("no service is named '", name.substr(0, kNameLengthMax),
                                           "'; there are liveness, readiness and the empty name")));
    }
    const bool serving = name == "liveness" || ready_.load();
    response->set_status(serving ? grpc::health::v1::HealthCheckResponse::SERVING
                                 : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    return grpc::Status::OK;
  }

  void SetReady(bool ready) { ready_.store(ready); }

 private:
  std::atomic<bool> ready_{false};
};

HealthServer::HealthServer() : service_(std::make_unique<Service>()) {}

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const std::string& listen) {
  std::unique_ptr<HealthServer> health(new HealthServer());
  grpc::ServerBuilder builder;
  LeaveReflectionAway(&builder);
  // Not gRPC's own, which its threads for callbacks would answer.
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
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
