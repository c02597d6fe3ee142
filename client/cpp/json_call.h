// Calls of lmhead.v1.LmHeadService by name, with protobuf's own JSON in and out: the way in for
// other languages. Every field of the API is reachable, also those this file has never heard of.

#ifndef LMHEAD_CLIENT_CPP_JSON_CALL_H_
#define LMHEAD_CLIENT_CPP_JSON_CALL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace lmhead {

// Fills `message` from JSON; an empty text is an empty message. INVALID_ARGUMENT naming the message
// and what is wrong with the text, unknown fields among it.
absl::Status MessageFromJson(std::string_view json, google::protobuf::Message* message);

// All fields, also those at their default, under the names of the .proto files. Integers of 64 bits
// are strings, as protobuf's JSON has them.
absl::StatusOr<std::string> MessageToJson(const google::protobuf::Message& message);

// The unary method of that name. INVALID_ARGUMENT with the names there are when it is not one.
absl::StatusOr<const google::protobuf::MethodDescriptor*> FindUnaryMethod(std::string_view name);

// An empty message of a generated type.
std::unique_ptr<google::protobuf::Message> NewMessage(const google::protobuf::Descriptor& type);

// Makes the call and waits for its answer. REQUIRES: the messages are of the method's types.
absl::Status CallMethod(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                        const google::protobuf::MethodDescriptor& method,
                        const google::protobuf::Message& request,
                        google::protobuf::Message* response);

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_JSON_CALL_H_
