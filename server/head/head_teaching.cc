// The part of a head that opens streams, and lends its backend to the streams of its students.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "proto/types/limits.h"
#include "server/head/head.h"
#include "server/head/stream_admission.h"

namespace lmhead {
namespace {

// How many students an error message names.
constexpr size_t kStudentsShownMax = 4;

// How a teacher calls a student's stream.
std::string StudentName(const HeadSpec& head, const StreamSpec& spec) {
  if (spec.step == 0) return absl::StrCat("an evaluation of head ", head.name);
  return absl::StrCat("stream ", spec.stream_index, " of worker ", spec.worker, " in step ",
                      spec.step, " of head ", head.name);
}

}  // namespace

absl::StatusOr<ChunkShape> Head::ShapeOfChunks(const StreamSpec& spec, const Head* teacher) const {
  const int64_t row_bytes =
      ChunkRowBytes(spec_, teacher == nullptr ? nullptr : &teacher->spec(), spec);
  const int64_t max_chunk_tokens =
      std::min({environment_.chunk_bytes_max / row_bytes, kChunkTokensMax, plan_.batch_tokens});
  if (max_chunk_tokens < 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("one row of a chunk for head ", spec_.name, " has ", row_bytes,
                     " bytes, but this server takes chunks of at most ",
                     environment_.chunk_bytes_max, "; start it with a larger --chunk_bytes_max"));
  }
  return ChunkShape{.vocab_size = spec_.vocab_size,
                    .hidden_size = spec_.hidden_size,
                    .teacher_hidden_size = teacher == nullptr ? 0 : teacher->spec().hidden_size,
                    .max_chunk_tokens = max_chunk_tokens};
}

absl::StatusOr<std::shared_ptr<Step>> Head::AttachToStep(const StreamSpec& spec,
                                                         Step::AbortListener on_abort) {
  if (spec.step == 0) return std::shared_ptr<Step>();
  absl::StatusOr<std::shared_ptr<Step>> step = steps_.FindOpen(spec.step);
  if (!step.ok()) return step.status();
  absl::Status status =
      (*step)->AttachStream(spec.worker, spec.stream_index, std::move(on_abort), spec.side());
  if (!status.ok()) return status;
  return step;
}

absl::StatusOr<std::shared_ptr<HeadStream>> Head::OpenStream(StreamSpec spec,
                                                             Step::AbortListener on_abort,
                                                             std::shared_ptr<Head> teacher) {
  LMHEAD_CHECK(spec.recipe.has_teacher_head() == (teacher != nullptr), spec_.name);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (spec.step != 0 || spec.incarnation != 0) {
    if (absl::Status status = CheckIncarnation(spec.incarnation); !status.ok()) return status;
  }
  if (absl::Status status = CheckStream(spec_, spec); !status.ok()) return status;
  if (absl::Status status = CheckLoaded(); !status.ok()) return status;
  if (teacher != nullptr) {
    absl::Status status = CheckTeacher(spec_, teacher->spec(), spec.recipe, environment_.num_ranks);
    if (status.ok()) status = teacher->CheckUsable();
    if (status.ok()) status = teacher->CheckLoaded();
    if (!status.ok()) return status;
  }
  absl::StatusOr<ChunkShape> shape = ShapeOfChunks(spec, teacher.get());
  if (!shape.ok()) return shape.status();
  absl::StatusOr<std::shared_ptr<Step>> step = AttachToStep(spec, on_abort);
  if (!step.ok()) return step.status();
  uint64_t student_id = 0;
  if (teacher != nullptr) {
    absl::StatusOr<uint64_t> id =
        teacher->AttachStudent(StudentName(spec_, spec), std::move(on_abort));
    if (!id.ok()) {
      if (*step != nullptr) (*step)->DetachStream(spec.worker, spec.stream_index, spec.side());
      return id.status();
    }
    student_id = *id;
  }
  const bool paired = spec.side() != StreamSide::kWhole;
  std::shared_ptr<HeadStream> stream(new HeadStream(shared_from_this(), std::move(teacher),
                                                    *std::move(step), std::move(spec), *shape));
  stream->student_id_ = student_id;
  if (paired) stream->pairing_id_ = pairing_.Attach();
  return stream;
}

// --- Teaching ---

absl::StatusOr<uint64_t> Head::AttachStudent(std::string stream, Step::AbortListener on_abort) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckUsableLocked(); !status.ok()) return status;
  if (teaching_over_) {
    return absl::NotFoundError(absl::StrCat("head ", spec_.name, " is being deleted"));
  }
  students_[next_student_] = {std::move(stream), std::move(on_abort)};
  return next_student_++;
}

void Head::DetachStudent(uint64_t student_id) {
  absl::MutexLock lock(&mu_);
  students_.erase(student_id);
}

absl::Status Head::StopTeaching(bool force) {
  std::map<uint64_t, Student> students;
  {
    absl::MutexLock lock(&mu_);
    if (!students_.empty() && !force) {
      std::string names;
      size_t num_shown = 0;
      for (const auto& [id, student] : students_) {
        if (num_shown++ == kStudentsShownMax) break;
        absl::StrAppend(&names, names.empty() ? "" : ", ", student.stream);
      }
      if (students_.size() > kStudentsShownMax) {
        absl::StrAppend(&names, " and ", students_.size() - kStudentsShownMax, " more");
      }
      return absl::FailedPreconditionError(absl::StrCat("head ", spec_.name, " is the teacher of ",
                                                        names,
                                                        "; end them, or delete it with force"));
    }
    teaching_over_ = true;
    students.swap(students_);
  }
  const absl::Status status =
      absl::AbortedError(absl::StrCat("teacher_head ", spec_.name,
                                      " was deleted; abort the step, or open the stream "
                                      "again when the teacher is back"));
  for (const auto& [id, student] : students) {
    if (student.on_abort) student.on_abort(status);
  }
  return absl::OkStatus();
}

absl::StatusOr<ComputeBackend*> Head::LendBackend() {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckUsableLocked(); !status.ok()) return status;
  ++num_lent_;
  return backend_.get();
}

void Head::ReturnBackend() {
  absl::MutexLock lock(&mu_);
  --num_lent_;
}

}  // namespace lmhead
