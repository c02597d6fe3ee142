// The service that gRPC sees: every control call asks the guard who may, gets its request id into
// the log and into its error's message, and goes on to the methods of service.h.
//
// A method that is not here is UNIMPLEMENTED for everybody, whatever service.h has. ComputeLoss
// goes on at once: its stream asks the guard itself, for it learns the worker only from its first
// message.

#ifndef LMHEAD_SERVER_RPC_GUARDED_SERVICE_H_
#define LMHEAD_SERVER_RPC_GUARDED_SERVICE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "lmhead/v1/service.grpc.pb.h"
#include "server/head/head_registry.h"
#include "server/logging/logging.h"
#include "server/rpc/call_guard.h"
#include "server/rpc/service.h"

namespace lmhead {

// Thread-safe.
class GuardedService final
    : public v1::LmHeadService::WithRawCallbackMethod_ComputeLoss<v1::LmHeadService::Service> {
 public:
  // Everything outlives the service.
  GuardedService(LmHeadServiceImpl* service, const CallGuard* guard, const HeadRegistry* heads)
      : service_(service), guard_(guard), heads_(heads) {}

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;
  grpc::Status CreateHead(grpc::ServerContext* context, const v1::CreateHeadRequest* request,
                          v1::CreateHeadResponse* response) override;
  grpc::Status GetHead(grpc::ServerContext* context, const v1::GetHeadRequest* request,
                       v1::GetHeadResponse* response) override;
  grpc::Status ListHeads(grpc::ServerContext* context, const v1::ListHeadsRequest* request,
                         v1::ListHeadsResponse* response) override;
  grpc::Status DeleteHead(grpc::ServerContext* context, const v1::DeleteHeadRequest* request,
                          v1::DeleteHeadResponse* response) override;
  grpc::Status LoadWeights(grpc::ServerContext* context,
                           grpc::ServerReader<v1::LoadWeightsRequest>* reader,
                           v1::LoadWeightsResponse* response) override;
  grpc::Status ReadWeights(grpc::ServerContext* context, const v1::ReadWeightsRequest* request,
                           grpc::ServerWriter<v1::ReadWeightsResponse>* writer) override;
  grpc::Status BeginStep(grpc::ServerContext* context, const v1::BeginStepRequest* request,
                         v1::BeginStepResponse* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeLoss(
      grpc::CallbackServerContext* context) override;
  grpc::Status PrepareStep(grpc::ServerContext* context, const v1::PrepareStepRequest* request,
                           v1::PrepareStepResponse* response) override;
  grpc::Status CommitStep(grpc::ServerContext* context, const v1::CommitStepRequest* request,
                          v1::CommitStepResponse* response) override;
  grpc::Status AbortStep(grpc::ServerContext* context, const v1::AbortStepRequest* request,
                         v1::AbortStepResponse* response) override;
  grpc::Status AccumulateWeightGradient(grpc::ServerContext* context,
                                        const v1::AccumulateWeightGradientRequest* request,
                                        v1::AccumulateWeightGradientResponse* response) override;
  grpc::Status SaveCheckpoint(grpc::ServerContext* context,
                              const v1::SaveCheckpointRequest* request,
                              v1::SaveCheckpointResponse* response) override;
  grpc::Status RestoreCheckpoint(grpc::ServerContext* context,
                                 const v1::RestoreCheckpointRequest* request,
                                 v1::RestoreCheckpointResponse* response) override;
  grpc::Status EstimateMemory(grpc::ServerContext* context,
                              const v1::EstimateMemoryRequest* request,
                              v1::EstimateMemoryResponse* response) override;

 private:
  // Runs `method` when the guard and `check` allow it.
  grpc::Status Run(const grpc::ServerContext& context, const char* name, LogFields fields,
                   absl::FunctionRef<absl::Status(const Call&)> check,
                   absl::FunctionRef<grpc::Status()> method) const;

  // Whether the caller takes part in a step. OK of a step that is not known: the method says so.
  absl::Status CheckTakesPart(const Call& call, const std::string& head, uint64_t step) const;
  bool IsOpen(const std::string& head, uint64_t step) const;

  LmHeadServiceImpl* const service_;
  const CallGuard* const guard_;
  const HeadRegistry* const heads_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_GUARDED_SERVICE_H_
