// Multi-token prediction over a real server: several depths in one step of one head, and several
// heads on one trunk.

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/conformance/tolerances.h"
#include "tests/e2e/service_fixture.h"

namespace lmhead::e2e {
namespace {

constexpr uint64_t kStep = 1;
constexpr int64_t kTokens = 118;  // Not a multiple of a chunk's rows.
constexpr int64_t kChunkTokens = 32;
constexpr float kDepthScale = 0.25f;  // Of the second depth's loss.
constexpr double kGradHiddenTolerance =
    kFloat32Logits.grad_hidden_states + RoundingOf(DType::kFloat32);

HeadShape Shape(const std::string& name, int64_t vocab_size) {
  return {.name = name,
          .vocab_size = vocab_size,
          .optimizer = v1::OPTIMIZER_KIND_SGD,
          .has_bias = false};
}

// One depth's rows, and where the gradient of its hidden states goes.
struct Depth {
  Depth(const HeadShape& shape, const std::vector<float>& hidden_states,
        std::vector<int32_t> row_targets, float grad_scale)
      : hidden(hidden_states), targets(std::move(row_targets)), grad(hidden.size()) {
    const auto num_tokens = static_cast<int64_t>(targets.size());
    rows.hidden_states = {hidden.data(), num_tokens, shape.hidden_size, DType::kFloat32};
    rows.targets = targets;
    rows.grad_scale = grad_scale;
    rows.grad_hidden_states = {grad.data(), num_tokens, shape.hidden_size, DType::kFloat32};
  }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

  reference::Result Oracle(const HeadShape& shape) const {
    const std::vector<float> weight = InitialWeight(shape);
    const reference::Head head{.vocab_size = shape.vocab_size,
                               .hidden_size = shape.hidden_size,
                               .weight = {weight.begin(), weight.end()}};
    const reference::Tokens tokens{.hidden_states = {hidden.begin(), hidden.end()},
                                   .targets = targets,
                                   .grad_scale = rows.grad_scale};
    return reference::ComputeLoss(head, reference::Recipe(), tokens);
  }

  const std::vector<float>& hidden;
  const std::vector<int32_t> targets;
  std::vector<float> grad;
  LossRows rows;
};

// The targets of the depth after: those of the next position, and nothing for the last one.
std::vector<int32_t> NextTargets(const std::vector<int32_t>& targets) {
  std::vector<int32_t> next(targets.begin() + 1, targets.end());
  next.push_back(kDefaultIgnoreIndex);
  return next;
}

std::vector<double> Sum(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> sum = a;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  return sum;
}

double ErrorOf(const std::vector<float>& got, const std::vector<double>& want) {
  return RelativeError(std::span(got), std::span(want));
}

class MultiTokenTest : public ::testing::Test {
 protected:
  MultiTokenTest() : server_(StartServer()), client_(ConnectTo(server_->address())) {}

  // A writer of the one worker in an open step of the head.
  std::unique_ptr<StepWriter> Open(const HeadShape& shape, uint64_t incarnation) {
    WriterSpec spec{.head = shape.name,
                    .step = kStep,
                    .worker = WorkerName(0),
                    .incarnation = incarnation,
                    .num_connections = 2,
                    .chunk_tokens = kChunkTokens};
    spec.outputs.set_grad_hidden_states(true);
    auto writer = client_->OpenWriter(spec);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return writer.ok() ? *std::move(writer) : nullptr;
  }

  // Prepares and commits the step, and compares all that it made of the head with the gradient and
  // the losses that the oracle has.
  void ExpectStep(const HeadShape& shape, uint64_t incarnation, double loss_sum,
                  const std::vector<double>& grad_weight) {
    const auto prepared = PrepareStep(client_.get(), shape, kStep, incarnation);
    LMHEAD_ASSERT_OK(prepared);
    EXPECT_NEAR(prepared->sums().loss_sum(), loss_sum, kFloat32Logits.token_outputs * loss_sum);
    const auto accumulated = ReadTensor(client_.get(), shape, v1::TENSOR_KIND_GRAD_WEIGHT);
    LMHEAD_ASSERT_OK(accumulated);
    EXPECT_LE(ErrorOf(*accumulated, grad_weight), kFloat32Logits.grad_weight);

    const double multiplier = 1.0 / static_cast<double>(prepared->sums().num_valid_tokens());
    LMHEAD_ASSERT_OK(
        CommitStep(client_.get(), shape, kStep, incarnation, LearningRate(kStep), multiplier));
    const std::vector<float> initial = InitialWeight(shape);
    std::vector<double> wanted(initial.begin(), initial.end());
    reference::OptimizerState state;
    reference::ApplyUpdate({.kind = OptimizerKind::kSgd}, /*weight_decay=*/0.0, LearningRate(kStep),
                           multiplier, grad_weight, wanted, &state);
    const auto weight = ReadTensor(client_.get(), shape, v1::TENSOR_KIND_WEIGHT);
    LMHEAD_ASSERT_OK(weight);
    EXPECT_LE(ErrorOf(*weight, wanted), kParameterTolerance);
  }

  const std::unique_ptr<LocalServer> server_;
  const std::unique_ptr<Client> client_;
};

// As it is published: hidden states of its own for every depth, one head for all.
TEST_F(MultiTokenTest, DepthsAreChunksOfOneStepOfOneHead) {
  const HeadShape shape = Shape("lm", 211);
  LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
  const auto incarnation = BeginStep(client_.get(), shape, kStep, 1);
  LMHEAD_ASSERT_OK(incarnation);
  const Rows of_trunk = MakeRows(shape, kTokens, kStep, 0);
  const Rows of_module = MakeRows(shape, kTokens, kStep, 1);
  Depth first(shape, of_trunk.hidden_states, of_trunk.targets, 1.0f);
  Depth second(shape, of_module.hidden_states, NextTargets(of_trunk.targets), kDepthScale);

  const std::unique_ptr<StepWriter> writer = Open(shape, *incarnation);
  ASSERT_NE(writer, nullptr);
  std::vector<uint64_t> tickets;
  for (const Depth* depth : {&first, &second}) {
    const auto ticket = writer->Submit(depth->rows);
    LMHEAD_ASSERT_OK(ticket);
    tickets.push_back(*ticket);
  }
  const reference::Result want[] = {first.Oracle(shape), second.Oracle(shape)};
  for (size_t i = 0; i < tickets.size(); ++i) {
    const auto result = writer->Wait(tickets[i]);
    LMHEAD_ASSERT_OK(result);
    EXPECT_NEAR(result->sums.loss_sum, want[i].sums.loss_sum,
                kFloat32Logits.token_outputs * want[i].sums.loss_sum);
    EXPECT_EQ(result->sums.num_valid_tokens, want[i].sums.num_valid_tokens);
  }
  LMHEAD_ASSERT_OK(writer->Finish());
  EXPECT_LE(ErrorOf(first.grad, want[0].grad_hidden_states), kGradHiddenTolerance);
  EXPECT_LE(ErrorOf(second.grad, want[1].grad_hidden_states), kGradHiddenTolerance);
  ExpectStep(shape, *incarnation, want[0].sums.loss_sum + want[1].sums.loss_sum,
             Sum(want[0].grad_weight, want[1].grad_weight));
}

// A head for each depth: the worker sends the same rows to both, and adds the gradients up.
TEST_F(MultiTokenTest, TwoHeadsLearnFromTheSameHiddenStates) {
  const HeadShape shapes[] = {Shape("next", 211), Shape("after-next", 97)};
  const Rows trunk = MakeRows(shapes[1], kTokens, kStep, 0);  // Targets of either vocabulary.
  Depth next(shapes[0], trunk.hidden_states, trunk.targets, 1.0f);
  Depth after_next(shapes[1], trunk.hidden_states, NextTargets(trunk.targets), kDepthScale);
  Depth* const depths[] = {&next, &after_next};

  std::vector<uint64_t> incarnations, tickets;
  std::vector<std::unique_ptr<StepWriter>> writers;
  for (size_t i = 0; i < 2; ++i) {
    LMHEAD_ASSERT_OK(CreateHead(client_.get(), shapes[i]));
    const auto incarnation = BeginStep(client_.get(), shapes[i], kStep, 1);
    LMHEAD_ASSERT_OK(incarnation);
    incarnations.push_back(*incarnation);
    writers.push_back(Open(shapes[i], *incarnation));
    ASSERT_NE(writers.back(), nullptr);
  }
  for (size_t i = 0; i < 2; ++i) {
    const auto ticket = writers[i]->Submit(depths[i]->rows);
    LMHEAD_ASSERT_OK(ticket);
    tickets.push_back(*ticket);
  }
  for (size_t i = 0; i < 2; ++i) {
    LMHEAD_ASSERT_OK(writers[i]->Wait(tickets[i]));
    LMHEAD_ASSERT_OK(writers[i]->Finish());
  }
  const reference::Result want[] = {next.Oracle(shapes[0]), after_next.Oracle(shapes[1])};
  std::vector<float> grad = next.grad;
  for (size_t i = 0; i < grad.size(); ++i) grad[i] += after_next.grad[i];
  EXPECT_LE(ErrorOf(grad, Sum(want[0].grad_hidden_states, want[1].grad_hidden_states)),
            kGradHiddenTolerance);
  for (size_t i = 0; i < 2; ++i) {
    ExpectStep(shapes[i], incarnations[i], want[i].sums.loss_sum, want[i].grad_weight);
  }
}

}  // namespace
}  // namespace lmhead::e2e
