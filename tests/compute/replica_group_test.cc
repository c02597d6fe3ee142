// Replicas of a head on the CPU: what they share, and that together they are one head.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "server/compute/cpu_backend.h"
#include "server/compute/gloo_collective.h"
#include "server/compute/local_rank.h"
#include "server/compute/rank_pool.h"
#include "server/compute/shard_group.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"
#include "tests/util/forwarding_backend.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 12;
constexpr int64_t kBatchTokens = 24;

struct Layout {
  int32_t num_ranks = 1;  // A replica.
  int32_t num_replicas = 1;

  int32_t all() const { return num_ranks * num_replicas; }
};

void PrintTo(const Layout& layout, std::ostream* out) {
  *out << layout.num_ranks << " ranks in each of " << layout.num_replicas << " replicas";
}

// A rank's backend that can be told to fail.
class RankUnderTest final : public ForwardingBackend {
 public:
  struct Control {
    std::atomic<bool> fails_to_reduce{false};
    std::atomic<bool> fails_to_update{false};
    std::atomic<bool> holds_batches{false};  // Until it is false.
    std::atomic<int> num_batches{0};
    std::atomic<int> num_reductions{0};
    RankUnderTest* last = nullptr;  // Made last, and still there.
  };

  RankUnderTest(std::unique_ptr<ComputeBackend> inner, Control* control)
      : ForwardingBackend(std::move(inner)), control_(*control) {
    control_.last = this;
  }

  void ComputeBatch(const BatchInput& input, BatchDone done) override {
    ++control_.num_batches;
    while (control_.holds_batches) absl::SleepFor(absl::Milliseconds(1));
    ForwardingBackend::ComputeBatch(input, std::move(done));
  }
  absl::Status ReduceGradients() override {
    ++control_.num_reductions;
    if (control_.fails_to_reduce) return absl::InternalError("the device fell off");
    return ForwardingBackend::ReduceGradients();
  }
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override {
    if (control_.fails_to_update) return absl::InternalError("no update today");
    return ForwardingBackend::ApplyUpdate(update);
  }

 private:
  Control& control_;
};

using Control = RankUnderTest::Control;

std::unique_ptr<Collective> MakeCollective(int32_t rank, int32_t size) {
  if (size == 1) return nullptr;
  return CreateGlooCollective(rank, size, {.timeout = absl::Seconds(20)}).value();
}

// All ranks of a layout; one rank without a pool.
class Ranks {
 public:
  explicit Ranks(const Layout& layout)
      : layout_(layout), controls_(layout.all()), accounts_(layout.all()) {
    if (layout.all() == 1) return;
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int32_t rank = 0; rank < layout.all(); ++rank) {
      ranks.push_back(std::make_unique<LocalRank>(
          LocalRank::Collectives{
              .shards = MakeCollective(rank % layout.num_ranks, layout.num_ranks),
              .peers = MakeCollective(rank / layout.num_ranks, layout.num_replicas)},
          [this, rank](const HeadSpec& spec, const MemoryPlan& plan, const RankContext& context) {
            return Make(rank, spec, plan, context);
          }));
    }
    pool_ = std::make_unique<RankPool>(std::move(ranks),
                                       RankPool::Options{.num_replicas = layout.num_replicas});
  }

  std::unique_ptr<ComputeBackend> MakeHead(const HeadSpec& spec) {
    const MemoryPlan plan =
        PlanForSchedule(spec, spec.schedule,
                        {.num_ranks = layout_.num_ranks, .num_replicas = layout_.num_replicas});
    if (pool_ == nullptr) return CreateCpuBackend(spec, plan, &accounts_[0]).value();
    absl::StatusOr<std::unique_ptr<ShardGroup>> group = ShardGroup::Create(pool_.get(), spec, plan);
    EXPECT_TRUE(group.ok()) << group.status();
    return *std::move(group);
  }

  const Layout& layout() const { return layout_; }
  Control& control(int32_t rank) { return controls_[rank]; }
  const MemoryAccount& account(int32_t rank) const { return accounts_[rank]; }
  RankPool& pool() { return *pool_; }

 private:
  absl::StatusOr<std::unique_ptr<ComputeBackend>> Make(int32_t rank, const HeadSpec& spec,
                                                       const MemoryPlan& plan,
                                                       const RankContext& context) {
    auto inner = CreateCpuBackend(spec, plan, &accounts_[rank], context);
    if (!inner.ok()) return inner.status();
    return std::make_unique<RankUnderTest>(*std::move(inner), &controls_[rank]);
  }

  const Layout layout_;
  std::vector<Control> controls_;
  std::vector<MemoryAccount> accounts_;
  std::unique_ptr<RankPool> pool_;
};

HeadSpec SpecOf(DType dtype, OptimizerSpec optimizer, int64_t vocab_size = 37) {
  return {.name = "lm",
          .vocab_size = vocab_size,
          .hidden_size = kHidden,
          .weight_dtype = dtype,
          .has_bias = true,
          .trainable = true,
          .optimizer = optimizer,
          .schedule = Schedule::kRetain,
          .batch_tokens = kBatchTokens,
          .weight_init = {.kind = WeightInitKind::kNormal, .std = 0.5, .seed = 3}};
}

const OptimizerSpec kSgd = {.kind = OptimizerKind::kSgd};
const OptimizerSpec kMomentum = {.kind = OptimizerKind::kSgd, .momentum = 0.9};
const OptimizerSpec kAdamW = {
    .kind = OptimizerKind::kAdamW, .weight_decay = 0.1, .decay_bias = true};

// The rows of one batch, of one chunk.
struct Batch {
  std::vector<float> hidden_states;
  std::vector<int32_t> targets;
  std::vector<float> grad_hidden_states;
  absl::Status status;
  double loss_sum = 0.0;

  Batch(int64_t num_tokens, int64_t vocab_size, uint32_t seed)
      : hidden_states(num_tokens * kHidden), targets(num_tokens) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : hidden_states) value = normal(random);
    for (int32_t& target : targets) {
      target = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size));
    }
    grad_hidden_states.resize(hidden_states.size());
  }
};

std::vector<Batch> MakeBatches(int count, int64_t vocab_size, uint32_t seed) {
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) {
    batches.emplace_back(5 + (i * 7) % (kBatchTokens - 5), vocab_size, seed * 1000 + i);
  }
  return batches;
}

// Computes them all, each launched without waiting for those before it.
void Compute(ComputeBackend* head, std::vector<Batch>* batches) {
  const LossRecipe recipe;
  std::vector<ChunkRows> rows;
  for (Batch& batch : *batches) {
    const auto n = static_cast<int64_t>(batch.targets.size());
    rows.push_back({.hidden_states = {batch.hidden_states.data(), n, kHidden},
                    .targets = batch.targets,
                    .grad_hidden_states = {batch.grad_hidden_states.data(), n, kHidden}});
  }
  absl::BlockingCounter pending(static_cast<int>(batches->size()));
  for (size_t i = 0; i < batches->size(); ++i) {
    Batch& batch = (*batches)[i];
    head->ComputeBatch({.recipe = &recipe,
                        .mode = BackwardMode::kHiddenAndWeight,
                        .chunks = {&rows[i], 1},
                        .outputs = {.grad_hidden_states = true}},
                       [&](absl::StatusOr<BatchOutput> output) {
                         batch.status = output.status();
                         if (output.ok()) batch.loss_sum = output->sums[0].loss_sum;
                         pending.DecrementCount();
                       });
  }
  pending.Wait();
}

void ComputeOk(ComputeBackend* head, std::vector<Batch> batches) {
  Compute(head, &batches);
  for (const Batch& batch : batches) EXPECT_TRUE(batch.status.ok()) << batch.status;
}

bool IsBias(TensorKind kind) {
  return kind == TensorKind::kBias || kind == TensorKind::kGradBias ||
         kind == TensorKind::kBiasExpAvg || kind == TensorKind::kBiasExpAvgSq;
}

DType DTypeOf(const HeadSpec& spec, TensorKind kind) {
  return kind == TensorKind::kWeight ? spec.weight_dtype : DType::kFloat32;
}

std::vector<std::byte> ReadBytes(ComputeBackend* head, const HeadSpec& spec, TensorKind kind,
                                 VocabRange rows) {
  const int64_t cols = IsBias(kind) ? 1 : kHidden;
  MatrixView view = {nullptr, rows.size(), cols, DTypeOf(spec, kind)};
  std::vector<std::byte> bytes(view.size_bytes());
  view.data = bytes.data();
  const absl::Status status = head->ReadRows(kind, rows.start, view);
  EXPECT_TRUE(status.ok()) << status;
  return bytes;
}

std::vector<std::byte> ReadBytes(ComputeBackend* head, const HeadSpec& spec, TensorKind kind) {
  return ReadBytes(head, spec, kind, {0, spec.vocab_size});
}

std::vector<float> ReadFloats(ComputeBackend* head, const HeadSpec& spec, TensorKind kind) {
  const std::vector<std::byte> bytes = ReadBytes(head, spec, kind);
  EXPECT_EQ(DTypeOf(spec, kind), DType::kFloat32);
  std::vector<float> floats(bytes.size() / sizeof(float));
  std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

void WriteBytes(ComputeBackend* head, const HeadSpec& spec, TensorKind kind,
                const std::vector<std::byte>& bytes) {
  const absl::Status status = head->WriteRows(
      kind, 0, {bytes.data(), spec.vocab_size, IsBias(kind) ? 1 : kHidden, DTypeOf(spec, kind)});
  EXPECT_TRUE(status.ok()) << status;
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  EXPECT_EQ(got.size(), want.size());
  double error = 0.0;
  double square = 0.0;
  for (size_t i = 0; i < want.size() && i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    square += std::pow(want[i], 2);
  }
  return square == 0.0 ? std::sqrt(error) : std::sqrt(error / square);
}

// The tensors that a checkpoint of the head holds.
std::vector<TensorKind> SavedKinds(const HeadSpec& spec) {
  std::vector<TensorKind> kinds = {TensorKind::kWeight, TensorKind::kMasterWeight,
                                   TensorKind::kBias};
  const bool adamw = spec.optimizer.kind == OptimizerKind::kAdamW;
  if (adamw || spec.optimizer.momentum > 0) {
    kinds.push_back(TensorKind::kWeightExpAvg);
    kinds.push_back(TensorKind::kBiasExpAvg);
  }
  if (adamw) {
    kinds.push_back(TensorKind::kWeightExpAvgSq);
    kinds.push_back(TensorKind::kBiasExpAvgSq);
  }
  return kinds;
}

void TrainStep(ComputeBackend* head, int64_t vocab_size, uint32_t step) {
  ComputeOk(head, MakeBatches(7, vocab_size, step));
  const absl::StatusOr<double> norm = head->GradSquaredNorm();
  ASSERT_TRUE(norm.ok()) << norm.status();
  const absl::Status status = head->ApplyUpdate({.learning_rate = 0.02, .grad_multiplier = 0.1});
  ASSERT_TRUE(status.ok()) << status;
}

// Every replica has the bits of the first one, and no gradient is left.
void ExpectReplicasAlike(Ranks* ranks, const HeadSpec& spec) {
  const Layout& layout = ranks->layout();
  for (int32_t rank = layout.num_ranks; rank < layout.all(); ++rank) {
    const VocabRange shard = ShardRange(spec, layout.num_ranks, rank % layout.num_ranks);
    if (shard.size() == 0) continue;
    for (const TensorKind kind : {TensorKind::kWeight, TensorKind::kBias}) {
      EXPECT_EQ(ReadBytes(ranks->control(rank).last, spec, kind, shard),
                ReadBytes(ranks->control(rank % layout.num_ranks).last, spec, kind, shard))
          << "rank " << rank << ", tensor " << static_cast<int>(kind);
    }
  }
}

class ReplicaGroupTest : public testing::TestWithParam<Layout> {
 protected:
  ReplicaGroupTest() : ranks_(GetParam()) {}
  Ranks ranks_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, ReplicaGroupTest,
                         testing::Values(Layout{1, 2}, Layout{2, 2}, Layout{1, 3}),
                         [](const auto& info) {
                           return absl::StrCat("ranks_", info.param.num_ranks, "_replicas_",
                                               info.param.num_replicas);
                         });

// Vocabularies that replicas share evenly, unevenly, and that leave some of them no rows to own.
TEST_P(ReplicaGroupTest, TrainingIsThatOfOneRankAndTheSameOnEveryReplica) {
  Ranks one_rank({1, 1});
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const OptimizerSpec& optimizer : {kSgd, kMomentum, kAdamW}) {
      for (const int64_t vocab_size : {48, 37, 3}) {
        SCOPED_TRACE(absl::StrCat("vocabulary ", vocab_size, ", ", std::string(DTypeName(dtype)),
                                  ", optimizer ", static_cast<int>(optimizer.kind)));
        const HeadSpec spec = SpecOf(dtype, optimizer, vocab_size);
        const auto want = one_rank.MakeHead(spec);
        const auto got = ranks_.MakeHead(spec);
        for (uint32_t step = 1; step <= 4; ++step) {
          TrainStep(want.get(), vocab_size, step);
          TrainStep(got.get(), vocab_size, step);
          ExpectReplicasAlike(&ranks_, spec);
        }
        for (const TensorKind kind : SavedKinds(spec)) {
          if (DTypeOf(spec, kind) != DType::kFloat32) continue;
          EXPECT_LE(
              RelativeError(ReadFloats(got.get(), spec, kind), ReadFloats(want.get(), spec, kind)),
              1e-5)
              << "tensor " << static_cast<int>(kind);
        }
        EXPECT_EQ(got->num_updates(), 4);
      }
    }
  }
}

TEST_P(ReplicaGroupTest, AnswersAreThoseOfOneRank) {
  Ranks one_rank({1, 1});
  const HeadSpec spec = SpecOf(DType::kFloat32, kSgd);
  const auto want_head = one_rank.MakeHead(spec);
  const auto got_head = ranks_.MakeHead(spec);
  std::vector<Batch> want = MakeBatches(9, spec.vocab_size, 1);
  std::vector<Batch> got = want;
  Compute(want_head.get(), &want);
  Compute(got_head.get(), &got);
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(got[i].status.ok()) << got[i].status;
    EXPECT_NEAR(got[i].loss_sum, want[i].loss_sum, 1e-5 * want[i].loss_sum);
    EXPECT_LE(RelativeError(got[i].grad_hidden_states, want[i].grad_hidden_states), 1e-5);
  }
}

// All replicas compute at once: each holds its batch until all have one.
TEST_P(ReplicaGroupTest, BatchesAreSpreadOverTheReplicas) {
  const auto head = ranks_.MakeHead(SpecOf(DType::kFloat32, kSgd));
  const Layout& layout = GetParam();
  for (int32_t rank = 0; rank < layout.all(); ++rank) ranks_.control(rank).holds_batches = true;
  std::vector<Batch> batches = MakeBatches(layout.num_replicas, 37, 1);
  std::thread computing([&] { Compute(head.get(), &batches); });
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  const auto all_have_one = [&] {
    for (int32_t rank = 0; rank < layout.all(); ++rank) {
      if (ranks_.control(rank).num_batches != 1) return false;
    }
    return true;
  };
  while (!all_have_one() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(all_have_one());
  for (int32_t rank = 0; rank < layout.all(); ++rank) ranks_.control(rank).holds_batches = false;
  computing.join();
  for (const Batch& batch : batches) EXPECT_TRUE(batch.status.ok()) << batch.status;
  int64_t num_tokens = 0;
  for (int32_t replica = 0; replica < layout.num_replicas; ++replica) {
    EXPECT_EQ(ranks_.pool().work(replica).num_batches, 1);
    num_tokens += ranks_.pool().work(replica).num_tokens;
  }
  int64_t wanted = 0;
  for (const Batch& batch : batches) wanted += static_cast<int64_t>(batch.targets.size());
  EXPECT_EQ(num_tokens, wanted);
}

// A prepare that is repeated, and batches after it, count every gradient once.
TEST_P(ReplicaGroupTest, GradientsAreReducedOnceHoweverOftenTheyAreAskedFor) {
  Ranks one_rank({1, 1});
  const HeadSpec spec = SpecOf(DType::kFloat32, kAdamW);
  const auto want = one_rank.MakeHead(spec);
  const auto got = ranks_.MakeHead(spec);
  const auto expect_gradients = [&] {
    for (const TensorKind kind : {TensorKind::kGradWeight, TensorKind::kGradBias}) {
      EXPECT_LE(
          RelativeError(ReadFloats(got.get(), spec, kind), ReadFloats(want.get(), spec, kind)),
          1e-5);
    }
  };
  for (uint32_t round = 1; round <= 2; ++round) {
    ComputeOk(want.get(), MakeBatches(5, spec.vocab_size, round));
    ComputeOk(got.get(), MakeBatches(5, spec.vocab_size, round));
    expect_gradients();
    const double norm = got->GradSquaredNorm().value();
    EXPECT_NEAR(norm, want->GradSquaredNorm().value(), 1e-5 * norm);
    const int reductions = ranks_.control(0).num_reductions;
    EXPECT_EQ(got->GradSquaredNorm().value(), norm);
    EXPECT_EQ(ranks_.control(0).num_reductions, reductions) << "nothing was added since";
    expect_gradients();
    EXPECT_TRUE(got->ReduceGradients().ok());
    expect_gradients();
  }
  // And of the backends themselves, whatever their group remembers.
  for (int repeat = 0; repeat < 2; ++repeat) {
    absl::BlockingCounter pending(GetParam().all());
    for (int32_t rank = 0; rank < GetParam().all(); ++rank) {
      ranks_.pool().rank(rank).ReduceGradients(1, [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        pending.DecrementCount();
      });
    }
    pending.Wait();
    expect_gradients();
  }
  ASSERT_TRUE(want->ApplyUpdate({.learning_rate = 0.1}).ok());
  ASSERT_TRUE(got->ApplyUpdate({.learning_rate = 0.1}).ok());
  ExpectReplicasAlike(&ranks_, spec);
  EXPECT_LE(RelativeError(ReadFloats(got.get(), spec, TensorKind::kWeight),
                          ReadFloats(want.get(), spec, TensorKind::kWeight)),
            1e-5);
  EXPECT_EQ(got->GradSquaredNorm().value(), 0.0);
}

TEST_P(ReplicaGroupTest, RowsThatAreAddedCountOnce) {
  const HeadSpec spec = SpecOf(DType::kFloat32, kSgd);
  const auto head = ranks_.MakeHead(spec);
  const std::vector<int32_t> ids = {0, 18, 19, 36};
  std::vector<float> rows(ids.size() * kHidden);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = 1.0f + static_cast<float>(i);
  const ConstMatrixView view = {rows.data(), 4, kHidden, DType::kFloat32};
  std::vector<float> want(37 * kHidden);
  for (int repeat = 1; repeat <= 2; ++repeat) {
    ASSERT_TRUE(head->AddGradRows(ids, 0, view).ok());
    double square = 0.0;
    for (size_t i = 0; i < rows.size(); ++i) {
      float& value = want[ids[i / kHidden] * kHidden + i % kHidden];
      value += rows[i];
      square += static_cast<double>(value) * value;
    }
    EXPECT_EQ(ReadFloats(head.get(), spec, TensorKind::kGradWeight), want);
    EXPECT_EQ(head->GradSquaredNorm().value(), square);
    EXPECT_EQ(ReadFloats(head.get(), spec, TensorKind::kGradWeight), want);
  }
}

TEST_P(ReplicaGroupTest, AGradientThatIsDiscardedIsGoneEverywhere) {
  const HeadSpec spec = SpecOf(DType::kFloat32, kSgd);
  const auto head = ranks_.MakeHead(spec);
  for (const bool prepared : {false, true}) {
    ComputeOk(head.get(), MakeBatches(5, spec.vocab_size, 1));
    if (prepared) {
      ASSERT_TRUE(head->GradSquaredNorm().ok());
    }
    ASSERT_TRUE(head->DiscardGradients().ok());
    EXPECT_EQ(head->GradSquaredNorm().value(), 0.0);
    for (int32_t rank = 0; rank < GetParam().all(); ++rank) {
      const VocabRange shard = ShardRange(spec, GetParam().num_ranks, rank % GetParam().num_ranks);
      for (const std::byte byte :
           ReadBytes(ranks_.control(rank).last, spec, TensorKind::kGradWeight, shard)) {
        ASSERT_EQ(byte, std::byte{0}) << "rank " << rank;
      }
    }
  }
}

// A rank that fails in the reduction: the others do not wait for it, nobody uses what is left, and
// the next step is sound.
TEST_P(ReplicaGroupTest, AReductionThatFailsEndsTheStepAndTheNextOneIsSound) {
  Ranks one_rank({1, 1});
  const HeadSpec spec = SpecOf(DType::kBFloat16, kMomentum);
  const auto want = one_rank.MakeHead(spec);
  const auto head = ranks_.MakeHead(spec);
  for (int32_t rank = 0; rank < GetParam().all(); ++rank) {
    ComputeOk(head.get(), MakeBatches(5, spec.vocab_size, 1));
    ranks_.control(rank).fails_to_reduce = true;
    const absl::Time start = absl::Now();
    const absl::Status status = head->GradSquaredNorm().status();
    EXPECT_LT(absl::Now() - start, absl::Seconds(15)) << "before the collective's timeout";
    const int32_t replica = rank / GetParam().num_ranks;
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(status.message(),
              absl::StrCat("rank ", rank, " (replica ", replica, "): the device fell off"));
    ranks_.control(rank).fails_to_reduce = false;
    EXPECT_EQ(head->GradSquaredNorm().status(), status) << "until it is discarded";
    EXPECT_EQ(head->ApplyUpdate({.learning_rate = 0.1}), status);
    std::vector<float> rows(kHidden);
    EXPECT_EQ(head->ReadRows(TensorKind::kGradWeight, 0, {rows.data(), 1, kHidden}), status);
    ASSERT_TRUE(head->DiscardGradients().ok());
  }
  for (uint32_t step = 1; step <= 2; ++step) {
    TrainStep(want.get(), spec.vocab_size, step);
    TrainStep(head.get(), spec.vocab_size, step);
  }
  ExpectReplicasAlike(&ranks_, spec);
  EXPECT_LE(RelativeError(ReadFloats(head.get(), spec, TensorKind::kMasterWeight),
                          ReadFloats(want.get(), spec, TensorKind::kMasterWeight)),
            1e-5);
}

TEST_P(ReplicaGroupTest, AnUpdateThatAReplicaDidNotDoBreaksTheHeadForGood) {
  const HeadSpec spec = SpecOf(DType::kFloat32, kSgd);
  const auto head = ranks_.MakeHead(spec);
  ComputeOk(head.get(), MakeBatches(5, spec.vocab_size, 1));
  const int32_t last = GetParam().all() - 1;
  ranks_.control(last).fails_to_update = true;
  const absl::Time start = absl::Now();
  const absl::Status status = head->ApplyUpdate({.learning_rate = 0.1});
  EXPECT_LT(absl::Now() - start, absl::Seconds(15)) << "before the collective's timeout";
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("weights differ"), HasSubstr(absl::StrCat("rank ", last, " (replica ")),
            HasSubstr("no update today")));
  ranks_.control(last).fails_to_update = false;
  EXPECT_EQ(head->ApplyUpdate({.learning_rate = 0.1}), status);
  const auto other = ranks_.MakeHead(spec);
  TrainStep(other.get(), spec.vocab_size, 1);
}

// What a checkpoint does: every tensor out of one head, row block by row block, into another.
TEST_P(ReplicaGroupTest, AHeadMovesToOneRankAndBackWithEveryBit) {
  Ranks one_rank({1, 1});
  Ranks others({3, 2});
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const OptimizerSpec& optimizer : {kMomentum, kAdamW}) {
      const HeadSpec spec = SpecOf(dtype, optimizer);
      const auto first = ranks_.MakeHead(spec);
      for (uint32_t step = 1; step <= 2; ++step) TrainStep(first.get(), spec.vocab_size, step);
      HeadSpec blank = spec;
      blank.weight_init = {};
      ComputeBackend* from = first.get();
      const std::unique_ptr<ComputeBackend> heads[] = {
          one_rank.MakeHead(blank), others.MakeHead(blank), ranks_.MakeHead(blank)};
      for (const std::unique_ptr<ComputeBackend>& to : heads) {
        for (const TensorKind kind : SavedKinds(spec)) {
          WriteBytes(to.get(), spec, kind, ReadBytes(from, spec, kind));
        }
        to->set_num_updates(from->num_updates());
        for (const TensorKind kind : SavedKinds(spec)) {
          EXPECT_EQ(ReadBytes(to.get(), spec, kind), ReadBytes(first.get(), spec, kind));
        }
        from = to.get();
      }
      ExpectReplicasAlike(&ranks_, spec);  // The last head made there.
      // One batch, so that sums have one order, and the same step of both ends in the same bits.
      for (ComputeBackend* const head : {first.get(), heads[2].get()}) {
        ComputeOk(head, MakeBatches(1, spec.vocab_size, 9));
        ASSERT_TRUE(head->ApplyUpdate({.learning_rate = 0.1}).ok());
      }
      for (const TensorKind kind : SavedKinds(spec)) {
        EXPECT_EQ(ReadBytes(heads[2].get(), spec, kind), ReadBytes(first.get(), spec, kind));
      }
    }
  }
}

// The optimizer's state is there once, over the replicas.
TEST_P(ReplicaGroupTest, EachReplicaKeepsTheStateOfTheRowsItOwnsAlone) {
  const HeadSpec spec = SpecOf(DType::kBFloat16, kAdamW, /*vocab_size=*/48 * 1024);
  const auto head = ranks_.MakeHead(spec);
  const MemoryPlan whole =
      PlanForSchedule(spec, spec.schedule, {.num_ranks = GetParam().num_ranks});
  const MemoryPlan plan =
      PlanForSchedule(spec, spec.schedule,
                      {.num_ranks = GetParam().num_ranks, .num_replicas = GetParam().num_replicas});
  for (const MemoryCategory category :
       {MemoryCategory::kMasterWeight, MemoryCategory::kOptimizerState}) {
    EXPECT_EQ(plan[category], whole[category] / GetParam().num_replicas);
  }
  EXPECT_EQ(plan[MemoryCategory::kWeight], whole[MemoryCategory::kWeight]);
  EXPECT_EQ(plan[MemoryCategory::kGradWeight], whole[MemoryCategory::kGradWeight]);
  for (int32_t rank = 0; rank < GetParam().all(); ++rank) {
    EXPECT_EQ(ranks_.account(rank).Read().total.live_bytes, plan.TotalBytes());
  }
}

}  // namespace
}  // namespace lmhead
