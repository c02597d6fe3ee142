// Bad input over a real socket: a clear error, nothing accumulated, and the server goes on.

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>

#include <functional>
#include <limits>

#include "tests/rpc/rpc_fixture.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

class BadInputTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    CreateHead(Spec());
    Begin(1);
  }

  // Nothing bad was counted, and a worker still gets through.
  void ExpectStepUntouched() {
    FeedWorker(Open(1), 2);
    v1::PrepareStepResponse prepared;
    const grpc::Status status = Prepare(1, &prepared);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(prepared.num_chunks(), 2u);
    EXPECT_EQ(prepared.sums().num_tokens(), 6);
  }
};

struct BadChunk {
  const char* name;
  std::function<void(v1::Chunk*)> spoil;
  grpc::StatusCode code;
  std::vector<std::string> words;  // Of the message.
  std::function<void(v1::StreamOpen*)> open = [](v1::StreamOpen*) {};
};

class BadChunkTest : public BadInputTest, public ::testing::WithParamInterface<BadChunk> {};

TEST_P(BadChunkTest, IsRefusedAndNothingIsCounted) {
  const BadChunk& bad = GetParam();
  v1::StreamOpen open = Open(1);
  bad.open(&open);
  v1::Chunk chunk = MakeChunk(0);
  bad.spoil(&chunk);
  const grpc::Status status = StatusOfChunk(open, chunk);
  EXPECT_EQ(status.error_code(), bad.code) << status.error_message();
  for (const std::string& word : bad.words) EXPECT_THAT(status.error_message(), HasSubstr(word));
  ExpectStepUntouched();
}

constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;

INSTANTIATE_TEST_SUITE_P(
    All, BadChunkTest,
    ::testing::Values(
        BadChunk{"Narrow",
                 [](v1::Chunk* c) { c->mutable_hidden_states()->resize(3 * 7 * 4); },
                 kInvalid,
                 {"hidden_states has 84 bytes", "wanted 96", "3 rows of 8 float32"}},
        BadChunk{"NoHidden",
                 [](v1::Chunk* c) { c->clear_hidden_states(); },
                 kInvalid,
                 {"hidden_states has 0 bytes"}},
        BadChunk{"ZeroRows", [](v1::Chunk* c) { *c = v1::Chunk(); }, kInvalid, {"num_tokens"}},
        BadChunk{"NegativeRows", [](v1::Chunk* c) { c->set_num_tokens(-3); }, kInvalid, {}},
        BadChunk{"TooManyRows",
                 [](v1::Chunk* c) {
                   c->set_num_tokens(kDefaultBatchTokensCpu + 1);
                   c->mutable_hidden_states()->resize(c->num_tokens() * kHidden * 4);
                   c->mutable_targets()->Resize(c->num_tokens(), 0);
                 },
                 kInvalid,
                 {"1025 rows", "wanted 1 to 1024"}},
        BadChunk{"HugeRowCount",
                 [](v1::Chunk* c) { c->set_num_tokens(std::numeric_limits<int64_t>::max()); },
                 kInvalid,
                 {}},
        BadChunk{"TargetAtVocabSize",
                 [](v1::Chunk* c) { c->set_targets(1, kVocab); },
                 kInvalid,
                 {"target of row 1 is 13", "wanted 0 to 12", "worker w0 in step 1 of head lm"}},
        BadChunk{"NegativeTarget",
                 [](v1::Chunk* c) { c->set_targets(2, -1); },
                 kInvalid,
                 {"target of row 2 is -1"}},
        BadChunk{"MissingTargets",
                 [](v1::Chunk* c) { c->clear_targets(); },
                 kInvalid,
                 {"0 targets for 3 rows"}},
        BadChunk{"FewTargets",
                 [](v1::Chunk* c) { c->mutable_targets()->RemoveLast(); },
                 kInvalid,
                 {"targets"}},
        BadChunk{"UnwantedWeights",
                 [](v1::Chunk* c) { c->mutable_token_weights()->Resize(3, 1.0f); },
                 kInvalid,
                 {"token_weights", "does not ask"}},
        BadChunk{"MissingWeights",
                 [](v1::Chunk*) {},
                 kInvalid,
                 {"token_weights has 0 entries"},
                 [](v1::StreamOpen* o) { o->mutable_recipe()->set_token_weights(true); }},
        BadChunk{"NanWeight",
                 [](v1::Chunk* c) {
                   c->mutable_token_weights()->Resize(3, 1.0f);
                   c->set_token_weights(2, std::nanf(""));
                 },
                 kInvalid,
                 {"token_weights of row 2 is nan"},
                 [](v1::StreamOpen* o) { o->mutable_recipe()->set_token_weights(true); }},
        BadChunk{"ZeroTemperature",
                 [](v1::Chunk* c) { c->mutable_token_temperature()->Resize(3, 0.0f); },
                 kInvalid,
                 {"token_temperature of row 0"},
                 [](v1::StreamOpen* o) { o->mutable_recipe()->set_per_token_temperature(true); }},
        BadChunk{"InfiniteGradScale",
                 [](v1::Chunk* c) { c->set_grad_scale(std::numeric_limits<float>::infinity()); },
                 kInvalid,
                 {"grad_scale is inf"}},
        BadChunk{"FieldOfAnotherObjective",
                 [](v1::Chunk* c) { c->mutable_advantage()->Resize(3, 1.0f); },
                 kInvalid,
                 {"carries advantage"}},
        BadChunk{"IndexTooLarge",
                 [](v1::Chunk* c) { c->set_chunk_index(kChunksPerWorkerMax); },
                 kInvalid,
                 {"chunk_index"}},
        BadChunk{"WrongChecksum",
                 [](v1::Chunk* c) { c->set_checksum(1); },
                 grpc::StatusCode::DATA_LOSS,
                 {"chunk 0"}}),
    [](const auto& info) { return info.param.name; });

struct BadOpen {
  const char* name;
  std::function<void(v1::StreamOpen*)> spoil;
  grpc::StatusCode code;
  std::string words;
};

void AskTeacher(v1::StreamOpen* open, const std::string& teacher) {
  v1::DistillationSpec& spec = *open->mutable_recipe()->mutable_distillation();
  spec.set_divergence(v1::DistillationSpec::DIVERGENCE_FORWARD_KL);
  spec.set_teacher_head(teacher);
  spec.set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
}

class BadOpenTest : public BadInputTest, public ::testing::WithParamInterface<BadOpen> {};

TEST_P(BadOpenTest, IsRefused) {
  v1::StreamOpen open = Open(1);
  GetParam().spoil(&open);
  const grpc::Status status = StatusOfOpen(open);
  EXPECT_EQ(status.error_code(), GetParam().code) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr(GetParam().words));
  ExpectStepUntouched();
}

INSTANTIATE_TEST_SUITE_P(
    All, BadOpenTest,
    ::testing::Values(
        BadOpen{"UnknownHead", [](v1::StreamOpen* o) { o->set_head("nobody"); },
                grpc::StatusCode::NOT_FOUND, "there is lm"},
        BadOpen{"NoDType", [](v1::StreamOpen* o) { o->clear_hidden_dtype(); }, kInvalid,
                "hidden_dtype"},
        BadOpen{"UnknownWorker", [](v1::StreamOpen* o) { o->set_worker("w9"); }, kInvalid, "w9"},
        BadOpen{"AnotherStep", [](v1::StreamOpen* o) { o->set_step(2); },
                grpc::StatusCode::FAILED_PRECONDITION, "step 1 is open"},
        BadOpen{"NoIncarnation", [](v1::StreamOpen* o) { o->set_incarnation(0); }, kInvalid,
                "incarnation"},
        BadOpen{"AnotherIncarnation",
                [](v1::StreamOpen* o) { o->set_incarnation(o->incarnation() + 1); },
                grpc::StatusCode::FAILED_PRECONDITION, "restarted"},
        BadOpen{"StreamIndexTooLarge",
                [](v1::StreamOpen* o) { o->set_stream_index(kStreamsPerWorkerMax); }, kInvalid,
                "stream_index"},
        BadOpen{"TeacherUnknown", [](v1::StreamOpen* o) { AskTeacher(o, "nobody"); },
                grpc::StatusCode::NOT_FOUND, "recipe.distillation.teacher_head"},
        BadOpen{"TeacherItself", [](v1::StreamOpen* o) { AskTeacher(o, "lm"); }, kInvalid,
                "the head itself"},
        BadOpen{"TeacherSideAlone",
                [](v1::StreamOpen* o) {
                  o->set_teacher_side(true);
                  o->clear_outputs();
                },
                kInvalid, "teacher_side"},
        BadOpen{"TopKBeyondTheHead", [](v1::StreamOpen* o) { o->mutable_outputs()->set_top_k(5); },
                kInvalid, "outputs.top_k is 5, but head lm has room for 0"},
        BadOpen{"TwoObjectives",
                [](v1::StreamOpen* o) {
                  AskTeacher(o, "nobody");
                  o->mutable_recipe()->mutable_policy()->set_kind(
                      v1::PolicySpec::KIND_COEFFICIENTS);
                },
                kInvalid, "recipe.distillation and recipe.policy are both set"},
        BadOpen{"BadSmoothing",
                [](v1::StreamOpen* o) { o->mutable_recipe()->set_label_smoothing(2.0f); }, kInvalid,
                "label_smoothing"}),
    [](const auto& info) { return info.param.name; });

// --- The protocol of the stream ---

TEST_F(BadInputTest, ChunkBeforeOpen) {
  TestStream stream(stub_.get());
  stream.Send(MakeChunk(0));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), kInvalid);
  EXPECT_THAT(status.error_message(), HasSubstr("first message of a stream must be `open`"));
  ExpectStepUntouched();
}

TEST_F(BadInputTest, SecondOpen) {
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  stream.Send(Open(1));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), kInvalid);
  EXPECT_THAT(status.error_message(), HasSubstr("second `open`"));
  ExpectStepUntouched();
}

TEST_F(BadInputTest, MessageAfterEnd) {
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  ASSERT_TRUE(stream.SendEnd(2));
  stream.Send(MakeChunk(0));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), kInvalid);
  EXPECT_THAT(status.error_message(), HasSubstr("after `end`"));
  ExpectStepUntouched();
}

TEST_F(BadInputTest, NothingAtAll) {
  TestStream stream(stub_.get());
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("before it sent `open`"));
}

TEST_F(BadInputTest, ClosedWithoutEndKeepsWhatWasSent) {
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  ASSERT_TRUE(stream.Send(MakeChunk(0)));
  stream.HalfClose();
  EXPECT_TRUE(stream.Read().has_result());
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("without `end`"));
  // The worker comes again: chunk 0 is a duplicate now.
  TestStream again(stub_.get());
  ASSERT_TRUE(again.Send(Open(1)));
  ASSERT_TRUE(again.Read().has_opened());
  ASSERT_TRUE(again.Send(MakeChunk(0)));
  EXPECT_TRUE(again.Read().result().duplicate());
  ASSERT_TRUE(again.SendEnd(1));
  EXPECT_TRUE(again.Finish().ok());
}

TEST_F(BadInputTest, GoodChunksBeforeABadOneAreAnswered) {
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  v1::Chunk bad = MakeChunk(1);
  bad.set_targets(0, kVocab);
  stream.Send(MakeChunk(0));
  stream.Send(bad);
  EXPECT_EQ(stream.Read().result().sums().num_tokens(), 3);
  EXPECT_FALSE(stream.Read().has_result());
  EXPECT_EQ(stream.Finish().error_code(), kInvalid);
}

// Bytes that are no message, on a stream that is open or not.
TEST_F(BadInputTest, GarbageBytes) {
  v1::ComputeLossRequest open;
  *open.mutable_open() = Open(1);
  const std::string open_bytes = open.SerializeAsString();
  for (const std::string& garbage : {std::string("\xff\xff\xff\xff\xff"), std::string(1000, '\x7a'),
                                     std::string(64, '\0'), std::string("\x7a\xff\xff\xff\x7f")}) {
    for (const bool opened : {false, true}) {
      grpc::GenericStub generic(MakeChannel());
      grpc::ClientContext context;
      grpc::CompletionQueue queue;
      void* tag = nullptr;
      bool ok = false;
      auto call = generic.PrepareCall(&context, "/lmhead.v1.LmHeadService/ComputeLoss", &queue);
      call->StartCall(nullptr);
      queue.Next(&tag, &ok);
      for (const std::string& bytes : opened ? std::vector<std::string>{open_bytes, garbage}
                                             : std::vector<std::string>{garbage}) {
        const grpc::Slice slice(bytes);
        call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
        queue.Next(&tag, &ok);
      }
      call->WritesDone(nullptr);
      queue.Next(&tag, &ok);
      grpc::Status status;
      do {
        grpc::ByteBuffer answer;
        call->Read(&answer, nullptr);
        queue.Next(&tag, &ok);
      } while (ok);
      call->Finish(&status, nullptr);
      queue.Next(&tag, &ok);
      EXPECT_EQ(status.error_code(), kInvalid) << status.error_message();
    }
  }
  ExpectStepUntouched();
}

TEST_F(BadInputTest, MessageOverTheLimit) {
  v1::Chunk chunk = MakeChunk(0);
  chunk.mutable_hidden_states()->resize(64 * kMiB);
  const grpc::Status status = StatusOfChunk(Open(1), chunk);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  ExpectStepUntouched();
}

// Larger than a slot, but within what gRPC takes.
TEST_F(BadInputTest, ChunkOverTheLimit) {
  v1::Chunk chunk = MakeChunk(0);
  chunk.mutable_hidden_states()->resize(7 * kMiB);
  const grpc::Status status = StatusOfChunk(Open(1), chunk);
  EXPECT_EQ(status.error_code(), kInvalid) << status.error_message();
  ExpectStepUntouched();
}

TEST_F(BadInputTest, StreamOpenedTwice) {
  TestStream first(stub_.get());
  ASSERT_TRUE(first.Send(Open(1)));
  ASSERT_TRUE(first.Read().has_opened());
  const grpc::Status status = StatusOfOpen(Open(1));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(status.error_message(), HasSubstr("stream 0 of worker w0"));
  // The first one is not disturbed.
  ASSERT_TRUE(first.Send(MakeChunk(0)));
  EXPECT_TRUE(first.Read().has_result());
  ASSERT_TRUE(first.SendEnd(1));
  EXPECT_TRUE(first.Finish().ok());
}

TEST_F(BadInputTest, ChunkAfterPrepare) {
  FeedWorker(Open(1), 2);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  const grpc::Status status = StatusOfChunk(Open(1), MakeChunk(1));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("step 1 of head lm is prepared"));
  // The end, however, may be repeated by a worker that has not seen its answer.
  TestStream again(stub_.get());
  ASSERT_TRUE(again.Send(Open(1)));
  ASSERT_TRUE(again.Read().has_opened());
  ASSERT_TRUE(again.SendEnd(2));
  EXPECT_EQ(again.Read().ended().num_chunks_counted(), 2u);
  EXPECT_TRUE(again.Finish().ok());
}

// --- Control calls ---

TEST_F(BadInputTest, HeadThatDoesNotFit) {
  v1::HeadSpec spec = Spec("huge");
  spec.set_vocab_size(1 << 20);
  spec.set_hidden_size(1024);
  grpc::ClientContext context;
  v1::CreateHeadRequest request;
  *request.mutable_spec() = spec;
  v1::CreateHeadResponse response;
  const grpc::Status status = stub_->CreateHead(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("grad_weight"));
  ExpectStepUntouched();
}

TEST_F(BadInputTest, CommitWithBadNumbers) {
  FeedWorker(Open(1), 1);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  v1::CommitStepResponse committed;
  for (const double rate : {-0.1, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const grpc::Status status = Commit(1, &committed, rate);
    EXPECT_EQ(status.error_code(), kInvalid);
    EXPECT_THAT(status.error_message(), HasSubstr("learning_rate"));
  }
  EXPECT_TRUE(Commit(1, &committed).ok());
}

TEST_F(BadInputTest, BeginStepWithBadWorkers) {
  ASSERT_TRUE(Abort(1, "x").ok());
  for (const std::vector<std::string>& workers :
       {std::vector<std::string>{}, {"a", "a"}, {"with space"}, {""}, {std::string(200, 'a')}}) {
    grpc::ClientContext context;
    v1::BeginStepRequest request;
    request.set_head("lm");
    request.set_step(1);
    *request.mutable_workers() = {workers.begin(), workers.end()};
    v1::BeginStepResponse response;
    EXPECT_EQ(stub_->BeginStep(&context, request, &response).error_code(), kInvalid);
  }
}

}  // namespace
}  // namespace lmhead
