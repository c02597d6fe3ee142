// Ranks of the CPU backend beside each other, as threads over Gloo: what each owns, and what they
// tell each other. That all losses are right on every number of ranks is in tests/conformance.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/types/vocab_range.h"
#include "server/compute/cpu_backend.h"
#include "server/compute/gloo_collective.h"
#include "server/compute/rendezvous.h"

namespace lmhead {
namespace {

constexpr int64_t kHidden = 8;
constexpr int64_t kVocab = 37;
constexpr int64_t kTokens = 5;

HeadSpec Spec() {
  return {.name = "lm",
          .vocab_size = kVocab,
          .hidden_size = kHidden,
          .has_bias = true,
          .trainable = true,
          .optimizer = {.kind = OptimizerKind::kAdamW},
          .schedule = Schedule::kRetain,
          .batch_tokens = 8,
          .weight_init = {.kind = WeightInitKind::kNormal, .std = 0.7, .seed = 11},
          .top_k_max = 20};
}

// A head of several ranks.
class Group {
 public:
  Group(const HeadSpec& spec, int32_t num_ranks) : spec_(spec), accounts_(num_ranks) {
    const MemoryPlan plan = PlanForSchedule(spec, spec.schedule, {.num_ranks = num_ranks});
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      RankContext context = {.rank = rank, .num_ranks = num_ranks};
      if (num_ranks > 1) {
        collectives_.push_back(CreateGlooCollective(rank, num_ranks, {}).value());
        context.collective = collectives_.back().get();
      }
      backends_.push_back(CreateCpuBackend(spec, plan, &accounts_[rank], context).value());
    }
    if (num_ranks == 1) return;
    InProcessStore store;
    OnEach([&](int32_t rank) {
      const absl::Status status = collectives_[rank]->Connect(&store);
      EXPECT_TRUE(status.ok()) << status;
    });
  }

  void OnEach(const std::function<void(int32_t)>& work) {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      threads.emplace_back([&work, rank] { work(rank); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Rows of a tensor of all ranks, put together.
  std::vector<float> Read(TensorKind kind, int64_t cols) {
    std::vector<float> values(kVocab * cols);
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      const VocabRange range = RangeOf(rank);
      const absl::Status status = backends_[rank]->ReadRows(
          kind, range.start,
          {values.data() + range.start * cols, range.size(), cols, DType::kFloat32});
      EXPECT_TRUE(status.ok()) << status;
    }
    return values;
  }

  VocabRange RangeOf(int32_t rank) const { return ShardRange(spec_, num_ranks(), rank); }
  ComputeBackend& backend(int32_t rank) { return *backends_[rank]; }
  Collective& collective(int32_t rank) { return *collectives_[rank]; }
  int32_t num_ranks() const { return static_cast<int32_t>(accounts_.size()); }

 private:
  const HeadSpec spec_;
  std::vector<MemoryAccount> accounts_;
  std::vector<std::unique_ptr<Collective>> collectives_;
  std::vector<std::unique_ptr<ComputeBackend>> backends_;
};

struct Answer {
  std::vector<absl::StatusOr<BatchOutput>> of_ranks;
  std::vector<float> token_loss = std::vector<float>(kTokens);
  std::vector<int32_t> topk_ids = std::vector<int32_t>(kTokens * 20);
  std::vector<float> grad_hidden = std::vector<float>(kTokens * kHidden);
};

class CpuRanksTest : public testing::TestWithParam<int32_t> {
 protected:
  CpuRanksTest() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& value : hidden_) value = normal(random);
  }

  // Rank 0 writes the outputs, as in a shard group.
  Answer Compute(Group& group, bool broadcast) {
    Answer answer;
    answer.of_ranks.assign(group.num_ranks(), absl::InternalError("no answer"));
    group.OnEach([&](int32_t rank) {
      ChunkRows rows = {.hidden_states = {hidden_.data(), kTokens, kHidden, DType::kFloat32},
                        .targets = targets_};
      if (rank == 0) {
        rows.grad_hidden_states = {answer.grad_hidden.data(), kTokens, kHidden, DType::kFloat32};
        rows.token_loss = answer.token_loss.data();
        rows.topk_ids = answer.topk_ids.data();
        topk_logprobs_.resize(answer.topk_ids.size());
        rows.topk_logprobs = topk_logprobs_.data();
      } else if (broadcast) {
        rows.hidden_states.data = nullptr;
      }
      const BatchInput input = {
          .recipe = &recipe_,
          .mode = BackwardMode::kHiddenAndWeight,
          .chunks = {&rows, 1},
          .outputs = {.grad_hidden_states = true, .token_loss = true, .top_k = 20},
          .broadcast_hidden_states = broadcast};
      group.backend(rank).ComputeBatch(
          input, [&](absl::StatusOr<BatchOutput> output) { answer.of_ranks[rank] = output; });
    });
    return answer;
  }

  const LossRecipe recipe_{.label_smoothing = 0.1f};
  std::vector<float> hidden_ = std::vector<float>(kTokens * kHidden);
  std::vector<int32_t> targets_ = {0, 36, 18, -100, 19};
  std::vector<float> topk_logprobs_;
};
// 37 ids over 9 ranks of five each leave the last one without any.
INSTANTIATE_TEST_SUITE_P(Ranks, CpuRanksTest, testing::Values(1, 2, 3, 9));

TEST_P(CpuRanksTest, TheInitialWeightDoesNotDependOnTheRanks) {
  Group one(Spec(), 1);
  Group group(Spec(), GetParam());
  EXPECT_EQ(group.Read(TensorKind::kWeight, kHidden), one.Read(TensorKind::kWeight, kHidden));
}

TEST_P(CpuRanksTest, BroadcastRowsGiveTheSameBits) {
  hidden_[2 * kHidden + 3] = std::nanf("");  // Every rank has to see it.
  Group group(Spec(), GetParam());
  const Answer own = Compute(group, /*broadcast=*/false);
  const std::vector<float> own_grad = group.Read(TensorKind::kGradWeight, kHidden);
  group.OnEach([&](int32_t rank) { EXPECT_TRUE(group.backend(rank).DiscardGradients().ok()); });
  const Answer broadcast = Compute(group, /*broadcast=*/true);
  EXPECT_EQ(broadcast.token_loss, own.token_loss);
  EXPECT_EQ(broadcast.topk_ids, own.topk_ids);
  EXPECT_EQ(broadcast.grad_hidden, own.grad_hidden);
  EXPECT_EQ(group.Read(TensorKind::kGradWeight, kHidden), own_grad);
  EXPECT_EQ(own.token_loss[2], 0.0f);
}

TEST_P(CpuRanksTest, EveryRankAnswersTheSameSums) {
  Group group(Spec(), GetParam());
  const Answer answer = Compute(group, /*broadcast=*/false);
  for (const auto& output : answer.of_ranks) {
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(output->sums, answer.of_ranks[0]->sums);
    EXPECT_EQ(output->sums[0].num_valid_tokens, 4);
  }
}

TEST_P(CpuRanksTest, OneRanksAnswersWithinRounding) {
  Group one(Spec(), 1);
  const Answer want = Compute(one, false);
  Group group(Spec(), GetParam());
  const Answer got = Compute(group, false);
  EXPECT_EQ(got.topk_ids, want.topk_ids);
  for (int64_t i = 0; i < kTokens; ++i) EXPECT_NEAR(got.token_loss[i], want.token_loss[i], 2e-6);
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    EXPECT_NEAR(got.grad_hidden[i], want.grad_hidden[i], 1e-6);
  }
  for (const auto& [kind, cols] : {std::pair(TensorKind::kGradWeight, kHidden),
                                   std::pair(TensorKind::kGradBias, int64_t{1})}) {
    const std::vector<float> want_grad = one.Read(kind, cols);
    const std::vector<float> got_grad = group.Read(kind, cols);
    for (size_t i = 0; i < want_grad.size(); ++i) EXPECT_NEAR(got_grad[i], want_grad[i], 1e-6);
  }
}

TEST_P(CpuRanksTest, GradientRowsReachTheirRanksOnce) {
  Group group(Spec(), GetParam());
  const std::vector<int32_t> ids = {36, 0, 12};
  const std::vector<float> rows(ids.size() * kHidden, 2.0f);
  group.OnEach([&](int32_t rank) {
    const ConstMatrixView view = {rows.data(), 3, kHidden, DType::kFloat32};
    EXPECT_TRUE(group.backend(rank).AddGradRows(ids, 0, view).ok());
  });
  const std::vector<float> grad = group.Read(TensorKind::kGradWeight, kHidden);
  for (int64_t id = 0; id < kVocab; ++id) {
    const bool listed = id == 36 || id == 0 || id == 12;
    EXPECT_EQ(grad[id * kHidden], listed ? 2.0f : 0.0f) << id;
  }
  double norm = 0.0;
  for (int32_t rank = 0; rank < group.num_ranks(); ++rank) {
    norm += group.backend(rank).GradSquaredNorm().value();
  }
  EXPECT_DOUBLE_EQ(norm, 3 * kHidden * 4.0);
}

TEST_P(CpuRanksTest, RowsOfAnotherRankAreRefused) {
  Group group(Spec(), GetParam());
  std::vector<float> row(kHidden);
  for (int32_t rank = 0; rank < group.num_ranks(); ++rank) {
    const int64_t outside = group.RangeOf(rank).stop;
    EXPECT_EQ(group.backend(rank)
                  .ReadRows(TensorKind::kWeight, outside, {row.data(), 1, kHidden, DType::kFloat32})
                  .code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_P(CpuRanksTest, AnAbortedGroupFailsOnEveryRankNamingTheOneThatEndedIt) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank has no group";
  Group group(Spec(), GetParam());
  group.collective(0).Abort(absl::UnavailableError("rank 0 has had enough"));
  const Answer answer = Compute(group, /*broadcast=*/false);
  for (const auto& output : answer.of_ranks) {
    ASSERT_FALSE(output.ok());
    EXPECT_NE(output.status().message().find("rank 0"), std::string::npos) << output.status();
  }
}

}  // namespace
}  // namespace lmhead
