// What a stream may ask of its head and of its teacher, and how many rows its chunks have.

#include "server/head/stream_admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace lmhead {
namespace {

using ::testing::HasSubstr;

HeadSpec Student() {
  HeadSpec spec;
  spec.name = "lm";
  spec.vocab_size = 100;
  spec.hidden_size = 16;
  spec.trainable = true;
  spec.teacher_hidden_size = 32;
  spec.top_k_max = 8;
  return spec;
}

HeadSpec Teacher() {
  HeadSpec spec;
  spec.name = "teacher";
  spec.vocab_size = 100;
  spec.hidden_size = 32;
  return spec;
}

LossRecipe Recipe(Divergence divergence = Divergence::kForwardKl) {
  LossRecipe recipe;
  recipe.distillation = DistillationSpec{.divergence = divergence, .teacher_head = "teacher"};
  return recipe;
}

StreamSpec Stream(const LossRecipe& recipe = {}) {
  StreamSpec spec;
  spec.worker = "w0";
  spec.recipe = recipe;
  return spec;
}

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& says) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(says));
}

TEST(CheckStream, TopKFitsTheHead) {
  StreamSpec spec = Stream();
  spec.outputs.top_k = 8;
  EXPECT_TRUE(CheckStream(Student(), spec).ok());
  spec.outputs.top_k = 9;
  ExpectStatus(CheckStream(Student(), spec), absl::StatusCode::kInvalidArgument,
               "outputs.top_k is 9, but head lm has room for 8");
  LossRecipe topk;
  topk.distillation = DistillationSpec{
      .divergence = Divergence::kTopkForwardKl, .top_k = 9, .topk_mass = TopkMass::kKeep};
  ExpectStatus(CheckStream(Student(), Stream(topk)), absl::StatusCode::kInvalidArgument,
               "recipe.distillation.top_k is 9");
}

TEST(CheckStream, SidesOfAPairedStream) {
  StreamSpec spec = Stream(Recipe());
  spec.teacher_side = true;
  ExpectStatus(CheckStream(Student(), spec), absl::StatusCode::kInvalidArgument,
               "teacher_side is set, but recipe.distillation.paired_stream is not");
  spec.recipe.distillation->paired_stream = true;
  EXPECT_TRUE(CheckStream(Student(), spec).ok());
  spec.outputs.lse = true;
  ExpectStatus(CheckStream(Student(), spec), absl::StatusCode::kInvalidArgument,
               "outputs are asked for on the teacher's side");
  spec.teacher_side = false;
  EXPECT_TRUE(CheckStream(Student(), spec).ok());
  spec.worker.clear();
  ExpectStatus(CheckStream(Student(), spec), absl::StatusCode::kInvalidArgument, "worker is empty");
}

TEST(CheckTeacher, WhoMayTeach) {
  EXPECT_TRUE(CheckTeacher(Student(), Teacher(), Recipe(), 1).ok());
  HeadSpec itself = Teacher();
  itself.name = "lm";
  ExpectStatus(CheckTeacher(Student(), itself, Recipe(), 1), absl::StatusCode::kInvalidArgument,
               "the head itself");
  HeadSpec trainable = Teacher();
  trainable.trainable = true;
  ExpectStatus(CheckTeacher(Student(), trainable, Recipe(), 1),
               absl::StatusCode::kFailedPrecondition, "is trainable");
  HeadSpec wide = Teacher();
  wide.hidden_size = 33;
  ExpectStatus(CheckTeacher(Student(), wide, Recipe(), 1), absl::StatusCode::kFailedPrecondition,
               "teacher_hidden_size of at least 33");
}

TEST(CheckTeacher, VocabulariesOfDifferentSize) {
  HeadSpec larger = Teacher();
  larger.vocab_size = 120;
  HeadSpec smaller = Teacher();
  smaller.vocab_size = 90;
  for (const HeadSpec& teacher : {larger, smaller}) {
    LossRecipe recipe = Recipe();
    ExpectStatus(CheckTeacher(Student(), teacher, recipe, 1), absl::StatusCode::kInvalidArgument,
                 "vocabulary rows");
    recipe.distillation->vocabulary = TeacherVocabulary::kCommon;
    EXPECT_TRUE(CheckTeacher(Student(), teacher, recipe, 1).ok());
  }
  const auto padded = [](Divergence divergence) {
    LossRecipe recipe = Recipe(divergence);
    recipe.distillation->vocabulary = TeacherVocabulary::kPad;
    return recipe;
  };
  const auto infinite = absl::StatusCode::kInvalidArgument;
  ExpectStatus(CheckTeacher(Student(), larger, padded(Divergence::kForwardKl), 1), infinite,
               "the forward KL is infinite");
  ExpectStatus(CheckTeacher(Student(), smaller, padded(Divergence::kReverseKl), 1), infinite,
               "the reverse KL is infinite");
  EXPECT_TRUE(CheckTeacher(Student(), smaller, padded(Divergence::kForwardKl), 1).ok());
  EXPECT_TRUE(CheckTeacher(Student(), larger, padded(Divergence::kReverseKl), 1).ok());
  EXPECT_TRUE(CheckTeacher(Student(), larger, padded(Divergence::kJsd), 1).ok());
  EXPECT_TRUE(CheckTeacher(Student(), smaller, padded(Divergence::kJsd), 1).ok());
}

TEST(CheckTeacher, RanksLieBesideEachOther) {
  HeadSpec larger = Teacher();
  larger.vocab_size = 120;
  LossRecipe recipe = Recipe();
  recipe.distillation->vocabulary = TeacherVocabulary::kCommon;
  EXPECT_TRUE(CheckTeacher(Student(), larger, recipe, 1).ok());
  ExpectStatus(CheckTeacher(Student(), larger, recipe, 2), absl::StatusCode::kInvalidArgument,
               "the same partition_vocab_size");
  HeadSpec student = Student();
  student.partition_vocab_size = 120;
  EXPECT_TRUE(CheckTeacher(student, larger, recipe, 2).ok());
}

TEST(ChunkRowBytes, CountsAllThatAChunkCarriesAndGetsBack) {
  const HeadSpec teacher = Teacher();
  StreamSpec spec = Stream();
  EXPECT_EQ(ChunkRowBytes(Student(), nullptr, spec), 16 * 4);
  spec.outputs.top_k = 3;
  EXPECT_EQ(ChunkRowBytes(Student(), nullptr, spec), 16 * 4 + 3 * 8);
  spec.recipe = Recipe();
  spec.recipe.distillation->teacher_hidden_dtype = DType::kBFloat16;
  EXPECT_EQ(ChunkRowBytes(Student(), &teacher, spec), 16 * 4 + 3 * 8 + 32 * 2);
}

TEST(ChunkRowBytes, IsTheSameOnBothSidesOfAPairedStream) {
  const HeadSpec teacher = Teacher();
  StreamSpec student = Stream(Recipe());
  student.recipe.distillation->paired_stream = true;
  StreamSpec other = student;
  student.outputs.top_k = 3;
  other.teacher_side = true;
  EXPECT_EQ(ChunkRowBytes(Student(), &teacher, student), ChunkRowBytes(Student(), &teacher, other));
  EXPECT_EQ(ChunkRowBytes(Student(), &teacher, student), 16 * 4 + 8 * 8);
}

}  // namespace
}  // namespace lmhead
