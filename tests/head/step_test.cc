#include "server/head/step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "proto/types/limits.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

bool Never() { return false; }

std::string Message(const absl::Status& status) { return std::string(status.message()); }

LossSums SumsOf(int64_t num_tokens, double loss_sum) {
  return {.loss_sum = loss_sum, .num_tokens = num_tokens, .num_valid_tokens = num_tokens};
}

// A step of workers a and b.
class StepTest : public ::testing::Test {
 protected:
  // A chunk that arrives and is computed.
  void Feed(const std::string& worker, uint64_t index, double loss_sum = 1.0) {
    absl::StatusOr<ChunkVerdict> verdict = step_.AcceptChunk(worker, index, /*checksum=*/index);
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    ASSERT_EQ(*verdict, ChunkVerdict::kNew);
    step_.ChunkAccumulated(worker, index, SumsOf(2, loss_sum));
  }
  void FeedAll() {
    Feed("a", 0);
    Feed("a", 1);
    Feed("b", 0);
    ASSERT_TRUE(step_.EndWorker("a", 2).ok());
    ASSERT_TRUE(step_.EndWorker("b", 1).ok());
  }
  absl::Status Await() { return step_.AwaitComplete(absl::InfinitePast(), Never); }

  Step step_{"lm", 7, {"a", "b"}};
};

// --- The ledger ---

TEST_F(StepTest, NewChunkThenTheSameAgainIsADuplicate) {
  Feed("a", 3);
  EXPECT_EQ(*step_.AcceptChunk("a", 3, 3), ChunkVerdict::kDuplicate);
  EXPECT_EQ(step_.NumChunksCounted("a"), 1u);
  EXPECT_EQ(step_.sums(), SumsOf(2, 1.0));
}

TEST_F(StepTest, ChunkInFlightIsADuplicateToo) {
  ASSERT_EQ(*step_.AcceptChunk("a", 0, 5), ChunkVerdict::kNew);
  EXPECT_EQ(*step_.AcceptChunk("a", 0, 5), ChunkVerdict::kDuplicate);
  step_.ChunkAccumulated("a", 0, SumsOf(2, 1.0));
  EXPECT_EQ(step_.NumChunksCounted("a"), 1u);
}

TEST_F(StepTest, WorkersCountTheirChunksApart) {
  Feed("a", 0);
  Feed("b", 0);
  EXPECT_EQ(step_.NumChunksCounted("a"), 1u);
  EXPECT_EQ(step_.NumChunksCounted("b"), 1u);
  EXPECT_EQ(step_.sums(), SumsOf(4, 2.0));
}

TEST_F(StepTest, SameIndexWithOtherContentsIsRefused) {
  Feed("a", 3);
  const absl::Status status = step_.AcceptChunk("a", 3, 99).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Message(status), HasSubstr("chunk 3 of worker a in step 7 of head lm"));
  EXPECT_EQ(step_.NumChunksCounted("a"), 1u);
}

TEST_F(StepTest, UnknownWorkerIsRefusedNamingTheWorkers) {
  const absl::Status status = step_.AcceptChunk("c", 0, 0).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Message(status), HasSubstr("'c' is not one of step 7"));
  EXPECT_THAT(Message(status), HasSubstr("a, b"));
}

TEST_F(StepTest, ChunkIndexIsBounded) {
  EXPECT_TRUE(step_.AcceptChunk("a", kChunksPerWorkerMax - 1, 0).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(step_.AcceptChunk("a", kChunksPerWorkerMax, 0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(step_.AcceptChunk("a", ~uint64_t{0}, 0).status()));
}

TEST_F(StepTest, ChunkBeyondTheStatedCountIsRefused) {
  ASSERT_TRUE(step_.EndWorker("a", 2).ok());
  EXPECT_TRUE(step_.AcceptChunk("a", 1, 0).ok());
  const absl::Status status = step_.AcceptChunk("a", 2, 0).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Message(status), HasSubstr("ended with 2 chunks"));
}

// --- Ends ---

TEST_F(StepTest, EndAnswersWhatIsCountedAndMayBeRepeated) {
  Feed("a", 0);
  EXPECT_EQ(*step_.EndWorker("a", 2), 1u);
  Feed("a", 1);
  EXPECT_EQ(*step_.EndWorker("a", 2), 2u);
}

TEST_F(StepTest, AllStreamsOfAWorkerStateTheSameCount) {
  ASSERT_TRUE(step_.EndWorker("a", 2).ok());
  const absl::Status status = step_.EndWorker("a", 3).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Message(status), HasSubstr("got num_chunks 3, stated before was 2"));
}

TEST_F(StepTest, EndBelowAChunkThatCameIsRefused) {
  Feed("a", 4);
  const absl::Status status = step_.EndWorker("a", 4).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(Message(status), HasSubstr("chunk 4 has been received"));
  EXPECT_TRUE(step_.EndWorker("a", 5).ok());
}

TEST_F(StepTest, EndIsBoundedAndOfAKnownWorker) {
  EXPECT_TRUE(absl::IsInvalidArgument(step_.EndWorker("a", kChunksPerWorkerMax + 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(step_.EndWorker("c", 1).status()));
  EXPECT_TRUE(step_.EndWorker("a", kChunksPerWorkerMax).ok());
}

TEST_F(StepTest, EndMayBeRepeatedOncePrepared) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  EXPECT_EQ(*step_.EndWorker("a", 2), 2u);
  EXPECT_TRUE(absl::IsInvalidArgument(step_.EndWorker("a", 3).status()));
}

// --- Completeness ---

TEST_F(StepTest, IncompleteNamesWorkersAndChunks) {
  Feed("a", 0);
  Feed("a", 2);
  Feed("a", 6);
  ASSERT_TRUE(step_.EndWorker("a", 8).ok());
  const absl::Status status = step_.CheckComplete();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(Message(status), HasSubstr("not ended: b"));
  EXPECT_THAT(Message(status), HasSubstr("worker a (8 chunks): chunks 1, 3-5, 7 have not arrived"));
}

TEST_F(StepTest, LongListsAreCutShort) {
  for (uint64_t i = 0; i < 40; i += 2) Feed("a", i);
  ASSERT_TRUE(step_.EndWorker("a", 41).ok());
  EXPECT_THAT(Message(step_.CheckComplete()), HasSubstr("chunks 1, 3, 5, 7 and more"));
  EXPECT_THAT(Message(step_.CheckComplete()), Not(HasSubstr("9")));
}

TEST_F(StepTest, ChunkStillBeingComputedIsNotCounted) {
  Feed("b", 0);
  ASSERT_TRUE(step_.EndWorker("b", 1).ok());
  ASSERT_TRUE(step_.AcceptChunk("a", 0, 0).ok());
  ASSERT_TRUE(step_.EndWorker("a", 1).ok());
  EXPECT_THAT(Message(step_.CheckComplete()),
              HasSubstr("worker a (1 chunks): 1 still being computed"));
  step_.ChunkAccumulated("a", 0, SumsOf(2, 1.0));
  EXPECT_TRUE(step_.CheckComplete().ok());
}

TEST_F(StepTest, WorkersWithoutChunksComplete) {
  ASSERT_TRUE(step_.EndWorker("a", 0).ok());
  EXPECT_FALSE(step_.CheckComplete().ok());
  ASSERT_TRUE(step_.EndWorker("b", 0).ok());
  EXPECT_TRUE(step_.CheckComplete().ok());
  EXPECT_EQ(step_.Prepare(0.0)->num_chunks, 0u);
}

TEST_F(StepTest, CompleteAfterEveryChunkInAnyOrder) {
  ASSERT_TRUE(step_.EndWorker("a", 2).ok());
  ASSERT_TRUE(step_.EndWorker("b", 1).ok());
  Feed("b", 0);
  Feed("a", 1);
  EXPECT_FALSE(step_.CheckComplete().ok());
  Feed("a", 0);
  EXPECT_TRUE(step_.CheckComplete().ok());
}

TEST_F(StepTest, AwaitCompleteReturnsWhenTheLastChunkIsCounted) {
  std::thread waiter([&] { EXPECT_TRUE(step_.AwaitComplete(absl::InfiniteFuture(), Never).ok()); });
  FeedAll();
  waiter.join();
}

TEST_F(StepTest, AwaitCompleteSaysWhatIsMissingAtTheDeadline) {
  const absl::Status status = step_.AwaitComplete(absl::InfinitePast(), Never);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(Message(status), HasSubstr("a, b"));
}

TEST_F(StepTest, AwaitCompleteEndsWhenItsCallerIsGone) {
  std::atomic<bool> gone{false};
  std::thread waiter([&] {
    EXPECT_TRUE(absl::IsCancelled(
        step_.AwaitComplete(absl::InfiniteFuture(), [&] { return gone.load(); })));
  });
  gone = true;
  waiter.join();
}

// --- Prepare ---

TEST_F(StepTest, PrepareStoresOneResultForAll) {
  FeedAll();
  EXPECT_FALSE(step_.prepared().has_value());
  const PreparedStep result = *step_.Prepare(2.5);
  EXPECT_EQ(step_.state(), StepState::kPrepared);
  EXPECT_EQ(result.sums, SumsOf(6, 3.0));
  EXPECT_EQ(result.num_chunks, 3u);
  EXPECT_EQ(result.grad_squared_norm, 2.5);
  EXPECT_EQ(step_.prepared()->sums, result.sums);
  EXPECT_TRUE(Await().ok());
}

TEST_F(StepTest, AnAbortedStepIsNotPrepared) {
  FeedAll();
  ASSERT_TRUE(*step_.Abort("the server stops"));
  EXPECT_THAT(Message(step_.Prepare(1.0).status()), HasSubstr("the server stops"));
  EXPECT_EQ(step_.state(), StepState::kAborted);
}

TEST_F(StepTest, NoChunkAfterPrepare) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  for (const uint64_t index : {0, 5}) {
    const absl::Status status = step_.AcceptChunk("a", index, index).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(Message(status), HasSubstr("step 7 of head lm is prepared"));
  }
}

// --- Commit ---

TEST_F(StepTest, CommitNeedsPrepare) {
  FeedAll();
  const auto checked = step_.CheckCommit({});
  EXPECT_TRUE(absl::IsFailedPrecondition(checked.status()));
  EXPECT_THAT(Message(checked.status()), HasSubstr("PrepareStep before CommitStep"));
}

TEST_F(StepTest, RepeatedCommitGetsTheStoredResult) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  const CommitParameters parameters = {.learning_rate = 0.1, .grad_multiplier = 0.5};
  const auto first = step_.CheckCommit(parameters);
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(first->has_value());
  ASSERT_TRUE(step_.StartCommit().ok());
  step_.Commit(parameters, {.step = 7, .num_updates = 3, .grad_norm = 1.5});
  const auto second = step_.CheckCommit(parameters);
  ASSERT_TRUE(second.ok() && second->has_value());
  EXPECT_TRUE((*second)->repeated);
  EXPECT_EQ((*second)->num_updates, 3u);
  EXPECT_EQ((*second)->grad_norm, 1.5);
  EXPECT_TRUE(absl::IsFailedPrecondition(step_.AcceptChunk("a", 0, 0).status()));
}

TEST_F(StepTest, AbortAndCommitExcludeEachOther) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  ASSERT_TRUE(step_.StartCommit().ok());
  const absl::Status refused = step_.Abort("x").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(Message(refused), HasSubstr("is being committed"));
  step_.CommitFailed();
  EXPECT_TRUE(*step_.Abort("x"));
  EXPECT_TRUE(absl::IsAborted(step_.StartCommit()));
}

TEST_F(StepTest, CommitWithOtherParametersIsRefused) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  const CommitParameters parameters = {.learning_rate = 0.1, .grad_multiplier = 0.5};
  ASSERT_TRUE(step_.StartCommit().ok());
  step_.Commit(parameters, {.step = 7});
  for (CommitParameters other : {CommitParameters{.learning_rate = 0.2, .grad_multiplier = 0.5},
                                 CommitParameters{.learning_rate = 0.1, .grad_multiplier = 0.25}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(step_.CheckCommit(other).status()));
  }
}

TEST_F(StepTest, NonfiniteRowsNeedPermission) {
  ASSERT_TRUE(step_.AcceptChunk("a", 0, 0).ok());
  step_.ChunkAccumulated("a", 0, {.num_tokens = 4, .num_nonfinite_rows = 2});
  ASSERT_TRUE(step_.EndWorker("a", 1).ok());
  ASSERT_TRUE(step_.EndWorker("b", 0).ok());
  EXPECT_EQ(step_.Prepare(1.0)->sums.num_nonfinite_rows, 2);
  const absl::Status status = step_.CheckCommit({}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(Message(status), HasSubstr("2 rows"));
  EXPECT_THAT(Message(status), HasSubstr("allow_nonfinite_rows"));
  EXPECT_TRUE(step_.CheckCommit({.allow_nonfinite_rows = true}).ok());
}

TEST_F(StepTest, AGradientThatIsNotFiniteIsNotCommitted) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(std::numeric_limits<double>::quiet_NaN()).ok());
  for (const bool allow : {false, true}) {
    const absl::Status status = step_.CheckCommit({.allow_nonfinite_rows = allow}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(Message(status),
                HasSubstr("the squared gradient of step 7 of head lm sums to nan"));
    EXPECT_THAT(Message(status), HasSubstr("abort the step"));
  }
  EXPECT_TRUE(*step_.Abort("NaN"));
}

// --- Abort ---

TEST_F(StepTest, AbortTellsWhoeverWaitsAndStreams) {
  std::vector<std::string> told;
  const auto listener = [&](const absl::Status& status) { told.push_back(Message(status)); };
  ASSERT_TRUE(step_.AttachStream("a", 0, listener).ok());
  ASSERT_TRUE(step_.AttachStream("b", 0, listener).ok());
  step_.DetachStream("b", 0);
  std::thread waiter([&] {
    const absl::Status status = step_.AwaitComplete(absl::InfiniteFuture(), Never);
    EXPECT_TRUE(absl::IsAborted(status));
    EXPECT_THAT(Message(status), HasSubstr("worker b died"));
  });
  EXPECT_TRUE(*step_.Abort("worker b died"));
  waiter.join();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_THAT(told[0], HasSubstr("step 7 of head lm was aborted: worker b died"));
}

TEST_F(StepTest, AbortedTakesNothingMoreAndRepeatsQuietly) {
  EXPECT_TRUE(*step_.Abort("x"));
  EXPECT_FALSE(*step_.Abort("y"));
  EXPECT_TRUE(absl::IsAborted(step_.AcceptChunk("a", 0, 0).status()));
  EXPECT_TRUE(absl::IsAborted(step_.EndWorker("a", 0).status()));
  EXPECT_TRUE(absl::IsAborted(step_.CheckCommit({}).status()));
  EXPECT_TRUE(absl::IsAborted(step_.AttachStream("a", 0, nullptr)));
  EXPECT_TRUE(absl::IsAborted(Await()));
}

TEST_F(StepTest, PreparedMayBeAbortedCommittedMayNot) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  Step other("lm", 8, {"a"});
  ASSERT_TRUE(other.EndWorker("a", 0).ok());
  ASSERT_TRUE(other.Prepare(0.0).ok());
  EXPECT_TRUE(*other.Abort("x"));
  ASSERT_TRUE(step_.StartCommit().ok());
  step_.Commit({}, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(step_.Abort("x").status()));
  EXPECT_EQ(step_.state(), StepState::kCommitted);
}

TEST_F(StepTest, NothingIsInFlightOnceItsChunksHaveCome) {
  ASSERT_TRUE(step_.AcceptChunk("a", 0, 0).ok());
  ASSERT_TRUE(step_.AcceptChunk("a", 1, 0).ok());
  ASSERT_TRUE(step_.Abort("x").ok());
  std::atomic<int> num_done{0};
  std::thread waiter([&] {
    step_.AwaitNoneInFlight();
    EXPECT_EQ(num_done.load(), 2);
  });
  ++num_done;
  step_.ChunkAccumulated("a", 0, {});
  ++num_done;
  step_.ChunkFailed("a", 1, absl::InternalError("x"));
  waiter.join();
}

// --- Poison ---

TEST_F(StepTest, FailedBatchLeavesOnlyAbort) {
  FeedAll();
  Step step("lm", 9, {"a"});
  ASSERT_TRUE(step.AcceptChunk("a", 3, 0).ok());
  step.ChunkFailed("a", 3, absl::InternalError("launch failed"));
  step.Poison(absl::InternalError("a later error"));
  for (const absl::Status& status :
       {step.failure(), step.AcceptChunk("a", 0, 0).status(), step.EndWorker("a", 4).status(),
        step.CheckCommit({}).status(), step.AttachStream("a", 0, nullptr),
        step.AwaitComplete(absl::InfiniteFuture(), Never)}) {
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr("chunk 3 of worker a: launch failed"));
  }
  EXPECT_TRUE(*step.Abort("x"));
}

TEST_F(StepTest, PoisonReachesAPreparedStepButNotACommittedOne) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  step_.Poison(absl::InternalError("x"));
  EXPECT_TRUE(absl::IsAborted(step_.CheckCommit({}).status()));
  Step committed("lm", 8, {"a"});
  ASSERT_TRUE(committed.EndWorker("a", 0).ok());
  ASSERT_TRUE(committed.Prepare(0.0).ok());
  ASSERT_TRUE(committed.StartCommit().ok());
  committed.Commit({}, {});
  committed.Poison(absl::InternalError("x"));
  EXPECT_TRUE(committed.CheckCommit({}).ok());
}

// --- Streams ---

TEST_F(StepTest, OneStreamAnIndex) {
  ASSERT_TRUE(step_.AttachStream("a", 0, nullptr).ok());
  const absl::Status status = step_.AttachStream("a", 0, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Message(status), HasSubstr("stream 0 of worker a"));
  EXPECT_TRUE(step_.AttachStream("a", 1, nullptr).ok());
  EXPECT_TRUE(step_.AttachStream("b", 0, nullptr).ok());
  step_.DetachStream("a", 0);
  EXPECT_TRUE(step_.AttachStream("a", 0, nullptr).ok());
}

TEST_F(StepTest, StreamsAreBoundedAndOfKnownWorkers) {
  EXPECT_TRUE(absl::IsInvalidArgument(step_.AttachStream("a", kStreamsPerWorkerMax, nullptr)));
  EXPECT_TRUE(absl::IsInvalidArgument(step_.AttachStream("", 0, nullptr)));
}

TEST_F(StepTest, PreparedTakesStreamsCommittedDoesNot) {
  FeedAll();
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  EXPECT_TRUE(step_.AttachStream("a", 0, nullptr).ok());
  ASSERT_TRUE(step_.StartCommit().ok());
  step_.Commit({}, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(step_.AttachStream("a", 1, nullptr)));
}

// --- StepSequence ---

class StepSequenceTest : public ::testing::Test {
 protected:
  std::shared_ptr<Step> Begin(uint64_t number) {
    absl::StatusOr<StepSequence::Begun> begun = steps_.Begin(number, {"a"});
    EXPECT_TRUE(begun.ok()) << begun.status();
    return begun.ok() ? begun->step : nullptr;
  }
  void CommitOpen() {
    std::shared_ptr<Step> step = steps_.open();
    ASSERT_TRUE(step->EndWorker("a", 0).ok());
    ASSERT_TRUE(step->Prepare(0.0).ok());
    ASSERT_TRUE(step->StartCommit().ok());
    step->Commit({}, {.step = step->number()});
    steps_.Close();
  }
  void AbortOpen() {
    ASSERT_TRUE(steps_.open()->Abort("x").ok());
    steps_.Close();
  }

  StepSequence steps_{"lm"};
};

TEST_F(StepSequenceTest, BeginIsIdempotentInAnyOrderOfTheSameWorkers) {
  ASSERT_TRUE(steps_.Begin(3, {"b", "a"}).ok());
  const auto again = steps_.Begin(3, {"a", "b"});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->already_open);
  EXPECT_EQ(again->step, steps_.open());
}

TEST_F(StepSequenceTest, BeginRefusesBadWorkersAndStepZero) {
  EXPECT_TRUE(absl::IsInvalidArgument(steps_.Begin(0, {"a"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(steps_.Begin(1, {}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(steps_.Begin(1, {"a", "b", "a"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      steps_.Begin(1, std::vector<std::string>(kWorkersMax + 1, "a")).status()));
  EXPECT_EQ(steps_.open(), nullptr);
}

TEST_F(StepSequenceTest, BeginWithOtherWorkersNamesBothSets) {
  ASSERT_TRUE(steps_.Begin(3, {"a", "b"}).ok());
  const absl::Status status = steps_.Begin(3, {"a", "c"}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(Message(status), HasSubstr("open with workers a, b; got a, c"));
}

TEST_F(StepSequenceTest, OneStepAtATime) {
  Begin(3);
  for (const uint64_t other : {2, 4}) {
    const absl::Status status = steps_.Begin(other, {"a"}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(Message(status), HasSubstr("step 3 is open"));
  }
}

TEST_F(StepSequenceTest, NumbersGrowButMaySkip) {
  Begin(3);
  CommitOpen();
  EXPECT_EQ(steps_.last_committed_step(), 3u);
  for (const uint64_t number : {2, 3}) {
    const absl::Status status = steps_.Begin(number, {"a"}).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(Message(status), HasSubstr("greater than 3"));
  }
  Begin(9);
}

TEST_F(StepSequenceTest, AbortedStepMayBeginAgain) {
  Begin(3);
  AbortOpen();
  EXPECT_EQ(steps_.last_committed_step(), 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(steps_.FindOpen(3).status()));
  EXPECT_THAT(Message(steps_.FindOpen(3).status()), HasSubstr("step 3 of head lm was aborted: x"));
  EXPECT_EQ((*steps_.FindEver(3))->state(), StepState::kAborted);
  EXPECT_EQ(Begin(3)->state(), StepState::kOpen);
  CommitOpen();
  EXPECT_EQ((*steps_.FindEver(3))->state(), StepState::kCommitted);
}

TEST_F(StepSequenceTest, FindsWhatARepeatedCallNeeds) {
  Begin(3);
  CommitOpen();
  Begin(4);
  EXPECT_EQ((*steps_.FindOpen(4))->number(), 4u);
  EXPECT_TRUE(absl::IsFailedPrecondition(steps_.FindOpen(3).status()));
  EXPECT_EQ((*steps_.FindOpenOrCommitted(3))->state(), StepState::kCommitted);
  EXPECT_TRUE(absl::IsFailedPrecondition(steps_.FindOpenOrCommitted(2).status()));
  EXPECT_THAT(Message(steps_.FindOpen(5).status()), HasSubstr("step 4 is open"));
}

TEST_F(StepSequenceTest, PoisonedStepIsNotBegunAgainBeforeItsAbort) {
  Begin(3)->Poison(absl::InternalError("x"));
  EXPECT_TRUE(absl::IsAborted(steps_.Begin(3, {"a"}).status()));
  AbortOpen();
  EXPECT_EQ(Begin(3)->state(), StepState::kOpen);
}

// Many threads feed and repeat chunks; every chunk is new exactly once.
TEST(StepThreads, EveryChunkIsNewOnce) {
  Step step("lm", 1, {"a", "b"});
  constexpr uint64_t kChunks = 200;
  std::atomic<int> num_new{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, worker = std::string(t % 2 == 0 ? "a" : "b")] {
      for (uint64_t i = 0; i < kChunks; ++i) {
        absl::StatusOr<ChunkVerdict> verdict = step.AcceptChunk(worker, i, i);
        ASSERT_TRUE(verdict.ok());
        if (*verdict == ChunkVerdict::kDuplicate) continue;
        ++num_new;
        step.ChunkAccumulated(worker, i, SumsOf(1, 1.0));
      }
      EXPECT_TRUE(step.EndWorker(worker, kChunks).ok());
    });
  }
  EXPECT_TRUE(step.AwaitComplete(absl::InfiniteFuture(), Never).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_new.load(), static_cast<int>(2 * kChunks));
  EXPECT_EQ(step.Prepare(0.0)->sums, SumsOf(2 * kChunks, 2.0 * kChunks));
}

}  // namespace
}  // namespace lmhead
