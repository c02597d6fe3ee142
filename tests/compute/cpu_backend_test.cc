#include "server/compute/cpu_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "server/compute/gloo_collective.h"

namespace lmhead {
namespace {

constexpr int64_t kHidden = 8;

HeadSpec Spec() {
  return {.name = "lm",
          .vocab_size = 37,
          .hidden_size = kHidden,
          .trainable = true,
          .optimizer = {.kind = OptimizerKind::kSgd},
          .schedule = Schedule::kRetain,
          .batch_tokens = 4};
}

class CpuBackendTest : public testing::Test {
 protected:
  std::unique_ptr<ComputeBackend> Create(const HeadSpec& spec) {
    auto backend = CreateCpuBackend(spec, PlanForSchedule(spec, spec.schedule, {}), &account_);
    EXPECT_TRUE(backend.ok()) << backend.status();
    return *std::move(backend);
  }

  static absl::StatusOr<BatchOutput> Compute(ComputeBackend& backend, const BatchInput& input) {
    absl::StatusOr<BatchOutput> output = absl::InternalError("no answer");
    backend.ComputeBatch(input, [&](absl::StatusOr<BatchOutput> result) { output = result; });
    return output;
  }

  MemoryAccount account_;
  std::vector<float> hidden_ = std::vector<float>(4 * kHidden, 0.5f);
  const std::vector<int32_t> targets_ = {1, 2, 3, 4};
  const ChunkRows rows_ = {.hidden_states = {hidden_.data(), 4, kHidden, DType::kFloat32},
                           .targets = targets_};
};

TEST_F(CpuBackendTest, AnswersOnceBeforeItReturns) {
  const auto backend = Create(Spec());
  const LossRecipe recipe;
  int num_answers = 0;
  BatchOutput output;
  backend->ComputeBatch({&recipe, BackwardMode::kHiddenAndWeight, {&rows_, 1}},
                        [&](absl::StatusOr<BatchOutput> result) {
                          ASSERT_TRUE(result.ok()) << result.status();
                          output = *std::move(result);
                          ++num_answers;
                        });
  EXPECT_EQ(num_answers, 1);
  ASSERT_EQ(output.sums.size(), 1u);
  EXPECT_NEAR(output.sums[0].loss_sum, 4 * std::log(37.0), 1e-5);  // The weight is zero.
  EXPECT_GT(output.timings.compute_seconds, 0.0);
  EXPECT_EQ(output.timings.queue_seconds, 0.0);
}

TEST_F(CpuBackendTest, GivesItsMemoryBack) {
  const auto live = [&] { return account_.Read().total.live_bytes; };
  {
    const auto backend = Create(Spec());
    EXPECT_GT(live(), 0);
  }
  EXPECT_EQ(live(), 0);
}

TEST_F(CpuBackendTest, AHeadTheSystemHasNoRoomForIsRefused) {
  HeadSpec spec = Spec();
  spec.vocab_size = int64_t{1} << 30;
  spec.hidden_size = int64_t{1} << 20;
  const auto backend = CreateCpuBackend(spec, PlanForSchedule(spec, spec.schedule, {}), &account_);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(account_.Read().total.live_bytes, 0);
}

TEST_F(CpuBackendTest, AnUpdateWithNumbersThatAreNotFiniteIsRefusedAndChangesNothing) {
  const auto backend = Create(Spec());
  const float nan = std::nanf("");
  for (const OptimizerUpdate& update :
       {OptimizerUpdate{.learning_rate = nan}, OptimizerUpdate{.grad_multiplier = nan}}) {
    EXPECT_EQ(backend->ApplyUpdate(update).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(backend->num_updates(), 0);
  EXPECT_TRUE(backend->ApplyUpdate({.learning_rate = 0.1}).ok());
  EXPECT_EQ(backend->num_updates(), 1);
}

TEST_F(CpuBackendTest, AnEntropyIsSummedOnlyWhereOneIsWanted) {
  const auto backend = Create(Spec());
  const LossRecipe recipe;
  for (const bool wanted : {false, true}) {
    const BatchInput input{
        .recipe = &recipe, .chunks = {&rows_, 1}, .outputs = {.entropy = wanted}};
    const auto output = Compute(*backend, input);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_NEAR(output->sums[0].entropy_sum, wanted ? 4 * std::log(37.0) : 0.0, 1e-5);
  }
}

TEST_F(CpuBackendTest, ArraysThatTheRecipeDoesNotWantOrThatAreMissingAreRefused) {
  HeadSpec spec = Spec();
  spec.top_k_max = 2;
  const auto backend = Create(spec);
  const std::vector<float> numbers(8, 0.0f);
  const std::vector<int32_t> ids = {0, 1, 2, 3, 4, 5, 6, 37};
  LossRecipe policy{.policy = PolicySpec{}};
  LossRecipe list{.distillation = DistillationSpec{.divergence = Divergence::kTopkForwardKl,
                                                   .top_k = 2,
                                                   .topk_mass = TopkMass::kKeep}};
  const auto code_of = [&](const LossRecipe& recipe, const ChunkRows& rows) {
    return Compute(*backend, {.recipe = &recipe, .chunks = {&rows, 1}}).status().code();
  };
  EXPECT_EQ(code_of(policy, rows_), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of(list, rows_), absl::StatusCode::kInvalidArgument);
  ChunkRows rows = rows_;
  rows.logprob_grad = rows.entropy_grad = std::span(numbers).first(4);
  EXPECT_EQ(code_of(policy, rows), absl::StatusCode::kOk);
  EXPECT_EQ(code_of(LossRecipe(), rows), absl::StatusCode::kInvalidArgument);
  rows.entropy_grad = std::span(numbers).first(3);
  EXPECT_EQ(code_of(policy, rows), absl::StatusCode::kInvalidArgument);
  rows = rows_;
  rows.teacher_topk_logprobs = numbers;
  rows.teacher_topk_ids = ids;  // The last one is outside the vocabulary.
  EXPECT_EQ(code_of(list, rows), absl::StatusCode::kInvalidArgument);
}

TEST_F(CpuBackendTest, WhatTheHeadHasNoMemoryForIsRefused) {
  const auto backend = Create(Spec());
  const LossRecipe plain;
  const BatchInput input{.recipe = &plain, .chunks = {&rows_, 1}, .outputs = {.top_k = 1}};
  EXPECT_EQ(Compute(*backend, input).status().code(), absl::StatusCode::kFailedPrecondition);

  HeadSpec teacher_spec = Spec();
  teacher_spec.name = "teacher";
  const auto teacher = Create(teacher_spec);
  const LossRecipe distillation{.distillation = DistillationSpec{.teacher_head = "teacher"}};
  ChunkRows rows = rows_;
  rows.teacher_hidden_states = rows.hidden_states;
  const BatchInput batch{.recipe = &distillation, .chunks = {&rows, 1}, .teacher = teacher.get()};
  EXPECT_EQ(Compute(*backend, batch).status().code(), absl::StatusCode::kFailedPrecondition);
  HeadSpec spec = Spec();
  spec.teacher_hidden_size = kHidden;
  EXPECT_TRUE(Compute(*Create(spec), batch).ok());
}

// --- Tensors -----------------------------------------------------------------------------------

std::vector<float> Counting(int64_t count, float first) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

ConstMatrixView View(const std::vector<float>& values, int64_t cols) {
  return {values.data(), static_cast<int64_t>(values.size()) / cols, cols, DType::kFloat32};
}

std::vector<float> Read(ComputeBackend& backend, TensorKind kind, int64_t cols) {
  std::vector<float> values(37 * cols);
  const absl::Status status = backend.ReadRows(kind, 0, {values.data(), 37, cols, DType::kFloat32});
  EXPECT_TRUE(status.ok()) << status;
  return values;
}

TEST_F(CpuBackendTest, GradientRowsAreAddedWhereTheyBelong) {
  const auto backend = Create(Spec());
  const std::vector<float> rows = Counting(2 * kHidden, 1.0f);
  const std::vector<int32_t> ids = {30, 4};
  ASSERT_TRUE(backend->AddGradRows(ids, 0, View(rows, kHidden)).ok());
  ASSERT_TRUE(backend->AddGradRows({}, 3, View(rows, kHidden)).ok());
  const std::vector<float> grad = Read(*backend, TensorKind::kGradWeight, kHidden);
  for (int64_t id = 0; id < 37; ++id) {
    for (int64_t column = 0; column < kHidden; ++column) {
      const float first = rows[column], second = rows[kHidden + column];
      const float want = id == 30 ? first : id == 3 ? first : id == 4 ? 2 * second : 0.0f;
      EXPECT_EQ(grad[id * kHidden + column], want) << id;
    }
  }
}

TEST_F(CpuBackendTest, GradientRowsThatDoNotFitAreRefused) {
  HeadSpec spec = Spec();
  const auto backend = Create(spec);
  const std::vector<float> rows = Counting(2 * kHidden, 1.0f);
  using absl::StatusCode;
  const auto code_of = [&](std::vector<int32_t> ids, int64_t start, ConstMatrixView view) {
    return backend->AddGradRows(ids, start, view).code();
  };
  EXPECT_EQ(code_of({1}, 0, View(rows, kHidden)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({1, 37}, 0, View(rows, kHidden)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({-1, 2}, 0, View(rows, kHidden)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({}, 36, View(rows, kHidden)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({}, 0, View(rows, 2 * kHidden)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({}, 0, {rows.data(), 2, kHidden, DType::kBFloat16}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Read(*backend, TensorKind::kGradWeight, kHidden), std::vector<float>(37 * kHidden));
  spec.trainable = false;
  spec.schedule = Schedule::kFrozen;
  EXPECT_EQ(Create(spec)->AddGradRows({}, 0, View(rows, kHidden)).code(),
            StatusCode::kFailedPrecondition);
}

TEST_F(CpuBackendTest, AHeadWhoseTensorsAreWrittenGoesOnAsTheOneTheyWereReadFrom) {
  HeadSpec spec = Spec();
  spec.weight_dtype = DType::kBFloat16;
  spec.has_bias = true;
  spec.optimizer = {.kind = OptimizerKind::kAdamW, .weight_decay = 0.1};
  spec.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.5, .seed = 3};
  const auto original = Create(spec);
  const auto restored = Create(spec);
  const LossRecipe recipe;
  const BatchInput input{
      .recipe = &recipe, .mode = BackwardMode::kHiddenAndWeight, .chunks = {&rows_, 1}};
  const auto train = [&](ComputeBackend& backend) {
    ASSERT_TRUE(Compute(backend, input).ok());
    ASSERT_TRUE(backend.ApplyUpdate({.learning_rate = 0.01}).ok());
  };
  for (int i = 0; i < 3; ++i) train(*original);
  for (const TensorKind kind :
       {TensorKind::kMasterWeight, TensorKind::kWeightExpAvg, TensorKind::kWeightExpAvgSq}) {
    const std::vector<float> values = Read(*original, kind, kHidden);
    ASSERT_TRUE(restored->WriteRows(kind, 0, View(values, kHidden)).ok());
  }
  for (const TensorKind kind :
       {TensorKind::kBias, TensorKind::kBiasExpAvg, TensorKind::kBiasExpAvgSq}) {
    ASSERT_TRUE(restored->WriteRows(kind, 0, View(Read(*original, kind, 1), 1)).ok());
  }
  restored->set_num_updates(original->num_updates());
  train(*original);
  train(*restored);
  EXPECT_EQ(restored->num_updates(), 4);
  for (const TensorKind kind : {TensorKind::kMasterWeight, TensorKind::kWeightExpAvgSq}) {
    EXPECT_EQ(Read(*restored, kind, kHidden), Read(*original, kind, kHidden));
  }
  EXPECT_EQ(Read(*restored, TensorKind::kBias, 1), Read(*original, TensorKind::kBias, 1));
  std::vector<uint16_t> weights[2];
  for (int i = 0; i < 2; ++i) {
    weights[i].resize(37 * kHidden);
    const MatrixView view = {weights[i].data(), 37, kHidden, DType::kBFloat16};
    ASSERT_TRUE((i == 0 ? original : restored)->ReadRows(TensorKind::kWeight, 0, view).ok());
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST_F(CpuBackendTest, TensorsThatTheHeadDoesNotKeepAreRefused) {
  const auto backend = Create(Spec());  // SGD without momentum, without a bias.
  const std::vector<float> rows(kHidden);
  using absl::StatusCode;
  EXPECT_EQ(backend->WriteRows(TensorKind::kWeightExpAvg, 0, View(rows, kHidden)).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->WriteRows(TensorKind::kBiasExpAvg, 0, View(rows, 1)).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->WriteRows(TensorKind::kGradWeight, 0, View(rows, kHidden)).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(backend->WriteRows(TensorKind::kWeight, 37, View(rows, kHidden)).code(),
            StatusCode::kInvalidArgument);
}

// Everything a head may have in scratch, of one rank and of the first of several.
TEST_F(CpuBackendTest, TheAccountedPeakIsThePlan) {
  for (const int32_t num_ranks : {1, 3}) {
    for (const Schedule schedule : {Schedule::kRetain, Schedule::kRecompute, Schedule::kEval}) {
      for (const int64_t teacher_hidden_size : {0, 24}) {
        for (const int32_t top_k_max : {0, 5}) {
          HeadSpec spec = Spec();
          spec.weight_dtype = DType::kBFloat16;
          spec.has_bias = true;
          spec.teacher_hidden_size = teacher_hidden_size;
          spec.top_k_max = top_k_max;
          const MemoryPlan plan = PlanForSchedule(spec, schedule, {.num_ranks = num_ranks});
          std::unique_ptr<Collective> collective;  // Never used.
          if (num_ranks > 1) collective = CreateGlooCollective(0, num_ranks, {}).value();
          MemoryAccount account;
          const auto backend =
              CreateCpuBackend(spec, plan, &account,
                               {.rank = 0, .num_ranks = num_ranks, .collective = collective.get()});
          ASSERT_TRUE(backend.ok()) << backend.status();
          const MemoryAccount::Snapshot snapshot = account.Read();
          for (int i = 0; i < kNumMemoryCategories; ++i) {
            EXPECT_EQ(snapshot.categories[i].live_bytes, plan.bytes[i]) << i;
          }
          EXPECT_EQ(snapshot.total.peak_process_bytes, plan.TotalBytes());
        }
      }
    }
  }
}

}  // namespace
}  // namespace lmhead
