// Real heads on the CPU, real files: what is saved comes back, what is damaged is refused.

#include "server/checkpoint/checkpoint_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/compute/cpu_backend.h"
#include "server/head/head_registry.h"
#include "server/memory/budget.h"
#include "tests/util/own_test.h"
#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 13;
constexpr int64_t kHidden = 4;
constexpr char kRootVariable[] = "LMHEAD_TEST_CHECKPOINT_ROOT";

bool Never() { return false; }

absl::Status Restore(CheckpointStore& store, Head& head, const std::string& name) {
  const absl::StatusOr<StoredCheckpoint> found = store.Find(head.spec().name, name);
  return found.ok() ? store.Restore(head, *found) : found.status();
}

HeadSpec Spec(DType dtype, OptimizerKind kind, bool bias) {
  HeadSpec spec;
  spec.name = "lm";
  spec.vocab_size = kVocab;
  spec.hidden_size = kHidden;
  spec.weight_dtype = dtype;
  spec.has_bias = bias;
  spec.trainable = true;
  spec.optimizer.kind = kind;
  if (kind == OptimizerKind::kSgd) spec.optimizer.momentum = 0.9;
  spec.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.5, .seed = 3};
  return spec;
}

// One server's worth of heads.
class World {
 public:
  explicit World(uint64_t incarnation, int32_t num_ranks = 1)
      : incarnation_(incarnation),
        registry_(&budget_, {.backend = BackendKind::kCpu},
                  [this](const HeadSpec& spec, const MemoryPlan& plan) {
                    return CreateCpuBackend(spec, plan, &account_);
                  },
                  {.executor = &executor_,
                   .account = &account_,
                   .metrics = &metrics_,
                   .incarnation = incarnation,
                   .chunk_bytes_max = 1 << 20,
                   .num_ranks = num_ranks}) {}

  std::shared_ptr<Head> Create(const HeadSpec& spec) {
    absl::StatusOr<std::shared_ptr<Head>> head = registry_.Create(spec);
    EXPECT_TRUE(head.ok()) << head.status();
    return *head;
  }

  // One step whose gradient is a function of its number.
  CommittedStep Train(Head& head, uint64_t step) {
    EXPECT_TRUE(head.BeginStep(step, {"w0"}, incarnation_).ok());
    std::vector<float> rows(kVocab * kHidden);
    std::mt19937 random(static_cast<uint32_t>(step));
    std::normal_distribution<float> normal;
    for (float& value : rows) value = normal(random);
    absl::StatusOr<bool> piece = head.AccumulateGradient(
        step, incarnation_,
        {.worker = "w0",
         .checksum = step,
         .rows = {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(float)}});
    EXPECT_TRUE(piece.ok()) << piece.status();
    auto stream = head.OpenStream({.step = step, .worker = "w0", .incarnation = incarnation_},
                                  /*on_abort=*/nullptr);
    EXPECT_TRUE(stream.ok()) << stream.status();
    EXPECT_TRUE((*stream)->End(0).ok());
    EXPECT_TRUE(head.PrepareStep(step, incarnation_, absl::InfiniteFuture(), Never).ok());
    absl::StatusOr<CommittedStep> committed = head.CommitStep(step, incarnation_, kCommit);
    EXPECT_TRUE(committed.ok()) << committed.status();
    return *committed;
  }

  static std::vector<float> Weight(Head& head) {
    std::vector<float> weight(kVocab * kHidden);
    const TensorKind kind = head.spec().weight_dtype == DType::kFloat32 ? TensorKind::kWeight
                                                                        : TensorKind::kMasterWeight;
    const absl::Status status =
        head.ReadRows(kind, 0, {weight.data(), kVocab, kHidden, DType::kFloat32});
    EXPECT_TRUE(status.ok()) << status;
    return weight;
  }

  HeadRegistry& registry() { return registry_; }

  static constexpr CommitParameters kCommit = {.learning_rate = 0.01, .grad_multiplier = 0.5};

 private:
  const uint64_t incarnation_;
  Metrics metrics_{"test", "cpu"};
  MemoryAccount account_;
  MemoryBudget budget_{int64_t{1} << 30};
  Executor executor_{{}};
  HeadRegistry registry_;
};

class CheckpointStoreTest : public ::testing::Test {
 protected:
  // Until there is a complete checkpoint of a later step.
  void AwaitSaveAfter(uint64_t step) const {
    const CheckpointStore store(root_, 3, "test");
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    for (;; absl::SleepFor(absl::Milliseconds(5))) {
      const absl::StatusOr<StoredCheckpoint> found = store.Find("lm", "");
      if (found.ok() && found->manifest.snapshot.last_committed_step > step) return;
      ASSERT_LT(absl::Now(), deadline) << "no save after step " << step;
    }
  }

  const TemporaryFolder folder_;
  const std::string root_ = folder_.path();
};

// Training goes on bit by bit as if nothing had happened.
TEST_F(CheckpointStoreTest, TrainingGoesOnAfterARestore) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSgd}) {
      for (const int32_t num_ranks : {1, 3}) {
        SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " ", static_cast<int>(kind), " ",
                                  num_ranks));
        const HeadSpec spec = Spec(dtype, kind, /*bias=*/true);
        CheckpointStore store(
            absl::StrCat(root_, "/", static_cast<int>(dtype), static_cast<int>(kind), num_ranks), 0,
            "test");
        World first(1, num_ranks);
        const std::shared_ptr<Head> head = first.Create(spec);
        first.Train(*head, 1);
        first.Train(*head, 2);
        const absl::StatusOr<SavedCheckpoint> saved = store.Save(*head, "");
        ASSERT_TRUE(saved.ok()) << saved.status();
        EXPECT_EQ(saved->name, "step-000000000002");
        first.Train(*head, 3);

        World second(2);
        const std::shared_ptr<Head> restored = second.Create(spec);
        ASSERT_TRUE(Restore(store, *restored, "").ok());
        EXPECT_EQ(restored->Status().last_committed_step, 2);
        const CommittedStep third = second.Train(*restored, 3);
        EXPECT_EQ(third.num_updates, 3);
        EXPECT_EQ(World::Weight(*restored), World::Weight(*head));
      }
    }
  }
}

TEST_F(CheckpointStoreTest, TheLastCommitIsAnsweredAgainAfterARestart) {
  CheckpointStore store(root_, 0, "test");
  World first(1);
  const std::shared_ptr<Head> head =
      first.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  const CommittedStep committed = first.Train(*head, 5);
  ASSERT_TRUE(store.Save(*head, "a").ok());

  World second(2);
  const std::shared_ptr<Head> restored = second.Create(head->spec());
  ASSERT_TRUE(Restore(store, *restored, "a").ok());
  const absl::StatusOr<CommittedStep> again = restored->CommitStep(5, 1, World::kCommit);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->repeated);
  EXPECT_EQ(again->grad_norm, committed.grad_norm);
  EXPECT_EQ(restored->CommitStep(5, 1, {.learning_rate = 1.0}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(restored->BeginStep(5, {"w0"}, 2).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(CheckpointStoreTest, OnlyTheNewestAreKept) {
  CheckpointStore store(root_, 2, "test");
  World world(1);
  const std::shared_ptr<Head> head =
      world.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  for (uint64_t step = 1; step <= 4; ++step) {
    world.Train(*head, step);
    ASSERT_TRUE(store.Save(*head, "").ok());
  }
  EXPECT_TRUE(store.Find("lm", "step-000000000004").ok());
  EXPECT_TRUE(store.Find("lm", "step-000000000003").ok());
  const absl::Status gone = store.Find("lm", "step-000000000002").status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(gone.message()), HasSubstr("step-000000000004, step-000000000003"));
}

TEST_F(CheckpointStoreTest, TheSameNameTwice) {
  CheckpointStore store(root_, 0, "test");
  World world(1);
  const std::shared_ptr<Head> head =
      world.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  world.Train(*head, 1);
  const absl::StatusOr<SavedCheckpoint> first = store.Save(*head, "a");
  const absl::StatusOr<SavedCheckpoint> again = store.Save(*head, "a");
  ASSERT_TRUE(first.ok() && again.ok()) << first.status() << again.status();
  EXPECT_EQ(again->num_bytes, first->num_bytes);
  world.Train(*head, 2);
  EXPECT_EQ(store.Save(*head, "a").status().code(), absl::StatusCode::kAlreadyExists);
  for (const char* name : {"..", ".", "a/b", "~a"}) {
    EXPECT_EQ(store.Save(*head, name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

// Every single byte of the tensor file, cut or changed, is noticed before the head is touched.
TEST_F(CheckpointStoreTest, TornAndChangedFilesAreRefused) {
  CheckpointStore store(root_, 0, "test");
  World world(1);
  const std::shared_ptr<Head> head =
      world.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  world.Train(*head, 1);
  ASSERT_TRUE(store.Save(*head, "a").ok());
  const std::string file = root_ + "/lm/a/shard-00000-of-00001.safetensors";
  std::string good;
  {
    std::ifstream in(file, std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(in), {});
  }
  const auto write = [&](const std::string& bytes) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  };
  const std::vector<float> before = World::Weight(*head);
  for (size_t i = 0; i < good.size(); i += 37) {
    std::string flipped = good;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    write(flipped);
    const absl::Status changed = Restore(store, *head, "a");
    EXPECT_EQ(changed.code(), absl::StatusCode::kDataLoss) << i;
    EXPECT_THAT(std::string(changed.message()), HasSubstr("shard-00000-of-00001"));
    write(good.substr(0, i));
    const absl::Status torn = Restore(store, *head, "a");
    EXPECT_EQ(torn.code(), absl::StatusCode::kDataLoss) << i;
    EXPECT_THAT(std::string(torn.message()), HasSubstr("torn"));
  }
  EXPECT_EQ(World::Weight(*head), before);
  write(good);
  EXPECT_TRUE(Restore(store, *head, "a").ok());
}

TEST_F(CheckpointStoreTest, DamagedManifestsAreNoCheckpoints) {
  CheckpointStore store(root_, 0, "test");
  World world(1);
  const std::shared_ptr<Head> head =
      world.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  world.Train(*head, 1);
  ASSERT_TRUE(store.Save(*head, "old").ok());
  world.Train(*head, 2);
  ASSERT_TRUE(store.Save(*head, "new").ok());
  const std::string path = root_ + "/lm/new/manifest.json";
  std::string good;
  {
    std::ifstream in(path);
    good.assign(std::istreambuf_iterator<char>(in), {});
  }
  for (size_t length = 0; length + 2 < good.size(); length += 11) {
    std::ofstream(path, std::ios::trunc) << good.substr(0, length);
    EXPECT_EQ(store.Find("lm", "new").status().code(), absl::StatusCode::kInvalidArgument)
        << length;
  }
  // The newest complete one is the old one.
  EXPECT_EQ(store.Find("lm", "")->manifest.snapshot.last_committed_step, 1);
  // A save over the damaged one replaces it.
  ASSERT_TRUE(store.Save(*head, "new").ok());
  EXPECT_EQ(store.Find("lm", "")->manifest.snapshot.last_committed_step, 2);
}

TEST_F(CheckpointStoreTest, AnotherHeadsCheckpointIsRefusedWithTheDifference) {
  CheckpointStore store(root_, 0, "test");
  World world(1);
  const std::shared_ptr<Head> head =
      world.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  ASSERT_TRUE(store.Save(*head, "a").ok());
  World other(2);
  HeadSpec spec = head->spec();
  spec.hidden_size = 8;
  const std::shared_ptr<Head> wider = other.Create(spec);
  const absl::Status status = Restore(store, *wider, "a");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("hidden_size is 4 in the checkpoint and 8 in the head"));
}

// What the killed process of the next test runs: restores, then trains and saves without end.
TEST(CheckpointSaverProcess, SavesUntilKilled) {
  const char* const root = std::getenv(kRootVariable);
  if (root == nullptr) GTEST_SKIP() << "the other process of AKilledSaveLeavesOnlyWholeCheckpoints";
  CheckpointStore store(root, 3, "test");
  World world(1);
  const std::shared_ptr<Head> head =
      world.Create(Spec(DType::kFloat32, OptimizerKind::kSgd, false));
  uint64_t step = 1;
  if (const absl::StatusOr<StoredCheckpoint> found = store.Find("lm", ""); found.ok()) {
    ASSERT_TRUE(Restore(store, *head, "").ok());
    step = found->manifest.snapshot.last_committed_step + 1;
  }
  for (;; ++step) {
    world.Train(*head, step);
    const absl::StatusOr<SavedCheckpoint> saved = store.Save(*head, "");
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
}

TEST_F(CheckpointStoreTest, AKilledSaveLeavesOnlyWholeCheckpoints) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  uint64_t newest = 0;
  for (int round = 0; round < 8; ++round) {
    const pid_t child =
        StartOwnTest("CheckpointSaverProcess.SavesUntilKilled", {{kRootVariable, root_}});
    // Half of them are killed at any time from their start, half after a save of theirs at least.
    if (round % 2 == 0) AwaitSaveAfter(newest);
    absl::SleepFor(absl::Milliseconds(random() % 400));
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, WNOHANG), 0) << "it ended by itself";
    kill(child, SIGKILL);
    waitpid(child, &status, 0);

    CheckpointStore store(root_, 3, "test");
    const absl::StatusOr<StoredCheckpoint> found = store.Find("lm", "");
    ASSERT_TRUE(found.ok()) << found.status();
    World world(2);
    const std::shared_ptr<Head> head = world.Create(found->manifest.snapshot.spec);
    const absl::Status restored = Restore(store, *head, "");
    ASSERT_TRUE(restored.ok()) << restored;
    EXPECT_GE(found->manifest.snapshot.last_committed_step, newest);
    newest = found->manifest.snapshot.last_committed_step;
  }
  EXPECT_GT(newest, 0);
}

}  // namespace
}  // namespace lmhead
