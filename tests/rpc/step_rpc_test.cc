// Steps over a real socket: what is counted, and how often.

#include <gmock/gmock.h>

#include <thread>

#include "tests/rpc/rpc_fixture.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

class StepRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    CreateHead(Spec());
  }
};

TEST_F(StepRpcTest, OneStepTrainsTheHead) {
  const std::vector<float> before = ReadWeight();
  const uint64_t incarnation = Begin(1);
  EXPECT_EQ(incarnation, server_->incarnation());
  FeedWorker(Open(1), 3);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_EQ(prepared.num_chunks(), 3u);
  EXPECT_EQ(prepared.sums().num_tokens(), 9);
  EXPECT_EQ(prepared.sums().num_valid_tokens(), 9);
  EXPECT_GT(prepared.sums().loss_sum(), 0.0);
  EXPECT_GT(prepared.grad_squared_norm(), 0.0);
  v1::CommitStepResponse committed;
  ASSERT_TRUE(Commit(1, &committed).ok());
  EXPECT_EQ(committed.num_updates(), 1u);
  EXPECT_FALSE(committed.repeated());
  EXPECT_DOUBLE_EQ(committed.grad_norm(), std::sqrt(prepared.grad_squared_norm()) * 0.25);
  EXPECT_NE(ReadWeight(), before);
}

TEST_F(StepRpcTest, RepeatedCallsGetTheSameAnswersAndCountOnce) {
  Begin(1);
  Begin(1);
  FeedWorker(Open(1), 2);
  v1::PrepareStepResponse first_prepare, second_prepare;
  ASSERT_TRUE(Prepare(1, &first_prepare).ok());
  ASSERT_TRUE(Prepare(1, &second_prepare).ok());
  EXPECT_EQ(first_prepare.SerializeAsString(), second_prepare.SerializeAsString());
  v1::CommitStepResponse first, second, other;
  ASSERT_TRUE(Commit(1, &first).ok());
  const std::vector<float> weight = ReadWeight();
  ASSERT_TRUE(Commit(1, &second).ok());
  EXPECT_TRUE(second.repeated());
  EXPECT_EQ(second.grad_norm(), first.grad_norm());
  EXPECT_EQ(Commit(1, &other, 0.75).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReadWeight(), weight);
  // Prepare of a committed step still answers.
  v1::PrepareStepResponse late;
  ASSERT_TRUE(Prepare(1, &late).ok());
  EXPECT_EQ(first_prepare.SerializeAsString(), late.SerializeAsString());
}

TEST_F(StepRpcTest, DuplicatesAreAnsweredAndNotCounted) {
  CreateHead(Spec("other"));
  for (const char* head : {"lm", "other"}) {
    Begin(1, 1, head);
    FeedWorker(Open(1, "w0", head), 4, head == std::string("lm") ? 1 : 3);
    v1::PrepareStepResponse prepared;
    ASSERT_TRUE(Prepare(1, &prepared, 5.0, head).ok());
    EXPECT_EQ(prepared.num_chunks(), 4u);
    EXPECT_EQ(prepared.sums().num_tokens(), 12);
    v1::CommitStepResponse committed;
    ASSERT_TRUE(Commit(1, &committed, 0.5, false, head).ok());
  }
  EXPECT_EQ(ReadWeight("lm"), ReadWeight("other"));  // To the bit.
}

TEST_F(StepRpcTest, DuplicateGetsTheSameAnswer) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  stream.Read();
  ASSERT_TRUE(stream.Send(MakeChunk(0)));
  const v1::ChunkResult first = stream.Read().result();
  ASSERT_TRUE(stream.Send(MakeChunk(0)));
  const v1::ChunkResult second = stream.Read().result();
  EXPECT_FALSE(first.duplicate());
  EXPECT_TRUE(second.duplicate());
  EXPECT_EQ(first.grad_hidden_states(), second.grad_hidden_states());
  EXPECT_EQ(first.sums().SerializeAsString(), second.sums().SerializeAsString());
}

TEST_F(StepRpcTest, SameIndexWithOtherContentsIsRefused) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  stream.Read();
  ASSERT_TRUE(stream.Send(MakeChunk(0)));
  stream.Read();
  stream.Send(MakeChunk(0, 3, /*seed=*/2));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("other contents"));
}

TEST_F(StepRpcTest, TwoWorkersAtOnce) {
  Begin(1, 2);
  std::thread other([&] { FeedWorker(Open(1, "w1"), 5); });
  FeedWorker(Open(1, "w0"), 7);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  other.join();
  EXPECT_EQ(prepared.num_chunks(), 12u);
  EXPECT_EQ(prepared.sums().num_tokens(), 36);
}

TEST_F(StepRpcTest, SeveralStreamsOfAWorkerShareItsChunks) {
  Begin(1);
  std::vector<std::unique_ptr<TestStream>> streams;
  for (uint32_t s = 0; s < 3; ++s) {
    v1::StreamOpen open = Open(1);
    open.set_stream_index(s);
    streams.push_back(std::make_unique<TestStream>(stub_.get()));
    ASSERT_TRUE(streams[s]->Send(open));
    ASSERT_TRUE(streams[s]->Read().has_opened());
  }
  for (uint64_t i = 0; i < 9; ++i) {
    ASSERT_TRUE(streams[i % 3]->Send(MakeChunk(i)));
    EXPECT_EQ(streams[i % 3]->Read().result().chunk_index(), i);
  }
  ASSERT_TRUE(streams[0]->SendEnd(9));
  EXPECT_EQ(streams[0]->Read().ended().num_chunks_counted(), 9u);
  ASSERT_TRUE(streams[1]->SendEnd(9));
  EXPECT_EQ(streams[1]->Read().ended().num_chunks_counted(), 9u);
  EXPECT_TRUE(streams[0]->Finish().ok());
  EXPECT_TRUE(streams[1]->Finish().ok());
  streams[2]->SendEnd(8);
  const grpc::Status status = streams[2]->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("stated before was 9"));
  v1::PrepareStepResponse prepared;
  EXPECT_TRUE(Prepare(1, &prepared).ok());
}

TEST_F(StepRpcTest, ResultsComeInOrderHoweverManyAreInFlight) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  constexpr uint64_t kChunks = 50;
  std::thread writer([&] {
    for (uint64_t i = 0; i < kChunks; ++i) ASSERT_TRUE(stream.Send(MakeChunk(i)));
    ASSERT_TRUE(stream.SendEnd(kChunks));
  });
  for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(stream.Read().result().chunk_index(), i);
  EXPECT_EQ(stream.Read().ended().num_chunks_counted(), kChunks);
  writer.join();
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(StepRpcTest, MissingChunksAndWorkersAreNamed) {
  Begin(1, 2);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  stream.Read();
  ASSERT_TRUE(stream.Send(MakeChunk(1)));
  stream.Read();
  ASSERT_TRUE(stream.SendEnd(4));
  EXPECT_EQ(stream.Read().ended().num_chunks_counted(), 1u);
  EXPECT_TRUE(stream.Finish().ok());
  v1::PrepareStepResponse prepared;
  const grpc::Status status = Prepare(1, &prepared, 0.01);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("not ended: w1"));
  EXPECT_THAT(status.error_message(), HasSubstr("chunks 0, 2-3 have not arrived"));
}

TEST_F(StepRpcTest, PrepareTellsTheReasonBeforeTheClientsDeadline) {
  Begin(1);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
  v1::PrepareStepRequest request;
  request.set_head("lm");
  request.set_step(1);
  request.set_incarnation(server_->incarnation());
  v1::PrepareStepResponse response;
  const grpc::Status status = stub_->PrepareStep(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("not ended: w0"));
}

TEST_F(StepRpcTest, NonfiniteRowsAreCountedAndCommitAsks) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  stream.Read();
  v1::Chunk chunk = MakeChunk(0);
  const float nan = std::nanf("");
  chunk.mutable_hidden_states()->replace(kHidden * sizeof(float), sizeof(float),
                                         reinterpret_cast<const char*>(&nan), sizeof(float));
  ASSERT_TRUE(stream.Send(chunk));
  const v1::ChunkResult result = stream.Read().result();
  EXPECT_EQ(result.sums().num_nonfinite_rows(), 1);
  EXPECT_EQ(result.sums().num_valid_tokens(), 2);
  ASSERT_TRUE(stream.SendEnd(1));
  EXPECT_TRUE(stream.Finish().ok());
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_EQ(prepared.sums().num_nonfinite_rows(), 1);
  v1::CommitStepResponse committed;
  const grpc::Status status = Commit(1, &committed);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("allow_nonfinite_rows"));
  EXPECT_TRUE(Commit(1, &committed, 0.5, /*allow_nonfinite_rows=*/true).ok());
  for (const float value : ReadWeight()) EXPECT_TRUE(std::isfinite(value));
}

TEST_F(StepRpcTest, AbortThrowsTheGradientAwayAndTellsTheOthers) {
  const std::vector<float> before = ReadWeight();
  Begin(1, 2);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  stream.Read();
  ASSERT_TRUE(stream.Send(MakeChunk(0)));
  stream.Read();
  std::thread waiter([&] {
    v1::PrepareStepResponse prepared;
    const grpc::Status status = Prepare(1, &prepared, 60.0);
    EXPECT_FALSE(status.ok());  // Whether it waits already or comes too late.
    EXPECT_THAT(status.error_message(), HasSubstr("was aborted: loss is NaN"));
  });
  ASSERT_TRUE(Abort(1, "loss is NaN").ok());
  waiter.join();
  EXPECT_FALSE(stream.Read().has_result());
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("loss is NaN"));
  EXPECT_TRUE(Abort(1, "again").ok());

  // The step begun again holds nothing of the first try.
  CreateHead(Spec("fresh"));
  for (const char* head : {"lm", "fresh"}) {
    Begin(1, 1, head);
    FeedWorker(Open(1, "w0", head), 2);
    v1::PrepareStepResponse prepared;
    ASSERT_TRUE(Prepare(1, &prepared, 5.0, head).ok());
    EXPECT_EQ(prepared.sums().num_tokens(), 6);
    v1::CommitStepResponse committed;
    ASSERT_TRUE(Commit(1, &committed, 0.5, false, head).ok());
  }
  EXPECT_EQ(ReadWeight("lm"), ReadWeight("fresh"));
}

TEST_F(StepRpcTest, CallsOfAnotherStepOrServerAreRefused) {
  Begin(3);
  v1::PrepareStepResponse prepared;
  EXPECT_THAT(Prepare(2, &prepared).error_message(), HasSubstr("step 3 is open"));
  v1::CommitStepResponse committed;
  EXPECT_EQ(Commit(4, &committed).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Commit(3, &committed).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Abort(2, "x").error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  grpc::ClientContext context;
  v1::BeginStepRequest request;
  request.set_head("lm");
  request.set_step(3);
  request.add_workers("w0");
  request.set_incarnation(server_->incarnation() + 1);
  v1::BeginStepResponse response;
  const grpc::Status status = stub_->BeginStep(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("restarted"));
}

TEST_F(StepRpcTest, EvaluationKeepsNoGradient) {
  Begin(1);
  v1::StreamOpen open = Open(0, "");
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(open));
  ASSERT_TRUE(stream.Read().has_opened());
  ASSERT_TRUE(stream.Send(MakeChunk(5)));
  const v1::ChunkResult result = stream.Read().result();
  EXPECT_EQ(result.grad_hidden_states().size(), 3u * kHidden * sizeof(float));
  ASSERT_TRUE(stream.SendEnd(1));
  EXPECT_EQ(stream.Read().ended().num_chunks_counted(), 1u);
  EXPECT_TRUE(stream.Finish().ok());
  FeedWorker(Open(1), 0);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_EQ(prepared.sums().num_tokens(), 0);
  EXPECT_EQ(prepared.grad_squared_norm(), 0.0);
}

TEST_F(StepRpcTest, FrozenHeadHasStepsWithoutUpdates) {
  v1::HeadSpec spec = Spec("frozen");
  spec.set_trainable(false);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
  CreateHead(spec);
  const std::vector<float> before = ReadWeight("frozen");
  Begin(1, 1, "frozen");
  FeedWorker(Open(1, "w0", "frozen"), 2);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared, 5.0, "frozen").ok());
  EXPECT_EQ(prepared.sums().num_tokens(), 6);
  v1::CommitStepResponse committed;
  ASSERT_TRUE(Commit(1, &committed, 0.5, false, "frozen").ok());
  EXPECT_EQ(committed.num_updates(), 0u);
  EXPECT_EQ(ReadWeight("frozen"), before);
}

TEST_F(StepRpcTest, EveryWantedOutputComesAndNoOther) {
  v1::StreamOpen open = Open(0, "");
  v1::OutputSpec* outputs = open.mutable_outputs();
  outputs->set_grad_hidden_states(false);
  outputs->set_token_loss(true);
  outputs->set_logprob(true);
  outputs->set_lse(true);
  outputs->set_argmax(true);
  outputs->set_entropy(true);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(open));
  EXPECT_EQ(stream.Read().opened().schedule(), v1::SCHEDULE_EVAL);
  ASSERT_TRUE(stream.Send(MakeChunk(0)));
  const v1::ChunkResult result = stream.Read().result();
  EXPECT_TRUE(result.grad_hidden_states().empty());
  ASSERT_EQ(result.token_loss_size(), 3);
  ASSERT_EQ(result.logprob_size(), 3);
  EXPECT_EQ(result.lse_size(), 3);
  EXPECT_EQ(result.entropy_size(), 3);
  EXPECT_EQ(result.argmax_size(), 3);
  double loss_sum = 0.0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FLOAT_EQ(result.token_loss(i), -result.logprob(i));
    loss_sum += result.token_loss(i);
  }
  EXPECT_NEAR(result.sums().loss_sum(), loss_sum, 1e-5);
}

}  // namespace
}  // namespace lmhead
