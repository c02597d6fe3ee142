#include "proto/wire/status.h"

#include <algorithm>
#include <string>

#include "proto/types/limits.h"

namespace lmhead {
namespace {

struct CodePair {
  absl::StatusCode absl_code;
  grpc::StatusCode grpc_code;
};

constexpr CodePair kCodes[] = {
    {absl::StatusCode::kOk, grpc::StatusCode::OK},
    {absl::StatusCode::kCancelled, grpc::StatusCode::CANCELLED},
    {absl::StatusCode::kUnknown, grpc::StatusCode::UNKNOWN},
    {absl::StatusCode::kInvalidArgument, grpc::StatusCode::INVALID_ARGUMENT},
    {absl::StatusCode::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED},
    {absl::StatusCode::kNotFound, grpc::StatusCode::NOT_FOUND},
    {absl::StatusCode::kAlreadyExists, grpc::StatusCode::ALREADY_EXISTS},
    {absl::StatusCode::kPermissionDenied, grpc::StatusCode::PERMISSION_DENIED},
    {absl::StatusCode::kResourceExhausted, grpc::StatusCode::RESOURCE_EXHAUSTED},
    {absl::StatusCode::kFailedPrecondition, grpc::StatusCode::FAILED_PRECONDITION},
    {absl::StatusCode::kAborted, grpc::StatusCode::ABORTED},
    {absl::StatusCode::kOutOfRange, grpc::StatusCode::OUT_OF_RANGE},
    {absl::StatusCode::kUnimplemented, grpc::StatusCode::UNIMPLEMENTED},
    {absl::StatusCode::kInternal, grpc::StatusCode::INTERNAL},
    {absl::StatusCode::kUnavailable, grpc::StatusCode::UNAVAILABLE},
    {absl::StatusCode::kDataLoss, grpc::StatusCode::DATA_LOSS},
    {absl::StatusCode::kUnauthenticated, grpc::StatusCode::UNAUTHENTICATED},
};

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto* pair = std::find_if(std::begin(kCodes), std::end(kCodes),
                                  [&](CodePair p) { return p.absl_code == status.code(); });
  const auto code = pair == std::end(kCodes) ? grpc::StatusCode::UNKNOWN : pair->grpc_code;
  std::string message(status.message().substr(0, kStatusMessageBytesMax));
  if (message.size() < status.message().size()) message.replace(message.size() - 3, 3, "...");
  return grpc::Status(code, std::move(message));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  const auto* pair = std::find_if(std::begin(kCodes), std::end(kCodes),
                                  [&](CodePair p) { return p.grpc_code == status.error_code(); });
  const auto code = pair == std::end(kCodes) ? absl::StatusCode::kUnknown : pair->absl_code;
  return absl::Status(code, status.error_message());
}

}  // namespace lmhead
