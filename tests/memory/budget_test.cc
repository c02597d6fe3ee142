#include "server/memory/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace lmhead {
namespace {

using ::testing::HasSubstr;

HeadSpec Spec(std::string name) {
  HeadSpec spec;
  spec.name = std::move(name);
  spec.vocab_size = 50'000;
  spec.hidden_size = 64;
  spec.weight_dtype = DType::kFloat32;
  spec.trainable = true;
  spec.optimizer.kind = OptimizerKind::kAdamW;
  return spec;
}

const int64_t kRetain = PlanForSchedule(Spec("x"), Schedule::kRetain, {}).TotalBytes();
const int64_t kRecompute = PlanForSchedule(Spec("x"), Schedule::kRecompute, {}).TotalBytes();

TEST(MemoryBudgetTest, ReservesAndReleases) {
  MemoryBudget budget(kRetain + kRecompute);
  EXPECT_EQ(budget.Reserve(Spec("a"), {}).value().schedule, Schedule::kRetain);
  EXPECT_EQ(budget.reserved_bytes(), kRetain);
  EXPECT_EQ(budget.available_bytes(), kRecompute);
  // What is left holds the smaller schedule only.
  EXPECT_EQ(budget.Reserve(Spec("b"), {}).value().schedule, Schedule::kRecompute);
  EXPECT_EQ(budget.available_bytes(), 0);
  budget.Release("a");
  EXPECT_EQ(budget.reserved_bytes(), kRecompute);
  EXPECT_EQ(budget.Reserve(Spec("a"), {}).value().schedule, Schedule::kRetain);
}

TEST(MemoryBudgetTest, RefusalSaysWhatIsWantedWhatThereIsWhoHoldsItAndWhatToDo) {
  MemoryBudget budget(kRetain + kRecompute - 1);
  ASSERT_TRUE(budget.Reserve(Spec("teacher"), {}).ok());
  const absl::Status status = budget.Reserve(Spec("student"), {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("head student needs " + std::to_string(kRecompute)));
  EXPECT_THAT(message, HasSubstr("recompute"));
  EXPECT_THAT(message, HasSubstr(std::to_string(kRecompute - 1) + " are free"));
  EXPECT_THAT(message, HasSubstr("grad_weight"));
  EXPECT_THAT(message, HasSubstr("limit"));
  EXPECT_THAT(message, HasSubstr("teacher 0.2"));
  EXPECT_THAT(message, HasSubstr("--memory_limit_bytes"));
  EXPECT_EQ(budget.reserved_bytes(), kRetain);
}

TEST(MemoryBudgetTest, NothingFitsIntoAFullBudget) {
  MemoryBudget budget(kRetain);
  ASSERT_TRUE(budget.Reserve(Spec("a"), {}).ok());
  EXPECT_EQ(budget.available_bytes(), 0);
  EXPECT_FALSE(budget.Reserve(Spec("b"), {}).ok());
}

TEST(MemoryBudgetTest, ARefusalNamesFewHolders) {
  MemoryBudget budget(20 * kRecompute);
  HeadSpec spec;
  for (int i = 0; i < 20; ++i) {
    spec = Spec("head" + std::to_string(i));
    spec.schedule = Schedule::kRecompute;
    ASSERT_TRUE(budget.Reserve(spec, {}).ok());
  }
  EXPECT_THAT(std::string(budget.Reserve(Spec("more"), {}).status().message()),
              HasSubstr("and 12 smaller ones"));
}

TEST(MemoryBudgetTest, TwoHeadsAtOnceCannotTakeTheSameBytes) {
  MemoryBudget budget(3 * kRecompute);
  std::atomic<int> admitted = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      HeadSpec spec = Spec("head" + std::to_string(i));
      spec.schedule = Schedule::kRecompute;
      if (budget.Reserve(spec, {}).ok()) ++admitted;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admitted, 3);
  EXPECT_EQ(budget.available_bytes(), 0);
}

}  // namespace
}  // namespace lmhead
