#include "client/cpp/json_call.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "lmhead/v1/service.pb.h"
#include "proto/wire/status.h"

namespace lmhead {
namespace {

namespace pb = google::protobuf;

constexpr char kServiceName[] = "lmhead.v1.LmHeadService";

bool IsUnary(const pb::MethodDescriptor& method) {
  return !method.client_streaming() && !method.server_streaming();
}

}  // namespace

absl::Status MessageFromJson(std::string_view json, pb::Message* message) {
  if (json.empty()) return absl::OkStatus();
  const auto status =
      pb::util::JsonStringToMessage(pb::StringPiece(json.data(), json.size()), message);
  if (status.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("JSON of ", message->GetDescriptor()->name(), ": ",
                                                 std::string(status.message())));
}

absl::StatusOr<std::string> MessageToJson(const pb::Message& message) {
  pb::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = pb::util::MessageToJsonString(message, &json, options);
  if (status.ok()) return json;
  return absl::InternalError(absl::StrCat("cannot write ", message.GetDescriptor()->name(),
                                          " as JSON: ", std::string(status.message())));
}

absl::StatusOr<const pb::MethodDescriptor*> FindUnaryMethod(std::string_view name) {
  // Mentions a message, so that the linker keeps the descriptors of the service's file.
  const pb::ServiceDescriptor* service =
      v1::GetServerInfoRequest::descriptor()->file()->pool()->FindServiceByName(kServiceName);
  if (service == nullptr) return absl::InternalError("the service's descriptor is missing");
  const pb::MethodDescriptor* method = service->FindMethodByName(std::string(name));
  if (method != nullptr && IsUnary(*method)) return method;
  std::vector<std::string> names;
  for (int i = 0; i < service->method_count(); ++i) {
    if (IsUnary(*service->method(i))) names.push_back(service->method(i)->name());
  }
  return absl::InvalidArgumentError(absl::StrCat("method is '", std::string(name),
                                                 "', want one of ", absl::StrJoin(names, ", ")));
}

std::unique_ptr<pb::Message> NewMessage(const pb::Descriptor& type) {
  return std::unique_ptr<pb::Message>(
      pb::MessageFactory::generated_factory()->GetPrototype(&type)->New());
}

absl::Status CallMethod(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                        const pb::MethodDescriptor& method, const pb::Message& request,
                        pb::Message* response) {
  std::string bytes;
  if (!request.SerializeToString(&bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(method.input_type()->name(), " cannot be serialized"));
  }
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer outgoing(&slice, 1);
  grpc::ByteBuffer incoming;
  grpc::Status status;
  absl::Notification done;
  grpc::GenericStub stub(channel);
  stub.UnaryCall(context, absl::StrCat("/", kServiceName, "/", method.name()), grpc::StubOptions(),
                 &outgoing, &incoming, [&](grpc::Status answer) {
                   status = std::move(answer);
                   done.Notify();
                 });
  done.WaitForNotification();
  if (!status.ok()) return FromGrpcStatus(status);
  grpc::ProtoBufferReader reader(&incoming);
  if (reader.status().ok() && response->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("the server's answer is not a ", method.output_type()->name()));
}

}  // namespace lmhead
