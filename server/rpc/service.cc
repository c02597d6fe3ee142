#include "server/rpc/service.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "proto/wire/gradient_piece.h"
#include "proto/wire/status.h"
#include "server/rpc/info.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

// PrepareStep's wait when the request does not say, and the most it may say.
constexpr absl::Duration kPrepareWaitDefault = absl::Seconds(60);
constexpr absl::Duration kPrepareWaitMax = absl::Hours(24);

// How long before the client's deadline PrepareStep answers, so that the client sees what is
// missing rather than DEADLINE_EXCEEDED.
constexpr absl::Duration kDeadlineMargin = absl::Milliseconds(500);

absl::StatusOr<TensorKind> TensorKindFromProto(v1::TensorKind kind) {
  if (kind == v1::TENSOR_KIND_UNSPECIFIED || !v1::TensorKind_IsValid(kind)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor is ", static_cast<int>(kind),
                                                   ", wanted one of TensorKind, such as ",
                                                   v1::TensorKind_Name(v1::TENSOR_KIND_WEIGHT)));
  }
  return static_cast<TensorKind>(kind);
}

absl::StatusOr<absl::Time> PrepareDeadline(const v1::PrepareStepRequest& request,
                                           const grpc::ServerContext& context) {
  const double seconds = request.wait_seconds();
  if (!std::isfinite(seconds) || seconds < 0.0) {
    return absl::InvalidArgumentError(
        absl::StrCat("wait_seconds is ", seconds, ", wanted a finite number of at least 0"));
  }
  const absl::Time now = absl::Now();
  const absl::Duration wait =
      seconds == 0.0 ? kPrepareWaitDefault : std::min(absl::Seconds(seconds), kPrepareWaitMax);
  const absl::Time client_deadline = absl::FromChrono(context.deadline());
  const absl::Duration margin = std::min(kDeadlineMargin, (client_deadline - now) / 4);
  return std::min(now + wait, client_deadline - margin);
}

v1::DenseLogits DenseLogitsToProto(const DenseLogits& dense) {
  v1::DenseLogits proto;
  proto.set_logits_bytes(dense.logits_bytes);
  proto.set_float32_logits_bytes(dense.float32_logits_bytes);
  proto.set_log_softmax_bytes(dense.log_softmax_bytes);
  proto.set_grad_logits_bytes(dense.grad_logits_bytes);
  proto.set_total_bytes(dense.TotalBytes());
  return proto;
}

// Replaces the server's ranks and replicas in `options` by those that the request states.
absl::Status ReadRanks(const v1::EstimateMemoryRequest& request, PlanOptions* options) {
  const int32_t stated_ranks = request.num_ranks();
  const int32_t stated_replicas = request.num_replicas();
  for (const auto& [field, stated] :
       {std::pair<absl::string_view, int32_t>{"num_ranks", stated_ranks},
        {"num_replicas", stated_replicas}}) {
    if (stated >= 0 && stated <= kRanksMax) continue;
    return absl::InvalidArgumentError(absl::StrCat(field, " is ", stated, ", wanted 1 to ",
                                                   kRanksMax, ", or 0 for the server's"));
  }
  const int32_t ranks =
      stated_ranks == 0 ? options->num_ranks * options->num_replicas : stated_ranks;
  const int32_t replicas = stated_replicas == 0 ? options->num_replicas : stated_replicas;
  if (ranks % replicas != 0) {
    const auto whose = [](int32_t stated) { return stated == 0 ? " (the server's)" : ""; };
    return absl::InvalidArgumentError(
        absl::StrCat("num_replicas is ", replicas, whose(stated_replicas),
                     ", wanted a divisor of num_ranks, ", ranks, whose(stated_ranks)));
  }
  options->num_ranks = ranks / replicas;
  options->num_replicas = replicas;
  return absl::OkStatus();
}

absl::Status CheckNumTokens(const v1::EstimateMemoryRequest& request) {
  // With the largest vocabulary and all its buffers the bytes stay below 2^63.
  constexpr int64_t kTokensMax = int64_t{1} << 28;
  const int64_t sequences = request.num_sequences();
  const int64_t length = request.sequence_length();
  if (sequences >= 0 && length >= 0 && (sequences == 0 || length <= kTokensMax / sequences)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("num_sequences x sequence_length is ", sequences,
                                                 " x ", length, ", wanted 0 to ", kTokensMax,
                                                 " tokens"));
}

}  // namespace

LmHeadServiceImpl::LmHeadServiceImpl(const StreamEnvironment& env, ServerFacts facts)
    : env_(env), facts_(std::move(facts)) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LmHeadServiceImpl::ComputeLoss(
    grpc::CallbackServerContext* context) {
  return ChunkStream::Start(context, env_);
}

grpc::Status LmHeadServiceImpl::GetServerInfo(grpc::ServerContext* context,
                                              const v1::GetServerInfoRequest* request,
                                              v1::GetServerInfoResponse* response) {
  response->set_version(facts_.version);
  response->set_incarnation(env_.incarnation);
  response->set_backend(facts_.backend);
  for (const ServerFacts::Device& device : facts_.read_devices()) {
    v1::DeviceInfo* info = response->add_devices();
    info->set_rank(device.rank);
    info->set_replica(device.replica);
    info->set_name(device.name);
    info->set_total_memory_bytes(device.total_memory_bytes);
  }
  v1::ServerLimits* limits = response->mutable_limits();
  limits->set_max_message_bytes(facts_.max_message_bytes);
  limits->set_max_chunk_bytes(facts_.max_chunk_bytes);
  limits->set_num_staging_slots(env_.slots->num_slots());
  limits->set_max_streams(env_.streams->max_streams());
  limits->set_max_inflight_chunks(env_.max_inflight_chunks);
  for (const std::shared_ptr<Head>& head : env_.heads->List()) {
    *response->add_heads() = HeadStatusToProto(head->Status());
  }
  const int64_t staging_bytes = env_.slots->num_slots() * env_.slots->slot_bytes();
  for (const RankMemory& memory : facts_.read_memory()) {
    *response->add_memory() = RankMemoryToProto(memory, staging_bytes);
  }
  response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - facts_.started_at));
  return grpc::Status::OK;
}

// --- Heads ---

grpc::Status LmHeadServiceImpl::CreateHead(grpc::ServerContext* context,
                                           const v1::CreateHeadRequest* request,
                                           v1::CreateHeadResponse* response) {
  absl::StatusOr<HeadSpec> spec = HeadSpecFromProto(request->spec());
  if (!spec.ok()) return ToGrpcStatus(spec.status());
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Create(*spec);
  if (!head.ok()) return ToGrpcStatus(head.status());
  *response->mutable_head() = HeadStatusToProto((*head)->Status());
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::GetHead(grpc::ServerContext* context,
                                        const v1::GetHeadRequest* request,
                                        v1::GetHeadResponse* response) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  *response->mutable_head() = HeadStatusToProto((*head)->Status());
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::ListHeads(grpc::ServerContext* context,
                                          const v1::ListHeadsRequest* request,
                                          v1::ListHeadsResponse* response) {
  for (const std::shared_ptr<Head>& head : env_.heads->List()) {
    *response->add_heads() = HeadStatusToProto(head->Status());
  }
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::DeleteHead(grpc::ServerContext* context,
                                           const v1::DeleteHeadRequest* request,
                                           v1::DeleteHeadResponse* response) {
  return ToGrpcStatus(env_.heads->Delete(request->head(), request->force()));
}

// --- Weights ---

grpc::Status LmHeadServiceImpl::LoadWeights(grpc::ServerContext* context,
                                            grpc::ServerReader<v1::LoadWeightsRequest>* reader,
                                            v1::LoadWeightsResponse* response) {
  v1::LoadWeightsRequest message;
  if (!reader->Read(&message)) {
    return ToGrpcStatus(absl::InvalidArgumentError(
        "LoadWeights: got no message; wanted the head, the tensor and the dtype in the first one"));
  }
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(message.head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<TensorKind> kind = TensorKindFromProto(message.tensor());
  if (!kind.ok()) return ToGrpcStatus(kind.status());
  absl::StatusOr<DType> dtype = DTypeFromProto(message.dtype(), "dtype");
  if (!dtype.ok()) return ToGrpcStatus(dtype.status());
  int64_t num_rows = 0;
  do {
    // The first message may name the tensor alone.
    if (message.has_rows()) {
      const v1::TensorRows& rows = message.rows();
      absl::Status status =
          (*head)->WriteRows(*kind, rows.row_start(), rows.num_rows(), *dtype, rows.data());
      if (!status.ok()) return ToGrpcStatus(status);
      num_rows += rows.num_rows();
    }
  } while (reader->Read(&message));
  response->set_num_rows(num_rows);
  response->set_weights_loaded((*head)->Status().weights_loaded);
  spdlog::info("head {}: {} rows of {} loaded", (*head)->spec().name, num_rows,
               v1::TensorKind_Name(static_cast<v1::TensorKind>(*kind)));
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::ReadWeights(grpc::ServerContext* context,
                                            const v1::ReadWeightsRequest* request,
                                            grpc::ServerWriter<v1::ReadWeightsResponse>* writer) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<TensorKind> kind = TensorKindFromProto(request->tensor());
  if (!kind.ok()) return ToGrpcStatus(kind.status());
  absl::StatusOr<TensorShape> shape = (*head)->ShapeOf(*kind);
  if (!shape.ok()) return ToGrpcStatus(shape.status());
  int64_t row = request->row_start();
  const bool starts_inside = row >= 0 && row < shape->rows;  // Before any arithmetic with it.
  const int64_t wanted =
      request->num_rows() == 0 && starts_inside ? shape->rows - row : request->num_rows();
  if (!starts_inside || wanted < 0 || wanted > shape->rows - row) {
    return ToGrpcStatus(absl::InvalidArgumentError(
        absl::StrCat("ReadWeights: got ", request->num_rows(), " rows from row ", row,
                     ", wanted a range within the tensor's ", shape->rows, " rows")));
  }
  const int64_t row_bytes = shape->cols * BytesPerElement(shape->dtype);
  const int64_t rows_per_message = std::max<int64_t>(1, kWeightMessageBytes / row_bytes);
  const int64_t stop = row + wanted;
  v1::ReadWeightsResponse message;
  message.set_dtype(DTypeToProto(shape->dtype));
  while (row < stop) {
    const int64_t num_rows = std::min(rows_per_message, stop - row);
    std::string* data = message.mutable_rows()->mutable_data();
    data->resize(static_cast<size_t>(num_rows * row_bytes));
    message.mutable_rows()->set_row_start(row);
    message.mutable_rows()->set_num_rows(num_rows);
    absl::Status status =
        (*head)->ReadRows(*kind, row, {data->data(), num_rows, shape->cols, shape->dtype});
    if (!status.ok()) return ToGrpcStatus(status);
    if (!writer->Write(message)) return ToGrpcStatus(absl::CancelledError("the client is gone"));
    row += num_rows;
  }
  return grpc::Status::OK;
}

// --- Steps ---

grpc::Status LmHeadServiceImpl::BeginStep(grpc::ServerContext* context,
                                          const v1::BeginStepRequest* request,
                                          v1::BeginStepResponse* response) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  for (const std::string& worker : request->workers()) {
    absl::Status status = ValidateName("worker name", worker);
    if (!status.ok()) return ToGrpcStatus(status);
  }
  absl::StatusOr<Head::BegunStep> begun =
      (*head)->BeginStep(request->step(), {request->workers().begin(), request->workers().end()},
                         request->incarnation());
  if (!begun.ok()) return ToGrpcStatus(begun.status());
  response->set_incarnation(begun->incarnation);
  response->set_already_open(begun->already_open);
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::PrepareStep(grpc::ServerContext* context,
                                            const v1::PrepareStepRequest* request,
                                            v1::PrepareStepResponse* response) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<absl::Time> deadline = PrepareDeadline(*request, *context);
  if (!deadline.ok()) return ToGrpcStatus(deadline.status());
  absl::StatusOr<PreparedStep> prepared =
      (*head)->PrepareStep(request->step(), request->incarnation(), *deadline,
                           [&] { return context->IsCancelled() || !env_.streams->ended().ok(); });
  if (absl::IsCancelled(prepared.status()) && !env_.streams->ended().ok()) {
    return ToGrpcStatus(env_.streams->ended());
  }
  if (!prepared.ok()) return ToGrpcStatus(prepared.status());
  *response->mutable_sums() = LossSumsToProto(prepared->sums);
  response->set_grad_squared_norm(prepared->grad_squared_norm);
  response->set_num_chunks(prepared->num_chunks);
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::CommitStep(grpc::ServerContext* context,
                                           const v1::CommitStepRequest* request,
                                           v1::CommitStepResponse* response) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<CommittedStep> committed =
      (*head)->CommitStep(request->step(), request->incarnation(),
                          {.learning_rate = request->learning_rate(),
                           .grad_multiplier = request->grad_multiplier(),
                           .allow_nonfinite_rows = request->allow_nonfinite_rows()});
  if (!committed.ok()) return ToGrpcStatus(committed.status());
  if (!committed->repeated) {
    spdlog::info("head {}: step {} committed, grad_norm {}", request->head(), request->step(),
                 committed->grad_norm);
  }
  response->set_step(committed->step);
  response->set_num_updates(committed->num_updates);
  response->set_grad_norm(committed->grad_norm);
  response->set_repeated(committed->repeated);
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::AbortStep(grpc::ServerContext* context,
                                          const v1::AbortStepRequest* request,
                                          v1::AbortStepResponse* response) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<bool> aborted =
      (*head)->AbortStep(request->step(), request->incarnation(), request->reason());
  if (!aborted.ok()) return ToGrpcStatus(aborted.status());
  if (*aborted) {
    spdlog::info("head {}: step {} aborted: {}", request->head(), request->step(),
                 request->reason());
  }
  response->set_aborted(*aborted);
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::AccumulateWeightGradient(
    grpc::ServerContext* context, const v1::AccumulateWeightGradientRequest* request,
    v1::AccumulateWeightGradientResponse* response) {
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<bool> duplicate = (*head)->AccumulateGradient(
      request->step(), request->incarnation(),
      {.worker = request->worker(),
       .index = request->index(),
       .checksum = GradientPieceChecksum(*request),
       .row_start = request->row_start(),
       .row_ids = {request->row_ids().data(), static_cast<size_t>(request->row_ids_size())},
       .rows = request->rows()});
  if (!duplicate.ok()) return ToGrpcStatus(duplicate.status());
  response->set_duplicate(*duplicate);
  return grpc::Status::OK;
}

// --- Memory ---

grpc::Status LmHeadServiceImpl::EstimateMemory(grpc::ServerContext* context,
                                               const v1::EstimateMemoryRequest* request,
                                               v1::EstimateMemoryResponse* response) {
  absl::StatusOr<HeadSpec> spec = HeadSpecFromProto(request->spec(), NameRule::kMayBeEmpty);
  if (!spec.ok()) return ToGrpcStatus(spec.status());
  PlanOptions options = env_.heads->plan_options();
  absl::Status status = ReadRanks(*request, &options);
  if (status.ok()) status = CheckNumTokens(*request);
  if (!status.ok()) return ToGrpcStatus(status);
  response->set_num_ranks(options.num_ranks * options.num_replicas);
  response->set_num_replicas(options.num_replicas);
  for (const Schedule schedule : SchedulesOf(*spec)) {
    *response->add_plans() = MemoryPlanToProto(PlanForSchedule(*spec, schedule, options));
  }
  const int64_t available_bytes = env_.heads->available_bytes();
  response->set_available_bytes(available_bytes);
  options.budget_bytes = available_bytes;
  const absl::StatusOr<MemoryPlan> plan = PlanHead(*spec, options);
  response->set_chosen_schedule(ScheduleToProto(plan.ok() ? plan->schedule : Schedule::kAuto));
  const int64_t num_tokens = request->num_sequences() * request->sequence_length();
  if (num_tokens > 0) {
    *response->mutable_dense() =
        DenseLogitsToProto(PlanDenseLogits(num_tokens, spec->vocab_size, spec->weight_dtype));
  }
  return grpc::Status::OK;
}

}  // namespace lmhead
