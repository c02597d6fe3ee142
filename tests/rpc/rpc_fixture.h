// A real server on a loopback port and an ordinary generated stub: what the tests of server/rpc
// share. The client side is deliberately not lmhead's own: any protobuf client must get along.

#ifndef LMHEAD_TESTS_RPC_RPC_FIXTURE_H_
#define LMHEAD_TESTS_RPC_RPC_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lmhead/v1/service.grpc.pb.h"
#include "proto/types/limits.h"
#include "server/server.h"

namespace lmhead {

// Budget of the fixture's server: several small heads on any backend, no large one.
inline constexpr int64_t kMemoryLimitBytes = 512 * kMiB;

// The shape of the tests' head.
inline constexpr int64_t kVocab = 13;
inline constexpr int64_t kHidden = 8;

// One ComputeLoss stream of a generated stub.
class TestStream {
 public:
  explicit TestStream(v1::LmHeadService::Stub* stub);
  ~TestStream();  // Cancels when not finished.

  bool Send(const v1::StreamOpen& open);
  bool Send(const v1::Chunk& chunk);
  bool SendEnd(uint64_t num_chunks);
  bool SendReceived(uint64_t chunk_index);

  // The next answer; kind not set when the stream is over.
  v1::ComputeLossResponse Read();

  void HalfClose();
  void Cancel() { context_.TryCancel(); }

  // Reads what is left and returns the stream's status.
  grpc::Status Finish();

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ComputeLossRequest, v1::ComputeLossResponse>>
      stream_;
  bool half_closed_ = false;
  bool finished_ = false;
};

class RpcTest : public ::testing::Test {
 protected:
  // Small figures, so that every bound is within reach of a test.
  static ServerConfig Config();

  void SetUp() override { Restart(Config()); }
  void Restart(const ServerConfig& config);

  // A connection of its own.
  std::unique_ptr<v1::LmHeadService::Stub> Connect();
  std::shared_ptr<grpc::Channel> MakeChannel();

  static v1::HeadSpec Spec(const std::string& name = "lm");
  void CreateHead(const v1::HeadSpec& spec);

  // BeginStep; returns its incarnation. The worker names are w0, w1, ….
  uint64_t Begin(uint64_t step, int num_workers = 1, const std::string& head = "lm");

  v1::StreamOpen Open(uint64_t step, const std::string& worker = "w0",
                      const std::string& head = "lm");

  // Rows that are a function of the arguments; kHidden float32 columns.
  static v1::Chunk MakeChunk(uint64_t index, int64_t num_tokens = 3, int seed = 1);

  // A worker's whole stream: chunks 0 to num_chunks - 1, each sent `copies` times, and the end.
  void FeedWorker(const v1::StreamOpen& open, int num_chunks, int copies = 1);

  grpc::Status Prepare(uint64_t step, v1::PrepareStepResponse* response, double wait_seconds = 5.0,
                       const std::string& head = "lm");
  grpc::Status Commit(uint64_t step, v1::CommitStepResponse* response, double learning_rate = 0.5,
                      bool allow_nonfinite_rows = false, const std::string& head = "lm");
  grpc::Status Abort(uint64_t step, const std::string& reason);
  std::vector<float> ReadWeight(const std::string& head = "lm");

  // Sends `chunk` alone on a stream of step 1 and returns how that stream ended.
  grpc::Status StatusOfChunk(const v1::StreamOpen& open, const v1::Chunk& chunk);
  // Opens a stream and returns how it ended.
  grpc::Status StatusOfOpen(const v1::StreamOpen& open);

  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::LmHeadService::Stub> stub_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_RPC_RPC_FIXTURE_H_
