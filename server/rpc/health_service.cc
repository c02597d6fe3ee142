#include "server/rpc/health_service.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "proto/wire/status.h"

namespace lmhead {

grpc::Status HealthService::Check(grpc::ServerContext*,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) {
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

}  // namespace lmhead
