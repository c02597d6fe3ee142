// grpc.health.v1 on a port of its own, in plaintext: what kubelet's probes, which speak no TLS,
// ask.
//
// It has threads of its own, so that the data plane under full load does not keep it from
// answering, and serves nothing else.

#ifndef LMHEAD_SERVER_RPC_HEALTH_SERVER_H_
#define LMHEAD_SERVER_RPC_HEALTH_SERVER_H_

#include <grpcpp/server.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/rpc/health_service.h"

namespace lmhead {

// Thread-safe.
class HealthServer {
 public:
  // Not ready at first. UNAVAILABLE when the address is taken.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Start(const std::string& listen);
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

  void SetReady(bool ready);
  int port() const { return port_; }

 private:
  HealthServer();

  std::unique_ptr<HealthService> service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_HEALTH_SERVER_H_
