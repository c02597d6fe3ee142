// Checkpoints and gradients computed elsewhere, over a real socket and across a restart.

#include <gmock/gmock.h>

#include "tests/rpc/rpc_fixture.h"
#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

class CheckpointRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    Restart(WithCheckpoints(/*restore=*/false));
    CreateHead(Spec());
  }
  void TearDown() override { server_.reset(); }  // Before its folder goes.

  ServerConfig WithCheckpoints(bool restore) const {
    ServerConfig config = Config();
    config.checkpoint_dir = root_.path();
    config.restore = restore;
    return config;
  }

  void TrainStep(uint64_t step) {
    Begin(step);
    FeedWorker(Open(step), 2);
    v1::PrepareStepResponse prepared;
    ASSERT_TRUE(Prepare(step, &prepared).ok());
    v1::CommitStepResponse committed;
    ASSERT_TRUE(Commit(step, &committed).ok());
  }

  grpc::Status Save(const std::string& name, v1::SaveCheckpointResponse* response) {
    grpc::ClientContext context;
    v1::SaveCheckpointRequest request;
    request.set_head("lm");
    request.set_name(name);
    return stub_->SaveCheckpoint(&context, request, response);
  }

  grpc::Status Restore(const std::string& name, v1::RestoreCheckpointResponse* response) {
    grpc::ClientContext context;
    v1::RestoreCheckpointRequest request;
    request.set_head("lm");
    request.set_name(name);
    return stub_->RestoreCheckpoint(&context, request, response);
  }

  const TemporaryFolder root_;
};

TEST_F(CheckpointRpcTest, ARestartedServerGoesOnWhereTheCheckpointWas) {
  TrainStep(1);
  v1::SaveCheckpointResponse saved;
  ASSERT_TRUE(Save("", &saved).ok());
  EXPECT_EQ(saved.step(), 1);
  EXPECT_GT(saved.num_bytes(), 0);
  TrainStep(2);
  const std::vector<float> weight = ReadWeight();

  // Stopped in order: what was trained since is saved as well.
  server_->Stop(absl::Now());
  Restart(WithCheckpoints(/*restore=*/true));
  EXPECT_EQ(ReadWeight(), weight);
  TrainStep(3);
  v1::RestoreCheckpointResponse restored;
  ASSERT_TRUE(Restore(saved.name(), &restored).ok());
  EXPECT_EQ(restored.head().last_committed_step(), 1);
  TrainStep(2);
  EXPECT_EQ(ReadWeight(), weight);
}

TEST_F(CheckpointRpcTest, ADeletedHeadComesBack) {
  TrainStep(1);
  const std::vector<float> weight = ReadWeight();
  v1::SaveCheckpointResponse saved;
  ASSERT_TRUE(Save("kept", &saved).ok());
  grpc::ClientContext context;
  v1::DeleteHeadRequest request;
  request.set_head("lm");
  v1::DeleteHeadResponse deleted;
  ASSERT_TRUE(stub_->DeleteHead(&context, request, &deleted).ok());
  v1::RestoreCheckpointResponse restored;
  ASSERT_TRUE(Restore("kept", &restored).ok());
  EXPECT_EQ(ReadWeight(), weight);
}

TEST_F(CheckpointRpcTest, RefusalsSayWhatToDo) {
  Begin(1);
  v1::SaveCheckpointResponse saved;
  ASSERT_TRUE(Save("zero", &saved).ok());  // The state before the step that is open.
  EXPECT_EQ(saved.step(), 0);
  v1::RestoreCheckpointResponse restored;
  grpc::Status status = Restore("zero", &restored);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("step 1 is open"));
  status = Restore("other", &restored);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("complete ones: zero"));
  EXPECT_EQ(Save("../x", &saved).error_code(), grpc::StatusCode::INVALID_ARGUMENT);

  Restart(Config());
  CreateHead(Spec());
  status = Save("a", &saved);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("--checkpoint_dir"));
}

class GradientRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    CreateHead(Spec());
    incarnation_ = Begin(1);
  }

  v1::AccumulateWeightGradientRequest Piece(uint64_t index, const std::vector<float>& values) {
    v1::AccumulateWeightGradientRequest request;
    request.set_head("lm");
    request.set_step(1);
    request.set_incarnation(incarnation_);
    request.set_worker("w0");
    request.set_index(index);
    request.set_rows(values.data(), values.size() * sizeof(float));
    return request;
  }

  grpc::Status Add(const v1::AccumulateWeightGradientRequest& request, bool* duplicate = nullptr) {
    grpc::ClientContext context;
    v1::AccumulateWeightGradientResponse response;
    grpc::Status status = stub_->AccumulateWeightGradient(&context, request, &response);
    if (duplicate != nullptr) *duplicate = response.duplicate();
    return status;
  }

  std::vector<float> GradWeight() {
    grpc::ClientContext context;
    v1::ReadWeightsRequest request;
    request.set_head("lm");
    request.set_tensor(v1::TENSOR_KIND_GRAD_WEIGHT);
    auto reader = stub_->ReadWeights(&context, request);
    std::vector<float> values;
    for (v1::ReadWeightsResponse message; reader->Read(&message);) {
      const auto* first = reinterpret_cast<const float*>(message.rows().data().data());
      values.insert(values.end(), first, first + message.rows().data().size() / sizeof(float));
    }
    EXPECT_TRUE(reader->Finish().ok());
    return values;
  }

  uint64_t incarnation_ = 0;
};

TEST_F(GradientRpcTest, RowsAreAddedOnce) {
  const std::vector<float> two_rows(2 * kHidden, 0.5f);
  bool duplicate = true;
  ASSERT_TRUE(Add(Piece(0, two_rows), &duplicate).ok());  // Rows 0 and 1.
  EXPECT_FALSE(duplicate);
  auto sparse = Piece(1, two_rows);
  sparse.add_row_ids(kVocab - 1);
  sparse.add_row_ids(0);
  ASSERT_TRUE(Add(sparse).ok());
  ASSERT_TRUE(Add(sparse, &duplicate).ok());
  EXPECT_TRUE(duplicate);
  const std::vector<float> grad = GradWeight();
  for (int64_t row = 0; row < kVocab; ++row) {
    const float wanted = row == 0 ? 1.0f : row == 1 || row == kVocab - 1 ? 0.5f : 0.0f;
    for (int64_t col = 0; col < kHidden; ++col) EXPECT_EQ(grad[row * kHidden + col], wanted) << row;
  }
  // A duplicate is known as one also when the step takes nothing new any more.
  FeedWorker(Open(1), 1);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  ASSERT_TRUE(Add(sparse, &duplicate).ok());
  EXPECT_TRUE(duplicate);
  EXPECT_EQ(Add(Piece(2, two_rows)).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(GradientRpcTest, BadPiecesAreRefusedAndNothingIsAdded) {
  const std::vector<float> row(kHidden, 1.0f);
  ASSERT_TRUE(Add(Piece(0, row)).ok());
  std::vector<std::pair<v1::AccumulateWeightGradientRequest, std::string>> bad;
  bad.emplace_back(Piece(0, std::vector<float>(kHidden, 2.0f)), "other contents");
  bad.emplace_back(Piece(1, std::vector<float>(kHidden - 1)), "wanted a multiple of");
  bad.emplace_back(Piece(1, {}), "rows has 0 bytes");
  bad.emplace_back(Piece(1, std::vector<float>((kVocab + 1) * kHidden)), "within the");
  bad.emplace_back(Piece(1, row), "wanted them within");
  bad.back().first.set_row_start(kVocab);
  bad.emplace_back(Piece(1, row), "wanted them within");
  bad.back().first.set_row_start(std::numeric_limits<int64_t>::max());
  bad.emplace_back(Piece(1, row), "row id 13");
  bad.back().first.add_row_ids(kVocab);
  bad.emplace_back(Piece(1, row), "row id -1");
  bad.back().first.add_row_ids(-1);
  bad.emplace_back(Piece(1, row), "2 row_ids for 1");
  bad.back().first.add_row_ids(1);
  bad.back().first.add_row_ids(2);
  bad.emplace_back(Piece(1, std::vector<float>(2 * kHidden)), "twice");
  bad.back().first.add_row_ids(1);
  bad.back().first.add_row_ids(1);
  bad.emplace_back(Piece(1, std::vector<float>(kHidden, NAN)), "NaN");
  bad.emplace_back(Piece(1, row), "worker");
  bad.back().first.set_worker("stranger");
  const std::vector<float> before = GradWeight();
  for (const auto& [request, what] : bad) {
    const grpc::Status status = Add(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << what;
    EXPECT_THAT(status.error_message(), HasSubstr(what));
  }
  EXPECT_EQ(GradWeight(), before);
}

}  // namespace
}  // namespace lmhead
