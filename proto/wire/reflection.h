// gRPC reflection, kept off where nobody asked for it.

#ifndef LMHEAD_PROTO_WIRE_REFLECTION_H_
#define LMHEAD_PROTO_WIRE_REFLECTION_H_

#include <grpcpp/server_builder.h>

namespace lmhead {

// The server of `builder` serves no reflection. To be called for every server of a program that is
// linked with gRPC's library of it: by being linked, the library adds itself to all of them.
void LeaveReflectionAway(grpc::ServerBuilder* builder);

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_REFLECTION_H_
