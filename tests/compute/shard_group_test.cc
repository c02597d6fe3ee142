// Shard groups over threads and Gloo, with shards small enough to see what each rank was asked.

#include "server/compute/shard_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/compute/gloo_collective.h"
#include "server/compute/local_rank.h"
#include "server/memory/memory_plan.h"

namespace lmhead {
namespace {

constexpr int64_t kHidden = 2;

// What the test switches and what it looks at, of one rank.
struct RankControl {
  std::atomic<bool> fails_to_create{false};
  std::atomic<bool> fails_batches{false};
  std::atomic<bool> fails_updates{false};
  std::atomic<int> num_heads{0};
  std::atomic<int> num_discards{0};
};

// A shard that keeps its rows of the weight. Its "loss" of a token is the sum of the weight of the
// whole head and of all teachers', times the token's first hidden state: right only when every
// rank took part.
class SumShard final : public ComputeBackend {
 public:
  SumShard(const HeadSpec& spec, const RankContext& context, RankControl* control)
      : range_(ShardRange(spec, context.num_ranks, context.rank)),
        context_(context),
        control_(*control),
        weight_(range_.size() * kHidden) {
    ++control_.num_heads;
  }
  ~SumShard() override { --control_.num_heads; }

  void ComputeBatch(const BatchInput& input, BatchDone done) override { done(Compute(input)); }
  absl::StatusOr<double> GradSquaredNorm() override { return OwnSum(); }
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override {
    if (control_.fails_updates) return absl::InternalError("no update today");
    for (float& value : weight_) value -= static_cast<float>(update.learning_rate);
    ++num_updates_;
    return absl::OkStatus();
  }
  absl::Status DiscardGradients() override {
    ++control_.num_discards;
    return absl::OkStatus();
  }
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows) override {
    for (size_t i = 0; i < row_ids.size(); ++i) {
      if (!range_.Contains(row_ids[i])) continue;
      const float* const from = static_cast<const float*>(rows.data) + i * kHidden;
      for (int64_t j = 0; j < kHidden; ++j) Row(row_ids[i])[j] += from[j];
    }
    return absl::OkStatus();
  }
  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) override {
    if (absl::Status status = CheckRange(row_start, rows.rows); !status.ok()) return status;
    std::memcpy(Row(row_start), rows.data, rows.size_bytes());
    return absl::OkStatus();
  }
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) override {
    if (absl::Status status = CheckRange(row_start, rows.rows); !status.ok()) return status;
    std::memcpy(rows.data, Row(row_start), rows.size_bytes());
    return absl::OkStatus();
  }
  int64_t num_updates() const override { return num_updates_; }
  void set_num_updates(int64_t num_updates) override { num_updates_ = num_updates; }

 private:
  float* Row(int64_t row) { return weight_.data() + (row - range_.start) * kHidden; }
  double OwnSum() const {
    double sum = 0.0;
    for (const float value : weight_) sum += value;
    return sum;
  }
  absl::Status CheckRange(int64_t row_start, int64_t num_rows) const {
    if (row_start >= range_.start && row_start + num_rows <= range_.stop) return absl::OkStatus();
    return absl::InternalError("rows of another rank");
  }

  absl::StatusOr<BatchOutput> Compute(const BatchInput& input) {
    if (control_.fails_batches) return absl::InternalError("the device fell off");
    float sum = static_cast<float>(OwnSum());
    if (input.teacher != nullptr) {
      sum += static_cast<float>(static_cast<SumShard*>(input.teacher)->OwnSum());
    }
    absl::Status status = context_.collective->AllReduce(&sum, 1, nullptr);
    BatchOutput output;
    for (const ChunkRows& chunk : input.chunks) {
      const int64_t rows = chunk.hidden_states.rows;
      std::vector<float> hidden(rows * kHidden);
      if (chunk.hidden_states.data != nullptr) {
        std::memcpy(hidden.data(), chunk.hidden_states.data, rows * kHidden * sizeof(float));
      }
      if (input.broadcast_hidden_states) {
        EXPECT_EQ(chunk.hidden_states.data != nullptr, context_.rank == 0);
        status.Update(context_.collective->Broadcast(
            hidden.data(), static_cast<int64_t>(hidden.size() * sizeof(float)), 0, nullptr));
      }
      EXPECT_EQ(chunk.token_loss != nullptr, context_.rank == 0) << "rank 0 alone writes outputs";
      EXPECT_TRUE(input.outputs.token_loss);
      if (!status.ok()) return status;
      // All ranks agree on the hidden states, or this differs between them.
      float check = hidden[0];
      status = context_.collective->AllReduce(&check, 1, nullptr);
      EXPECT_EQ(check, hidden[0] * static_cast<float>(context_.num_ranks));
      for (int64_t i = 0; chunk.token_loss != nullptr && i < rows; ++i) {
        chunk.token_loss[i] = sum * hidden[i * kHidden];
      }
      output.sums.push_back({.loss_sum = context_.rank == 0 ? sum : -1.0, .num_tokens = rows});
    }
    if (!status.ok()) return status;
    return output;
  }

  const VocabRange range_;
  const RankContext context_;
  RankControl& control_;
  std::vector<float> weight_;
  int64_t num_updates_ = 0;
};

class ShardGroupTest : public testing::TestWithParam<int32_t> {
 protected:
  explicit ShardGroupTest(bool broadcast = false) : controls_(GetParam()) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int32_t rank = 0; rank < GetParam(); ++rank) {
      absl::StatusOr<std::unique_ptr<Collective>> collective =
          CreateGlooCollective(rank, GetParam(), {});
      EXPECT_TRUE(collective.ok()) << collective.status();
      ranks.push_back(std::make_unique<LocalRank>(
          LocalRank::Collectives{.shards = *std::move(collective)},
          [this](const HeadSpec& spec, const MemoryPlan& plan,
                 const RankContext& context) -> absl::StatusOr<std::unique_ptr<ComputeBackend>> {
            RankControl& control = controls_[context.rank];
            if (control.fails_to_create) return absl::ResourceExhaustedError("no room");
            return std::make_unique<SumShard>(spec, context, &control);
          }));
    }
    pool_ = std::make_unique<RankPool>(std::move(ranks),
                                       RankPool::Options{.broadcast_hidden_states = {broadcast}});
  }

  int32_t num_ranks() const { return GetParam(); }
  int32_t last_rank() const { return GetParam() - 1; }

  static HeadSpec Spec(int64_t vocab_size) {
    return {.name = "lm", .vocab_size = vocab_size, .hidden_size = kHidden, .trainable = true};
  }

  // A group whose weight is `value` everywhere.
  std::unique_ptr<ShardGroup> MakeGroup(int64_t vocab_size, float value) {
    absl::StatusOr<std::unique_ptr<ShardGroup>> group =
        ShardGroup::Create(pool_.get(), Spec(vocab_size), {});
    EXPECT_TRUE(group.ok()) << group.status();
    const std::vector<float> weight(vocab_size * kHidden, value);
    EXPECT_TRUE(
        (*group)->WriteRows(TensorKind::kWeight, 0, {weight.data(), vocab_size, kHidden}).ok());
    return *std::move(group);
  }

  // The "loss" of one token with hidden state 3.
  absl::StatusOr<float> Loss(ShardGroup& group, ShardGroup* teacher = nullptr) {
    const std::vector<float> hidden = {3.0f, 4.0f};
    const int32_t target = 0;
    float token_loss = -1.0f;
    const ChunkRows chunk = {.hidden_states = {hidden.data(), 1, kHidden},
                             .targets = {&target, 1},
                             .token_loss = &token_loss};
    const LossRecipe recipe;
    absl::StatusOr<BatchOutput> result;
    absl::Notification finished;
    group.ComputeBatch({.recipe = &recipe,
                        .chunks = {&chunk, 1},
                        .outputs = {.token_loss = true},
                        .teacher = teacher},
                       [&](absl::StatusOr<BatchOutput> output) {
                         result = std::move(output);
                         finished.Notify();
                       });
    finished.WaitForNotification();
    if (!result.ok()) return result.status();
    EXPECT_EQ(result->sums.size(), 1u);
    EXPECT_GE(result->sums[0].loss_sum, 0.0) << "the sums are rank 0's";
    return token_loss;
  }

  std::vector<RankControl> controls_;
  std::unique_ptr<RankPool> pool_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardGroupTest, testing::Values(2, 3, 4));

// Vocabularies that the ranks divide, do not divide, and that leave the last ones nothing.
TEST_P(ShardGroupTest, RowsGoToTheirRanksAndComeBack) {
  for (const int64_t vocab_size : {int64_t{12}, int64_t{13}, int64_t{2}, int64_t{1}}) {
    absl::StatusOr<std::unique_ptr<ShardGroup>> group =
        ShardGroup::Create(pool_.get(), Spec(vocab_size), {});
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<float> weight(vocab_size * kHidden);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i);
    // Three rows at a time, so that messages straddle the shards.
    for (int64_t row = 0; row < vocab_size; row += 3) {
      const int64_t rows = std::min<int64_t>(3, vocab_size - row);
      const absl::Status status = (*group)->WriteRows(
          TensorKind::kWeight, row, {weight.data() + row * kHidden, rows, kHidden});
      ASSERT_TRUE(status.ok()) << status;
    }
    std::vector<float> read(weight.size());
    ASSERT_TRUE(
        (*group)->ReadRows(TensorKind::kWeight, 0, {read.data(), vocab_size, kHidden}).ok());
    EXPECT_EQ(read, weight);
    if (vocab_size < 2) continue;
    ASSERT_TRUE((*group)->ReadRows(TensorKind::kWeight, 1, {read.data(), 1, kHidden}).ok());
    EXPECT_EQ(read[0], weight[kHidden]);
  }
}

TEST_P(ShardGroupTest, BatchesNormsAndUpdatesAreOfAllRanks) {
  const std::unique_ptr<ShardGroup> group = MakeGroup(10, 0.5f);
  EXPECT_EQ(Loss(*group).value(), 30.0f);
  EXPECT_EQ(group->GradSquaredNorm().value(), 10.0);
  ASSERT_TRUE(group->ApplyUpdate({.learning_rate = 0.25}).ok());
  EXPECT_EQ(group->num_updates(), 1);
  EXPECT_EQ(Loss(*group).value(), 15.0f);
  const std::vector<int32_t> ids = {9, 0, 4};
  const std::vector<float> rows(ids.size() * kHidden, 1.0f);
  ASSERT_TRUE(group->AddGradRows(ids, 0, {rows.data(), 3, kHidden}).ok());
  EXPECT_EQ(group->GradSquaredNorm().value(), 5.0 + 6.0);
  group->set_num_updates(7);
  EXPECT_EQ(group->num_updates(), 7);
}

TEST_P(ShardGroupTest, EachRankGetsItsOwnShardOfTheTeacher) {
  const std::unique_ptr<ShardGroup> student = MakeGroup(10, 0.5f);
  const std::unique_ptr<ShardGroup> teacher = MakeGroup(5, 2.0f);
  EXPECT_EQ(Loss(*student, teacher.get()).value(), (10.0f + 20.0f) * 3.0f);
}

TEST_P(ShardGroupTest, AHeadThatARankHasNoRoomForLeavesNothingBehind) {
  controls_[last_rank()].fails_to_create = true;
  const auto group = ShardGroup::Create(pool_.get(), Spec(10), {});
  EXPECT_EQ(group.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(group.status().message().find(absl::StrCat("rank ", last_rank(), ": no room")),
            std::string::npos)
      << group.status();
  for (const RankControl& control : controls_) EXPECT_EQ(control.num_heads, 0);
  controls_[last_rank()].fails_to_create = false;
  EXPECT_EQ(Loss(*MakeGroup(10, 0.5f)).value(), 30.0f);
}

TEST_P(ShardGroupTest, ARankThatFailsEndsTheBatchEverywhereAndTheNextOneWorks) {
  const std::unique_ptr<ShardGroup> group = MakeGroup(10, 0.5f);
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    ASSERT_TRUE(Loss(*group).ok());
    controls_[rank].fails_batches = true;
    const absl::Status status = Loss(*group).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(status.message(), absl::StrCat("rank ", rank, ": the device fell off"));
    EXPECT_FALSE(pool_->connected());
    controls_[rank].fails_batches = false;
    ASSERT_TRUE(group->DiscardGradients().ok());
  }
  EXPECT_EQ(Loss(*group).value(), 30.0f);
  EXPECT_EQ(pool_->generation(), static_cast<uint64_t>(num_ranks() + 1));
  for (const RankControl& control : controls_) EXPECT_EQ(control.num_discards, num_ranks());
}

TEST_P(ShardGroupTest, AnUpdateThatARankDidNotDoBreaksTheHeadForGood) {
  const std::unique_ptr<ShardGroup> group = MakeGroup(10, 0.5f);
  const std::unique_ptr<ShardGroup> other = MakeGroup(10, 0.5f);
  controls_[0].fails_updates = true;
  const absl::Status status = group->ApplyUpdate({.learning_rate = 0.25});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_NE(status.message().find("rank 0: no update today"), std::string::npos) << status;
  controls_[0].fails_updates = false;
  EXPECT_EQ(group->ApplyUpdate({.learning_rate = 0.25}), status);
  EXPECT_EQ(Loss(*group).status(), status);
  EXPECT_EQ(group->num_updates(), 0);
  EXPECT_EQ(Loss(*other).value(), 30.0f) << "other heads go on";
}

class BroadcastGroupTest : public ShardGroupTest {
 protected:
  BroadcastGroupTest() : ShardGroupTest(/*broadcast=*/true) {}
};
INSTANTIATE_TEST_SUITE_P(Ranks, BroadcastGroupTest, testing::Values(2, 3));

TEST_P(BroadcastGroupTest, RankZeroAloneHasTheHiddenStates) {
  EXPECT_EQ(Loss(*MakeGroup(10, 0.5f)).value(), 30.0f);
}

}  // namespace
}  // namespace lmhead
