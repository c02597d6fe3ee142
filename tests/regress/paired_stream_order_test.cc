// Results of a paired stream once came in the order of its chunks. A chunk whose other side had not
// come then held back the results of later chunks; the teacher's side waited for the student's word
// that it had those, with its window full, and never sent what the first chunk waited for.

#include <gtest/gtest.h>

#include <memory>

#include "tests/rpc/paired_fixture.h"

namespace lmhead {
namespace {

class PairedStreamOrderTest : public PairedStreamTest {};

TEST_F(PairedStreamOrderTest, AChunkThatWaitsHoldsBackNoLaterResultOfTheStudent) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(1, kRows)));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  EXPECT_EQ(student->Read().result().chunk_index(), 0u);
  ASSERT_TRUE(student->SendReceived(0));
  EXPECT_EQ(teacher->Read().result().chunk_index(), 0u);
  ASSERT_TRUE(teacher->Send(TeacherChunk(1)));
  EXPECT_EQ(student->Read().result().chunk_index(), 1u);
  ExpectEnds(*student, 2);
  EXPECT_EQ(teacher->Read().result().chunk_index(), 1u);
  ExpectEnds(*teacher, 2);
  v1::PrepareStepResponse prepared;
  EXPECT_TRUE(Prepare(1, &prepared).ok());
}

TEST_F(PairedStreamOrderTest, AChunkThatIsKeptHoldsBackNoLaterResultOfTheTeacher) {
  Begin(1);
  const auto teacher = Start(OpenSide(1, true));
  const auto student = Start(OpenSide(1, false));
  for (uint64_t i : {0, 1}) {
    ASSERT_TRUE(teacher->Send(TeacherChunk(i)));
    ASSERT_TRUE(student->Send(MakeChunk(i, kRows)));
    ASSERT_EQ(student->Read().result().chunk_index(), i);
  }
  ASSERT_TRUE(student->SendReceived(1));
  EXPECT_EQ(teacher->Read().result().chunk_index(), 1u);
  ASSERT_TRUE(student->SendReceived(0));
  EXPECT_EQ(teacher->Read().result().chunk_index(), 0u);
  ExpectEnds(*student, 2);
  ExpectEnds(*teacher, 2);
}

}  // namespace
}  // namespace lmhead
