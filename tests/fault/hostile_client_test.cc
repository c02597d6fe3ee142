// Clients that misbehave on the wire. Whatever they send, the server goes on serving others.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <thread>

#include "lmhead/v1/service.grpc.pb.h"
#include "tests/e2e/service_fixture.h"
#include "tests/fault/chaos_proxy.h"

namespace lmhead::fault {
namespace {

using e2e::HeadShape;
using e2e::Rows;

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr uint64_t kSeed = 20240607;

// Writes the bytes, reads what comes for a moment, closes.
void SendRaw(const std::string& address, const std::string& bytes) {
  const int fd = ConnectSocket(address);
  ASSERT_GE(fd, 0) << "the server no longer takes connections";
  // A short send is fine: the server may have closed already.
  (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  const timeval moment{.tv_usec = 2000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof(moment));
  char buffer[4096];
  (void)recv(fd, buffer, sizeof(buffer), 0);
  close(fd);
}

std::string RandomBytes(std::mt19937_64* generator, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>((*generator)());
  return bytes;
}

class HostileClientTest : public ::testing::Test {
 protected:
  HostileClientTest()
      : server_(e2e::StartServer({"--write_timeout_seconds=1"})),
        client_(e2e::ConnectTo(server_->address())) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  }

  // A new head trains one step just as the oracle does.
  void ExpectServes(const std::string& head) {
    const HeadShape shape{.name = head};
    LMHEAD_ASSERT_OK(e2e::CreateHead(client_.get(), shape));
    std::vector<Rows> rows = {e2e::MakeRows(shape, 100, 1, 0)};
    Client* const workers[] = {client_.get()};
    LMHEAD_ASSERT_OK(e2e::RunStep(client_.get(), workers, shape, 1, {}, &rows));
    e2e::OracleTrainer oracle(shape);
    oracle.Step(rows, 1);
    auto weight = e2e::ReadTensor(client_.get(), shape, v1::TENSOR_KIND_WEIGHT);
    LMHEAD_ASSERT_OK(weight);
    EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
  }

  std::unique_ptr<LocalServer> server_;
  std::unique_ptr<Client> client_;
  std::mt19937_64 generator_{kSeed};
};

TEST_F(HostileClientTest, RandomBytes) {
  for (int i = 0; i < 100; ++i) {
    std::string bytes = RandomBytes(&generator_, generator_() % 5000);
    if (i % 2 == 0) bytes = kPreface + bytes;  // So that they reach the frame parser.
    SendRaw(server_->address(), bytes);
  }
  ExpectServes("after");
}

TEST_F(HostileClientTest, RealTrafficCutShortAndFlipped) {
  // What an honest worker sends in a step, as it went over the wire.
  std::vector<std::string> recorded;
  {
    ChaosProxy recorder(server_->address(), nullptr);
    auto honest = e2e::ConnectTo(recorder.address());
    const HeadShape shape{.name = "recorded"};
    LMHEAD_ASSERT_OK(e2e::CreateHead(honest.get(), shape));
    std::vector<Rows> rows = {e2e::MakeRows(shape, 200, 1, 0)};
    Client* const workers[] = {honest.get()};
    LMHEAD_ASSERT_OK(e2e::RunStep(honest.get(), workers, shape, 1, {}, &rows));
    recorded = recorder.SentByClients();
  }
  ASSERT_FALSE(recorded.empty());
  for (const std::string& session : recorded) {
    ASSERT_GT(session.size(), sizeof(kPreface));
    for (int i = 0; i < 60; ++i) {
      std::string bytes = session.substr(0, generator_() % session.size());
      const int flips = i % 3 == 0 ? 0 : 1 + static_cast<int>(generator_() % 4);
      for (int flip = 0; flip < flips && bytes.size() > sizeof(kPreface); ++flip) {
        // Behind the preface: a broken preface ends everything at once.
        const size_t at = sizeof(kPreface) + generator_() % (bytes.size() - sizeof(kPreface));
        bytes[at] = static_cast<char>(generator_());
      }
      SendRaw(server_->address(), bytes);
    }
  }
  ExpectServes("after");
}

TEST_F(HostileClientTest, ManyIdleConnections) {
  std::vector<int> sockets;
  for (int i = 0; i < 200; ++i) {
    sockets.push_back(ConnectSocket(server_->address()));
    ASSERT_GE(sockets.back(), 0);
  }
  ExpectServes("beside");
  for (int fd : sockets) close(fd);
}

// A stream of chunks whose results are asked for and never read.
class NeverReads {
 public:
  explicit NeverReads(const std::string& address)
      : stub_(v1::LmHeadService::NewStub(
            grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {
    stream_ = stub_->ComputeLoss(&context_);
  }

  // Sends chunks until the server ends the stream. Returns how many went out.
  int SendUntilEnded(const HeadShape& shape, int64_t num_tokens) {
    v1::ComputeLossRequest open;
    open.mutable_open()->set_head(shape.name);
    open.mutable_open()->set_hidden_dtype(v1::DTYPE_FLOAT32);
    open.mutable_open()->mutable_outputs()->set_grad_hidden_states(true);
    if (!stream_->Write(open)) return 0;
    v1::ComputeLossRequest request;
    v1::Chunk* chunk = request.mutable_chunk();
    chunk->set_num_tokens(num_tokens);
    chunk->mutable_targets()->Resize(static_cast<int>(num_tokens), 0);
    chunk->set_hidden_states(std::string(num_tokens * shape.hidden_size * 4, '\0'));
    int num_sent = 0;
    while (stream_->Write(request)) chunk->set_chunk_index(++num_sent);
    return num_sent;
  }

  grpc::Status Finish() {
    v1::ComputeLossResponse response;
    while (stream_->Read(&response)) {
    }
    return stream_->Finish();
  }

 private:
  std::unique_ptr<v1::LmHeadService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ComputeLossRequest, v1::ComputeLossResponse>>
      stream_;
};

TEST_F(HostileClientTest, AClientThatNeverReadsIsEndedAndHoldsUpNobody) {
  const HeadShape shape{.name = "lm", .vocab_size = 64, .hidden_size = 512};
  LMHEAD_ASSERT_OK(e2e::CreateHead(client_.get(), shape));
  NeverReads rude(server_->address());
  int num_sent = 0;
  std::thread sender([&] { num_sent = rude.SendUntilEnded(shape, 512); });  // 1 MiB a chunk.
  ExpectServes("beside");
  sender.join();
  EXPECT_GT(num_sent, 0);
  EXPECT_LT(num_sent, 1000);
  const grpc::Status status = rude.Finish();
  EXPECT_FALSE(status.ok());
  ExpectServes("after");
}

}  // namespace
}  // namespace lmhead::fault
