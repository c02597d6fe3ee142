#include "server/compute/cpu_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

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
  std::vector<float> entropy(4);
  ChunkRows with = rows_;
  with.entropy = entropy.data();
  for (const ChunkRows* rows : std::initializer_list<const ChunkRows*>{&rows_, &with}) {
    backend->ComputeBatch({&recipe, BackwardMode::kNone, {rows, 1}},
                          [&](absl::StatusOr<BatchOutput> result) {
                            ASSERT_TRUE(result.ok());
                            const double want = rows == &with ? 4 * std::log(37.0) : 0.0;
                            EXPECT_NEAR(result->sums[0].entropy_sum, want, 1e-5);
                          });
  }
}

}  // namespace
}  // namespace lmhead
