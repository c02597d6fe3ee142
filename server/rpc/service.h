// The methods of lmhead.v1.LmHeadService: messages in, domain calls, messages out.
//
// ComputeLoss runs on gRPC's callback threads (chunk_stream.h). Every other method runs on gRPC's
// synchronous threads, which may wait: for the executor, for the other workers of a step.

#ifndef LMHEAD_SERVER_RPC_SERVICE_H_
#define LMHEAD_SERVER_RPC_SERVICE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "lmhead/v1/service.grpc.pb.h"
#include "server/head/head_registry.h"
#include "server/metrics/metrics.h"
#include "server/rpc/chunk_stream.h"

namespace lmhead {

// What GetServerInfo tells of the server.
struct ServerFacts {
  std::string version;
  std::string backend;  // "cpu" or "cuda".
  struct Device {
    int32_t rank = 0;
    int32_t replica = 0;
    std::string name;
    int64_t total_memory_bytes = 0;
  };
  int64_t max_message_bytes = 0;
  int64_t max_chunk_bytes = 0;
  absl::Time started_at;
  std::function<std::vector<Device>()> read_devices;  // Of every rank, like the next.
  std::function<std::vector<RankMemory>()> read_memory;
};

// Thread-safe.
class LmHeadServiceImpl final
    : public v1::LmHeadService::WithRawCallbackMethod_ComputeLoss<v1::LmHeadService::Service> {
 public:
  // What `env` points to must outlive the service.
  LmHeadServiceImpl(const StreamEnvironment& env, ServerFacts facts);

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
  const StreamEnvironment env_;
  const ServerFacts facts_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_SERVICE_H_
