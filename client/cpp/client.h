// The C++ client: control calls, and the step writer that streams hidden states out and gradients
// in.
//
//   auto client = Client::Connect("localhost:50051", {});
//   client->CreateHead(...);  client->BeginStep(...);
//   auto writer = client->OpenWriter({.head = "lm", .step = 1, .worker = "w0", ...});
//   auto ticket = writer->Submit(rows);      // borrows rows until Wait returns
//   auto result = writer->Wait(ticket);      // sums; gradients are in rows.grad_hidden_states
//   writer->Finish();
//   client->PrepareStep(...);  client->CommitStep(...);
//
// Addresses: `host:port`, `ipv4:…`, `ipv6:…`, `dns:///…` or `unix:/path`. A status keeps the
// server's code and message, with the address in front.

#ifndef LMHEAD_CLIENT_CPP_CLIENT_H_
#define LMHEAD_CLIENT_CPP_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/credentials.h"
#include "client/cpp/step_writer.h"
#include "lmhead/v1/service.pb.h"
#include "proto/types/tensor_view.h"

namespace lmhead {

struct ChannelSecurity;

struct ClientOptions {
  // Waiting for the first connection, and for each one after a break.
  absl::Duration connect_timeout = absl::Seconds(10);
  // Deadline of each control call; PrepareStep adds its own wait.
  absl::Duration call_timeout = absl::Seconds(60);
  // Attempts of a control call or a stream after UNAVAILABLE, with exponential back-off.
  int max_attempts = 5;
  // TLS and tokens.
  ClientCredentials credentials;
  // Sent with every call, and then in the server's log lines about it and at the end of its errors.
  // Empty: each call and each writer gets a random one. See proto/wire/request_id.h.
  std::string request_id;
};

// Thread-safe.
class Client {
 public:
  // Connects and asks GetServerInfo. UNAVAILABLE with the address when nobody answers in time;
  // INVALID_ARGUMENT for options that are wrong, such as a file that cannot be read.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(std::string_view address,
                                                         const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // The calls of lmhead.v1.LmHeadService; comments there. Calls that may be repeated are retried
  // on UNAVAILABLE.
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo();
  absl::StatusOr<v1::HeadInfo> CreateHead(const v1::HeadSpec& spec);
  absl::StatusOr<v1::HeadInfo> GetHead(std::string_view head);
  absl::Status DeleteHead(std::string_view head, bool force);
  absl::StatusOr<v1::BeginStepResponse> BeginStep(const v1::BeginStepRequest& request);
  absl::StatusOr<v1::PrepareStepResponse> PrepareStep(const v1::PrepareStepRequest& request);
  absl::StatusOr<v1::CommitStepResponse> CommitStep(const v1::CommitStepRequest& request);
  absl::StatusOr<v1::AbortStepResponse> AbortStep(const v1::AbortStepRequest& request);
  absl::StatusOr<v1::AccumulateWeightGradientResponse> AccumulateWeightGradient(
      const v1::AccumulateWeightGradientRequest& request);
  // These two take as long as the disk does: up to an hour, whatever call_timeout is.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request);
  absl::StatusOr<v1::RestoreCheckpointResponse> RestoreCheckpoint(
      const v1::RestoreCheckpointRequest& request);
  absl::StatusOr<v1::EstimateMemoryResponse> EstimateMemory(
      const v1::EstimateMemoryRequest& request);

  // Any unary call by name ("CreateHead"), its request and its answer as protobuf's JSON: see
  // json_call.h. Repeated on UNAVAILABLE like the calls above. A timeout of zero means theirs.
  absl::StatusOr<std::string> CallJson(std::string_view method, std::string_view request_json,
                                       absl::Duration timeout);

  // Sends rows [row_start, row_start + rows.rows) of a tensor in messages of about 4 MiB.
  absl::Status LoadWeights(std::string_view head, v1::TensorKind tensor, int64_t row_start,
                           ConstMatrixView rows);

  // Fills `rows` from row_start on. INVALID_ARGUMENT when its dtype is not the tensor's.
  absl::Status ReadWeights(std::string_view head, v1::TensorKind tensor, int64_t row_start,
                           MatrixView rows);

  // Opens the streams of one worker in one step (or of an evaluation, step 0). The writer may
  // outlive the client.
  absl::StatusOr<std::unique_ptr<StepWriter>> OpenWriter(const WriterSpec& spec);

  const std::string& address() const { return address_; }

 private:
  class Connection;
  Client(std::string address, const ClientOptions& options, const ChannelSecurity& security);

  const std::string address_;
  const ClientOptions options_;
  std::unique_ptr<Connection> connection_;
};

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_CLIENT_H_
