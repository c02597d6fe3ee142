#include "server/memory/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>

#include "server/memory/arena.h"

namespace lmhead {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kMiBytes = int64_t{1} << 20;

HeadSpec Spec(int64_t vocab_size, int64_t hidden_size, DType dtype) {
  HeadSpec spec;
  spec.name = "lm";
  spec.vocab_size = vocab_size;
  spec.hidden_size = hidden_size;
  spec.weight_dtype = dtype;
  spec.trainable = true;
  spec.optimizer.kind = OptimizerKind::kAdamW;
  return spec;
}

// The example of the documentation, worked out by hand: 131072 x 4096 elements are 2^29.
TEST(MemoryPlanTest, HeadOf131072By4096InBFloat16) {
  const MemoryPlan plan = PlanForSchedule(Spec(131072, 4096, DType::kBFloat16), Schedule::kRetain,
                                          {.backend = BackendKind::kCpu});
  EXPECT_EQ(plan[MemoryCategory::kWeight], 1 * kGiB);
  EXPECT_EQ(plan[MemoryCategory::kMasterWeight], 2 * kGiB);
  EXPECT_EQ(plan[MemoryCategory::kGradWeight], 2 * kGiB);
  EXPECT_EQ(plan[MemoryCategory::kOptimizerState], 4 * kGiB);
  EXPECT_EQ(plan[MemoryCategory::kCollective], 0);
  EXPECT_EQ(plan.shard_size, 131072);
}

TEST(MemoryPlanTest, CpuScratchOf131072By4096) {
  const HeadSpec spec = Spec(131072, 4096, DType::kBFloat16);
  const int64_t staging = 2 * 16 * kMiBytes + 1024 * kCpuRowStateBytes;
  const int64_t workspace = kCpuVocabTile * 4096 * 4 + kCpuGemmScratchBytesMax;
  const MemoryPlan retain = PlanForSchedule(spec, Schedule::kRetain, {});
  EXPECT_EQ(retain.batch_tokens, 1024);
  EXPECT_EQ(retain.vocab_tile, kCpuVocabTile);
  EXPECT_EQ(retain[MemoryCategory::kLogitsScratch], 512 * kMiBytes);  // 2^10 * 2^17 * 4
  EXPECT_EQ(retain[MemoryCategory::kDeviceStaging], staging);
  EXPECT_EQ(retain[MemoryCategory::kLibraryWorkspace], workspace);
  EXPECT_EQ(retain.TotalBytes(), 9 * kGiB + 512 * kMiBytes + staging + workspace);
  const MemoryPlan recompute = PlanForSchedule(spec, Schedule::kRecompute, {});
  const int64_t tile_logits = 1024 * kCpuVocabTile * 4;
  EXPECT_EQ(recompute[MemoryCategory::kLogitsScratch], tile_logits);
  EXPECT_EQ(recompute.TotalBytes(), 9 * kGiB + tile_logits + staging + workspace);
}

TEST(MemoryPlanTest, CudaScratchOf131072By4096) {
  const HeadSpec spec = Spec(131072, 4096, DType::kBFloat16);
  const PlanOptions options = {.backend = BackendKind::kCuda};
  const MemoryPlan retain = PlanForSchedule(spec, Schedule::kRetain, options);
  EXPECT_EQ(retain.batch_tokens, 4096);
  EXPECT_EQ(retain[MemoryCategory::kLogitsScratch], 1 * kGiB);  // 2^12 * 2^17 * 2
  EXPECT_EQ(retain[MemoryCategory::kLibraryWorkspace], 32 * kMiBytes);
  const MemoryPlan recompute = PlanForSchedule(spec, Schedule::kRecompute, options);
  EXPECT_EQ(recompute.vocab_tile, 32768);
  EXPECT_EQ(recompute[MemoryCategory::kLogitsScratch], 256 * kMiBytes);
  EXPECT_LT(recompute.TotalBytes(), retain.TotalBytes());
}

TEST(MemoryPlanTest, DenseLogitsOfOneSequenceOf131072) {
  const DenseLogits dense = PlanDenseLogits(131072, 131072, DType::kBFloat16);
  EXPECT_EQ(dense.logits_bytes, 32 * kGiB);
  EXPECT_EQ(dense.float32_logits_bytes, 64 * kGiB);
  EXPECT_EQ(dense.log_softmax_bytes, 64 * kGiB);
  EXPECT_EQ(dense.grad_logits_bytes, 32 * kGiB);
  EXPECT_EQ(dense.TotalBytes(), 192 * kGiB);
  const DenseLogits float32 = PlanDenseLogits(131072, 131072, DType::kFloat32);
  EXPECT_EQ(float32.logits_bytes, 64 * kGiB);
  EXPECT_EQ(float32.float32_logits_bytes, 0);
  EXPECT_EQ(float32.TotalBytes(), 192 * kGiB);
}

TEST(MemoryPlanTest, OnlyABFloat16TrainableHeadHasAMasterWeight) {
  EXPECT_EQ(PlanForSchedule(Spec(1000, 64, DType::kFloat32), Schedule::kRetain,
                            {})[MemoryCategory::kMasterWeight],
            0);
  HeadSpec frozen = Spec(1000, 64, DType::kBFloat16);
  frozen.trainable = false;
  frozen.optimizer.kind = OptimizerKind::kNone;
  const MemoryPlan plan = PlanForSchedule(frozen, Schedule::kFrozen, {});
  EXPECT_EQ(plan[MemoryCategory::kMasterWeight], 0);
  EXPECT_EQ(plan[MemoryCategory::kGradWeight], 0);
  EXPECT_EQ(plan[MemoryCategory::kOptimizerState], 0);
  EXPECT_EQ(plan[MemoryCategory::kWeight], 1000 * 64 * 2);
}

TEST(MemoryPlanTest, OptimizerStateFollowsTheOptimizer) {
  HeadSpec spec = Spec(1000, 64, DType::kFloat32);
  const auto state = [&] {
    return PlanForSchedule(spec, Schedule::kRetain, {})[MemoryCategory::kOptimizerState];
  };
  EXPECT_EQ(state(), 2 * 1000 * 64 * 4);
  spec.optimizer.kind = OptimizerKind::kSgd;
  EXPECT_EQ(state(), 0);
  spec.optimizer.momentum = 0.9;
  EXPECT_EQ(state(), 1000 * 64 * 4);
}

TEST(MemoryPlanTest, BiasIsFloat32WithGradientAndState) {
  HeadSpec spec = Spec(1001, 64, DType::kBFloat16);
  const MemoryPlan without = PlanForSchedule(spec, Schedule::kRetain, {});
  spec.has_bias = true;
  const MemoryPlan with = PlanForSchedule(spec, Schedule::kRetain, {});
  const int64_t bias = 4032;  // 1001 * 4 rounded up to a multiple of 64.
  EXPECT_EQ(with[MemoryCategory::kWeight] - without[MemoryCategory::kWeight], bias);
  EXPECT_EQ(with[MemoryCategory::kMasterWeight], without[MemoryCategory::kMasterWeight]);
  EXPECT_EQ(with[MemoryCategory::kGradWeight] - without[MemoryCategory::kGradWeight], bias);
  EXPECT_EQ(with[MemoryCategory::kOptimizerState] - without[MemoryCategory::kOptimizerState],
            2 * bias);
}

TEST(MemoryPlanTest, RanksSplitTheVocabulary) {
  const HeadSpec spec = Spec(1003, 64, DType::kFloat32);
  const MemoryPlan plan = PlanForSchedule(spec, Schedule::kRetain, {.num_ranks = 4});
  EXPECT_EQ(plan.shard_size, 251);
  EXPECT_EQ(plan[MemoryCategory::kWeight], 251 * 64 * 4);
  EXPECT_GT(plan[MemoryCategory::kCollective], 0);
}

TEST(MemoryPlanTest, BatchTokensComeFromTheHeadThenTheServerThenTheBackend) {
  HeadSpec spec = Spec(1000, 64, DType::kFloat32);
  const auto batch_tokens = [&](const PlanOptions& options) {
    return PlanForSchedule(spec, Schedule::kRetain, options).batch_tokens;
  };
  EXPECT_EQ(batch_tokens({.backend = BackendKind::kCpu}), 1024);
  EXPECT_EQ(batch_tokens({.backend = BackendKind::kCuda}), 4096);
  EXPECT_EQ(batch_tokens({.batch_tokens = 256}), 256);
  spec.batch_tokens = 77;
  EXPECT_EQ(batch_tokens({.batch_tokens = 256}), 77);
}

TEST(MemoryPlanTest, AutoTakesTheFastestThatFits) {
  const HeadSpec spec = Spec(100'000, 64, DType::kFloat32);
  const int64_t retain = PlanForSchedule(spec, Schedule::kRetain, {}).TotalBytes();
  const int64_t recompute = PlanForSchedule(spec, Schedule::kRecompute, {}).TotalBytes();
  ASSERT_LT(recompute, retain);
  EXPECT_EQ(PlanHead(spec, {}).value().schedule, Schedule::kRetain);
  HeadSpec frozen = spec;
  frozen.trainable = false;
  EXPECT_EQ(PlanHead(frozen, {}).value().schedule, Schedule::kFrozen);
  EXPECT_EQ(PlanHead(spec, {.budget_bytes = retain}).value().schedule, Schedule::kRetain);
  EXPECT_EQ(PlanHead(spec, {.budget_bytes = retain - 1}).value().schedule, Schedule::kRecompute);
  EXPECT_EQ(PlanHead(spec, {.budget_bytes = recompute}).value().schedule, Schedule::kRecompute);
  const absl::Status status = PlanHead(spec, {.budget_bytes = recompute - 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("schedule recompute"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(recompute)));
  EXPECT_THAT(std::string(status.message()), HasSubstr("optimizer_state"));
}

TEST(MemoryPlanTest, AStatedScheduleIsNotReplaced) {
  HeadSpec spec = Spec(100'000, 64, DType::kFloat32);
  const int64_t recompute = PlanForSchedule(spec, Schedule::kRecompute, {}).TotalBytes();
  spec.schedule = Schedule::kRetain;
  EXPECT_EQ(PlanHead(spec, {.budget_bytes = recompute}).status().code(),
            absl::StatusCode::kResourceExhausted);
  spec.schedule = Schedule::kRecompute;
  EXPECT_EQ(PlanHead(spec, {}).value().schedule, Schedule::kRecompute);
}

TEST(MemoryPlanTest, SchedulesFollowTrainability) {
  HeadSpec spec = Spec(10, 10, DType::kFloat32);
  EXPECT_THAT(SchedulesOf(spec), ElementsAre(Schedule::kRetain, Schedule::kRecompute));
  spec.trainable = false;
  EXPECT_THAT(SchedulesOf(spec), ElementsAre(Schedule::kFrozen));
}

TEST(MemoryPlanTest, BreakdownNamesEveryCategoryThatHoldsSomethingLargestFirst) {
  const std::string text =
      PlanForSchedule(Spec(131072, 4096, DType::kBFloat16), Schedule::kRetain, {}).Breakdown();
  EXPECT_LT(text.find("optimizer_state"), text.find("master_weight"));
  EXPECT_LT(text.find("master_weight"), text.find("logits_scratch"));
  EXPECT_THAT(text, HasSubstr("4294967296 bytes       4096.0 MiB"));
  EXPECT_THAT(text, Not(HasSubstr("collective")));
  EXPECT_THAT(text, HasSubstr("total"));
}

// Worked out by hand, of a shard of half of 131072 rows under recompute.
TEST(MemoryPlanTest, CpuScratchOfATeacherOfTopKAndOfRanks) {
  HeadSpec spec = Spec(131072, 4096, DType::kBFloat16);
  const PlanOptions options = {.num_ranks = 2};
  const MemoryPlan plain = PlanForSchedule(spec, Schedule::kRecompute, options);
  const auto more = [&](MemoryCategory category) {
    return PlanForSchedule(spec, Schedule::kRecompute, options)[category] - plain[category];
  };
  EXPECT_EQ(plain[MemoryCategory::kCollective], 1024 * 4096 * 4);  // Broadcast rows.
  spec.teacher_hidden_size = 8192;
  EXPECT_EQ(more(MemoryCategory::kLogitsScratch), 1024 * kCpuVocabTile * 4);
  EXPECT_EQ(more(MemoryCategory::kDeviceStaging), 1024 * (8192 * 4 + kCpuDivergenceStateBytes));
  EXPECT_EQ(more(MemoryCategory::kCollective), 1024 * 4096 * 4);
  spec.teacher_hidden_size = 0;
  spec.top_k_max = 1000;
  EXPECT_EQ(more(MemoryCategory::kLogitsScratch), 0);
  EXPECT_EQ(
      more(MemoryCategory::kDeviceStaging),
      1024 * (1000 * (kCpuTeacherEntryBytes + kCpuTopKEntryBytes) + kCpuDivergenceStateBytes));
  // The lists of one rank and of both are more than the rows.
  EXPECT_EQ(more(MemoryCategory::kCollective), 1024 * (3 * 1000 * 8 - 4096 * 4));
}

// A small student is split where its larger teacher is, so its last shard is not the smallest.
TEST(MemoryPlanTest, APartitionOfAnotherSizeMovesTheShards) {
  HeadSpec spec = Spec(1000, 64, DType::kFloat32);
  spec.partition_vocab_size = 1600;
  EXPECT_EQ(PlanForSchedule(spec, Schedule::kRetain, {.num_ranks = 4}).shard_size, 400);
  spec.partition_vocab_size = 800;
  EXPECT_EQ(PlanForSchedule(spec, Schedule::kRetain, {.num_ranks = 4}).shard_size, 400);
}

// Every piece a backend carves has a place in the plan: carved one by one they fill it exactly.
class PlanAndCarveTest
    : public ::testing::TestWithParam<std::tuple<DType, bool, bool, Schedule, int64_t>> {};

TEST_P(PlanAndCarveTest, CarvingThePiecesFillsThePlan) {
  const auto [dtype, has_bias, trainable, schedule, batch_tokens] = GetParam();
  HeadSpec spec = Spec(4999, 37, dtype);
  spec.has_bias = has_bias;
  spec.trainable = trainable;
  if (!trainable) spec.optimizer.kind = OptimizerKind::kNone;
  if (has_bias) {  // Everything optional at once.
    spec.teacher_hidden_size = 53;
    spec.top_k_max = 7;
  }
  const MemoryPlan plan = PlanForSchedule(spec, schedule, {.batch_tokens = batch_tokens});
  MemoryAccount account;
  {
    const auto arena = HostArena::Create(plan, &account).value();
    const int64_t elements = 4999 * 37;
    arena->Carve(MemoryCategory::kWeight, elements * BytesPerElement(dtype));
    if (has_bias) arena->CarveArray<float>(MemoryCategory::kWeight, 4999);
    if (trainable) {
      if (dtype == DType::kBFloat16)
        arena->CarveArray<float>(MemoryCategory::kMasterWeight, elements);
      arena->CarveArray<float>(MemoryCategory::kGradWeight, elements);
      for (int i = 0; i < 2; ++i)
        arena->CarveArray<float>(MemoryCategory::kOptimizerState, elements);
      if (has_bias) {
        arena->CarveArray<float>(MemoryCategory::kGradWeight, 4999);
        for (int i = 0; i < 2; ++i) arena->CarveArray<float>(MemoryCategory::kOptimizerState, 4999);
      }
    }
    const CpuScratch scratch = PlanCpuScratch(spec, plan);
    arena->Carve(MemoryCategory::kLogitsScratch, scratch.logits_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.hidden_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.grad_hidden_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.row_state_bytes);
    arena->Carve(MemoryCategory::kLogitsScratch, scratch.teacher_logits_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.teacher_hidden_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.divergence_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.teacher_entries_bytes);
    arena->Carve(MemoryCategory::kDeviceStaging, scratch.top_k_bytes);
    arena->Carve(MemoryCategory::kCollective, scratch.collective_bytes);
    arena->Carve(MemoryCategory::kLibraryWorkspace, scratch.weight_tile_bytes);
    arena->Carve(MemoryCategory::kLibraryWorkspace, scratch.gemm_scratch_bytes);
    arena->Seal();
    const MemoryAccount::Snapshot snapshot = account.Read();
    for (int i = 0; i < kNumMemoryCategories; ++i) {
      const auto category = static_cast<MemoryCategory>(i);
      EXPECT_EQ(snapshot.categories[i].live_bytes, plan[category]) << MemoryCategoryName(category);
    }
    EXPECT_EQ(snapshot.total.live_bytes, plan.TotalBytes());
  }
  EXPECT_EQ(account.Read().total.live_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Trainable, PlanAndCarveTest,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Bool(), ::testing::Values(true),
                                            ::testing::Values(Schedule::kRetain,
                                                              Schedule::kRecompute),
                                            ::testing::Values(1, 33)));
INSTANTIATE_TEST_SUITE_P(NotTrainable, PlanAndCarveTest,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Bool(), ::testing::Values(false),
                                            ::testing::Values(Schedule::kFrozen, Schedule::kEval),
                                            ::testing::Values(1, 33)));

}  // namespace
}  // namespace lmhead
