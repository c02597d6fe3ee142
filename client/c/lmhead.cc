#include "client/c/lmhead.h"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "client/c/handles.h"
#include "proto/types/limits.h"
#include "proto/types/tensor_view.h"

namespace {

using lmhead::CheckGiven;
using lmhead::Guarded;

// Size of the struct in version 1.0.
constexpr size_t kClientOptionsFirstSize =
    offsetof(lmhead_client_options, request_id) + sizeof(lmhead_client_options::request_id);

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

absl::Status FirstError(std::initializer_list<absl::Status> all) {
  for (const absl::Status& status : all) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckSeconds(double seconds, const char* name) {
  if (std::isfinite(seconds) && seconds >= 0.0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %g, want seconds of at least 0", name, seconds));
}

absl::StatusOr<lmhead::ClientOptions> OptionsOf(const lmhead_client_options* given) {
  const lmhead_client_options defaults = LMHEAD_CLIENT_OPTIONS_INIT;
  const auto taken = lmhead::TakeStruct(given == nullptr ? &defaults : given, defaults,
                                        kClientOptionsFirstSize, "options");
  if (!taken.ok()) return taken.status();
  if (absl::Status status =
          FirstError({CheckSeconds(taken->connect_timeout_seconds, "connect_timeout_seconds"),
                      CheckSeconds(taken->call_timeout_seconds, "call_timeout_seconds")});
      !status.ok()) {
    return status;
  }
  if (taken->max_attempts < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_attempts is %d, want at least 1", taken->max_attempts));
  }
  return lmhead::ClientOptions{
      .connect_timeout = absl::Seconds(taken->connect_timeout_seconds),
      .call_timeout = absl::Seconds(taken->call_timeout_seconds),
      .max_attempts = taken->max_attempts,
      .credentials = {.tls_ca_file = TextOf(taken->tls_ca_file),
                      .tls_cert_file = TextOf(taken->tls_cert_file),
                      .tls_key_file = TextOf(taken->tls_key_file),
                      .tls_server_name = TextOf(taken->tls_server_name),
                      .token_file = TextOf(taken->token_file)},
      .request_id = TextOf(taken->request_id),
  };
}

char* NewString(const std::string& text) {
  char* copy = new char[text.size() + 1];
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

absl::StatusOr<lmhead::v1::TensorKind> TensorOf(int32_t tensor) {
  if (tensor >= LMHEAD_WEIGHT && lmhead::v1::TensorKind_IsValid(tensor)) {
    return static_cast<lmhead::v1::TensorKind>(tensor);
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("tensor is %d, want an LMHEAD_WEIGHT or its like", tensor));
}

absl::Status CheckMatrix(int32_t dtype, int64_t num_rows, int64_t num_columns, const void* rows) {
  if (absl::Status status = CheckGiven(rows, "rows"); !status.ok()) return status;
  if (dtype < LMHEAD_FLOAT32 || dtype > LMHEAD_FLOAT16) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype is %d, want LMHEAD_FLOAT32, _BFLOAT16 or _FLOAT16", dtype));
  }
  if (num_rows >= 1 && num_rows <= lmhead::kVocabSizeMax && num_columns >= 1 &&
      num_columns <= lmhead::kHiddenSizeMax) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("rows is [%d, %d], want 1 to %d rows of 1 to %d columns", num_rows,
                      num_columns, lmhead::kVocabSizeMax, lmhead::kHiddenSizeMax));
}

// Rows [start, start + count) of a gradient as one message.
lmhead::v1::AccumulateWeightGradientRequest Piece(
    lmhead::v1::AccumulateWeightGradientRequest request, int64_t row_start, const int32_t* row_ids,
    int64_t num_columns, const float* rows, int64_t start, int64_t count) {
  if (row_ids == nullptr) {
    request.set_row_start(row_start + start);
  } else {
    request.mutable_row_ids()->Add(row_ids + start, row_ids + start + count);
  }
  request.set_rows(rows + start * num_columns,
                   static_cast<size_t>(count * num_columns) * sizeof(float));
  return request;
}

}  // namespace

lmhead_status lmhead_client_connect(const char* address, const lmhead_client_options* options,
                                    lmhead_client** client, lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    if (absl::Status status =
            FirstError({CheckGiven(address, "address"), CheckGiven(client, "client")});
        !status.ok()) {
      return status;
    }
    const auto taken = OptionsOf(options);
    if (!taken.ok()) return taken.status();
    auto connected = lmhead::Client::Connect(address, *taken);
    if (!connected.ok()) return connected.status();
    *client = new lmhead_client{*std::move(connected)};
    return absl::OkStatus();
  });
}

void lmhead_client_close(lmhead_client* client) {
  Guarded(nullptr, [&] {
    delete client;
    return absl::OkStatus();
  });
}

lmhead_status lmhead_client_call(lmhead_client* client, const char* method,
                                 const char* request_json, double timeout_seconds,
                                 char** response_json, lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    if (absl::Status status =
            FirstError({CheckGiven(client, "client"), CheckGiven(method, "method"),
                        CheckGiven(response_json, "response_json"),
                        CheckSeconds(timeout_seconds, "timeout_seconds")});
        !status.ok()) {
      return status;
    }
    const auto answer =
        client->client->CallJson(method, TextOf(request_json), absl::Seconds(timeout_seconds));
    if (!answer.ok()) return answer.status();
    *response_json = NewString(*answer);
    return absl::OkStatus();
  });
}

lmhead_status lmhead_client_load_weights(lmhead_client* client, const char* head, int32_t tensor,
                                         int32_t dtype, int64_t row_start, int64_t num_rows,
                                         int64_t num_columns, const void* rows,
                                         lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    if (absl::Status status = FirstError({CheckGiven(client, "client"), CheckGiven(head, "head"),
                                          CheckMatrix(dtype, num_rows, num_columns, rows)});
        !status.ok()) {
      return status;
    }
    const auto kind = TensorOf(tensor);
    if (!kind.ok()) return kind.status();
    return client->client->LoadWeights(head, *kind, row_start,
                                       {.data = rows,
                                        .rows = num_rows,
                                        .cols = num_columns,
                                        .dtype = static_cast<lmhead::DType>(dtype)});
  });
}

lmhead_status lmhead_client_read_weights(lmhead_client* client, const char* head, int32_t tensor,
                                         int32_t dtype, int64_t row_start, int64_t num_rows,
                                         int64_t num_columns, void* rows, lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    if (absl::Status status = FirstError({CheckGiven(client, "client"), CheckGiven(head, "head"),
                                          CheckMatrix(dtype, num_rows, num_columns, rows)});
        !status.ok()) {
      return status;
    }
    const auto kind = TensorOf(tensor);
    if (!kind.ok()) return kind.status();
    return client->client->ReadWeights(head, *kind, row_start,
                                       {.data = rows,
                                        .rows = num_rows,
                                        .cols = num_columns,
                                        .dtype = static_cast<lmhead::DType>(dtype)});
  });
}

lmhead_status lmhead_client_accumulate_weight_gradient(lmhead_client* client, const char* head,
                                                       uint64_t step, uint64_t incarnation,
                                                       const char* worker, uint64_t first_index,
                                                       int64_t row_start, const int32_t* row_ids,
                                                       int64_t num_rows, int64_t num_columns,
                                                       const float* rows, uint64_t* num_pieces,
                                                       lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    if (absl::Status status =
            FirstError({CheckGiven(client, "client"), CheckGiven(head, "head"),
                        CheckGiven(worker, "worker"), CheckGiven(num_pieces, "num_pieces"),
                        CheckMatrix(LMHEAD_FLOAT32, num_rows, num_columns, rows)});
        !status.ok()) {
      return status;
    }
    lmhead::v1::AccumulateWeightGradientRequest common;
    common.set_head(head);
    common.set_step(step);
    common.set_incarnation(incarnation);
    common.set_worker(worker);
    const int64_t row_bytes =
        (num_columns + 1) * static_cast<int64_t>(sizeof(float));  // And an id.
    const int64_t rows_per_piece = std::max<int64_t>(1, lmhead::kWeightMessageBytes / row_bytes);
    uint64_t pieces = 0;
    for (int64_t start = 0; start < num_rows; start += rows_per_piece, ++pieces) {
      common.set_index(first_index + pieces);
      const int64_t count = std::min(rows_per_piece, num_rows - start);
      const auto answer = client->client->AccumulateWeightGradient(
          Piece(common, row_start, row_ids, num_columns, rows, start, count));
      if (!answer.ok()) return answer.status();
    }
    *num_pieces = pieces;
    return absl::OkStatus();
  });
}
