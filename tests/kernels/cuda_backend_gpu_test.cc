// What the conformance suite does not ask: order and overlap of batches, memory, size, errors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "kernels/reference/reference.h"
#include "server/compute/cuda_backend.h"
#include "tests/kernels/gpu_fault.h"

namespace lmhead {
namespace {

using testing::HasSubstr;

HeadSpec TrainableSpec(int64_t vocab_size, int64_t hidden_size, int64_t batch_tokens) {
  return {.name = "lm",
          .vocab_size = vocab_size,
          .hidden_size = hidden_size,
          .weight_dtype = DType::kBFloat16,
          .trainable = true,
          .optimizer = {.kind = OptimizerKind::kSgd},
          .schedule = Schedule::kRetain,
          .batch_tokens = batch_tokens,
          .weight_init = {.kind = WeightInitKind::kNormal, .std = 0.2, .seed = 5}};
}

MemoryPlan PlanOf(const HeadSpec& spec) {
  return PlanForSchedule(spec, spec.schedule, {.backend = BackendKind::kCuda});
}

// A head on the first GPU.
struct Head {
  explicit Head(const HeadSpec& spec) : plan(PlanOf(spec)) {
    auto created = CreateCudaBackend(spec, plan, &account, /*device=*/0);
    EXPECT_TRUE(created.ok()) << created.status();
    if (created.ok()) backend = *std::move(created);
  }

  MemoryPlan plan;
  MemoryAccount account;
  std::unique_ptr<ComputeBackend> backend;
};

// Rows of bfloat16 hidden states, with room for their gradient.
struct Rows {
  Rows(int64_t count, int64_t hidden_size, int64_t vocab_size, uint32_t seed)
      : hidden(count * hidden_size), grad(count * hidden_size), targets(count), loss(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (uint16_t& value : hidden) value = FloatToBFloat16(normal(random));
    std::uniform_int_distribution<int32_t> target(0, static_cast<int32_t>(vocab_size) - 1);
    for (int32_t& value : targets) value = target(random);
    chunk = {.hidden_states = {hidden.data(), count, hidden_size, DType::kBFloat16},
             .targets = targets,
             .grad_hidden_states = {grad.data(), count, hidden_size, DType::kBFloat16},
             .token_loss = loss.data()};
  }

  std::vector<uint16_t> hidden;
  std::vector<uint16_t> grad;
  std::vector<int32_t> targets;
  std::vector<float> loss;
  ChunkRows chunk;
};

// With the gradient of the hidden states and the losses wanted.
BatchInput BatchOf(const LossRecipe& recipe, BackwardMode mode, const ChunkRows& chunk) {
  return {.recipe = &recipe,
          .mode = mode,
          .chunks = {&chunk, 1},
          .outputs = {.grad_hidden_states = true, .token_loss = true}};
}

absl::StatusOr<BatchOutput> Compute(ComputeBackend* backend, const BatchInput& input) {
  absl::StatusOr<BatchOutput> output;
  absl::Notification done;
  backend->ComputeBatch(input, [&](absl::StatusOr<BatchOutput> result) {
    output = std::move(result);
    done.Notify();
  });
  done.WaitForNotification();
  return output;
}

absl::StatusOr<BatchOutput> Compute(ComputeBackend* backend, const ChunkRows& chunk,
                                    BackwardMode mode) {
  const LossRecipe recipe;
  return Compute(backend, BatchOf(recipe, mode, chunk));
}

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!CudaAvailable(&why_not)) GTEST_SKIP() << why_not;
  }
};

TEST_F(CudaBackendTest, ManyBatchesUnderWayAnswerInOrderAndAlike) {
  constexpr int kBatches = 24;
  const HeadSpec spec = TrainableSpec(4099, 64, 256);
  Head head(spec);
  std::vector<Rows> rows;
  for (int i = 0; i < kBatches; ++i) rows.emplace_back(1 + 10 * i, 64, 4099, i);
  const LossRecipe recipe;
  std::vector<int> order;
  std::vector<double> sums(kBatches);
  absl::BlockingCounter done(kBatches);
  for (int i = 0; i < kBatches; ++i) {
    rows[i].chunk.targets = rows[i].targets;
    head.backend->ComputeBatch(BatchOf(recipe, BackwardMode::kHiddenAndWeight, rows[i].chunk),
                               [&, i](absl::StatusOr<BatchOutput> result) {
                                 ASSERT_TRUE(result.ok()) << result.status();
                                 order.push_back(i);
                                 sums[i] = result->sums[0].loss_sum;
                                 EXPECT_EQ(result->sums[0].num_tokens, 1 + 10 * i);
                                 EXPECT_GT(result->timings.compute_seconds, 0.0);
                                 done.DecrementCount();
                               });
  }
  done.Wait();
  for (int i = 0; i < kBatches; ++i) {
    EXPECT_EQ(order[i], i);
    const std::vector<uint16_t> grad = rows[i].grad;
    const auto alone = Compute(head.backend.get(), rows[i].chunk, BackwardMode::kHidden);
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(alone->sums[0].loss_sum, sums[i]);
    EXPECT_EQ(rows[i].grad, grad);
  }
}

TEST_F(CudaBackendTest, MemoryIsThePlanAndComesBack) {
  const HeadSpec spec = TrainableSpec(50021, 256, 512);
  { Head warm_up(TrainableSpec(64, 8, 16)); }  // Modules and cuBLASLt's handle stay.
  const int64_t used_before = DescribeCudaDevice(0)->used_bytes;
  MemoryPlan plan;
  {
    Head head(spec);
    plan = head.plan;
    EXPECT_EQ(head.account.Read().total.live_bytes, plan.TotalBytes());
    const int64_t used = DescribeCudaDevice(0)->used_bytes - used_before;
    EXPECT_GE(used, plan.TotalBytes());
    Rows rows(500, 256, 50021, 1);
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(Compute(head.backend.get(), rows.chunk, BackwardMode::kHiddenAndWeight).ok());
    }
    EXPECT_EQ(head.account.Read().total.peak_process_bytes, plan.TotalBytes());
    head.backend.reset();
    EXPECT_EQ(head.account.Read().total.live_bytes, 0);
  }
  EXPECT_LT(DescribeCudaDevice(0)->used_bytes - used_before, plan.TotalBytes() / 2);
}

TEST_F(CudaBackendTest, AHeadThatDoesNotFitIsRefusedWithTheBreakdown) {
  HeadSpec spec = TrainableSpec(int64_t{1} << 30, 4096, 4096);
  spec.weight_init = {};
  MemoryAccount account;
  const auto created = CreateCudaBackend(spec, PlanOf(spec), &account, 0);
  EXPECT_EQ(created.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(created.status().message()), HasSubstr("logits_scratch"));
  EXPECT_EQ(account.Read().total.live_bytes, 0);
  Head small(TrainableSpec(64, 8, 16));  // The refusal leaves the device usable.
  EXPECT_NE(small.backend, nullptr);
}

// What the oracle says of one row of `rows` and the head's weight.
reference::Result ExpectedOfRow(ComputeBackend* backend, const HeadSpec& spec, const Rows& rows,
                                int64_t row) {
  std::vector<std::byte> weight(spec.vocab_size * spec.hidden_size *
                                BytesPerElement(spec.weight_dtype));
  const MatrixView view = {weight.data(), spec.vocab_size, spec.hidden_size, spec.weight_dtype};
  const absl::Status status = backend->ReadRows(TensorKind::kWeight, 0, view);
  EXPECT_TRUE(status.ok()) << status;
  reference::Head head = {.vocab_size = spec.vocab_size, .hidden_size = spec.hidden_size};
  head.weight = reference::Upcast(view);
  reference::Tokens tokens;
  tokens.hidden_states = reference::Upcast(
      {&rows.hidden[row * spec.hidden_size], 1, spec.hidden_size, DType::kBFloat16});
  tokens.targets = {rows.targets[row]};
  return reference::ComputeLoss(head, reference::Recipe(), tokens);
}

// The bounds are those of bfloat16 logits in tests/conformance/tolerances.h.
void ExpectRow(ComputeBackend* backend, const HeadSpec& spec, const Rows& rows, int64_t row) {
  const reference::Result want = ExpectedOfRow(backend, spec, rows, row);
  EXPECT_NEAR(rows.loss[row], want.token_loss[0], 4e-3 * want.token_loss[0]) << row;
  double difference = 0.0;
  double norm = 0.0;
  for (int64_t h = 0; h < spec.hidden_size; ++h) {
    const double got = BFloat16ToFloat(rows.grad[row * spec.hidden_size + h]);
    difference += (got - want.grad_hidden_states[h]) * (got - want.grad_hidden_states[h]);
    norm += want.grad_hidden_states[h] * want.grad_hidden_states[h];
  }
  EXPECT_LE(std::sqrt(difference / norm), 8e-3) << row;
}

// 2^31 logits: the last rows lie beyond what 32 bits can index.
TEST_F(CudaBackendTest, OffsetsBeyondThirtyTwoBits) {
  constexpr int64_t kTokens = 16384;
  const HeadSpec spec = TrainableSpec(131072, 64, kTokens);
  Head head(spec);
  Rows rows(kTokens, spec.hidden_size, spec.vocab_size, 3);
  const auto output = Compute(head.backend.get(), rows.chunk, BackwardMode::kHiddenAndWeight);
  ASSERT_TRUE(output.ok()) << output.status();
  for (const int64_t row : {int64_t{0}, kTokens / 2, kTokens - 1}) {
    ExpectRow(head.backend.get(), spec, rows, row);
  }
}

// The weight of a bfloat16 head.
std::vector<double> WeightOf(ComputeBackend* backend, const HeadSpec& spec) {
  std::vector<uint16_t> weight(spec.vocab_size * spec.hidden_size);
  const MatrixView view = {weight.data(), spec.vocab_size, spec.hidden_size, DType::kBFloat16};
  const absl::Status status = backend->ReadRows(TensorKind::kWeight, 0, view);
  EXPECT_TRUE(status.ok()) << status;
  return reference::Upcast(view);
}

// The same with a teacher's logits beside the student's, and with lists of the largest. What an
// offset that wraps would give is nowhere near; the bounds leave room for bfloat16 logits.
TEST_F(CudaBackendTest, OffsetsBeyondThirtyTwoBitsOfATeacher) {
  constexpr int64_t kTokens = 16384;
  constexpr int32_t kTopK = 3;
  HeadSpec spec = TrainableSpec(131072, 64, kTokens);
  spec.teacher_hidden_size = 32;
  spec.top_k_max = kTopK;
  HeadSpec teacher_spec = TrainableSpec(131072, 32, 64);
  teacher_spec.trainable = false;
  teacher_spec.optimizer.kind = OptimizerKind::kNone;
  teacher_spec.schedule = Schedule::kEval;
  teacher_spec.weight_init.seed = 6;
  Head head(spec);
  Head teacher(teacher_spec);
  Rows rows(kTokens, spec.hidden_size, spec.vocab_size, 3);
  Rows teacher_rows(kTokens, teacher_spec.hidden_size, spec.vocab_size, 4);
  std::vector<int32_t> topk_ids(kTokens * kTopK);
  std::vector<float> topk_logprobs(kTokens * kTopK);
  rows.chunk.teacher_hidden_states = teacher_rows.chunk.hidden_states;
  rows.chunk.topk_ids = topk_ids.data();
  rows.chunk.topk_logprobs = topk_logprobs.data();
  LossRecipe recipe;
  recipe.distillation = DistillationSpec{.teacher_head = "teacher", .kl_temperature = 2.0f};
  BatchInput input = BatchOf(recipe, BackwardMode::kHiddenAndWeight, rows.chunk);
  input.outputs.top_k = kTopK;
  input.teacher = teacher.backend.get();
  const auto output = Compute(head.backend.get(), input);
  ASSERT_TRUE(output.ok()) << output.status();

  const reference::Head want_head = {.vocab_size = spec.vocab_size,
                                     .hidden_size = spec.hidden_size,
                                     .weight = WeightOf(head.backend.get(), spec)};
  const reference::Head want_teacher = {.vocab_size = spec.vocab_size,
                                        .hidden_size = teacher_spec.hidden_size,
                                        .weight = WeightOf(teacher.backend.get(), teacher_spec)};
  const auto row_of = [](const Rows& from, int64_t row, int64_t size) {
    return reference::Upcast({&from.hidden[row * size], 1, size, DType::kBFloat16});
  };
  for (const int64_t row : {int64_t{0}, kTokens - 1}) {
    reference::Tokens tokens;
    tokens.hidden_states = row_of(rows, row, spec.hidden_size);
    tokens.teacher_hidden_states = row_of(teacher_rows, row, teacher_spec.hidden_size);
    tokens.targets = {rows.targets[row]};
    const reference::Result want =
        reference::ComputeLoss(want_head, reference::Recipe(recipe), tokens, &want_teacher, kTopK);
    EXPECT_NEAR(rows.loss[row], want.token_loss[0], 1e-2 * want.token_loss[0]) << row;
    EXPECT_NEAR(topk_logprobs[row * kTopK], want.topk_logprobs[0], 0.05) << row;
    double difference = 0.0, norm = 0.0;
    for (int64_t h = 0; h < spec.hidden_size; ++h) {
      const double grad = want.grad_hidden_states[h];
      const double got = BFloat16ToFloat(rows.grad[row * spec.hidden_size + h]);
      difference += (got - grad) * (got - grad);
      norm += grad * grad;
    }
    EXPECT_LE(std::sqrt(difference / norm), 2e-2) << row;
  }
}

// Rows of hidden states and of the weight that start at any address.
TEST_F(CudaBackendTest, HiddenSizesThatNothingIsAlignedFor) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Schedule schedule : {Schedule::kRetain, Schedule::kRecompute}) {
      for (const int64_t hidden_size : {3, 7, 37, 129}) {
        SCOPED_TRACE(hidden_size);
        HeadSpec spec = TrainableSpec(257, hidden_size, 32);
        spec.weight_dtype = dtype;
        spec.schedule = schedule;
        Head head(spec);
        Rows rows(19, hidden_size, spec.vocab_size, 4);
        const auto output = Compute(head.backend.get(), rows.chunk, BackwardMode::kHiddenAndWeight);
        ASSERT_TRUE(output.ok()) << output.status();
        for (const int64_t row : {0, 1, 18}) ExpectRow(head.backend.get(), spec, rows, row);
      }
    }
  }
}

// Runs in a process of its own: a fault ends the use of CUDA in its process.
void FaultAndExpectPoison() {
  Head head(TrainableSpec(1031, 32, 64));
  Rows rows(60, 32, 1031, 1);
  LaunchFaultingKernel();
  const auto failed = Compute(head.backend.get(), rows.chunk, BackwardMode::kHiddenAndWeight);
  const auto again = Compute(head.backend.get(), rows.chunk, BackwardMode::kNone);
  const absl::Status update = head.backend->ApplyUpdate({.learning_rate = 1.0});
  const absl::Status discard = head.backend->DiscardGradients();
  const absl::Status norm = head.backend->GradSquaredNorm().status();
  const bool poisoned = failed.status().code() == absl::StatusCode::kAborted &&
                        again.status() == failed.status() && update == failed.status() &&
                        discard == failed.status() && norm == failed.status() &&
                        head.backend->num_updates() == 0;
  std::fprintf(stderr, "%s\n", failed.status().ToString().c_str());
  head.backend.reset();  // Ends without a crash.
  MemoryAccount account;
  const HeadSpec spec = TrainableSpec(64, 8, 16);
  const bool refused = !CreateCudaBackend(spec, PlanOf(spec), &account, 0).ok();
  std::_Exit(poisoned && refused ? 0 : 1);
}

TEST_F(CudaBackendTest, TheFirstErrorIsKeptAndTheProcessLives) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(FaultAndExpectPoison(), testing::ExitedWithCode(0), "head lm is poisoned");
}

}  // namespace
}  // namespace lmhead
