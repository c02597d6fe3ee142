// Whole steps through a real server process, compared with the oracle's own training loop.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/conformance/tolerances.h"
#include "tests/e2e/service_fixture.h"

namespace lmhead::e2e {
namespace {

constexpr int kNumWorkers = 2;
constexpr uint64_t kNumSteps = 10;
constexpr int64_t kTokensPerWorker = 120;  // Not a multiple of a chunk's rows.

struct TrainingCase {
  DType dtype;
  v1::Schedule schedule;
  v1::OptimizerKind optimizer;
  int num_connections;
};

// Largest relative errors: of a step's loss sum, of its grad_hidden_states, and of the whole
// movement of the weight after all steps.
struct Bounds {
  double loss, grad, movement;
};
Bounds BoundsOf(DType dtype, bool narrow_logits) {
  // The backend computes in float32; only the answer is rounded to bfloat16, whose unit is 2^-9.
  Bounds bounds = {1e-6, dtype == DType::kFloat32 ? 1e-5 : 0x1p-9, 1e-4};
  // Errors of a sum cancel by chance, in the yardstick too: the table has what is allowed.
  if (narrow_logits) bounds.loss = kBFloat16Logits.token_outputs;
  return bounds;
}

std::string CaseName(const ::testing::TestParamInfo<TrainingCase>& info) {
  const TrainingCase& c = info.param;
  return absl::StrCat(std::string(DTypeName(c.dtype)), "_",
                      std::string(ScheduleName(static_cast<Schedule>(c.schedule))), "_",
                      c.optimizer == v1::OPTIMIZER_KIND_SGD ? "sgd" : "adamw", "_",
                      c.num_connections, "connections");
}

class TrainingTest : public ::testing::TestWithParam<TrainingCase> {};

std::vector<Rows> MakeStepRows(const HeadShape& shape, uint64_t step) {
  std::vector<Rows> rows;
  for (int i = 0; i < kNumWorkers; ++i) {
    rows.push_back(MakeRows(shape, kTokensPerWorker, step, i));
  }
  return rows;
}

std::vector<double> MovementOf(const std::vector<double>& weight, const HeadShape& shape) {
  const std::vector<float> initial = InitialWeight(shape);
  std::vector<double> movement(weight);
  for (size_t i = 0; i < movement.size(); ++i) movement[i] -= initial[i];
  return movement;
}

std::vector<float> MovementOf(const std::vector<float>& weight, const HeadShape& shape) {
  const std::vector<float> initial = InitialWeight(shape);
  std::vector<float> movement(weight);
  for (size_t i = 0; i < movement.size(); ++i) movement[i] -= initial[i];
  return movement;
}

std::vector<float> GradOfAllWorkers(const std::vector<Rows>& rows) {
  std::vector<float> grad;
  for (const Rows& worker : rows) {
    grad.insert(grad.end(), worker.grad_hidden_states.begin(), worker.grad_hidden_states.end());
  }
  return grad;
}

std::vector<float> Narrowed(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

TEST_P(TrainingTest, TwoWorkersTrainAsTheOracleDoes) {
  const TrainingCase& c = GetParam();
  const HeadShape shape{.dtype = c.dtype, .schedule = c.schedule, .optimizer = c.optimizer};
  const bool narrow_logits = HoldsBFloat16Logits(shape);
  const Bounds bounds = BoundsOf(c.dtype, narrow_logits);
  auto server = StartServer();
  auto control = ConnectTo(server->address());
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Client*> workers;
  for (int i = 0; i < kNumWorkers; ++i) {
    clients.push_back(ConnectTo(server->address()));
    workers.push_back(clients.back().get());
  }
  LMHEAD_ASSERT_OK(CreateHead(control.get(), shape));

  OracleTrainer oracle(shape);
  OracleTrainer plain(shape, narrow_logits ? DType::kBFloat16 : DType::kFloat32);
  const auto allowed = [&](double bound, double plain_error) {
    return narrow_logits ? bound + 2.0 * plain_error : bound;
  };
  for (uint64_t step = 1; step <= kNumSteps; ++step) {
    std::vector<Rows> rows = MakeStepRows(shape, step);
    auto outcome =
        RunStep(control.get(), workers, shape, step, {.num_connections = c.num_connections}, &rows);
    LMHEAD_ASSERT_OK(outcome);
    const reference::Result want = oracle.Step(rows, step);
    const reference::Result yardstick = plain.Step(rows, step);
    const v1::LossSums& sums = outcome->prepared.sums();
    EXPECT_EQ(outcome->prepared.num_chunks(), kNumWorkers * 4u);  // 32 + 32 + 32 + 24 rows.
    EXPECT_EQ(sums.num_tokens(), kNumWorkers * kTokensPerWorker);
    EXPECT_EQ(sums.num_valid_tokens(), want.sums.num_valid_tokens);
    EXPECT_NEAR(sums.loss_sum(), want.sums.loss_sum, bounds.loss * want.sums.loss_sum);
    EXPECT_LE(RelativeError(GradOfAllWorkers(rows), want.grad_hidden_states),
              allowed(bounds.grad, RelativeError(Narrowed(yardstick.grad_hidden_states),
                                                 want.grad_hidden_states)));
    EXPECT_EQ(outcome->committed.num_updates(), step);
    EXPECT_FALSE(outcome->committed.repeated());
  }
  const auto kind =
      c.dtype == DType::kFloat32 ? v1::TENSOR_KIND_WEIGHT : v1::TENSOR_KIND_MASTER_WEIGHT;
  auto weight = ReadTensor(control.get(), shape, kind);
  LMHEAD_ASSERT_OK(weight);
  auto bias = ReadTensor(control.get(), shape, v1::TENSOR_KIND_BIAS);
  LMHEAD_ASSERT_OK(bias);
  const double weight_error =
      RelativeError(MovementOf(*weight, shape), MovementOf(oracle.weight(), shape));
  const double bias_error = RelativeError(*bias, oracle.bias());
  std::printf("after %d steps: weight movement %.2e, bias %.2e from the oracle\n",
              static_cast<int>(kNumSteps), weight_error, bias_error);
  EXPECT_LE(weight_error,
            allowed(bounds.movement, RelativeError(Narrowed(MovementOf(plain.weight(), shape)),
                                                   MovementOf(oracle.weight(), shape))));
  EXPECT_LE(bias_error,
            allowed(bounds.movement, RelativeError(Narrowed(plain.bias()), oracle.bias())));
}

INSTANTIATE_TEST_SUITE_P(
    All, TrainingTest,
    ::testing::Values(
        TrainingCase{DType::kFloat32, v1::SCHEDULE_RETAIN, v1::OPTIMIZER_KIND_ADAMW, 1},
        TrainingCase{DType::kFloat32, v1::SCHEDULE_RECOMPUTE, v1::OPTIMIZER_KIND_ADAMW, 3},
        TrainingCase{DType::kFloat32, v1::SCHEDULE_UNSPECIFIED, v1::OPTIMIZER_KIND_SGD, 2},
        TrainingCase{DType::kBFloat16, v1::SCHEDULE_RETAIN, v1::OPTIMIZER_KIND_ADAMW, 2},
        TrainingCase{DType::kBFloat16, v1::SCHEDULE_RECOMPUTE, v1::OPTIMIZER_KIND_SGD, 1}),
    CaseName);

// The fp32 weight bytes after a few steps of a single worker.
std::vector<float> TrainAlone(uint64_t num_steps) {
  const HeadShape shape;
  auto server = StartServer({"--join_chunks=off"});
  auto client = ConnectTo(server->address());
  Client* const workers[] = {client.get()};
  EXPECT_TRUE(CreateHead(client.get(), shape).ok());
  for (uint64_t step = 1; step <= num_steps; ++step) {
    std::vector<Rows> rows = {MakeRows(shape, kTokensPerWorker, step, 0)};
    auto outcome = RunStep(client.get(), workers, shape, step, {}, &rows);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
  }
  auto weight = ReadTensor(client.get(), shape, v1::TENSOR_KIND_WEIGHT);
  EXPECT_TRUE(weight.ok()) << weight.status();
  return weight.ok() ? *weight : std::vector<float>();
}

TEST(Determinism, OneWorkerTwiceGivesTheSameBits) {
  const std::vector<float> first = TrainAlone(4), second = TrainAlone(4);
  ASSERT_FALSE(first.empty());
  ASSERT_EQ(first.size(), second.size());
  EXPECT_EQ(std::memcmp(first.data(), second.data(), first.size() * sizeof(float)), 0);
}

class SharedServerTest : public ::testing::Test {
 protected:
  SharedServerTest() : server_(StartServer()), client_(ConnectTo(server_->address())) {}

  // Sums and outputs of `rows` through an evaluation stream.
  absl::StatusOr<LossResult> Evaluate(const HeadShape& shape, const Rows& rows,
                                      std::vector<float>* token_loss, std::vector<float>* lse) {
    WriterSpec spec{.head = shape.name, .hidden_dtype = DType::kFloat32};
    spec.outputs.set_token_loss(true);
    spec.outputs.set_lse(true);
    auto writer = client_->OpenWriter(spec);
    if (!writer.ok()) return writer.status();
    token_loss->resize(rows.num_tokens());
    lse->resize(rows.num_tokens());
    LossRows loss_rows;
    loss_rows.hidden_states = {rows.hidden_states.data(), rows.num_tokens(), shape.hidden_size,
                               DType::kFloat32};
    loss_rows.targets = rows.targets;
    loss_rows.token_loss = token_loss->data();
    loss_rows.lse = lse->data();
    auto result = (*writer)->Compute(loss_rows);
    if (!result.ok()) return result;
    if (auto ended = (*writer)->Finish(); !ended.ok()) return ended.status();
    return result;
  }

  std::unique_ptr<LocalServer> server_;
  std::unique_ptr<Client> client_;
};

reference::Result OracleOf(const HeadShape& shape, const Rows& rows) {
  return OracleTrainer(shape).Step({&rows, 1}, 1);
}

TEST_F(SharedServerTest, EverySchedulesLossAndGradientAreTheOracles) {
  uint64_t step = 0;
  for (const auto schedule : {v1::SCHEDULE_FROZEN, v1::SCHEDULE_RETAIN, v1::SCHEDULE_RECOMPUTE}) {
    HeadShape shape{.name = absl::StrCat("head-", schedule), .schedule = schedule};
    if (schedule == v1::SCHEDULE_FROZEN) shape.optimizer = v1::OPTIMIZER_KIND_NONE;
    SCOPED_TRACE(shape.name);
    LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
    Rows rows = MakeRows(shape, 100, 1, 0);
    const reference::Result want = OracleOf(shape, rows);

    auto incarnation = BeginStep(client_.get(), shape, ++step, 1);
    LMHEAD_ASSERT_OK(incarnation);
    auto fed = Feed(client_.get(), shape, step, *incarnation, WorkerName(0), {}, &rows);
    LMHEAD_ASSERT_OK(fed);
    EXPECT_NEAR(fed->sums.loss_sum, want.sums.loss_sum, 1e-6 * want.sums.loss_sum);
    EXPECT_EQ(fed->sums.num_valid_tokens, want.sums.num_valid_tokens);
    EXPECT_EQ(fed->sums.num_correct, want.sums.num_correct);
    EXPECT_LE(RelativeError(rows.grad_hidden_states, want.grad_hidden_states), 1e-5);
    auto prepared = PrepareStep(client_.get(), shape, step, *incarnation);
    LMHEAD_ASSERT_OK(prepared);
    if (schedule != v1::SCHEDULE_FROZEN) {
      auto grad = ReadTensor(client_.get(), shape, v1::TENSOR_KIND_GRAD_WEIGHT);
      LMHEAD_ASSERT_OK(grad);
      EXPECT_LE(RelativeError(*grad, want.grad_weight), 1e-5);
      double squared_norm = 0.0;
      for (double value : want.grad_weight) squared_norm += value * value;
      for (double value : want.grad_bias) squared_norm += value * value;
      EXPECT_NEAR(prepared->grad_squared_norm(), squared_norm, 1e-5 * squared_norm);
    }
    LMHEAD_ASSERT_OK(AbortStep(client_.get(), shape, step, *incarnation));
  }
}

TEST_F(SharedServerTest, EvaluationAnswersBesideAnOpenStepAndLeavesNoTrace) {
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
  auto incarnation = BeginStep(client_.get(), shape, 1, 1);
  LMHEAD_ASSERT_OK(incarnation);
  const Rows rows = MakeRows(shape, 100, 1, 0);
  std::vector<float> token_loss, lse;
  auto evaluated = Evaluate(shape, rows, &token_loss, &lse);
  LMHEAD_ASSERT_OK(evaluated);
  const reference::Result want = OracleOf(shape, rows);
  EXPECT_NEAR(evaluated->sums.loss_sum, want.sums.loss_sum, 1e-6 * want.sums.loss_sum);
  EXPECT_LE(RelativeError(token_loss, want.token_loss), 1e-6);
  EXPECT_LE(RelativeError(lse, want.lse), 1e-6);

  // The step saw none of it.
  Rows none = MakeRows(shape, 1, 1, 0);
  none.targets[0] = kDefaultIgnoreIndex;
  LMHEAD_ASSERT_OK(Feed(client_.get(), shape, 1, *incarnation, WorkerName(0), {}, &none));
  auto prepared = PrepareStep(client_.get(), shape, 1, *incarnation);
  LMHEAD_ASSERT_OK(prepared);
  EXPECT_EQ(prepared->num_chunks(), 1u);
  EXPECT_EQ(prepared->sums().num_valid_tokens(), 0);
  EXPECT_EQ(prepared->grad_squared_norm(), 0.0);
  EXPECT_EQ(none.grad_hidden_states, std::vector<float>(shape.hidden_size, 0.0f));
  auto weight = ReadTensor(client_.get(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_EQ(*weight, InitialWeight(shape));
}

TEST_F(SharedServerTest, SeveralConnectionsPutEachRowsGradientInItsPlace) {
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
  const Rows fresh = MakeRows(shape, 333, 1, 0);
  const reference::Result want = OracleOf(shape, fresh);
  uint64_t step = 0;
  for (const FeedOptions options : {FeedOptions{4, 1, 1}, FeedOptions{3, 2, 7},
                                    FeedOptions{2, 8, 50}, FeedOptions{1, 4, 1000}}) {
    SCOPED_TRACE(absl::StrCat(options.num_connections, " connections"));
    Rows rows = fresh;
    auto incarnation = BeginStep(client_.get(), shape, ++step, 1);
    LMHEAD_ASSERT_OK(incarnation);
    auto fed = Feed(client_.get(), shape, step, *incarnation, WorkerName(0), options, &rows);
    LMHEAD_ASSERT_OK(fed);
    const int64_t num_chunks = (333 + options.chunk_tokens - 1) / options.chunk_tokens;
    EXPECT_EQ(fed->num_chunks, num_chunks);
    EXPECT_LE(RelativeError(rows.grad_hidden_states, want.grad_hidden_states), 1e-5);
    auto prepared = PrepareStep(client_.get(), shape, step, *incarnation);
    LMHEAD_ASSERT_OK(prepared);
    EXPECT_EQ(prepared->num_chunks(), static_cast<uint64_t>(num_chunks));
    EXPECT_NEAR(prepared->sums().loss_sum(), want.sums.loss_sum, 1e-6 * want.sums.loss_sum);
    LMHEAD_ASSERT_OK(AbortStep(client_.get(), shape, step, *incarnation));
  }
}

TEST_F(SharedServerTest, ARepeatedCommitIsAnsweredFromTheStoredResult) {
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
  Rows rows = MakeRows(shape, 64, 1, 0);
  auto incarnation = BeginStep(client_.get(), shape, 1, 1);
  LMHEAD_ASSERT_OK(incarnation);
  LMHEAD_ASSERT_OK(Feed(client_.get(), shape, 1, *incarnation, WorkerName(0), {}, &rows));
  LMHEAD_ASSERT_OK(PrepareStep(client_.get(), shape, 1, *incarnation));
  auto first = CommitStep(client_.get(), shape, 1, *incarnation, 0.1, 0.5);
  LMHEAD_ASSERT_OK(first);
  auto weight = ReadTensor(client_.get(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);

  auto again = CommitStep(client_.get(), shape, 1, *incarnation, 0.1, 0.5);
  LMHEAD_ASSERT_OK(again);
  EXPECT_TRUE(again->repeated());
  EXPECT_EQ(again->num_updates(), first->num_updates());
  EXPECT_EQ(again->grad_norm(), first->grad_norm());
  auto other = CommitStep(client_.get(), shape, 1, *incarnation, 0.2, 0.5);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument) << other.status();
  auto unchanged = ReadTensor(client_.get(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(unchanged);
  EXPECT_EQ(*weight, *unchanged);
}

}  // namespace
}  // namespace lmhead::e2e
