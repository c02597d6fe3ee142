// The one translation between absl::Status, which the project speaks, and grpc::Status.
//
// Codes map one to one (gRPC's canonical codes); an unknown number becomes UNKNOWN. The message is
// kept. One longer than kStatusMessageBytesMax is cut there on the way out: it travels in HTTP/2
// trailers, whose size peers limit.

#ifndef LMHEAD_PROTO_WIRE_STATUS_H_
#define LMHEAD_PROTO_WIRE_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace lmhead {

grpc::Status ToGrpcStatus(const absl::Status& status);

// Also drops the binary details, which lmhead does not use.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_STATUS_H_
