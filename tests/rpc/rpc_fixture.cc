#include "tests/rpc/rpc_fixture.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "server/config/server_config.h"
#include "tests/util/paths.h"

namespace lmhead {

// --- TestStream ---

TestStream::TestStream(v1::LmHeadService::Stub* stub) : stream_(stub->ComputeLoss(&context_)) {}

TestStream::~TestStream() {
  if (finished_) return;
  context_.TryCancel();
  Finish();
}

bool TestStream::Send(const v1::StreamOpen& open) {
  v1::ComputeLossRequest request;
  *request.mutable_open() = open;
  return stream_->Write(request);
}

bool TestStream::Send(const v1::Chunk& chunk) {
  v1::ComputeLossRequest request;
  *request.mutable_chunk() = chunk;
  return stream_->Write(request);
}

bool TestStream::SendReceived(uint64_t chunk_index) {
  v1::ComputeLossRequest request;
  request.mutable_received()->set_chunk_index(chunk_index);
  return stream_->Write(request);
}

bool TestStream::SendEnd(uint64_t num_chunks) {
  v1::ComputeLossRequest request;
  request.mutable_end()->set_num_chunks(num_chunks);
  return stream_->Write(request);
}

v1::ComputeLossResponse TestStream::Read() {
  v1::ComputeLossResponse response;
  if (!stream_->Read(&response)) response.Clear();
  return response;
}

void TestStream::HalfClose() {
  if (!std::exchange(half_closed_, true)) stream_->WritesDone();
}

grpc::Status TestStream::Finish() {
  HalfClose();
  v1::ComputeLossResponse response;
  while (stream_->Read(&response)) {
  }
  finished_ = true;
  return stream_->Finish();
}

// --- RpcTest ---

ServerConfig RpcTest::Config() {
  ServerConfig config;
  config.listen = "127.0.0.1:0";
  config.backend = *ParseBackendChoice(TestBackend());
  config.memory_limit_bytes = kMemoryLimitBytes;
  config.batch_tokens = 1024;
  config.staging_slots = 4;
  config.chunk_bytes_max = kMiB;
  config.max_inflight_chunks = 2;
  config.write_timeout = absl::Seconds(2);
  return config;
}

void RpcTest::Restart(const ServerConfig& config) {
  stub_.reset();
  server_.reset();
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  stub_ = Connect();
}

std::shared_ptr<grpc::Channel> RpcTest::MakeChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                   arguments);
}

std::unique_ptr<v1::LmHeadService::Stub> RpcTest::Connect() {
  return v1::LmHeadService::NewStub(MakeChannel());
}

v1::HeadSpec RpcTest::Spec(const std::string& name) {
  v1::HeadSpec spec;
  spec.set_name(name);
  spec.set_vocab_size(kVocab);
  spec.set_hidden_size(kHidden);
  spec.set_weight_dtype(v1::DTYPE_FLOAT32);
  spec.set_trainable(true);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  spec.mutable_weight_init()->set_kind(v1::WeightInit::KIND_NORMAL);
  spec.mutable_weight_init()->set_std(0.3);
  spec.mutable_weight_init()->set_seed(11);
  return spec;
}

void RpcTest::CreateHead(const v1::HeadSpec& spec) {
  grpc::ClientContext context;
  v1::CreateHeadRequest request;
  *request.mutable_spec() = spec;
  v1::CreateHeadResponse response;
  const grpc::Status status = stub_->CreateHead(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
}

uint64_t RpcTest::Begin(uint64_t step, int num_workers, const std::string& head) {
  grpc::ClientContext context;
  v1::BeginStepRequest request;
  request.set_head(head);
  request.set_step(step);
  for (int i = 0; i < num_workers; ++i) request.add_workers("w" + std::to_string(i));
  v1::BeginStepResponse response;
  const grpc::Status status = stub_->BeginStep(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.incarnation();
}

v1::StreamOpen RpcTest::Open(uint64_t step, const std::string& worker, const std::string& head) {
  v1::StreamOpen open;
  open.set_head(head);
  open.set_step(step);
  open.set_worker(worker);
  if (step != 0) open.set_incarnation(server_->incarnation());
  open.set_hidden_dtype(v1::DTYPE_FLOAT32);
  open.mutable_outputs()->set_grad_hidden_states(true);
  return open;
}

v1::Chunk RpcTest::MakeChunk(uint64_t index, int64_t num_tokens, int seed) {
  v1::Chunk chunk;
  chunk.set_chunk_index(index);
  chunk.set_num_tokens(num_tokens);
  std::vector<float> hidden(static_cast<size_t>(num_tokens * kHidden));
  for (size_t i = 0; i < hidden.size(); ++i) {
    hidden[i] = std::sin(static_cast<float>(i + 7 * index + 31 * seed));
  }
  for (int64_t i = 0; i < num_tokens; ++i) {
    chunk.add_targets(static_cast<int32_t>((i + static_cast<int64_t>(index) + seed) % kVocab));
  }
  chunk.set_hidden_states(hidden.data(), hidden.size() * sizeof(float));
  return chunk;
}

void RpcTest::FeedWorker(const v1::StreamOpen& open, int num_chunks, int copies) {
  const std::unique_ptr<v1::LmHeadService::Stub> stub = Connect();
  TestStream stream(stub.get());
  ASSERT_TRUE(stream.Send(open));
  ASSERT_TRUE(stream.Read().has_opened());
  for (int i = 0; i < num_chunks; ++i) {
    for (int copy = 0; copy < copies; ++copy) {
      ASSERT_TRUE(stream.Send(MakeChunk(i)));
      const v1::ComputeLossResponse answer = stream.Read();
      ASSERT_EQ(answer.result().chunk_index(), static_cast<uint64_t>(i));
      EXPECT_EQ(answer.result().duplicate(), copy > 0);
    }
  }
  ASSERT_TRUE(stream.SendEnd(num_chunks));
  ASSERT_TRUE(stream.Read().has_ended());
  const grpc::Status status = stream.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

grpc::Status RpcTest::Prepare(uint64_t step, v1::PrepareStepResponse* response, double wait_seconds,
                              const std::string& head) {
  grpc::ClientContext context;
  v1::PrepareStepRequest request;
  request.set_head(head);
  request.set_step(step);
  request.set_incarnation(server_->incarnation());
  request.set_wait_seconds(wait_seconds);
  return Connect()->PrepareStep(&context, request, response);
}

grpc::Status RpcTest::Commit(uint64_t step, v1::CommitStepResponse* response, double learning_rate,
                             bool allow_nonfinite_rows, const std::string& head) {
  grpc::ClientContext context;
  v1::CommitStepRequest request;
  request.set_head(head);
  request.set_step(step);
  request.set_incarnation(server_->incarnation());
  request.set_learning_rate(learning_rate);
  request.set_grad_multiplier(0.25);
  request.set_allow_nonfinite_rows(allow_nonfinite_rows);
  return stub_->CommitStep(&context, request, response);
}

grpc::Status RpcTest::Abort(uint64_t step, const std::string& reason) {
  grpc::ClientContext context;
  v1::AbortStepRequest request;
  request.set_head("lm");
  request.set_step(step);
  request.set_incarnation(server_->incarnation());
  request.set_reason(reason);
  v1::AbortStepResponse response;
  return stub_->AbortStep(&context, request, &response);
}

std::vector<float> RpcTest::ReadWeight(const std::string& head) {
  grpc::ClientContext context;
  v1::ReadWeightsRequest request;
  request.set_head(head);
  request.set_tensor(v1::TENSOR_KIND_WEIGHT);
  const auto reader = stub_->ReadWeights(&context, request);
  std::vector<float> weight;
  for (v1::ReadWeightsResponse message; reader->Read(&message);) {
    const std::string& data = message.rows().data();
    const size_t start = weight.size();
    weight.resize(start + data.size() / sizeof(float));
    std::memcpy(weight.data() + start, data.data(), data.size());
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return weight;
}

grpc::Status RpcTest::StatusOfChunk(const v1::StreamOpen& open, const v1::Chunk& chunk) {
  TestStream stream(stub_.get());
  EXPECT_TRUE(stream.Send(open));
  EXPECT_TRUE(stream.Read().has_opened());
  stream.Send(chunk);
  return stream.Finish();
}

grpc::Status RpcTest::StatusOfOpen(const v1::StreamOpen& open) {
  TestStream stream(stub_.get());
  stream.Send(open);
  return stream.Finish();
}

}  // namespace lmhead
