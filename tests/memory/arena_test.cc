#include "server/memory/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace lmhead {
namespace {

using ::testing::HasSubstr;

MemoryPlan PlanOf(int64_t weight_bytes, int64_t grad_weight_bytes) {
  MemoryPlan plan;
  plan.schedule = Schedule::kRetain;
  plan.bytes[static_cast<size_t>(MemoryCategory::kWeight)] = weight_bytes;
  plan.bytes[static_cast<size_t>(MemoryCategory::kGradWeight)] = grad_weight_bytes;
  return plan;
}

TEST(HostArenaTest, PiecesAreAlignedZeroedAndDisjoint) {
  MemoryAccount account;
  const auto arena = HostArena::Create(PlanOf(64 * 1024, 128), &account).value();
  auto* const first = arena->CarveArray<uint8_t>(MemoryCategory::kWeight, 1);
  auto* const second = arena->CarveArray<uint8_t>(MemoryCategory::kWeight, 64 * 1024 - 64);
  auto* const third = arena->CarveArray<uint8_t>(MemoryCategory::kGradWeight, 128);
  for (const uint8_t* piece : {first, second, third}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(piece) % HostArena::kAlignment, 0u);
  }
  EXPECT_EQ(second - first, 64);
  EXPECT_EQ(third - second, 64 * 1024 - 64);
  EXPECT_TRUE(std::all_of(first, third + 128, [](uint8_t byte) { return byte == 0; }));
  std::fill(first, third + 128, 0xff);
}

TEST(HostArenaTest, CarvingNothingGivesNull) {
  MemoryAccount account;
  const auto arena = HostArena::Create(PlanOf(64, 0), &account).value();
  EXPECT_EQ(arena->Carve(MemoryCategory::kGradWeight, 0), nullptr);
  EXPECT_EQ(account.Read().total.live_bytes, 0);
}

TEST(HostArenaTest, NoRoomIsResourceExhaustedWithTheBreakdown) {
  MemoryAccount account;
  const auto arena = HostArena::Create(PlanOf(int64_t{1} << 50, 0), &account);
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(arena.status().message()), HasSubstr("1125899906842624"));
  EXPECT_EQ(account.Read().total.live_bytes, 0);
}

TEST(HostArenaDeathTest, CarvingPastThePlanOrAfterSealEndsTheProcess) {
  MemoryAccount account;
  const auto arena = HostArena::Create(PlanOf(128, 64), &account).value();
  arena->Carve(MemoryCategory::kWeight, 65);
  EXPECT_DEATH(arena->Carve(MemoryCategory::kWeight, 1),
               "1 bytes of weight: 128 of the plan's 128");
  EXPECT_DEATH(arena->Carve(MemoryCategory::kLogitsScratch, 1), "logits_scratch");
  EXPECT_DEATH(arena->Carve(MemoryCategory::kGradWeight, -1), "check failed");
  arena->Seal();
  EXPECT_DEATH(arena->Carve(MemoryCategory::kGradWeight, 1), "sealed");
}

TEST(MemoryAccountTest, PeaksOfTheSumAreNotSumsOfThePeaks) {
  MemoryAccount account;
  account.Add(MemoryCategory::kWeight, 100);
  account.Subtract(MemoryCategory::kWeight, 100);
  account.Add(MemoryCategory::kGradWeight, 60);
  const MemoryAccount::Snapshot snapshot = account.Read();
  EXPECT_EQ(snapshot.categories[static_cast<size_t>(MemoryCategory::kWeight)].peak_process_bytes,
            100);
  EXPECT_EQ(
      snapshot.categories[static_cast<size_t>(MemoryCategory::kGradWeight)].peak_process_bytes, 60);
  EXPECT_EQ(snapshot.total.peak_process_bytes, 100);
  EXPECT_EQ(snapshot.total.live_bytes, 60);
}

TEST(MemoryAccountTest, StepPeaksStartAnewFromTheLiveBytes) {
  MemoryAccount account;
  account.Add(MemoryCategory::kWeight, 100);
  account.Subtract(MemoryCategory::kWeight, 70);
  account.ResetStepPeaks();
  EXPECT_EQ(account.Read().total.peak_step_bytes, 30);
  EXPECT_EQ(account.Read().total.peak_process_bytes, 100);
  account.Add(MemoryCategory::kWeight, 20);
  account.Subtract(MemoryCategory::kWeight, 20);
  EXPECT_EQ(account.Read().total.peak_step_bytes, 50);
  EXPECT_EQ(account.Read().categories[0].peak_step_bytes, 50);
  EXPECT_EQ(account.Read().total.peak_process_bytes, 100);
}

TEST(MemoryAccountTest, CountsFromSeveralThreadsAddUp) {
  MemoryAccount account;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&account] {
      for (int n = 0; n < 1000; ++n) {
        account.Add(MemoryCategory::kWeight, 3);
        account.Add(MemoryCategory::kWeight, 2);
        account.Subtract(MemoryCategory::kWeight, 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(account.Read().total.live_bytes, 12'000);
  EXPECT_GE(account.Read().total.peak_process_bytes, 12'000);
  EXPECT_LE(account.Read().total.peak_process_bytes, 12'008);
}

TEST(MemoryAccountDeathTest, SubtractingMoreThanIsLiveEndsTheProcess) {
  MemoryAccount account;
  account.Add(MemoryCategory::kWeight, 5);
  EXPECT_DEATH(account.Subtract(MemoryCategory::kWeight, 6), "got 6, live 5");
}

}  // namespace
}  // namespace lmhead
