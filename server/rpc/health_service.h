// grpc.health.v1 as every port of the server has it: `liveness` is SERVING while the process runs;
// `readiness` and the empty name say what SetReady was told.
//
// Not gRPC's own: its Watch is a call that does not end, so that one client with it would hold up
// the end of a server that drains for as long as that may take. Here Watch is UNIMPLEMENTED.

#ifndef LMHEAD_SERVER_RPC_HEALTH_SERVICE_H_
#define LMHEAD_SERVER_RPC_HEALTH_SERVICE_H_

#include <atomic>

#include "grpc/health/v1/health.grpc.pb.h"

namespace lmhead {

// Thread-safe. Synchronous: it runs on threads of its server, not on those that all callback
// services share. Not ready at first.
class HealthService final : public grpc::health::v1::Health::Service {
 public:
  grpc::Status Check(grpc::ServerContext* context,
                     const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override;

  void SetReady(bool ready) { ready_.store(ready); }

 private:
  std::atomic<bool> ready_{false};
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_HEALTH_SERVICE_H_
