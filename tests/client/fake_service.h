// A typed, generated-stub server that speaks the protocol and computes nothing: its answers are
// simple functions of what it received. For tests of the client's protocol, its faults included.

#ifndef LMHEAD_TESTS_CLIENT_FAKE_SERVICE_H_
#define LMHEAD_TESTS_CLIENT_FAKE_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "lmhead/v1/service.grpc.pb.h"
#include "tests/util/temporary_folder.h"

namespace lmhead {

// What the fake answers for one element or byte.
inline float FakeTokenLoss(int32_t target) { return static_cast<float>(target) * 0.5f; }
inline float FakeLogprob(int32_t target) { return -FakeTokenLoss(target); }
inline float FakeLse(int32_t target) { return static_cast<float>(target) + 2.0f; }
inline float FakeEntropy(int32_t target) { return static_cast<float>(target) * 3.0f; }
inline int32_t FakeArgmax(int32_t target) { return target + 7; }
inline int32_t FakeTopkId(int32_t target, int32_t k) { return target * 100 + k; }
inline float FakeTopkLogprob(int32_t target, int32_t k) {
  return static_cast<float>(-target) - static_cast<float>(k);
}
inline char FakeGradByte(char hidden) { return static_cast<char>(hidden ^ 0x5a); }

class FakeService final : public v1::LmHeadService::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>;

  // What a test may change before the first call.
  uint64_t incarnation = 0x1234;
  int64_t max_chunk_tokens = 16384;
  int32_t max_inflight_chunks = 8;
  // Results are held back until this many chunks have arrived, over all streams.
  int hold_until = 0;
  // Called for each `open`; an error refuses the stream.
  std::function<grpc::Status(const v1::StreamOpen&)> check_open;
  // Called for each chunk before it is counted; an error ends the stream.
  std::function<grpc::Status(const v1::Chunk&)> check_chunk;
  // May change a response, or withhold it by returning false.
  std::function<bool(v1::ComputeLossResponse*)> filter;
  // Number of unary calls to fail with UNAVAILABLE first.
  std::atomic<int> unavailable_calls{0};

  // What a test may ask for.
  std::map<std::string, std::set<uint64_t>> ledger() const;  // Chunk indices by worker.
  std::vector<v1::StreamOpen> opens() const;
  std::vector<int64_t> chunk_rows() const;  // Rows of each chunk, by arrival.
  std::vector<uint64_t> received() const;   // Of each `received`, by arrival.
  std::map<uint32_t, int> chunks_by_stream() const;
  int most_unanswered() const;  // Most chunks without a result that a stream ever had.
  int num_delete_calls() const { return num_delete_calls_; }

  grpc::Status ComputeLoss(grpc::ServerContext* context, Stream* stream) override;
  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;
  grpc::Status DeleteHead(grpc::ServerContext* context, const v1::DeleteHeadRequest* request,
                          v1::DeleteHeadResponse* response) override;
  grpc::Status PrepareStep(grpc::ServerContext* context, const v1::PrepareStepRequest* request,
                           v1::PrepareStepResponse* response) override;
  grpc::Status LoadWeights(grpc::ServerContext* context,
                           grpc::ServerReader<v1::LoadWeightsRequest>* reader,
                           v1::LoadWeightsResponse* response) override;
  grpc::Status ReadWeights(grpc::ServerContext* context, const v1::ReadWeightsRequest* request,
                           grpc::ServerWriter<v1::ReadWeightsResponse>* writer) override;

 private:
  class Answers;

  grpc::Status TakeUnavailable();
  v1::ComputeLossResponse Answer(const v1::StreamOpen& open, const v1::Chunk& chunk);
  grpc::Status Serve(const v1::StreamOpen& open, Stream* stream, Answers& answers);

  mutable absl::Mutex mu_;
  int num_chunks_ = 0;
  int most_unanswered_ = 0;
  std::map<std::string, std::set<uint64_t>> ledger_;
  std::vector<v1::StreamOpen> opens_;
  std::vector<int64_t> chunk_rows_;
  std::vector<uint64_t> received_;
  std::map<uint32_t, int> chunks_by_stream_;
  std::map<int64_t, std::string> weight_rows_;
  v1::DType weight_dtype_ = v1::DTYPE_UNSPECIFIED;
  std::atomic<int> num_delete_calls_{0};
};

// Serves a FakeService; restartable at the same address.
class FakeServer {
 public:
  explicit FakeServer(FakeService* service);
  ~FakeServer();

  void Start();
  void Stop();  // Breaks every connection.
  const std::string& address() const { return address_; }

 private:
  FakeService* const service_;
  const TemporaryFolder directory_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CLIENT_FAKE_SERVICE_H_
