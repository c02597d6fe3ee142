// The join of the two sides of paired streams, without heads or streams.

#include "server/head/pairing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(60);

class PairingTest : public ::testing::Test {
 protected:
  ~PairingTest() override {
    for (const Pairing::StreamId id : streams_) pairing_.Detach(id);
  }

  Pairing::StreamId Attach() {
    streams_.push_back(pairing_.Attach());
    return streams_.back();
  }

  static Pairing::Key Key(uint64_t chunk_index, const std::string& worker = "w0") {
    return {.step = 3, .worker = worker, .chunk_index = chunk_index};
  }

  // A half whose rows tell it apart from others.
  static Pairing::Half Half(Pairing::StreamId stream, int64_t num_tokens) {
    Pairing::Half half;
    half.stream_id = stream;
    half.chunk.num_tokens = num_tokens;
    return half;
  }

  Pairing::Offered Offer(StreamSide side, uint64_t chunk_index, Pairing::StreamId stream,
                         int64_t num_tokens = 1) {
    return pairing_.Offer(side, Key(chunk_index), Half(stream, num_tokens), now_);
  }

  // Both sides of a chunk, joined.
  Pairing::Match Join(uint64_t chunk_index, Pairing::StreamId student, Pairing::StreamId teacher) {
    Offer(StreamSide::kTeacher, chunk_index, teacher);
    Pairing::Offered offered = Offer(StreamSide::kStudent, chunk_index, student);
    EXPECT_TRUE(offered.match.has_value());
    return *std::move(offered.match);
  }

  Pairing pairing_{"head lm", kTimeout};
  const absl::Time now_ = absl::Now();
  std::vector<Pairing::StreamId> streams_;
};

TEST_F(PairingTest, WhicheverSideComesFirstWaits) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  EXPECT_FALSE(Offer(StreamSide::kStudent, 0, student, 5).match.has_value());
  EXPECT_FALSE(Offer(StreamSide::kTeacher, 1, teacher, 6).match.has_value());
  EXPECT_EQ(pairing_.num_waiting(), 2);
  const Pairing::Offered first = Offer(StreamSide::kTeacher, 0, teacher, 7);
  const Pairing::Offered second = Offer(StreamSide::kStudent, 1, student, 8);
  ASSERT_TRUE(first.match.has_value());
  ASSERT_TRUE(second.match.has_value());
  EXPECT_EQ(first.match->student.chunk.num_tokens, 5);
  EXPECT_EQ(first.match->teacher.chunk.num_tokens, 7);
  EXPECT_EQ(second.match->student.chunk.num_tokens, 8);
  EXPECT_EQ(second.match->teacher.chunk.num_tokens, 6);
  EXPECT_EQ(pairing_.num_waiting(), 0);
}

TEST_F(PairingTest, StepWorkerAndIndexTellChunksApart) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  Offer(StreamSide::kStudent, 0, student);
  EXPECT_FALSE(
      pairing_.Offer(StreamSide::kTeacher, Key(0, "w1"), Half(teacher, 1), now_).match.has_value());
  EXPECT_FALSE(pairing_
                   .Offer(StreamSide::kTeacher, {.step = 4, .worker = "w0", .chunk_index = 0},
                          Half(teacher, 1), now_)
                   .match.has_value());
  EXPECT_FALSE(Offer(StreamSide::kTeacher, 1, teacher).match.has_value());
  EXPECT_TRUE(Offer(StreamSide::kTeacher, 0, teacher).match.has_value());
}

TEST_F(PairingTest, TheTeachersHalfIsKeptUntilTheStudentHasTheResult) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  const Pairing::Offered computed = pairing_.Computed(Join(0, student, teacher), now_);
  EXPECT_FALSE(computed.match.has_value());
  EXPECT_FALSE(computed.refused.has_value());
  EXPECT_EQ(pairing_.num_waiting(), 1);
  EXPECT_FALSE(pairing_.Received(Key(1)).has_value());
  const std::optional<Pairing::Half> half = pairing_.Received(Key(0));
  ASSERT_TRUE(half.has_value());
  EXPECT_EQ(half->stream_id, teacher);
  EXPECT_FALSE(pairing_.Received(Key(0)).has_value());
}

TEST_F(PairingTest, AStudentThatComesAgainFindsTheTeachersHalf) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  pairing_.Computed(Join(0, student, teacher), now_);
  pairing_.Detach(student);
  const Pairing::Offered again = Offer(StreamSide::kStudent, 0, Attach());
  ASSERT_TRUE(again.match.has_value());
  EXPECT_EQ(again.match->teacher.stream_id, teacher);
}

TEST_F(PairingTest, AStudentThatComesAgainWhileItIsComputedIsMatchedAfterwards) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  Pairing::Match match = Join(0, student, teacher);
  pairing_.Detach(student);
  const Pairing::StreamId successor = Attach();
  EXPECT_FALSE(Offer(StreamSide::kStudent, 0, successor).match.has_value());
  const Pairing::Offered computed = pairing_.Computed(std::move(match), now_);
  ASSERT_TRUE(computed.match.has_value());
  EXPECT_EQ(computed.match->student.stream_id, successor);
  EXPECT_EQ(computed.match->teacher.stream_id, teacher);
}

TEST_F(PairingTest, AStreamThatEndsGetsBackWhatItHasWaiting) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  Offer(StreamSide::kStudent, 0, student);
  Offer(StreamSide::kStudent, 1, student);
  pairing_.Computed(Join(2, student, teacher), now_);
  EXPECT_EQ(pairing_.Detach(student).size(), 2u);
  EXPECT_EQ(pairing_.num_waiting(), 1);
  EXPECT_EQ(pairing_.Detach(teacher).size(), 1u);
  EXPECT_EQ(pairing_.num_waiting(), 0);
  EXPECT_TRUE(pairing_.Detach(teacher).empty());
}

TEST_F(PairingTest, AHalfOfAStreamThatIsGoneIsRefused) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  Pairing::Match match = Join(0, student, teacher);
  pairing_.Detach(teacher);
  EXPECT_TRUE(Offer(StreamSide::kTeacher, 1, teacher).refused.has_value());
  EXPECT_TRUE(pairing_.Computed(std::move(match), now_).refused.has_value());
  EXPECT_EQ(pairing_.num_waiting(), 0);
}

TEST_F(PairingTest, AHalfThatComesAgainTakesThePlaceOfTheFirst) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId first = Attach();
  const Pairing::StreamId second = Attach();
  Offer(StreamSide::kTeacher, 0, first);
  const Pairing::Offered again = Offer(StreamSide::kTeacher, 0, second);
  ASSERT_TRUE(again.replaced.has_value());
  EXPECT_EQ(again.replaced->stream_id, first);
  const Pairing::Offered offered = Offer(StreamSide::kStudent, 0, student);
  ASSERT_TRUE(offered.match.has_value());
  EXPECT_EQ(offered.match->teacher.stream_id, second);
}

TEST_F(PairingTest, ATeacherThatComesAgainWhileItIsComputedReplacesTheFirst) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId first = Attach();
  Pairing::Match match = Join(0, student, first);
  const Pairing::StreamId second = Attach();
  Offer(StreamSide::kTeacher, 0, second);
  const Pairing::Offered computed = pairing_.Computed(std::move(match), now_);
  ASSERT_TRUE(computed.refused.has_value());
  EXPECT_EQ(computed.refused->stream_id, first);
  const std::optional<Pairing::Half> half = pairing_.Received(Key(0));
  ASSERT_TRUE(half.has_value());
  EXPECT_EQ(half->stream_id, second);
}

TEST_F(PairingTest, TheTimeoutNamesTheSideWorkerAndChunkThatAreMissing) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  Offer(StreamSide::kStudent, 7, student);
  Offer(StreamSide::kTeacher, 8, teacher);
  EXPECT_TRUE(pairing_.Expire(now_ + kTimeout / 2).empty());
  const std::vector<Pairing::GivenUp> given_up = pairing_.Expire(now_ + kTimeout);
  ASSERT_EQ(given_up.size(), 2u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(given_up[0].answer.status()));
  EXPECT_THAT(std::string(given_up[0].answer.status().message()),
              HasSubstr("chunk 7 of worker w0 in step 3 of head lm: the teacher's side"));
  EXPECT_THAT(std::string(given_up[1].answer.status().message()),
              HasSubstr("chunk 8 of worker w0 in step 3 of head lm: the student's side"));
  EXPECT_EQ(pairing_.num_waiting(), 0);
}

TEST_F(PairingTest, AKeptHalfOutlivesTheTimeoutWhileItsStudentLives) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId teacher = Attach();
  pairing_.Computed(Join(0, student, teacher), now_);
  EXPECT_TRUE(pairing_.Expire(now_ + 10 * kTimeout).empty());
  pairing_.Detach(student);
  EXPECT_TRUE(pairing_.Expire(absl::Now()).empty());
  const std::vector<Pairing::GivenUp> given_up = pairing_.Expire(absl::Now() + 2 * kTimeout);
  ASSERT_EQ(given_up.size(), 1u);
  // The chunk is counted: the teacher's program is answered, not failed.
  EXPECT_TRUE(given_up[0].answer.ok()) << given_up[0].answer.status();
}

TEST_F(PairingTest, TheEndOfAStudentsStreamFreesWhatWasComputedForIt) {
  const Pairing::StreamId student = Attach();
  const Pairing::StreamId other = Attach();
  const Pairing::StreamId teacher = Attach();
  pairing_.Computed(Join(0, student, teacher), now_);
  pairing_.Computed(Join(1, other, teacher), now_);
  EXPECT_EQ(pairing_.EndStream(student).size(), 1u);
  EXPECT_EQ(pairing_.num_waiting(), 1);
}

}  // namespace
}  // namespace lmhead
