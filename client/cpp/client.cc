#include "client/cpp/client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/channel_credentials.h"
#include "client/cpp/channels.h"
#include "client/cpp/json_call.h"
#include "client/cpp/step_writer_impl.h"
#include "lmhead/v1/service.grpc.pb.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "proto/wire/request_id.h"
#include "proto/wire/status.h"

namespace lmhead {
namespace {

// Of calls that write or read a whole head.
constexpr absl::Duration kCheckpointTimeout = absl::Hours(1);

using Stub = v1::LmHeadService::Stub;

// The most that PrepareStep waits for other workers when it is not told.
constexpr absl::Duration kPrepareWaitMax = absl::Seconds(60);

std::string ToString(std::string_view text) { return std::string(text); }

int64_t RowBytes(const ConstMatrixView& rows) { return rows.cols * BytesPerElement(rows.dtype); }

int64_t RowsPerMessage(const ConstMatrixView& rows) {
  return std::max<int64_t>(1, kWeightMessageBytes / RowBytes(rows));
}

// How long PrepareStep may wait in the server.
absl::Duration WaitOf(const v1::PrepareStepRequest& request) {
  return request.wait_seconds() > 0.0 ? absl::Seconds(request.wait_seconds()) : kPrepareWaitMax;
}

absl::Status CheckMatrix(const ConstMatrixView& rows) {
  if (rows.data != nullptr && rows.rows >= 1 && rows.cols >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("rows is a [%d, %d] matrix%s, want at least one row and one column",
                      rows.rows, rows.cols, rows.data == nullptr ? " at a null address" : ""));
}

// Writes every row of `rows`; false when the call has ended.
bool WriteRows(grpc::ClientWriter<v1::LoadWeightsRequest>& writer, v1::LoadWeightsRequest first,
               int64_t row_start, const ConstMatrixView& rows) {
  v1::LoadWeightsRequest request = std::move(first);
  const int64_t row_bytes = RowBytes(rows);
  const int64_t rows_per_message = RowsPerMessage(rows);
  for (int64_t start = 0; start < rows.rows; start += rows_per_message) {
    const int64_t count = std::min(rows_per_message, rows.rows - start);
    v1::TensorRows& piece = *request.mutable_rows();
    piece.set_row_start(row_start + start);
    piece.set_num_rows(count);
    piece.set_data(static_cast<const char*>(rows.data) + start * row_bytes,
                   static_cast<size_t>(count * row_bytes));
    if (!writer.Write(request)) return false;
    request.Clear();
  }
  return writer.WritesDone();
}

// Puts one message of ReadWeights where it belongs; *num_rows counts what is there.
absl::Status PlaceRows(const v1::ReadWeightsResponse& response, int64_t row_start,
                       const MatrixView& rows, int64_t* num_rows) {
  const absl::StatusOr<DType> dtype = DTypeFromProto(response.dtype(), "the tensor's dtype");
  if (!dtype.ok()) return absl::InternalError(dtype.status().message());
  if (*dtype != rows.dtype) {
    const std::string_view tensor = DTypeName(*dtype);
    const std::string_view given = DTypeName(rows.dtype);
    return absl::InvalidArgumentError(
        absl::StrFormat("the tensor is %s, rows to fill are %s", tensor, given));
  }
  const int64_t row_bytes = RowBytes(rows);
  const v1::TensorRows& piece = response.rows();
  const bool fits = piece.row_start() == row_start + *num_rows && piece.num_rows() >= 1 &&
                    piece.num_rows() <= rows.rows - *num_rows;
  if (!fits || piece.data().size() != static_cast<size_t>(piece.num_rows() * row_bytes)) {
    return absl::InternalError(
        absl::StrFormat("the server sent %d rows from %d in %d bytes, want at most %d rows from %d "
                        "of %d bytes each",
                        piece.num_rows(), piece.row_start(), piece.data().size(),
                        rows.rows - *num_rows, row_start + *num_rows, row_bytes));
  }
  std::memcpy(static_cast<char*>(rows.data) + *num_rows * row_bytes, piece.data().data(),
              piece.data().size());
  *num_rows += piece.num_rows();
  return absl::OkStatus();
}

absl::Status CheckWriterSpec(const WriterSpec& spec) {
  if (spec.num_connections < 1 || spec.num_connections > kStreamsPerWorkerMax) {
    return absl::InvalidArgumentError(absl::StrFormat("num_connections is %d, want 1 to %d",
                                                      spec.num_connections, kStreamsPerWorkerMax));
  }
  if (spec.max_inflight_chunks < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_inflight_chunks is %d, want at least 1", spec.max_inflight_chunks));
  }
  constexpr int64_t kChunkBytesMax = 1024 * kMiB;  // Messages are counted in int.
  if (spec.chunk_bytes < 1 || spec.chunk_bytes > kChunkBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk_bytes is %d, want 1 to %d", spec.chunk_bytes, kChunkBytesMax));
  }
  if (spec.chunk_tokens < 0 || spec.chunk_tokens > kChunkTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk_tokens is %d, want 0 to %d", spec.chunk_tokens, kChunkTokensMax));
  }
  const bool paired = spec.recipe.distillation().paired_stream();
  if (spec.teacher_side && !paired) {
    return absl::InvalidArgumentError(
        "teacher_side is set, but recipe.distillation.paired_stream is not");
  }
  if (paired && spec.chunk_tokens == 0) {
    return absl::InvalidArgumentError(
        "chunk_tokens is 0, but the two sides of a paired stream must cut alike: set the same on "
        "both");
  }
  return absl::OkStatus();
}

// How long to ask a channel that does not connect for the reason.
constexpr absl::Duration kWhyNotTimeout = absl::Seconds(1);

// A server that refuses a client's certificate closes the connection without saying so.
absl::Status WithTlsHint(const absl::Status& status) {
  if (!absl::IsUnavailable(status) || (!absl::StrContains(status.message(), "Socket closed") &&
                                       !absl::StrContains(status.message(), "Connection reset"))) {
    return status;
  }
  return absl::UnavailableError(
      absl::StrCat(status.message(),
                   "; over TLS this is also what a client without a certificate, or with one "
                   "that the server does not trust, sees: check tls_cert_file"));
}

}  // namespace

// The control channel, apart from those of the data plane: a small call never waits behind bulk.
class Client::Connection {
 public:
  Connection(const std::string& address, const ClientOptions& options,
             const ChannelSecurity& security)
      : address_(address),
        options_(options),
        tls_(security.tls),
        channel_(MakeChannel(address, security, kControlMessageBytesMax)),
        data_channels_(std::make_shared<ChannelPool>(address, security)),
        stub_(v1::LmHeadService::NewStub(channel_)) {}

  const std::shared_ptr<ChannelPool>& data_channels() const { return data_channels_; }

  absl::Status AwaitConnected() {
    absl::Status status =
        WaitForConnection(*channel_, address_, options_.connect_timeout, [] { return false; });
    if (!absl::IsUnavailable(status)) return status;
    // A call on a channel that has failed fails at once, and says why the channel did.
    const absl::Status why = Once(kWhyNotTimeout, [](Stub& stub, grpc::ClientContext& context) {
      v1::GetServerInfoResponse ignored;
      return FromGrpcStatus(stub.GetServerInfo(&context, {}, &ignored));
    });
    if (!absl::IsUnavailable(why)) return status;
    return absl::UnavailableError(absl::StrCat(status.message(), " (", why.message(), ")"));
  }

  // Runs `attempt` with a fresh context, again while the server is unavailable.
  template <typename Attempt>
  absl::Status Retry(absl::Duration timeout, Attempt attempt) {
    const std::string request_id = RequestId();
    absl::Status status = Once(timeout, attempt, request_id);
    for (int made = 1; made < options_.max_attempts && absl::IsUnavailable(status); ++made) {
      absl::SleepFor(RetryDelay(made));
      if (absl::Status connected = AwaitConnected(); !connected.ok()) return connected;
      status = Once(timeout, attempt, request_id);
    }
    return status;
  }

  // A unary call by its descriptor; deletions are not repeated (see Client::DeleteHead).
  absl::Status CallDescribed(const google::protobuf::MethodDescriptor& method,
                             const google::protobuf::Message& request,
                             google::protobuf::Message* response, absl::Duration timeout) {
    const auto attempt = [&](Stub&, grpc::ClientContext& context) {
      return CallMethod(channel_, &context, method, request, response);
    };
    return method.name() == "DeleteHead" ? Once(timeout, attempt) : Retry(timeout, attempt);
  }

  template <typename Attempt>
  absl::Status Once(absl::Duration timeout, Attempt attempt) {
    return Once(timeout, attempt, RequestId());
  }

  // A unary call that may be repeated.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request, absl::Duration timeout) {
    Response response;
    const absl::Status status = Retry(timeout, [&](Stub& stub, grpc::ClientContext& context) {
      return FromGrpcStatus((stub.*method)(&context, request, &response));
    });
    if (!status.ok()) return status;
    return response;
  }

 private:
  std::string RequestId() const {
    return options_.request_id.empty() ? MakeRequestId() : options_.request_id;
  }

  template <typename Attempt>
  absl::Status Once(absl::Duration timeout, Attempt attempt, const std::string& request_id) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    context.AddMetadata(kRequestIdKey, request_id);
    absl::Status status = AtAddress(address_, attempt(*stub_, context));
    return tls_ ? WithTlsHint(status) : status;
  }

  const std::string address_;
  const ClientOptions options_;
  const bool tls_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::shared_ptr<ChannelPool> data_channels_;
  const std::unique_ptr<Stub> stub_;
};

Client::Client(std::string address, const ClientOptions& options, const ChannelSecurity& security)
    : address_(std::move(address)),
      options_(options),
      connection_(std::make_unique<Connection>(address_, options, security)) {}

Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(std::string_view address,
                                                        const ClientOptions& options) {
  absl::StatusOr<ChannelSecurity> security = MakeChannelSecurity(options.credentials);
  if (!security.ok()) return security.status();
  if (!options.request_id.empty() && !IsRequestId(options.request_id)) {
    return absl::InvalidArgumentError(
        absl::StrCat("request_id is '", options.request_id,
                     "', wanted 1 to 128 characters of [A-Za-z0-9._:/-]"));
  }
  std::unique_ptr<Client> client(new Client(ToString(address), options, *security));
  if (absl::Status status = client->connection_->AwaitConnected(); !status.ok()) return status;
  if (const auto info = client->GetServerInfo(); !info.ok()) return info.status();
  return client;
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo() {
  return connection_->Call(&Stub::GetServerInfo, v1::GetServerInfoRequest(), options_.call_timeout);
}

absl::StatusOr<v1::HeadInfo> Client::CreateHead(const v1::HeadSpec& spec) {
  v1::CreateHeadRequest request;
  *request.mutable_spec() = spec;
  auto response = connection_->Call(&Stub::CreateHead, request, options_.call_timeout);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_head());
}

absl::StatusOr<v1::HeadInfo> Client::GetHead(std::string_view head) {
  v1::GetHeadRequest request;
  request.set_head(ToString(head));
  auto response = connection_->Call(&Stub::GetHead, request, options_.call_timeout);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_head());
}

absl::Status Client::DeleteHead(std::string_view head, bool force) {
  v1::DeleteHeadRequest request;
  request.set_head(ToString(head));
  request.set_force(force);
  v1::DeleteHeadResponse response;
  // Not repeated: after a deletion whose answer was lost it would say NOT_FOUND.
  return connection_->Once(options_.call_timeout, [&](Stub& stub, grpc::ClientContext& context) {
    return FromGrpcStatus(stub.DeleteHead(&context, request, &response));
  });
}

absl::StatusOr<v1::BeginStepResponse> Client::BeginStep(const v1::BeginStepRequest& request) {
  return connection_->Call(&Stub::BeginStep, request, options_.call_timeout);
}

absl::StatusOr<v1::PrepareStepResponse> Client::PrepareStep(const v1::PrepareStepRequest& request) {
  return connection_->Call(&Stub::PrepareStep, request, options_.call_timeout + WaitOf(request));
}

absl::StatusOr<v1::CommitStepResponse> Client::CommitStep(const v1::CommitStepRequest& request) {
  return connection_->Call(&Stub::CommitStep, request, options_.call_timeout);
}

absl::StatusOr<v1::AbortStepResponse> Client::AbortStep(const v1::AbortStepRequest& request) {
  return connection_->Call(&Stub::AbortStep, request, options_.call_timeout);
}

absl::StatusOr<v1::EstimateMemoryResponse> Client::EstimateMemory(
    const v1::EstimateMemoryRequest& request) {
  return connection_->Call(&Stub::EstimateMemory, request, options_.call_timeout);
}

absl::StatusOr<v1::AccumulateWeightGradientResponse> Client::AccumulateWeightGradient(
    const v1::AccumulateWeightGradientRequest& request) {
  return connection_->Call(&Stub::AccumulateWeightGradient, request, options_.call_timeout);
}

absl::StatusOr<v1::SaveCheckpointResponse> Client::SaveCheckpoint(
    const v1::SaveCheckpointRequest& request) {
  return connection_->Call(&Stub::SaveCheckpoint, request, kCheckpointTimeout);
}

absl::StatusOr<v1::RestoreCheckpointResponse> Client::RestoreCheckpoint(
    const v1::RestoreCheckpointRequest& request) {
  return connection_->Call(&Stub::RestoreCheckpoint, request, kCheckpointTimeout);
}

absl::StatusOr<std::string> Client::CallJson(std::string_view method, std::string_view request_json,
                                             absl::Duration timeout) {
  const auto found = FindUnaryMethod(method);
  if (!found.ok()) return found.status();
  const auto request = NewMessage(*(*found)->input_type());
  if (absl::Status status = MessageFromJson(request_json, request.get()); !status.ok()) {
    return status;
  }
  if (timeout <= absl::ZeroDuration()) {
    timeout = options_.call_timeout;
    if (const auto* prepare = dynamic_cast<const v1::PrepareStepRequest*>(request.get())) {
      timeout += WaitOf(*prepare);
    }
  }
  const auto response = NewMessage(*(*found)->output_type());
  if (absl::Status status = connection_->CallDescribed(**found, *request, response.get(), timeout);
      !status.ok()) {
    return status;
  }
  return MessageToJson(*response);
}

absl::Status Client::LoadWeights(std::string_view head, v1::TensorKind tensor, int64_t row_start,
                                 ConstMatrixView rows) {
  if (absl::Status status = CheckMatrix(rows); !status.ok()) return status;
  v1::LoadWeightsRequest first;
  first.set_head(ToString(head));
  first.set_tensor(tensor);
  first.set_dtype(DTypeToProto(rows.dtype));
  return connection_->Retry(options_.call_timeout, [&](Stub& stub, grpc::ClientContext& context) {
    v1::LoadWeightsResponse response;
    const auto writer = stub.LoadWeights(&context, &response);
    const bool written = WriteRows(*writer, first, row_start, rows);
    const absl::Status status = FromGrpcStatus(writer->Finish());
    if (!status.ok()) return status;
    if (written && response.num_rows() == rows.rows) return absl::OkStatus();
    return absl::InternalError(
        absl::StrFormat("the server wrote %d of %d rows", response.num_rows(), rows.rows));
  });
}

absl::Status Client::ReadWeights(std::string_view head, v1::TensorKind tensor, int64_t row_start,
                                 MatrixView rows) {
  if (absl::Status status = CheckMatrix(rows); !status.ok()) return status;
  v1::ReadWeightsRequest request;
  request.set_head(ToString(head));
  request.set_tensor(tensor);
  request.set_row_start(row_start);
  request.set_num_rows(rows.rows);
  return connection_->Retry(options_.call_timeout, [&](Stub& stub, grpc::ClientContext& context) {
    const auto reader = stub.ReadWeights(&context, request);
    v1::ReadWeightsResponse response;
    int64_t num_rows = 0;
    absl::Status placed;
    while (placed.ok() && reader->Read(&response)) {
      placed = PlaceRows(response, row_start, rows, &num_rows);
    }
    if (!placed.ok()) context.TryCancel();
    const absl::Status status = FromGrpcStatus(reader->Finish());
    if (!placed.ok()) return placed;
    if (!status.ok()) return status;
    if (num_rows == rows.rows) return absl::OkStatus();
    return absl::InternalError(
        absl::StrFormat("the server sent %d of %d rows", num_rows, rows.rows));
  });
}

absl::StatusOr<std::unique_ptr<StepWriter>> Client::OpenWriter(const WriterSpec& spec) {
  if (absl::Status status = CheckWriterSpec(spec); !status.ok()) return status;
  auto impl =
      std::make_shared<StepWriter::Impl>(address_, connection_->data_channels(), options_, spec);
  std::unique_ptr<StepWriter> writer(new StepWriter(impl));
  if (absl::Status status = impl->Open(); !status.ok()) return status;
  return writer;
}

}  // namespace lmhead
