// When a step is overdue, by a clock of the test's own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "server/head/step.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLease = absl::Minutes(10);
const StepLimits kLeaseOnly = {.worker_lease = kLease};

class StepLeaseTest : public ::testing::Test {
 protected:
  // Long after the lease of everything that happens in the test.
  absl::Time Late() const { return absl::Now() + kLease + absl::Seconds(1); }

  std::string OverdueAt(absl::Time now, const StepLimits& limits = kLeaseOnly) const {
    return step_.Overdue(now, limits).value_or("");
  }
  void Feed(const std::string& worker, uint64_t num_chunks) {
    for (uint64_t i = 0; i < num_chunks; ++i) {
      ASSERT_TRUE(step_.AcceptChunk(worker, i, 7 + i).ok());
      step_.ChunkAccumulated(worker, i, {});
    }
    ASSERT_TRUE(step_.EndWorker(worker, num_chunks).ok());
  }

  Step step_{"lm", 3, {"w0", "w1"}};
};

TEST_F(StepLeaseTest, IsOffUnlessAsked) {
  EXPECT_EQ(OverdueAt(absl::Now() + absl::Hours(1000), {}), "");
}

TEST_F(StepLeaseTest, NamesTheWorkerThatIsSilent) {
  EXPECT_EQ(OverdueAt(absl::Now() + kLease / 2), "");
  ASSERT_TRUE(step_.AttachStream("w0", 0, nullptr).ok());
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("worker w1"));
  ASSERT_TRUE(step_.AttachStream("w1", 0, nullptr).ok());
  EXPECT_EQ(OverdueAt(Late()), "");  // Both have streams.
  step_.DetachStream("w0", 0);
  EXPECT_EQ(OverdueAt(absl::Now() + kLease / 2), "");
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("worker w0"));
}

TEST_F(StepLeaseTest, OneOfTwoStreamsIsEnough) {
  ASSERT_TRUE(step_.AttachStream("w0", 0, nullptr).ok());
  ASSERT_TRUE(step_.AttachStream("w0", 1, nullptr).ok());
  ASSERT_TRUE(step_.AttachStream("w1", 0, nullptr).ok());
  step_.DetachStream("w0", 0);
  step_.DetachStream("w0", 0);  // Repeated: no effect.
  EXPECT_EQ(OverdueAt(Late()), "");
  step_.DetachStream("w0", 1);
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("worker w0"));
}

TEST_F(StepLeaseTest, AWorkerThatHasEndedNeedsNoMoreSigns) {
  Feed("w0", 2);
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("worker w1"));
  ASSERT_TRUE(step_.AttachStream("w1", 0, nullptr).ok());
  EXPECT_EQ(OverdueAt(Late()), "");
}

TEST_F(StepLeaseTest, AWorkerThatEndedWithChunksMissingHasNotEnded) {
  ASSERT_TRUE(step_.EndWorker("w0", 5).ok());
  Feed("w1", 1);
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("worker w0"));
}

TEST_F(StepLeaseTest, WhenAllHaveEndedSomebodyMustGoOn) {
  Feed("w0", 1);
  Feed("w1", 1);
  EXPECT_EQ(OverdueAt(absl::Now() + kLease / 2), "");
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("none has called PrepareStep"));
  ASSERT_TRUE(step_.Prepare(1.0).ok());
  EXPECT_THAT(OverdueAt(Late()), HasSubstr("none has called CommitStep"));
}

TEST_F(StepLeaseTest, AStepHasATimeOfItsOwn) {
  const StepLimits limits = {.step_timeout = absl::Minutes(5)};
  EXPECT_EQ(OverdueAt(step_.begun_at() + absl::Minutes(5), limits), "");
  EXPECT_THAT(OverdueAt(step_.begun_at() + absl::Minutes(6), limits),
              HasSubstr("--step_timeout_seconds"));
  ASSERT_TRUE(step_.Abort("enough").ok());
  EXPECT_EQ(OverdueAt(step_.begun_at() + absl::Minutes(6), limits), "");
}

}  // namespace
}  // namespace lmhead
