// The two sides of paired streams over a real socket: who waits for whom, and what becomes of them
// when one breaks, comes again, lies, or never comes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/tolerances.h"
#include "tests/rpc/paired_fixture.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

TEST_F(PairedStreamTest, TheSidesMeetAndGiveWhatOneStreamGives) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  for (uint64_t i = 0; i < 6; ++i) {
    // Each side first, in turn.
    TestStream& first = i % 2 == 0 ? *student : *teacher;
    TestStream& second = i % 2 == 0 ? *teacher : *student;
    ASSERT_TRUE(first.Send(i % 2 == 0 ? MakeChunk(i, kRows) : TeacherChunk(i)));
    ASSERT_TRUE(second.Send(i % 2 == 0 ? TeacherChunk(i) : MakeChunk(i, kRows)));
    const v1::ChunkResult result = student->Read().result();
    const v1::ChunkResult whole = WholeResult(i);
    EXPECT_EQ(result.chunk_index(), i);
    EXPECT_FALSE(result.duplicate());
    EXPECT_NEAR(result.sums().loss_sum(), whole.sums().loss_sum(),
                2 * kFloat32Logits.token_outputs * whole.sums().loss_sum());
    ExpectSameGrad(result, whole);
    ASSERT_TRUE(student->SendReceived(i));
    const v1::ChunkResult of_teacher = teacher->Read().result();
    EXPECT_EQ(of_teacher.chunk_index(), i);
    EXPECT_EQ(of_teacher.sums().num_tokens(), 0);
    EXPECT_TRUE(of_teacher.grad_hidden_states().empty());
  }
  ExpectEnds(*teacher, 6);
  ExpectEnds(*student, 6);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_EQ(prepared.num_chunks(), 6u);
}

TEST_F(PairedStreamTest, TheEndOfTheStudentsStreamStandsForWhatItHasReceived) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  ASSERT_TRUE(student->Read().has_result());
  ExpectEnds(*student, 1);
  EXPECT_TRUE(teacher->Read().has_result());
  ExpectEnds(*teacher, 1);
}

TEST_F(PairedStreamTest, PrepareWaitsForTheTeachersEnd) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  ASSERT_TRUE(student->Read().has_result());
  ExpectEnds(*student, 1);
  v1::PrepareStepResponse prepared;
  const grpc::Status status = Prepare(1, &prepared, 0.2);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("its teacher's side has not ended"));
  EXPECT_TRUE(teacher->Read().has_result());
  ExpectEnds(*teacher, 1);
  EXPECT_TRUE(Prepare(1, &prepared).ok());
}

TEST_F(PairedStreamTest, AStudentWhoseConnectionBrokeGetsItsResultAgain) {
  Begin(1);
  auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  const v1::ChunkResult first = student->Read().result();
  // The result never reached the program.
  student->Cancel();
  student.reset();
  v1::StreamOpen open = OpenSide(1, false);
  open.set_stream_index(1);
  student = Start(open);
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  const v1::ChunkResult again = student->Read().result();
  EXPECT_TRUE(again.duplicate());
  ExpectSameGrad(again, first);
  ASSERT_TRUE(student->SendReceived(0));
  EXPECT_TRUE(teacher->Read().has_result());
  ExpectEnds(*student, 1);
  ExpectEnds(*teacher, 1);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_EQ(prepared.num_chunks(), 1u);
  EXPECT_EQ(prepared.sums().num_tokens(), kRows);
}

TEST_F(PairedStreamTest, ATeacherWhoseConnectionBrokeIsAnsweredAtOnceWhenTheStudentIsDone) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  ASSERT_TRUE(student->Read().has_result());
  teacher->Cancel();
  teacher.reset();
  ASSERT_TRUE(student->SendReceived(0));
  ExpectEnds(*student, 1);
  v1::StreamOpen open = OpenSide(1, true);
  open.set_stream_index(1);
  teacher = Start(open);
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  EXPECT_TRUE(teacher->Read().result().duplicate());
  ExpectEnds(*teacher, 1);
  v1::PrepareStepResponse prepared;
  EXPECT_TRUE(Prepare(1, &prepared).ok());
}

TEST_F(PairedStreamTest, OtherContentsOfATeachersChunkAreRefused) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0)));
  ASSERT_TRUE(student->Read().has_result());
  ASSERT_TRUE(student->SendReceived(0));
  ASSERT_TRUE(teacher->Read().has_result());
  v1::Chunk other = TeacherChunk(1);
  other.set_chunk_index(0);
  ASSERT_TRUE(teacher->Send(other));
  const grpc::Status status = teacher->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("other contents on its teacher's side"));
}

TEST_F(PairedStreamTest, SidesThatAreCutDifferentlyAreToldBoth) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(0, kRows + 1)));
  for (TestStream* stream : {student.get(), teacher.get()}) {
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("must cut their rows alike"));
  }
}

TEST_F(PairedStreamTest, ASideThatNeverComesIsNamed) {
  ServerConfig config = Config();
  config.staging_slots = 16;
  config.pair_timeout = absl::Seconds(1);
  Restart(config);
  CreateHeads();
  Begin(1, 2);
  const auto student = Start(OpenSide(1, false, "w0"));
  const auto teacher = Start(OpenSide(1, true, "w1"));
  ASSERT_TRUE(student->Send(MakeChunk(7, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(8)));
  const grpc::Status of_student = student->Finish();
  EXPECT_EQ(of_student.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(of_student.error_message(),
              HasSubstr("chunk 7 of worker w0 in step 1 of head lm: the teacher's side"));
  const grpc::Status of_teacher = teacher->Finish();
  EXPECT_EQ(of_teacher.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(of_teacher.error_message(),
              HasSubstr("chunk 8 of worker w1 in step 1 of head lm: the student's side"));
}

TEST_F(PairedStreamTest, EvaluationPairsByTheWorkersName) {
  const auto student_a = Start(OpenSide(0, false, "a"));
  const auto student_b = Start(OpenSide(0, false, "b"));
  const auto teacher_b = Start(OpenSide(0, true, "b"));
  ASSERT_TRUE(student_a->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(student_b->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher_b->Send(TeacherChunk(0)));
  EXPECT_TRUE(student_b->Read().has_result());
  const auto teacher_a = Start(OpenSide(0, true, "a"));
  ASSERT_TRUE(teacher_a->Send(TeacherChunk(0)));
  EXPECT_TRUE(student_a->Read().has_result());
  const grpc::Status nameless = StatusOfOpen(OpenSide(0, false, ""));
  EXPECT_EQ(nameless.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(nameless.error_message(), HasSubstr("worker is empty"));
}

// However far the sides run apart, each within its windows, everyone finds a slot.
TEST_F(PairedStreamTest, NeitherSideStarvesTheOtherNorStreamsOfItsOwnKind) {
  Begin(1, 2);
  const auto student = Start(OpenSide(1, false, "w0"));
  const int32_t student_window = window_;
  const auto teacher = Start(OpenSide(1, true, "w1"));
  const int32_t teacher_window = window_;
  EXPECT_LE(student_window, 8);
  EXPECT_LE(teacher_window, 8);
  // Both fill their windows with chunks whose other side has not come.
  for (int32_t i = 0; i < student_window; ++i) ASSERT_TRUE(student->Send(MakeChunk(i, kRows)));
  for (int32_t i = 0; i < teacher_window; ++i) ASSERT_TRUE(teacher->Send(TeacherChunk(i)));
  const auto other_teacher = Start(OpenSide(1, true, "w0"));
  const auto other_student = Start(OpenSide(1, false, "w1"));
  const auto whole = Start(Open(0));
  ASSERT_TRUE(whole->Send(MakeChunk(0)));
  EXPECT_TRUE(whole->Read().has_result());
  for (int32_t i = 0; i < student_window; ++i) {
    ASSERT_TRUE(other_teacher->Send(TeacherChunk(i)));
    EXPECT_TRUE(student->Read().has_result());
    ASSERT_TRUE(student->SendReceived(i));
    EXPECT_TRUE(other_teacher->Read().has_result());
  }
  for (int32_t i = 0; i < teacher_window; ++i) {
    ASSERT_TRUE(other_student->Send(MakeChunk(i, kRows)));
    EXPECT_TRUE(other_student->Read().has_result());
    ASSERT_TRUE(other_student->SendReceived(i));
    EXPECT_TRUE(teacher->Read().has_result());
  }
}

TEST_F(PairedStreamTest, WindowsAreRefusedWhenHalfOfTheSlotsIsTaken) {
  ServerConfig config = Config();
  config.staging_slots = 4;
  Restart(config);
  CreateHeads();
  const auto first = Start(OpenSide(0, true, "a"));
  const auto second = Start(OpenSide(0, true, "b"));
  const grpc::Status status = StatusOfOpen(OpenSide(0, true, "c"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--staging_slots"));
  Start(OpenSide(0, false, "a"));
}

TEST_F(PairedStreamTest, AbortEndsBothSides) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(student->Send(MakeChunk(0, kRows)));
  ASSERT_TRUE(teacher->Send(TeacherChunk(1)));
  ASSERT_TRUE(Abort(1, "enough").ok());
  for (TestStream* stream : {student.get(), teacher.get()}) {
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
    EXPECT_THAT(status.error_message(), HasSubstr("enough"));
  }
}

TEST_F(PairedStreamTest, ReceivedIsForStudentsOfPairedStreamsAndOfAnsweredChunks) {
  Begin(1);
  const auto teacher = Start(OpenSide(1, true));
  ASSERT_TRUE(teacher->SendReceived(0));
  EXPECT_THAT(teacher->Finish().error_message(), HasSubstr("only the student's side"));
  const auto student = Start(OpenSide(1, false));
  ASSERT_TRUE(student->SendReceived(3));
  EXPECT_THAT(student->Finish().error_message(), HasSubstr("no such chunk"));
}

TEST_F(PairedStreamTest, ATeacherWithStudentsIsDeletedOnlyByForce) {
  Begin(1);
  const auto student = Start(OpenSide(1, false));
  const auto remove = [&](bool force) {
    grpc::ClientContext context;
    v1::DeleteHeadRequest request;
    request.set_head("teacher");
    request.set_force(force);
    v1::DeleteHeadResponse response;
    return stub_->DeleteHead(&context, request, &response);
  };
  const grpc::Status refused = remove(false);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(),
              HasSubstr("is the teacher of stream 0 of worker w0 in step 1 of head lm"));
  EXPECT_TRUE(remove(true).ok());
  const grpc::Status status = student->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("teacher_head teacher was deleted"));
}

}  // namespace
}  // namespace lmhead
