// Heads with a real backend that can be made to fail: what is poisoned, and what goes on.

#include "server/head/head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/compute/cpu_backend.h"
#include "server/head/head_registry.h"
#include "server/head/head_stream.h"
#include "server/memory/budget.h"
#include "tests/head/faulty_backend.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 11;
constexpr int64_t kHidden = 4;
constexpr uint64_t kIncarnation = 77;

bool Never() { return false; }

std::string Message(const absl::Status& status) { return std::string(status.message()); }

HeadSpec Spec(const std::string& name = "lm") {
  HeadSpec spec;
  spec.name = name;
  spec.vocab_size = kVocab;
  spec.hidden_size = kHidden;
  spec.trainable = true;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.5, .seed = 3};
  return spec;
}

// A chunk with the memory that a staging slot would give it.
struct Slot {
  explicit Slot(int64_t num_tokens) : targets(num_tokens, 1), outputs(OutputBytes(num_tokens, 0)) {
    std::vector<float> values(num_tokens * kHidden, 0.5f);
    hidden.resize(values.size() * sizeof(float));
    std::memcpy(hidden.data(), values.data(), hidden.size());
  }
  ArrivedChunk Chunk(uint64_t index) {
    return {.chunk_index = index,
            .num_tokens = static_cast<int64_t>(targets.size()),
            .checksum = index,
            .hidden_states = hidden,
            .targets = targets,
            .output_space = outputs};
  }

  std::vector<std::byte> hidden;
  std::vector<int32_t> targets;
  std::vector<std::byte> outputs;
};

class HeadTest : public ::testing::Test {
 protected:
  HeadTest()
      : registry_(&budget_, {.backend = BackendKind::kCpu}, Factory(),
                  {.executor = &executor_,
                   .account = &account_,
                   .metrics = &metrics_,
                   .incarnation = kIncarnation,
                   .chunk_bytes_max = 1 << 20}) {
    absl::StatusOr<std::shared_ptr<Head>> head = registry_.Create(Spec());
    EXPECT_TRUE(head.ok()) << head.status();
    head_ = *head;
  }

  BackendFactory Factory() {
    return [this](const HeadSpec& spec,
                  const MemoryPlan& plan) -> absl::StatusOr<std::unique_ptr<ComputeBackend>> {
      if (!create_error_.ok()) return create_error_;
      absl::StatusOr<std::unique_ptr<ComputeBackend>> real =
          CreateCpuBackend(spec, plan, &account_);
      if (!real.ok()) return real.status();
      return std::make_unique<FaultyBackend>(*std::move(real), &faults_);
    };
  }

  std::shared_ptr<HeadStream> Open(uint64_t step, Step::AbortListener on_abort = nullptr) {
    StreamSpec spec = {.step = step, .worker = step == 0 ? "" : "w0"};
    spec.incarnation = step == 0 ? 0 : kIncarnation;
    spec.outputs.grad_hidden_states = true;
    absl::StatusOr<std::shared_ptr<HeadStream>> stream =
        head_->OpenStream(spec, std::move(on_abort));
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }

  // Submits a chunk and waits for its answer.
  absl::StatusOr<ComputedChunk> Compute(HeadStream& stream, uint64_t index) {
    Slot slot(2);
    absl::Notification done;
    absl::StatusOr<ComputedChunk> answer;
    absl::Status status = stream.Submit(slot.Chunk(index), [&](absl::StatusOr<ComputedChunk> got) {
      answer = std::move(got);
      done.Notify();
    });
    if (!status.ok()) return status;
    done.WaitForNotification();
    return answer;
  }

  absl::Status Begin(uint64_t step) { return head_->BeginStep(step, {"w0"}, 0).status(); }
  absl::Status Feed(uint64_t step) {
    std::shared_ptr<HeadStream> stream = Open(step);
    absl::StatusOr<ComputedChunk> answer = Compute(*stream, 0);
    if (!answer.ok()) return answer.status();
    return stream->End(1);
  }
  absl::StatusOr<PreparedStep> Prepare(uint64_t step) {
    return head_->PrepareStep(step, kIncarnation, absl::InfinitePast(), Never);
  }
  absl::StatusOr<CommittedStep> Commit(uint64_t step) {
    return head_->CommitStep(step, kIncarnation, {.learning_rate = 0.1, .grad_multiplier = 1.0});
  }
  absl::StatusOr<bool> Abort(uint64_t step) { return head_->AbortStep(step, kIncarnation, "test"); }

  Faults faults_;
  absl::Status create_error_;
  Metrics metrics_{"test", "cpu"};
  MemoryBudget budget_{64 << 20};
  MemoryAccount account_;
  Executor executor_{{}};
  HeadRegistry registry_;
  std::shared_ptr<Head> head_;
};

TEST_F(HeadTest, StepFromBeginToCommit) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  ASSERT_TRUE(Prepare(1).ok());
  absl::StatusOr<CommittedStep> committed = Commit(1);
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->num_updates, 1u);
  EXPECT_EQ(head_->Status().last_committed_step, 1u);
  EXPECT_EQ(head_->Status().open_step, 0u);
}

TEST_F(HeadTest, FailedBatchPoisonsTheStepUntilItIsAborted) {
  ASSERT_TRUE(Begin(1).ok());
  std::shared_ptr<HeadStream> stream = Open(1);
  faults_.batch = true;
  const absl::Status failed = Compute(*stream, 0).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(Message(failed),
              HasSubstr("chunk 0 of worker w0 in step 1 of head lm: launch failed"));
  faults_.batch = false;
  for (const absl::Status& status : {Compute(*stream, 1).status(), stream->End(1),
                                     Prepare(1).status(), Commit(1).status(), Begin(1)}) {
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr("launch failed"));
  }
  EXPECT_TRUE(*Abort(1));
  EXPECT_EQ(faults_.num_discards, 1);
  stream.reset();
  // Begun again, it works: the head itself is sound.
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  ASSERT_TRUE(Prepare(1).ok());
  EXPECT_TRUE(Commit(1).ok());
}

TEST_F(HeadTest, FailedEvaluationPoisonsTheStepBesideIt) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  std::shared_ptr<HeadStream> evaluation = Open(0);
  faults_.batch = true;
  EXPECT_FALSE(Compute(*evaluation, 0).ok());
  EXPECT_TRUE(absl::IsAborted(Prepare(1).status()));
}

TEST_F(HeadTest, FailedEvaluationBetweenStepsIsCleanedUpByTheNextBegin) {
  std::shared_ptr<HeadStream> evaluation = Open(0);
  faults_.batch = true;
  EXPECT_FALSE(Compute(*evaluation, 0).ok());
  faults_.batch = false;
  ASSERT_TRUE(Begin(1).ok());
  EXPECT_EQ(faults_.num_discards, 1);
  ASSERT_TRUE(Feed(1).ok());
  EXPECT_TRUE(Prepare(1).ok());
}

TEST_F(HeadTest, FailedNormPoisonsTheStep) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  faults_.norm = true;
  EXPECT_THAT(Message(Prepare(1).status()), HasSubstr("norm failed"));
  faults_.norm = false;
  EXPECT_TRUE(absl::IsAborted(Prepare(1).status()));
  EXPECT_TRUE(*Abort(1));
}

// A server that stops abandons steps without waiting for the calls that are under way.
TEST_F(HeadTest, StepAbandonedWhileItIsPreparedStaysAborted) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  uint64_t abandoned = 0;
  faults_.in_norm = [&] { abandoned = head_->AbandonStep("the server stops"); };
  for (const absl::Status& status : {Prepare(1).status(), Commit(1).status()}) {
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr("the server stops"));
  }
  EXPECT_EQ(abandoned, 1u);
  EXPECT_EQ(head_->Status().last_committed_step, 0u);
}

// An evaluation that has been queued before the commit, and fails when the commit has been checked.
TEST_F(HeadTest, FailedEvaluationBeforeTheUpdatePreventsIt) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  ASSERT_TRUE(Prepare(1).ok());
  std::shared_ptr<HeadStream> evaluation = Open(0);
  absl::Notification commit_is_queued;
  faults_.before_batch = [&] { commit_is_queued.WaitForNotification(); };
  faults_.batch = true;
  Slot slot(2);
  ASSERT_TRUE(evaluation->Submit(slot.Chunk(0), [](const absl::StatusOr<ComputedChunk>&) {}).ok());
  absl::StatusOr<CommittedStep> committed;
  std::thread commit([&] { committed = Commit(1); });
  absl::SleepFor(absl::Milliseconds(50));  // It is sound whenever the commit comes.
  commit_is_queued.Notify();
  commit.join();
  EXPECT_TRUE(absl::IsAborted(committed.status())) << committed.status();
  EXPECT_EQ(head_->Status().last_committed_step, 0u);
  EXPECT_TRUE(head_->Status().poisoned_by.empty());
  EXPECT_TRUE(*Abort(1));
}

TEST_F(HeadTest, StepThatIsBeingCommittedIsNotAbandoned) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  ASSERT_TRUE(Prepare(1).ok());
  uint64_t abandoned = 1;
  faults_.in_update = [&] { abandoned = head_->AbandonStep("the server stops"); };
  EXPECT_TRUE(Commit(1).ok());
  EXPECT_EQ(abandoned, 0u);
  EXPECT_EQ(head_->Status().last_committed_step, 1u);
  EXPECT_THAT(metrics_.Render(), HasSubstr("lmhead_steps_total{outcome=\"aborted\"} 0"));
}

// Two restores of a poisoned head at once: the second has found the one that the first replaces.
TEST_F(HeadTest, DeletingAHeadSparesTheOneThatHasTakenItsPlace) {
  const std::shared_ptr<Head> replaced = head_;
  ASSERT_TRUE(registry_.Delete(*replaced).ok());
  EXPECT_TRUE(absl::IsNotFound(registry_.Find("lm").status()));
  EXPECT_TRUE(registry_.Delete(*replaced).ok());
  head_ = *registry_.Create(Spec());
  ASSERT_TRUE(Begin(1).ok());
  EXPECT_TRUE(registry_.Delete(*replaced).ok());
  EXPECT_EQ(*registry_.Find("lm"), head_);
  EXPECT_EQ(head_->Status().open_step, 1u);
}

TEST_F(HeadTest, FailedUpdatePoisonsTheHeadForGood) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Feed(1).ok());
  ASSERT_TRUE(Prepare(1).ok());
  std::shared_ptr<HeadStream> evaluation = Open(0);
  faults_.update = true;
  EXPECT_TRUE(absl::IsAborted(Commit(1).status()));
  faults_.update = false;
  for (const absl::Status& status : {Commit(1).status(), Prepare(1).status(), Abort(1).status(),
                                     Begin(2), Compute(*evaluation, 0).status()}) {
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr("update failed"));
  }
  EXPECT_THAT(head_->Status().poisoned_by, HasSubstr("update failed"));
  // It can be deleted without force, and created again.
  evaluation.reset();
  ASSERT_TRUE(registry_.Delete("lm", /*force=*/false).ok());
  absl::StatusOr<std::shared_ptr<Head>> again = registry_.Create(Spec());
  ASSERT_TRUE(again.ok());
  head_ = *again;
  EXPECT_TRUE(Begin(1).ok());
}

TEST_F(HeadTest, FailedDiscardPoisonsTheHead) {
  ASSERT_TRUE(Begin(1).ok());
  faults_.discard = true;
  EXPECT_TRUE(absl::IsAborted(Abort(1).status()));
  EXPECT_TRUE(absl::IsAborted(Begin(1)));
}

TEST_F(HeadTest, AbortWaitsForChunksOnTheirWay) {
  absl::Notification computing, go_on;
  faults_.before_batch = [&] {
    if (!computing.HasBeenNotified()) {
      computing.Notify();
      go_on.WaitForNotification();
    }
  };
  ASSERT_TRUE(Begin(1).ok());
  absl::Notification told;
  std::shared_ptr<HeadStream> stream = Open(1, [&](const absl::Status& status) {
    EXPECT_TRUE(absl::IsAborted(status));
    told.Notify();
  });
  std::thread feeder([&] { EXPECT_TRUE(Compute(*stream, 0).ok()); });
  computing.WaitForNotification();
  std::thread aborter([&] { EXPECT_TRUE(*Abort(1)); });
  told.WaitForNotification();  // The stream knows at once.
  EXPECT_EQ(faults_.num_discards, 0);
  go_on.Notify();
  feeder.join();
  aborter.join();
  EXPECT_EQ(faults_.num_discards, 1);
  // Nothing of the chunk is in the next try.
  stream.reset();
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(Open(1)->End(0).ok());
  absl::StatusOr<PreparedStep> prepared = Prepare(1);
  ASSERT_TRUE(prepared.ok());
  EXPECT_EQ(prepared->grad_squared_norm, 0.0);
  EXPECT_EQ(prepared->sums.num_tokens, 0);
}

TEST_F(HeadTest, DeleteWaitsForQueuedChunksAndLeavesStreamsSafe) {
  absl::Notification computing, go_on;
  faults_.before_batch = [&] {
    computing.Notify();
    go_on.WaitForNotification();
  };
  std::shared_ptr<HeadStream> stream = Open(0);
  std::thread feeder([&] { EXPECT_TRUE(Compute(*stream, 0).ok()); });
  computing.WaitForNotification();
  std::thread deleter([&] { EXPECT_TRUE(registry_.Delete("lm", false).ok()); });
  while (registry_.Find("lm").ok()) std::this_thread::yield();
  EXPECT_GT(budget_.reserved_bytes(), 0);
  go_on.Notify();
  feeder.join();
  deleter.join();
  EXPECT_EQ(budget_.reserved_bytes(), 0);
  EXPECT_EQ(account_.Read().total.live_bytes, 0);
  EXPECT_TRUE(absl::IsNotFound(Compute(*stream, 1).status()));
  EXPECT_TRUE(absl::IsNotFound(Begin(1)));
}

// --- Admission ---

TEST_F(HeadTest, WhatDoesNotFitIsRefusedWithTheBreakdown) {
  HeadSpec spec = Spec("big");
  spec.vocab_size = 1 << 20;
  spec.hidden_size = 64;
  const int64_t reserved_bytes = budget_.reserved_bytes();
  const absl::Status status = registry_.Create(spec).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(Message(status), HasSubstr("grad_weight"));
  EXPECT_EQ(budget_.reserved_bytes(), reserved_bytes);
  EXPECT_TRUE(absl::IsNotFound(registry_.Find("big").status()));
}

TEST_F(HeadTest, FailedCreationGivesTheReservationBack) {
  const int64_t reserved_bytes = budget_.reserved_bytes();
  create_error_ = absl::ResourceExhaustedError("the system has no room");
  EXPECT_TRUE(absl::IsResourceExhausted(registry_.Create(Spec("other")).status()));
  EXPECT_EQ(budget_.reserved_bytes(), reserved_bytes);
  create_error_ = absl::OkStatus();
  EXPECT_TRUE(registry_.Create(Spec("other")).ok());
}

TEST_F(HeadTest, HeadsUseTheBudgetUpAndDeletingMakesRoom) {
  std::vector<std::string> names;
  absl::Status status;
  for (int i = 0; status.ok() && i < 1000; ++i) {
    HeadSpec spec = Spec("h" + std::to_string(i));
    spec.schedule = Schedule::kRecompute;
    status = registry_.Create(spec).status();
    if (status.ok()) names.push_back(spec.name);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_LE(budget_.reserved_bytes(), budget_.limit_bytes());
  ASSERT_TRUE(registry_.Delete(names.front(), false).ok());
  HeadSpec spec = Spec("last");
  spec.schedule = Schedule::kRecompute;
  EXPECT_TRUE(registry_.Create(spec).ok());
}

TEST_F(HeadTest, UnknownHeadNamesThoseThereAre) {
  ASSERT_TRUE(registry_.Create(Spec("teacher")).ok());
  EXPECT_THAT(Message(registry_.Find("x").status()), HasSubstr("lm, teacher"));
  EXPECT_TRUE(absl::IsNotFound(registry_.Delete("x", true)));
}

TEST_F(HeadTest, StepPeaksStartAnewWithEachStep) {
  ASSERT_TRUE(registry_.Create(Spec("other")).ok());
  ASSERT_TRUE(registry_.Delete("other", false).ok());
  const MemoryAccount::Use before = account_.Read().total;
  EXPECT_GT(before.peak_step_bytes, before.live_bytes);
  ASSERT_TRUE(Begin(1).ok());
  EXPECT_EQ(account_.Read().total.peak_step_bytes, before.live_bytes);
  EXPECT_EQ(account_.Read().total.peak_process_bytes, before.peak_process_bytes);
}

}  // namespace
}  // namespace lmhead
