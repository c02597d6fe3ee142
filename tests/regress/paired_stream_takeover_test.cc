// What a broken connection had still delivered once ended the stream that had taken its place: a
// chunk that came on two streams of a side ended the first of them for good, although that may be
// the one whose client is there. Its client is told to try again instead.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/rpc/paired_fixture.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

class PairedStreamTakeoverTest : public PairedStreamTest {
 protected:
  // The stream_index-th stream of a side, opened.
  std::unique_ptr<TestStream> StartSide(bool teacher_side, uint32_t stream_index) {
    v1::StreamOpen open = OpenSide(1, teacher_side);
    open.set_stream_index(stream_index);
    return Start(open);
  }

  static void ExpectToldToTryAgain(TestStream& stream) {
    const grpc::Status status = stream.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("chunk 0 came again on another stream"));
  }
};

TEST_F(PairedStreamTakeoverTest, OfTheStudentsSide) {
  Begin(1);
  auto first = StartSide(false, 0);
  const auto teacher = StartSide(true, 0);
  ASSERT_TRUE(first->Send(MakeChunk(0, kRows)));
  // With the answer to chunk 1 the server has chunk 0, too.
  ASSERT_TRUE(first->Send(MakeChunk(1, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(1)));
  ASSERT_TRUE(first->Read().has_result());
  auto second = StartSide(false, 1);
  ASSERT_TRUE(second->Send(MakeChunk(0, kRows)));
  ExpectToldToTryAgain(*first);
  second->Cancel();
  second.reset();
  first = StartSide(false, 0);
  ASSERT_TRUE(first->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  EXPECT_EQ(first->Read().result().chunk_index(), 0u);
}

TEST_F(PairedStreamTakeoverTest, OfTheTeachersSideWhetherItWaitsOrIsKept) {
  Begin(1);
  const auto student = StartSide(false, 0);
  auto first = StartSide(true, 0);
  ASSERT_TRUE(first->Send(TeacherChunk(0)));
  ASSERT_TRUE(first->Send(TeacherChunk(1)));
  ASSERT_TRUE(student->Send(MakeChunk(1, kRows)));
  ASSERT_TRUE(student->Read().has_result());
  const auto second = StartSide(true, 1);
  ASSERT_TRUE(second->Send(TeacherChunk(0)));
  ExpectToldToTryAgain(*first);
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(student->Read().has_result());  // The teacher's side is kept now.
  first = StartSide(true, 0);
  ASSERT_TRUE(first->Send(TeacherChunk(0)));
  ExpectToldToTryAgain(*second);
  ASSERT_TRUE(first->Send(TeacherChunk(1)));
  ASSERT_TRUE(student->SendReceived(0));
  ASSERT_TRUE(student->SendReceived(1));
  EXPECT_TRUE(first->Read().has_result());
  EXPECT_TRUE(first->Read().has_result());
  ExpectEnds(*student, 2);
  ExpectEnds(*first, 2);
}

}  // namespace
}  // namespace lmhead
