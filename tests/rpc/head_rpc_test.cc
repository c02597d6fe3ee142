// Heads, weights and information, over a real socket.

#include <gmock/gmock.h>

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/wire/convert.h"
#include "server/memory/memory_plan.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

class HeadRpcTest : public RpcTest {
 protected:
  grpc::Status Create(const v1::HeadSpec& spec, v1::CreateHeadResponse* response) {
    grpc::ClientContext context;
    v1::CreateHeadRequest request;
    *request.mutable_spec() = spec;
    return stub_->CreateHead(&context, request, response);
  }

  // Loads float32 rows of `value` in one message.
  grpc::Status Load(int64_t row_start, int64_t num_rows, float value,
                    v1::LoadWeightsResponse* response, int64_t num_values = -1,
                    v1::TensorKind tensor = v1::TENSOR_KIND_WEIGHT) {
    grpc::ClientContext context;
    const auto writer = stub_->LoadWeights(&context, response);
    v1::LoadWeightsRequest request;
    request.set_head("lm");
    request.set_tensor(tensor);
    request.set_dtype(v1::DTYPE_FLOAT32);
    request.mutable_rows()->set_row_start(row_start);
    request.mutable_rows()->set_num_rows(num_rows);
    const std::vector<float> data(num_values < 0 ? num_rows * kHidden : num_values, value);
    request.mutable_rows()->set_data(data.data(), data.size() * sizeof(float));
    writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  }

  grpc::Status Read(v1::TensorKind tensor, int64_t row_start, int64_t num_rows) {
    grpc::ClientContext context;
    v1::ReadWeightsRequest request;
    request.set_head("lm");
    request.set_tensor(tensor);
    request.set_row_start(row_start);
    request.set_num_rows(num_rows);
    const auto reader = stub_->ReadWeights(&context, request);
    v1::ReadWeightsResponse message;
    while (reader->Read(&message)) {
    }
    return reader->Finish();
  }
};

TEST_F(HeadRpcTest, CreateIsIdempotentForTheSameSpecification) {
  v1::CreateHeadResponse first, second, third;
  ASSERT_TRUE(Create(Spec(), &first).ok());
  ASSERT_TRUE(Create(Spec(), &second).ok());
  EXPECT_EQ(first.SerializeAsString(), second.SerializeAsString());
  EXPECT_TRUE(first.head().weights_loaded());
  EXPECT_EQ(first.head().memory_plan().categories_size(), 8);
  // What the server answered is a specification too.
  ASSERT_TRUE(Create(first.head().spec(), &third).ok());
  v1::HeadSpec other = Spec();
  other.set_vocab_size(kVocab + 1);
  const grpc::Status status = Create(other, &third);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(status.error_message(), HasSubstr("another vocab_size"));
}

TEST_F(HeadRpcTest, BadSpecificationNamesTheField) {
  v1::HeadSpec spec = Spec();
  spec.set_hidden_size(0);
  v1::CreateHeadResponse response;
  const grpc::Status status = Create(spec, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("hidden_size"));
}

TEST_F(HeadRpcTest, RowsMustBeThereBeforeTheFirstChunk) {
  v1::HeadSpec spec = Spec();
  spec.clear_weight_init();
  CreateHead(spec);
  v1::LoadWeightsResponse loaded;
  ASSERT_TRUE(Load(0, 5, 1.0f, &loaded).ok());
  ASSERT_TRUE(Load(6, kVocab - 6, 2.0f, &loaded).ok());
  EXPECT_FALSE(loaded.weights_loaded());
  const grpc::Status status = StatusOfOpen(Open(0, ""));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("row 5 of 13"));
  ASSERT_TRUE(Load(4, 2, 3.0f, &loaded).ok());
  EXPECT_TRUE(loaded.weights_loaded());
  EXPECT_EQ(loaded.num_rows(), 2);
  const std::vector<float> weight = ReadWeight();
  ASSERT_EQ(weight.size(), static_cast<size_t>(kVocab * kHidden));
  EXPECT_EQ(weight[3 * kHidden], 1.0f);
  EXPECT_EQ(weight[4 * kHidden], 3.0f);
  EXPECT_EQ(weight[6 * kHidden], 2.0f);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(0, "")));
  EXPECT_TRUE(stream.Read().has_opened());
}

TEST_F(HeadRpcTest, BadRowsAreRefused) {
  CreateHead(Spec());
  const std::vector<float> before = ReadWeight();
  v1::LoadWeightsResponse loaded;
  for (const auto& [start, rows] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {kVocab, 1}, {0, kVocab + 1}, {0, 0}, {INT64_MAX, 1}, {5, INT64_MAX}}) {
    const grpc::Status status = Load(start, rows, 1.0f, &loaded, kHidden);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  const grpc::Status status = Load(0, 2, 1.0f, &loaded, kHidden);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("have 32 bytes, wanted 64"));
  EXPECT_EQ(Load(0, 1, 1.0f, &loaded, 1, v1::TENSOR_KIND_BIAS).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Load(0, 1, 1.0f, &loaded, -1, v1::TENSOR_KIND_GRAD_WEIGHT).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReadWeight(), before);
}

TEST_F(HeadRpcTest, WeightsAreNotLoadedWhileAStepIsOpen) {
  CreateHead(Spec());
  Begin(1);
  v1::LoadWeightsResponse loaded;
  const grpc::Status status = Load(0, 1, 1.0f, &loaded);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("step 1 is open"));
}

TEST_F(HeadRpcTest, GradientsAreReadOfAnOpenStepOnly) {
  CreateHead(Spec());
  EXPECT_EQ(Read(v1::TENSOR_KIND_GRAD_WEIGHT, 0, 0).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  Begin(1);
  EXPECT_TRUE(Read(v1::TENSOR_KIND_GRAD_WEIGHT, 0, 0).ok());
  EXPECT_EQ(Read(v1::TENSOR_KIND_BIAS, 0, 0).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Read(v1::TENSOR_KIND_UNSPECIFIED, 0, 0).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(HeadRpcTest, ReadRangesAreChecked) {
  CreateHead(Spec());
  EXPECT_TRUE(Read(v1::TENSOR_KIND_WEIGHT, kVocab - 1, 1).ok());
  for (const auto& [start, rows] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {kVocab, 0}, {0, kVocab + 1}, {0, -1}, {INT64_MIN, 0}, {1, INT64_MAX}}) {
    EXPECT_EQ(Read(v1::TENSOR_KIND_WEIGHT, start, rows).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
}

TEST_F(HeadRpcTest, InfoTellsHeadsLimitsAndMemory) {
  CreateHead(Spec("b"));
  CreateHead(Spec("a"));
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.version(), kVersion);
  EXPECT_EQ(info.incarnation(), server_->incarnation());
  EXPECT_EQ(info.backend(), TestBackend());
  EXPECT_EQ(info.limits().num_staging_slots(), 4);
  EXPECT_EQ(info.limits().max_streams(), 4);
  ASSERT_EQ(info.heads_size(), 2);
  EXPECT_EQ(info.heads(0).spec().name(), "a");
  ASSERT_EQ(info.memory_size(), 1);
  const v1::MemoryReport& memory = info.memory(0);
  EXPECT_EQ(memory.limit_bytes(), kMemoryLimitBytes);
  EXPECT_EQ(memory.reserved_bytes(),
            info.heads(0).memory_plan().total_bytes() + info.heads(1).memory_plan().total_bytes());
  EXPECT_EQ(memory.live_bytes(), memory.reserved_bytes());
  EXPECT_GT(memory.device_used_bytes(), 0);
}

TEST_F(HeadRpcTest, DeleteGivesTheMemoryBack) {
  CreateHead(Spec());
  v1::DeleteHeadRequest request;
  v1::DeleteHeadResponse deleted;
  request.set_head("lm");
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->DeleteHead(&context, request, &deleted).ok());
  }
  {
    grpc::ClientContext context;
    EXPECT_EQ(stub_->DeleteHead(&context, request, &deleted).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.heads_size(), 0);
  EXPECT_EQ(info.memory(0).live_bytes(), 0);
  EXPECT_EQ(info.memory(0).reserved_bytes(), 0);
}

// A server of two replicas, each of two ranks.
class ReplicatedHeadRpcTest : public HeadRpcTest {
 protected:
  void SetUp() override {
    ServerConfig config = Config();
    config.ranks = {.num_ranks = 4, .num_replicas = 2};
    Restart(config);
  }

  grpc::Status Estimate(int32_t num_ranks, int32_t num_replicas,
                        v1::EstimateMemoryResponse* response) {
    grpc::ClientContext context;
    v1::EstimateMemoryRequest request;
    *request.mutable_spec() = Spec();
    request.set_num_ranks(num_ranks);
    request.set_num_replicas(num_replicas);
    return stub_->EstimateMemory(&context, request, response);
  }
};

TEST_F(ReplicatedHeadRpcTest, InfoTellsTheReplicaOfEveryRank) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  ASSERT_EQ(info.devices_size(), 4);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(info.devices(rank).rank(), rank);
    EXPECT_EQ(info.devices(rank).replica(), rank / 2);
  }
}

// What is not stated is the server's, so that an estimate is what the head will have.
TEST_F(ReplicatedHeadRpcTest, EstimateIsForTheServersRanksUnlessOthersAreStated) {
  v1::EstimateMemoryResponse response;
  ASSERT_TRUE(Estimate(0, 0, &response).ok());
  EXPECT_EQ(response.num_ranks(), 4);
  EXPECT_EQ(response.num_replicas(), 2);
  v1::HeadSpec spec = Spec();
  spec.set_schedule(response.chosen_schedule());
  v1::CreateHeadResponse created;
  ASSERT_TRUE(Create(spec, &created).ok());
  EXPECT_EQ(response.plans(0).SerializeAsString(),
            created.head().memory_plan().SerializeAsString());

  HeadSpec domain = *HeadSpecFromProto(Spec());
  for (const auto& [ranks, replicas, ranks_a_replica, all_replicas] :
       std::vector<std::array<int32_t, 4>>{{4, 2, 2, 2},
                                           {0, 4, 1, 4},
                                           {0, 1, 4, 1},
                                           {6, 0, 3, 2},
                                           {1, 1, 1, 1},
                                           {9, 3, 3, 3},
                                           {1024, 1024, 1, 1024}}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", replicas, " replicas"));
    const grpc::Status status = Estimate(ranks, replicas, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.num_ranks(), ranks_a_replica * all_replicas);
    EXPECT_EQ(response.num_replicas(), all_replicas);
    ASSERT_EQ(response.plans_size(), 2);
    for (const v1::MemoryPlan& plan : response.plans()) {
      const MemoryPlan want = PlanForSchedule(
          domain, static_cast<Schedule>(plan.schedule()),
          {.backend = TestBackend() == "cuda" ? BackendKind::kCuda : BackendKind::kCpu,
           .num_ranks = ranks_a_replica,
           .num_replicas = all_replicas,
           .batch_tokens = Config().batch_tokens});
      EXPECT_EQ(plan.total_bytes(), want.TotalBytes());
      for (const v1::CategoryBytes& category : plan.categories()) {
        EXPECT_EQ(category.bytes(), want.bytes[category.category() - 1]);
      }
    }
  }
}

TEST_F(ReplicatedHeadRpcTest, EstimateNamesRanksAndReplicasThatDoNotFit) {
  struct Bad {
    int32_t num_ranks, num_replicas;
    const char* words;
  };
  for (const Bad& bad :
       {Bad{3, 2, "num_replicas is 2, wanted a divisor of num_ranks, 3"},
        Bad{0, 3, "num_replicas is 3, wanted a divisor of num_ranks, 4 (the server's)"},
        Bad{3, 0, "num_replicas is 2 (the server's), wanted a divisor of num_ranks, 3"},
        Bad{2, 4, "num_replicas is 4, wanted a divisor of num_ranks, 2"},
        Bad{-1, 0, "num_ranks is -1, wanted 1 to 1024, or 0 for the server's"},
        Bad{1025, 1, "num_ranks is 1025, wanted 1 to 1024"},
        Bad{0, -2, "num_replicas is -2, wanted 1 to 1024"},
        Bad{INT32_MAX, INT32_MAX, "num_ranks is 2147483647"},
        Bad{4, INT32_MIN, "num_replicas is -2147483648"}}) {
    v1::EstimateMemoryResponse response;
    const grpc::Status status = Estimate(bad.num_ranks, bad.num_replicas, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << bad.words;
    EXPECT_THAT(status.error_message(), HasSubstr(bad.words));
  }
}

TEST_F(HeadRpcTest, EstimateNeedsNoHeadAndAllocatesNothing) {
  v1::EstimateMemoryRequest request;
  *request.mutable_spec() = Spec();
  request.mutable_spec()->clear_name();
  request.mutable_spec()->set_vocab_size(131072);
  request.mutable_spec()->set_hidden_size(4096);
  request.mutable_spec()->set_weight_dtype(v1::DTYPE_BFLOAT16);
  request.set_num_sequences(1);
  request.set_sequence_length(131072);
  v1::EstimateMemoryResponse response;
  {
    grpc::ClientContext context;
    const grpc::Status status = stub_->EstimateMemory(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(response.plans_size(), 2);
  EXPECT_EQ(response.chosen_schedule(), v1::SCHEDULE_UNSPECIFIED);  // None fits the limit.
  EXPECT_EQ(response.dense().logits_bytes(), int64_t{32} << 30);
  EXPECT_EQ(response.available_bytes(), kMemoryLimitBytes);
  request.set_sequence_length(INT64_MAX);
  request.set_num_sequences(3);
  grpc::ClientContext context;
  EXPECT_EQ(stub_->EstimateMemory(&context, request, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace lmhead
