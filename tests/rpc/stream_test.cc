// Clients that vanish, stall or crowd, and what the server owes the others meanwhile.

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <thread>

#include "tests/rpc/rpc_fixture.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kWideHidden = 4096;

class StreamTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    CreateHead(Spec());
  }

  // All slots and streams are there for others again.
  void ExpectAllSlotsFree() {
    std::vector<std::unique_ptr<TestStream>> streams;
    for (int i = 0; i < Config().staging_slots; ++i) {
      streams.push_back(OpenEventually(Open(0, "")));
    }
    for (const auto& stream : streams) {
      ASSERT_TRUE(stream->Send(MakeChunk(0)));
      ASSERT_TRUE(stream->Read().has_result());
      ASSERT_TRUE(stream->SendEnd(1));
      EXPECT_TRUE(stream->Finish().ok());
    }
  }

  // Opens one stream, trying again while the ones before it are still being taken down.
  std::unique_ptr<TestStream> OpenEventually(const v1::StreamOpen& open) {
    for (;;) {
      auto stream = std::make_unique<TestStream>(stub_.get());
      stream->Send(open);
      if (stream->Read().has_opened()) return stream;
      const grpc::Status status = stream->Finish();
      EXPECT_TRUE(status.error_code() == grpc::StatusCode::ALREADY_EXISTS ||
                  status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED)
          << status.error_message();
      std::this_thread::yield();
    }
  }
};

TEST_F(StreamTest, ChunksOfAVanishedClientAreCounted) {
  Begin(1);
  {
    TestStream stream(stub_.get());
    ASSERT_TRUE(stream.Send(Open(1)));
    ASSERT_TRUE(stream.Read().has_opened());
    ASSERT_TRUE(stream.Send(MakeChunk(0)));
    ASSERT_TRUE(stream.Read().has_result());
    ASSERT_TRUE(stream.Send(MakeChunk(1)));
    stream.Cancel();
  }
  // The worker is back and sends everything again.
  std::unique_ptr<TestStream> stream = OpenEventually(Open(1));
  ASSERT_TRUE(stream->Send(MakeChunk(0)));
  EXPECT_TRUE(stream->Read().result().duplicate());
  ASSERT_TRUE(stream->Send(MakeChunk(1)));
  ASSERT_TRUE(stream->Read().has_result());  // New or not: the first try may not have arrived.
  ASSERT_TRUE(stream->SendEnd(2));
  EXPECT_EQ(stream->Read().ended().num_chunks_counted(), 2u);
  EXPECT_TRUE(stream->Finish().ok());
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_EQ(prepared.sums().num_tokens(), 6);
  ExpectAllSlotsFree();
}

TEST_F(StreamTest, ManyVanishingClientsLeaveNothingBehind) {
  for (int round = 0; round < 20; ++round) {
    std::unique_ptr<TestStream> stream = OpenEventually(Open(0, ""));
    for (int i = 0; i < round % 4; ++i) stream->Send(MakeChunk(i));
    if (round % 4 == 2) stream->Read();
    stream->Cancel();
  }
  for (int i = 0; i < Config().staging_slots; ++i) OpenEventually(Open(0, ""));
  OpenEventually(Open(0, ""))->Cancel();
}

// Answers of 512 KiB to a client that does not read them: gRPC's windows fill, the write stalls,
// and the server ends the stream rather than lend its slots for ever. Others are served meanwhile.
TEST_F(StreamTest, ClientThatNeverReadsIsEnded) {
  v1::HeadSpec spec = Spec("wide");
  spec.set_hidden_size(kWideHidden);
  CreateHead(spec);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // Windows stay at 64 KiB.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = v1::LmHeadService::NewStub(
      grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), arguments));
  TestStream stalled(stub.get());
  ASSERT_TRUE(stalled.Send(Open(0, "", "wide")));
  std::thread writer([&] {
    v1::Chunk chunk;
    chunk.set_num_tokens(32);
    chunk.mutable_hidden_states()->resize(32 * kWideHidden * sizeof(float));
    chunk.mutable_targets()->Resize(32, 0);
    for (uint64_t i = 0;; ++i) {
      chunk.set_chunk_index(i);
      if (!stalled.Send(chunk)) return;  // The stream has been ended.
    }
  });
  // Another stream gets on, while and after the first is stalled.
  std::unique_ptr<TestStream> other = OpenEventually(Open(0, ""));
  for (uint64_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(other->Send(MakeChunk(i)));
    ASSERT_TRUE(other->Read().has_result());
  }
  ASSERT_TRUE(other->SendEnd(100));
  EXPECT_TRUE(other->Finish().ok());
  writer.join();
  EXPECT_FALSE(stalled.Finish().ok());
  ExpectAllSlotsFree();
}

TEST_F(StreamTest, StreamThatIsNeverOpenedIsEnded) {
  TestStream stream(stub_.get());
  EXPECT_FALSE(stream.Read().has_opened());
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("no `open` came"));
}

TEST_F(StreamTest, MoreStreamsThanSlotsAreRefused) {
  std::vector<std::unique_ptr<TestStream>> streams;
  for (int i = 0; i < Config().staging_slots; ++i) {
    streams.push_back(std::make_unique<TestStream>(stub_.get()));
    ASSERT_TRUE(streams.back()->Send(Open(0, "")));
    ASSERT_TRUE(streams.back()->Read().has_opened());
  }
  const grpc::Status status = StatusOfOpen(Open(0, ""));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("4 ComputeLoss streams are open"));
  streams.clear();
  OpenEventually(Open(0, ""));
}

TEST_F(StreamTest, BlockedPreparesDoNotHoldUpTheRest) {
  Begin(1);
  constexpr int kCalls = 64;
  std::vector<std::thread> callers;
  std::atomic<int> num_prepared{0};
  for (int i = 0; i < kCalls; ++i) {
    callers.emplace_back([&] {
      v1::PrepareStepResponse prepared;
      const grpc::Status status = Prepare(1, &prepared, 100.0);
      EXPECT_TRUE(status.ok()) << status.error_message();
      if (prepared.sums().num_tokens() == 6) ++num_prepared;
    });
  }
  const auto channel = MakeChannel();
  for (int i = 0; i < 20; ++i) {
    grpc::GenericStub generic(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    grpc::CompletionQueue queue;
    void* tag = nullptr;
    bool ok = false;
    const grpc::Slice service(std::string("\x0a\x08liveness"));  // HealthCheckRequest.
    auto call = generic.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                         grpc::ByteBuffer(&service, 1), &queue);
    call->StartCall();
    grpc::ByteBuffer answer;
    grpc::Status status;
    call->Finish(&answer, &status, nullptr);
    queue.Next(&tag, &ok);
    ASSERT_TRUE(status.ok()) << status.error_message();
    grpc::Slice bytes;
    ASSERT_TRUE(answer.DumpToSingleSlice(&bytes).ok());
    EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "\x08\x01");  // SERVING.
  }
  FeedWorker(Open(1), 2);
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_prepared.load(), kCalls);
}

TEST_F(StreamTest, DeleteWhileStreaming) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  TestStream evaluation(stub_.get());
  ASSERT_TRUE(evaluation.Send(Open(0, "")));
  ASSERT_TRUE(evaluation.Read().has_opened());
  std::thread writer([&] {
    for (uint64_t i = 0; stream.Send(MakeChunk(i)); ++i) {
    }
  });
  ASSERT_TRUE(stream.Read().has_result());
  v1::DeleteHeadRequest request;
  v1::DeleteHeadResponse response;
  request.set_head("lm");
  {
    grpc::ClientContext context;
    const grpc::Status status = stub_->DeleteHead(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr("step 1 is open"));
  }
  request.set_force(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->DeleteHead(&context, request, &response).ok());
  }
  while (stream.Read().has_result()) {
  }
  writer.join();
  const grpc::Status status = stream.Finish();
  EXPECT_TRUE(status.error_code() == grpc::StatusCode::ABORTED ||
              status.error_code() == grpc::StatusCode::NOT_FOUND)
      << status.error_message();
  evaluation.Send(MakeChunk(0));
  EXPECT_EQ(evaluation.Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  // Its memory is free, its name too.
  CreateHead(Spec());
  ExpectAllSlotsFree();
}

TEST_F(StreamTest, StopLetsStreamsFinish) {
  TestStream stream(stub_.get());  // Of an evaluation; of steps, see drain_test.cc.
  ASSERT_TRUE(stream.Send(Open(0)));
  ASSERT_TRUE(stream.Read().has_opened());
  std::thread stop([&] { server_->Stop(absl::Now() + absl::Seconds(120)); });
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(stream.Send(MakeChunk(i)));
    ASSERT_TRUE(stream.Read().has_result());
  }
  ASSERT_TRUE(stream.SendEnd(20));
  ASSERT_TRUE(stream.Read().has_ended());
  EXPECT_TRUE(stream.Finish().ok());
  stop.join();
}

TEST_F(StreamTest, StopEndsStreamsAndPreparesAtItsDeadline) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  std::thread waiter([&] {
    v1::PrepareStepResponse prepared;
    EXPECT_FALSE(Prepare(1, &prepared, 100.0).ok());
  });
  server_->Stop(absl::Now());
  waiter.join();
  EXPECT_FALSE(stream.Read().has_result());
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED) << status.error_message();
}

TEST_F(StreamTest, PortInUseIsAnErrorThatNamesIt) {
  ServerConfig config = Config();
  config.listen = server_->address();
  const absl::StatusOr<std::unique_ptr<Server>> second = Server::Start(config);
  EXPECT_TRUE(absl::IsUnavailable(second.status()));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
}

}  // namespace
}  // namespace lmhead
