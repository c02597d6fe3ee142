#include "server/rpc/guarded_service.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "proto/wire/status.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

absl::Status NothingMore(const Call&) { return absl::OkStatus(); }

// On one line: some messages are tables.
std::string LogText(const absl::Status& status) {
  return absl::StrReplaceAll(status.ToString(), {{"\n", "; "}});
}

}  // namespace

grpc::Status GuardedService::Run(const grpc::ServerContext& context, const char* name,
                                 LogFields fields,
                                 absl::FunctionRef<absl::Status(const Call&)> check,
                                 absl::FunctionRef<grpc::Status()> method) const {
  const absl::Time start = absl::Now();
  const Call call = guard_->Admit(context, name);
  fields.request_id = call.request_id();
  const LogScope scope(fields);
  absl::Status refused = call.status();
  if (refused.ok()) refused = check(call);
  const absl::Status status = refused.ok() ? FromGrpcStatus(method()) : refused;
  if (status.ok()) {
    spdlog::debug("{} by {}: done in {}", name, call.caller_name(),
                  absl::FormatDuration(absl::Now() - start));
    return grpc::Status::OK;
  }
  if (absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)) {
    spdlog::warn("{} from {} refused: {}", name, context.peer(), LogText(status));
  } else {
    spdlog::info("{} by {} failed: {}", name, call.caller_name(), LogText(status));
  }
  return call.ToGrpcStatus(status);
}

absl::Status GuardedService::CheckTakesPart(const Call& call, const std::string& head,
                                            uint64_t step) const {
  absl::StatusOr<std::shared_ptr<Head>> found = heads_->Find(head);
  if (!found.ok()) return absl::OkStatus();
  const std::vector<std::string> workers = (*found)->WorkersOf(step);
  return workers.empty() ? absl::OkStatus() : call.CheckTakesPart(workers);
}

bool GuardedService::IsOpen(const std::string& head, uint64_t step) const {
  absl::StatusOr<std::shared_ptr<Head>> found = heads_->Find(head);
  return found.ok() && step != 0 && (*found)->Status().open_step == step;
}

// --- Server and heads ---

grpc::Status GuardedService::GetServerInfo(grpc::ServerContext* context,
                                           const v1::GetServerInfoRequest* request,
                                           v1::GetServerInfoResponse* response) {
  return Run(*context, "GetServerInfo", {}, NothingMore,
             [&] { return service_->GetServerInfo(context, request, response); });
}

grpc::Status GuardedService::CreateHead(grpc::ServerContext* context,
                                        const v1::CreateHeadRequest* request,
                                        v1::CreateHeadResponse* response) {
  return Run(
      *context, "CreateHead", {.head = request->spec().name()},
      [](const Call& call) { return call.CheckTakesNew("new head"); },
      [&] { return service_->CreateHead(context, request, response); });
}

grpc::Status GuardedService::GetHead(grpc::ServerContext* context,
                                     const v1::GetHeadRequest* request,
                                     v1::GetHeadResponse* response) {
  return Run(*context, "GetHead", {.head = request->head()}, NothingMore,
             [&] { return service_->GetHead(context, request, response); });
}

grpc::Status GuardedService::ListHeads(grpc::ServerContext* context,
                                       const v1::ListHeadsRequest* request,
                                       v1::ListHeadsResponse* response) {
  return Run(*context, "ListHeads", {}, NothingMore,
             [&] { return service_->ListHeads(context, request, response); });
}

grpc::Status GuardedService::DeleteHead(grpc::ServerContext* context,
                                        const v1::DeleteHeadRequest* request,
                                        v1::DeleteHeadResponse* response) {
  return Run(*context, "DeleteHead", {.head = request->head()}, NothingMore,
             [&] { return service_->DeleteHead(context, request, response); });
}

grpc::Status GuardedService::LoadWeights(grpc::ServerContext* context,
                                         grpc::ServerReader<v1::LoadWeightsRequest>* reader,
                                         v1::LoadWeightsResponse* response) {
  return Run(
      *context, "LoadWeights", {},
      [](const Call& call) { return call.CheckTakesNew("new weights"); },
      [&] { return service_->LoadWeights(context, reader, response); });
}

grpc::Status GuardedService::ReadWeights(grpc::ServerContext* context,
                                         const v1::ReadWeightsRequest* request,
                                         grpc::ServerWriter<v1::ReadWeightsResponse>* writer) {
  return Run(*context, "ReadWeights", {.head = request->head()}, NothingMore,
             [&] { return service_->ReadWeights(context, request, writer); });
}

// --- Steps ---

grpc::Status GuardedService::BeginStep(grpc::ServerContext* context,
                                       const v1::BeginStepRequest* request,
                                       v1::BeginStepResponse* response) {
  const auto check = [&](const Call& call) {
    if (!IsOpen(request->head(), request->step())) {
      if (absl::Status status = call.CheckTakesNew("new step"); !status.ok()) return status;
    }
    // Of no workers the method says what is wrong.
    if (request->workers().empty()) return absl::OkStatus();
    return call.CheckTakesPart({request->workers().begin(), request->workers().end()});
  };
  return Run(*context, "BeginStep", {.head = request->head(), .step = request->step()}, check,
             [&] { return service_->BeginStep(context, request, response); });
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* GuardedService::ComputeLoss(
    grpc::CallbackServerContext* context) {
  return service_->ComputeLoss(context);
}

grpc::Status GuardedService::PrepareStep(grpc::ServerContext* context,
                                         const v1::PrepareStepRequest* request,
                                         v1::PrepareStepResponse* response) {
  return Run(
      *context, "PrepareStep", {.head = request->head(), .step = request->step()},
      [&](const Call& call) { return CheckTakesPart(call, request->head(), request->step()); },
      [&] { return service_->PrepareStep(context, request, response); });
}

grpc::Status GuardedService::CommitStep(grpc::ServerContext* context,
                                        const v1::CommitStepRequest* request,
                                        v1::CommitStepResponse* response) {
  return Run(
      *context, "CommitStep", {.head = request->head(), .step = request->step()},
      [&](const Call& call) { return CheckTakesPart(call, request->head(), request->step()); },
      [&] { return service_->CommitStep(context, request, response); });
}

grpc::Status GuardedService::AbortStep(grpc::ServerContext* context,
                                       const v1::AbortStepRequest* request,
                                       v1::AbortStepResponse* response) {
  return Run(
      *context, "AbortStep", {.head = request->head(), .step = request->step()},
      [&](const Call& call) { return CheckTakesPart(call, request->head(), request->step()); },
      [&] { return service_->AbortStep(context, request, response); });
}

grpc::Status GuardedService::AccumulateWeightGradient(
    grpc::ServerContext* context, const v1::AccumulateWeightGradientRequest* request,
    v1::AccumulateWeightGradientResponse* response) {
  return Run(
      *context, "AccumulateWeightGradient",
      {.head = request->head(), .step = request->step(), .worker = request->worker()},
      [&](const Call& call) { return call.CheckWorker(request->worker()); },
      [&] { return service_->AccumulateWeightGradient(context, request, response); });
}

// --- Checkpoints and memory ---

grpc::Status GuardedService::SaveCheckpoint(grpc::ServerContext* context,
                                            const v1::SaveCheckpointRequest* request,
                                            v1::SaveCheckpointResponse* response) {
  return Run(*context, "SaveCheckpoint", {.head = request->head()}, NothingMore,
             [&] { return service_->SaveCheckpoint(context, request, response); });
}

grpc::Status GuardedService::RestoreCheckpoint(grpc::ServerContext* context,
                                               const v1::RestoreCheckpointRequest* request,
                                               v1::RestoreCheckpointResponse* response) {
  return Run(
      *context, "RestoreCheckpoint", {.head = request->head()},
      [](const Call& call) { return call.CheckTakesNew("new head"); },
      [&] { return service_->RestoreCheckpoint(context, request, response); });
}

grpc::Status GuardedService::EstimateMemory(grpc::ServerContext* context,
                                            const v1::EstimateMemoryRequest* request,
                                            v1::EstimateMemoryResponse* response) {
  return Run(*context, "EstimateMemory", {}, NothingMore,
             [&] { return service_->EstimateMemory(context, request, response); });
}

}  // namespace lmhead
