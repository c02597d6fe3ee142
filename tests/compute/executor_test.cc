#include "server/compute/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"

namespace lmhead {
namespace {

// Records how the executor launches. What it computes is the row count, so that each chunk's share
// of a batch can be recognised; the arithmetic of real backends has its own tests.
class RecordingBackend : public ComputeBackend {
 public:
  struct Launch {
    std::vector<int64_t> rows;
    BackwardMode mode;
  };

  void ComputeBatch(const BatchInput& input, BatchDone done) override {
    Launch launch = {.mode = input.mode};
    BatchOutput output;
    for (const ChunkRows& chunk : input.chunks) {
      launch.rows.push_back(chunk.hidden_states.rows);
      output.sums.push_back({.num_tokens = chunk.hidden_states.rows});
    }
    launches.push_back(launch);
    if (!error.ok()) return done(error);
    if (hold_answers) {
      held.push_back([done, output] { done(output); });
      ++num_held;
    } else {
      done(output);
    }
  }
  absl::StatusOr<double> GradSquaredNorm() override { return 0.0; }
  absl::Status ApplyUpdate(const OptimizerUpdate&) override { return absl::OkStatus(); }
  absl::Status DiscardGradients() override { return absl::OkStatus(); }
  absl::Status AddGradRows(std::span<const int32_t>, int64_t, ConstMatrixView) override {
    return absl::OkStatus();
  }
  absl::Status WriteRows(TensorKind, int64_t, ConstMatrixView) override { return absl::OkStatus(); }
  absl::Status ReadRows(TensorKind, int64_t, MatrixView) override { return absl::OkStatus(); }
  int64_t num_updates() const override { return 0; }
  void set_num_updates(int64_t) override {}

  // Touched on the executor's thread, or while it is known to be idle.
  std::vector<Launch> launches;
  absl::Status error;
  bool hold_answers = false;
  std::vector<std::function<void()>> held;
  std::atomic<int> num_held{0};  // Ever.
};

class ExecutorTest : public ::testing::Test {
 protected:
  void Start(bool join_chunks, int32_t max_inflight_batches = 1, int32_t eager_batches = 1) {
    executor_ =
        std::make_unique<Executor>(Executor::Options{.join_chunks = join_chunks,
                                                     .max_inflight_batches = max_inflight_batches,
                                                     .eager_batches = eager_batches});
  }
  void AwaitHeld(int num_batches) {
    while (backend_.num_held < num_batches) absl::SleepFor(absl::Milliseconds(1));
  }

  // Keeps the executor busy until Release, so that what is submitted meanwhile waits.
  void Block() {
    executor_->Post([this] { gate_.WaitForNotification(); });
  }
  void Release() { gate_.Notify(); }
  void Drain() {
    executor_->Run([] {});
  }

  void Submit(int64_t rows, BackwardMode mode = BackwardMode::kHidden,
              const std::shared_ptr<const LossRecipe>& recipe = nullptr, OutputSpec outputs = {},
              ComputeBackend* backend = nullptr) {
    ChunkTask task = {.backend = backend == nullptr ? &backend_ : backend,
                      .recipe = recipe == nullptr ? recipe_ : recipe,
                      .outputs = outputs,
                      .mode = mode,
                      .batch_tokens = 10};
    task.rows.hidden_states.rows = rows;
    task.done = [this, rows](absl::StatusOr<ChunkOutput> output) {
      if (!output.ok()) {
        errors_.push_back(output.status());
      } else {
        EXPECT_EQ(output->sums.num_tokens, rows);
        answered_.push_back(rows);
      }
    };
    executor_->Submit(std::move(task));
  }

  RecordingBackend backend_;
  std::shared_ptr<const LossRecipe> recipe_ = std::make_shared<LossRecipe>();
  absl::Notification gate_;
  std::vector<int64_t> answered_;
  std::vector<absl::Status> errors_;
  std::unique_ptr<Executor> executor_;  // Last: stops before what it touches is gone.
};

TEST_F(ExecutorTest, WithoutJoiningEveryChunkIsABatch) {
  Start(false);
  Block();
  Submit(1);
  Submit(2);
  EXPECT_EQ(executor_->queue_depth(), 2);
  Release();
  Drain();
  EXPECT_EQ(executor_->queue_depth(), 0);
  EXPECT_EQ(backend_.launches.size(), 2u);
  EXPECT_EQ(answered_, (std::vector<int64_t>{1, 2}));
}

TEST_F(ExecutorTest, JoinsUpToBatchTokens) {
  Start(true);
  Block();
  for (const int64_t rows : {4, 5, 3, 1, 7}) Submit(rows);
  Release();
  Drain();
  ASSERT_EQ(backend_.launches.size(), 2u);
  EXPECT_EQ(backend_.launches[0].rows, (std::vector<int64_t>{4, 5, 1}));  // 3 does not fit, 1 does.
  EXPECT_EQ(backend_.launches[1].rows, (std::vector<int64_t>{3, 7}));
}

TEST_F(ExecutorTest, NeverJoinsAcrossModeRecipeOutputsOrBackend) {
  RecordingBackend other;
  Start(true);
  Block();
  Submit(1, BackwardMode::kHiddenAndWeight);
  Submit(1, BackwardMode::kHidden);
  Submit(1, BackwardMode::kHiddenAndWeight,
         std::make_shared<LossRecipe>(LossRecipe{.z_loss = 1.0f}));
  Submit(1, BackwardMode::kHiddenAndWeight, nullptr, {.entropy = true});
  Submit(1, BackwardMode::kHiddenAndWeight, nullptr, {}, &other);
  // An equal recipe of another stream does join.
  Submit(2, BackwardMode::kHiddenAndWeight, std::make_shared<LossRecipe>());
  Release();
  Drain();
  ASSERT_EQ(backend_.launches.size(), 4u);
  EXPECT_EQ(backend_.launches[0].rows, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(other.launches.size(), 1u);
}

TEST_F(ExecutorTest, NothingPassesControlWork) {
  Start(true);
  std::vector<size_t> launches_before;
  Block();
  Submit(1);
  executor_->Post([&] { launches_before.push_back(backend_.launches.size()); });
  Submit(2);
  executor_->Post([&] { launches_before.push_back(backend_.launches.size()); });
  Release();
  Drain();
  EXPECT_EQ(launches_before, (std::vector<size_t>{1, 2}));
  EXPECT_EQ(answered_, (std::vector<int64_t>{1, 2}));
}

TEST_F(ExecutorTest, ControlWorkWaitsForAnswersOfUnfinishedBatches) {
  Start(false, /*max_inflight_batches=*/3);
  backend_.hold_answers = true;
  absl::Notification ran;
  std::atomic<bool> answered{false};
  Block();
  for (int i = 0; i < 3; ++i) Submit(1);
  executor_->Post([&] {
    EXPECT_TRUE(answered);
    EXPECT_EQ(answered_.size(), 3u);
    ran.Notify();
  });
  Release();
  AwaitHeld(3);  // All are launched, none is answered.
  answered = true;
  for (const auto& answer : backend_.held) answer();
  ran.WaitForNotification();
}

TEST_F(ExecutorTest, WaitsForAFreeBatchAndJoinsMeanwhile) {
  Start(true, /*max_inflight_batches=*/1);
  backend_.hold_answers = true;
  Block();
  Submit(10);
  Release();
  AwaitHeld(1);
  Submit(2);
  Submit(3);
  const auto first = backend_.held[0];
  backend_.hold_answers = false;
  first();
  Drain();
  ASSERT_EQ(backend_.launches.size(), 2u);
  EXPECT_EQ(backend_.launches[1].rows, (std::vector<int64_t>{2, 3}));
}

TEST_F(ExecutorTest, ABatchWithRoomWaitsWhileTheDeviceHasEnoughToDo) {
  Start(true, /*max_inflight_batches=*/3, /*eager_batches=*/2);
  backend_.hold_answers = true;
  for (int held = 1; held <= 2; ++held) {
    Submit(3);
    AwaitHeld(held);
  }
  Submit(4);  // Could take six rows more.
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(backend_.num_held, 2);
  EXPECT_EQ(executor_->queue_depth(), 1);
  Submit(2, BackwardMode::kNone);  // Does not fit it in kind, the next not in size.
  Submit(7);
  AwaitHeld(3);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(backend_.num_held, 3);  // So many may be unfinished.
  backend_.hold_answers = false;
  for (const auto& answer : std::exchange(backend_.held, {})) answer();
  Drain();
  ASSERT_EQ(backend_.launches.size(), 5u);
  EXPECT_EQ(backend_.launches[2].rows, (std::vector<int64_t>{4}));
  EXPECT_EQ(backend_.launches[3].rows, (std::vector<int64_t>{2}));
  EXPECT_EQ(backend_.launches[4].rows, (std::vector<int64_t>{7}));
}

TEST_F(ExecutorTest, ABatchBeforeControlWorkDoesNotWaitForMore) {
  Start(true, /*max_inflight_batches=*/2, /*eager_batches=*/1);
  backend_.hold_answers = true;
  Submit(1);
  AwaitHeld(1);
  Submit(1);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(backend_.num_held, 1);
  executor_->Post([] {});
  AwaitHeld(2);
  for (const auto& answer : std::exchange(backend_.held, {})) answer();
  Drain();
}

TEST_F(ExecutorTest, AFailedBatchFailsEachOfItsChunks) {
  Start(true);
  backend_.error = absl::InternalError("launch failed");
  Block();
  Submit(1);
  Submit(2);
  Release();
  Drain();
  ASSERT_EQ(errors_.size(), 2u);
  EXPECT_EQ(errors_[1], backend_.error);
  // The executor goes on.
  backend_.error = absl::OkStatus();
  Submit(3);
  Drain();
  EXPECT_EQ(answered_, (std::vector<int64_t>{3}));
}

TEST_F(ExecutorTest, RunsWhatIsQueuedBeforeItStops) {
  Start(false);
  Block();
  for (int i = 0; i < 5; ++i) Submit(1);
  bool ran = false;
  executor_->Post([&] { ran = true; });
  Release();
  executor_.reset();
  EXPECT_EQ(answered_.size(), 5u);
  EXPECT_TRUE(ran);
}

TEST_F(ExecutorTest, TellsOfEveryBatchAndCountsBusyTime) {
  std::vector<std::pair<int64_t, int64_t>> batches;
  executor_ = std::make_unique<Executor>(Executor::Options{
      .join_chunks = true,
      .on_batch = [&](int64_t chunks, int64_t tokens) { batches.emplace_back(chunks, tokens); }});
  Block();
  Submit(4);
  Submit(5);
  Release();
  Drain();
  EXPECT_EQ(batches, (std::vector<std::pair<int64_t, int64_t>>{{2, 9}}));
  EXPECT_GT(executor_->busy_seconds(), 0.0);
}

}  // namespace
}  // namespace lmhead
