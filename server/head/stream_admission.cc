#include "server/head/stream_admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

// An id and a log-probability.
constexpr int64_t kTopkEntryBytes = 8;

absl::Status CheckTopK(const HeadSpec& head, const char* field, int32_t top_k) {
  if (top_k <= head.top_k_max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", top_k, ", but head ", head.name,
                                                 " has room for ", head.top_k_max,
                                                 ": create it with top_k_max of at least ", top_k));
}

absl::Status CheckVocabularies(const HeadSpec& head, const HeadSpec& teacher,
                               const DistillationSpec& distillation) {
  if (teacher.vocab_size == head.vocab_size) return absl::OkStatus();
  const std::string sizes =
      absl::StrCat("teacher_head ", teacher.name, " has ", teacher.vocab_size,
                   " vocabulary rows and head ", head.name, " ", head.vocab_size);
  if (distillation.vocabulary == TeacherVocabulary::kEqual) {
    return absl::InvalidArgumentError(
        absl::StrCat(sizes,
                     ": state what becomes of the ids that only one of them has "
                     "(recipe.distillation.vocabulary)"));
  }
  if (distillation.vocabulary != TeacherVocabulary::kPad) return absl::OkStatus();
  const bool teacher_larger = teacher.vocab_size > head.vocab_size;
  if ((distillation.divergence == Divergence::kForwardKl && teacher_larger) ||
      (distillation.divergence == Divergence::kReverseKl && !teacher_larger)) {
    return absl::InvalidArgumentError(absl::StrCat(sizes, ": with VOCABULARY_PAD the ",
                                                   teacher_larger ? "forward" : "reverse",
                                                   " KL is infinite, want VOCABULARY_COMMON"));
  }
  return absl::OkStatus();
}

int64_t PartitionOf(const HeadSpec& spec) {
  return spec.partition_vocab_size > 0 ? spec.partition_vocab_size : spec.vocab_size;
}

}  // namespace

absl::Status CheckStream(const HeadSpec& head, const StreamSpec& spec) {
  const LossRecipe& recipe = spec.recipe;
  for (const absl::Status& status :
       {CheckTopK(head, "outputs.top_k", spec.outputs.top_k),
        CheckTopK(head, "recipe.distillation.top_k", recipe.teacher_top_k())}) {
    if (!status.ok()) return status;
  }
  if (spec.teacher_side && spec.side() != StreamSide::kTeacher) {
    return absl::InvalidArgumentError(
        "teacher_side is set, but recipe.distillation.paired_stream is not: only paired streams "
        "have two sides");
  }
  if (spec.side() == StreamSide::kTeacher && !(spec.outputs == OutputSpec())) {
    return absl::InvalidArgumentError(
        "outputs are asked for on the teacher's side of a paired stream, whose results carry none: "
        "ask for them on the student's side");
  }
  if (spec.side() != StreamSide::kWhole && spec.worker.empty()) {
    return absl::InvalidArgumentError(
        "worker is empty, but the sides of a paired stream find each other by the worker's name: "
        "state the same on both");
  }
  return absl::OkStatus();
}

absl::Status CheckTeacher(const HeadSpec& head, const HeadSpec& teacher, const LossRecipe& recipe,
                          int32_t num_ranks) {
  if (teacher.name == head.name) {
    return absl::InvalidArgumentError(absl::StrCat("recipe.distillation.teacher_head is ",
                                                   teacher.name,
                                                   ", the head itself; want another, frozen one"));
  }
  if (teacher.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("teacher_head ", teacher.name,
                     " is trainable; a teacher is frozen: create it with trainable false"));
  }
  if (teacher.hidden_size > head.teacher_hidden_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "teacher_head ", teacher.name, " has hidden_size ", teacher.hidden_size, ", but head ",
        head.name, " has memory for teachers of at most ", head.teacher_hidden_size,
        ": create it with teacher_hidden_size of at least ", teacher.hidden_size));
  }
  if (num_ranks > 1 && PartitionOf(teacher) != PartitionOf(head)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "teacher_head ", teacher.name, " is split over ", num_ranks, " ranks as a vocabulary of ",
        PartitionOf(teacher), ", head ", head.name, " as one of ", PartitionOf(head),
        ": create both with the same partition_vocab_size"));
  }
  return CheckVocabularies(head, teacher, *recipe.distillation);
}

int64_t ChunkRowBytes(const HeadSpec& head, const HeadSpec* teacher, const StreamSpec& spec) {
  const bool paired = spec.side() != StreamSide::kWhole;
  const int64_t num_outputs = paired ? head.top_k_max : spec.outputs.top_k;
  const int64_t student_bytes = head.hidden_size * BytesPerElement(spec.hidden_dtype) +
                                (num_outputs + spec.recipe.teacher_top_k()) * kTopkEntryBytes;
  if (teacher == nullptr) return student_bytes;
  const int64_t teacher_bytes =
      teacher->hidden_size * BytesPerElement(spec.recipe.distillation->teacher_hidden_dtype);
  return paired ? std::max(student_bytes, teacher_bytes) : student_bytes + teacher_bytes;
}

}  // namespace lmhead
