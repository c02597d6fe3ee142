#include "server/head/head_stream.h"

#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/check.h"
#include "server/head/head.h"

namespace lmhead {
namespace {

constexpr int64_t kOutputAlignment = 64;
constexpr int64_t kNumOutputs = 5;      // Of one element a token.
constexpr int64_t kNumTopkOutputs = 2;  // Of top_k elements a token.

// Bytes of an output of num_elements; of every dtype the same.
int64_t OutputStride(int64_t num_elements) {
  const int64_t bytes = num_elements * static_cast<int64_t>(sizeof(float));
  return (bytes + kOutputAlignment - 1) / kOutputAlignment * kOutputAlignment;
}

// How far the backward pass of a chunk goes.
BackwardMode ModeOf(const OutputSpec& outputs, bool accumulate) {
  if (accumulate) return BackwardMode::kHiddenAndWeight;
  return outputs.grad_hidden_states ? BackwardMode::kHidden : BackwardMode::kNone;
}

}  // namespace

int64_t OutputBytes(int64_t num_tokens, int32_t top_k) {
  return kNumOutputs * OutputStride(num_tokens) +
         kNumTopkOutputs * OutputStride(num_tokens * top_k);
}

HeadStream::HeadStream(std::shared_ptr<Head> head, std::shared_ptr<Head> teacher,
                       std::shared_ptr<Step> step, StreamSpec spec, const ChunkShape& shape)
    : head_(std::move(head)),
      teacher_(std::move(teacher)),
      step_(std::move(step)),
      spec_(std::move(spec)),
      recipe_(std::make_shared<const LossRecipe>(spec_.recipe)),
      shape_(shape),
      schedule_(step_ == nullptr && !spec_.outputs.grad_hidden_states ? Schedule::kEval
                                                                      : head_->plan().schedule),
      num_computed_(std::make_shared<std::atomic<uint64_t>>(0)) {}

HeadStream::~HeadStream() { Detach(); }

void HeadStream::Detach() {
  if (!attached_.exchange(false)) return;
  if (step_ != nullptr) step_->DetachStream(spec_.worker, spec_.stream_index, side());
  if (teacher_ != nullptr) teacher_->DetachStudent(student_id_);
  if (pairing_id_ == 0) return;
  for (const Pairing::Half& half : head_->pairing().Detach(pairing_id_)) {
    half.done(absl::CancelledError("the stream is over"));
  }
}

std::string HeadStream::Where(uint64_t chunk_index) const {
  if (step_ == nullptr)
    return absl::StrCat("chunk ", chunk_index, " for head ", head_->spec().name);
  return absl::StrCat("chunk ", chunk_index, " of worker ", spec_.worker, " in step ",
                      step_->number(), " of head ", head_->spec().name,
                      side() == StreamSide::kTeacher ? " (teacher's side)" : "");
}

// Lays the wanted outputs out in the chunk's slot: the one place where the task that writes them
// and the answer that shows them agree.
ChunkTask HeadStream::MakeTask(const ArrivedChunk& chunk, ChunkVerdict verdict,
                               ComputedChunk* answer) const {
  const int64_t n = chunk.num_tokens;
  const OutputSpec& outputs = spec_.outputs;
  LMHEAD_CHECK(static_cast<int64_t>(chunk.output_space.size()) >= OutputBytes(n, outputs.top_k),
               "no room for the outputs");
  std::byte* next = chunk.output_space.data();
  const auto carve = [&](bool wanted, int64_t per_token = 1) -> void* {
    if (!wanted) return nullptr;
    return std::exchange(next, next + OutputStride(n * per_token));
  };
  const auto span = [n](const auto* data, int64_t per_token = 1) {
    return std::span(data, data == nullptr ? 0 : static_cast<size_t>(n * per_token));
  };
  ChunkTask task = {.recipe = recipe_, .outputs = outputs};
  task.mode =
      ModeOf(outputs, verdict == ChunkVerdict::kNew && step_ != nullptr && head_->spec().trainable);
  task.batch_tokens = head_->plan().batch_tokens;
  const MatrixView hidden = {chunk.hidden_states.data(), n, head_->spec().hidden_size,
                             spec_.hidden_dtype};
  task.rows = {.hidden_states = hidden,
               .targets = chunk.targets,
               .token_weights = chunk.token_weights,
               .token_temperature = chunk.token_temperature,
               .grad_scale = chunk.grad_scale,
               .logprob_grad = chunk.logprob_grad,
               .entropy_grad = chunk.entropy_grad,
               .old_logprob = chunk.old_logprob,
               .advantage = chunk.advantage,
               .reference_logprob = chunk.reference_logprob,
               .teacher_topk_ids = chunk.teacher_topk_ids,
               .teacher_topk_logprobs = chunk.teacher_topk_logprobs,
               .token_loss = static_cast<float*>(carve(outputs.token_loss)),
               .logprob = static_cast<float*>(carve(outputs.logprob)),
               .lse = static_cast<float*>(carve(outputs.lse)),
               .entropy = static_cast<float*>(carve(outputs.entropy)),
               .argmax = static_cast<int32_t*>(carve(outputs.argmax)),
               .topk_ids = static_cast<int32_t*>(carve(outputs.top_k > 0, outputs.top_k)),
               .topk_logprobs = static_cast<float*>(carve(outputs.top_k > 0, outputs.top_k))};
  if (recipe_->has_teacher_head()) {
    task.rows.teacher_hidden_states = {chunk.teacher_hidden_states.data(), n,
                                       shape_.teacher_hidden_size,
                                       recipe_->distillation->teacher_hidden_dtype};
  }
  if (outputs.grad_hidden_states) task.rows.grad_hidden_states = hidden;
  *answer = {
      .chunk_index = chunk.chunk_index,
      .num_tokens = n,
      .duplicate = verdict == ChunkVerdict::kDuplicate,
      .token_loss = span(static_cast<const float*>(task.rows.token_loss)),
      .logprob = span(static_cast<const float*>(task.rows.logprob)),
      .lse = span(static_cast<const float*>(task.rows.lse)),
      .entropy = span(static_cast<const float*>(task.rows.entropy)),
      .argmax = span(static_cast<const int32_t*>(task.rows.argmax)),
      .topk_ids = span(static_cast<const int32_t*>(task.rows.topk_ids), outputs.top_k),
      .topk_logprobs = span(static_cast<const float*>(task.rows.topk_logprobs), outputs.top_k)};
  if (outputs.grad_hidden_states) answer->grad_hidden_states = chunk.hidden_states;
  return task;
}

absl::Status HeadStream::Submit(const ArrivedChunk& chunk, ChunkDone done) {
  absl::Status status = CheckChunk(Where(chunk.chunk_index), spec_, shape_, chunk);
  if (!status.ok()) return status;
  if (absl::Status usable = head_->CheckUsable(); !usable.ok()) return usable;
  return side() == StreamSide::kWhole ? Compute(chunk, nullptr, std::move(done))
                                      : SubmitHalf(chunk, std::move(done));
}

absl::Status HeadStream::Compute(const ArrivedChunk& chunk, const ArrivedChunk* teacher,
                                 ChunkDone done) {
  // Before the ledger is asked, so that a teacher that is gone spoils no step.
  if (teacher_ != nullptr) {
    if (absl::Status status = teacher_->CheckUsable(); !status.ok()) return status;
  }
  ChunkVerdict verdict = ChunkVerdict::kNew;
  if (step_ != nullptr) {
    absl::StatusOr<ChunkVerdict> accepted = step_->AcceptChunk(
        spec_.worker, chunk.chunk_index, chunk.checksum,
        teacher == nullptr ? std::nullopt : std::optional<uint64_t>(teacher->checksum));
    if (!accepted.ok()) return accepted.status();
    verdict = *accepted;
  }
  ComputedChunk answer;
  ChunkTask task = MakeTask(chunk, verdict, &answer);
  if (teacher != nullptr) {
    task.rows.teacher_hidden_states.data = teacher->teacher_hidden_states.data();
  }
  task.done = [head = head_, step = step_, worker = spec_.worker, num_computed = num_computed_,
               answer, where = Where(chunk.chunk_index),
               done = std::move(done)](absl::StatusOr<ChunkOutput> output) mutable {
    if (!output.ok()) {
      head->BookFailure(step.get(), worker, answer, output.status());
      done(absl::Status(output.status().code(),
                        absl::StrCat(where, ": ", output.status().message())));
      return;
    }
    answer.sums = output->sums;
    answer.timings = output->timings;
    head->BookResult(step.get(), worker, answer);
    num_computed->fetch_add(1, std::memory_order_relaxed);
    done(answer);
  };
  absl::Status status = head_->SubmitTask(std::move(task), teacher_.get());
  if (!status.ok() && step_ != nullptr && verdict == ChunkVerdict::kNew) {
    step_->ChunkFailed(spec_.worker, chunk.chunk_index, status);
  }
  return status;
}

// --- Paired streams ---

absl::Status HeadStream::SubmitHalf(const ArrivedChunk& chunk, ChunkDone done) {
  const Pairing::Key key = {spec_.step, spec_.worker, chunk.chunk_index};
  const bool of_teacher = side() == StreamSide::kTeacher;
  const auto student_has_result = [&]() -> absl::StatusOr<bool> {
    if (!of_teacher || step_ == nullptr) return false;
    return step_->IsReceived(spec_.worker, chunk.chunk_index, chunk.checksum);
  };
  absl::StatusOr<bool> over = student_has_result();
  if (!over.ok()) return over.status();
  if (*over) {
    done(Pairing::TeacherAnswer(chunk, /*duplicate=*/true));
    return absl::OkStatus();
  }
  Pairing& pairing = head_->pairing();
  Pairing::Half half = {pairing_id_, shared_from_this(), chunk, std::move(done)};
  absl::Status status =
      Settle(pairing.Offer(side(), key, std::move(half), absl::Now()), pairing_id_);
  if (!status.ok()) return status;
  // The student's word may have come between the question and the offer.
  over = student_has_result();
  if (over.ok() && *over) {
    if (std::optional<Pairing::Half> taken = pairing.Received(key)) {
      taken->done(Pairing::TeacherAnswer(taken->chunk, /*duplicate=*/true));
    }
  }
  return absl::OkStatus();
}

absl::Status HeadStream::Settle(Pairing::Offered offered, Pairing::StreamId mine) {
  // UNAVAILABLE: which of the two streams its client still has is not known here. What a broken
  // connection had still delivered must not end the one that took its place for good.
  const auto taken_over = [](const Pairing::Half& half) {
    return absl::UnavailableError(absl::StrCat(
        "chunk ", half.chunk.chunk_index,
        " came again on another stream of the worker, which has it now; if that stream is gone, "
        "open this one again and send what has no result"));
  };
  if (offered.replaced.has_value()) offered.replaced->done(taken_over(*offered.replaced));
  if (offered.refused.has_value()) {
    if (offered.refused->stream_id == mine) return absl::CancelledError("the stream is over");
    offered.refused->done(taken_over(*offered.refused));
  }
  if (!offered.match.has_value()) return absl::OkStatus();
  return ComputeMatch(*std::move(offered.match), mine);
}

absl::Status HeadStream::ComputeMatch(Pairing::Match match, Pairing::StreamId mine) {
  const auto both = std::make_shared<Pairing::Match>(std::move(match));
  HeadStream& student = *both->student.stream;
  absl::Status status = student.CheckSidesAgree(both->student, both->teacher);
  if (status.ok()) {
    const auto finish = [both](absl::StatusOr<ComputedChunk> answer) {
      if (!answer.ok()) {
        both->teacher.done(answer.status());
        both->student.done(answer.status());
        return;
      }
      const Pairing::Half student_half = both->student;
      Pairing& pairing = student_half.stream->head_->pairing();
      // First the teacher's half is put away: the student's client may say at once that it has the
      // result.
      Settle(pairing.Computed(std::move(*both), absl::Now()), /*mine=*/0).IgnoreError();
      student_half.done(std::move(answer));
    };
    status = student.Compute(both->student.chunk, &both->teacher.chunk, finish);
  }
  if (status.ok()) return status;
  for (const Pairing::Half* half : {&both->student, &both->teacher}) {
    if (half->stream_id != mine) half->done(status);
  }
  return status;
}

absl::Status HeadStream::CheckSidesAgree(const Pairing::Half& student,
                                         const Pairing::Half& teacher) const {
  const std::string where = Where(student.chunk.chunk_index);
  if (student.chunk.num_tokens != teacher.chunk.num_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": has ", student.chunk.num_tokens, " rows on the student's side and ",
        teacher.chunk.num_tokens, " on the teacher's; both programs must cut their rows alike"));
  }
  if (*recipe_ == *teacher.stream->recipe_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": the two sides were opened with different recipes, wanted equal ones"));
}

absl::Status HeadStream::Received(uint64_t chunk_index) {
  if (side() != StreamSide::kStudent) {
    return absl::InvalidArgumentError(
        absl::StrCat("`received` for ", Where(chunk_index),
                     ": only the student's side of a paired stream sends it"));
  }
  if (step_ != nullptr) {
    absl::Status status = step_->MarkReceived(spec_.worker, chunk_index);
    if (!status.ok()) return status;
  }
  if (std::optional<Pairing::Half> half =
          head_->pairing().Received({spec_.step, spec_.worker, chunk_index})) {
    half->done(Pairing::TeacherAnswer(half->chunk, /*duplicate=*/false));
  }
  return absl::OkStatus();
}

void HeadStream::ExpireUnpaired(absl::Time now) {
  if (side() == StreamSide::kWhole) return;
  for (Pairing::GivenUp& given_up : head_->pairing().Expire(now)) {
    given_up.half.done(std::move(given_up.answer));
  }
}

absl::Status HeadStream::End(uint64_t num_chunks) {
  if (absl::Status status = head_->CheckUsable(); !status.ok()) return status;
  if (side() == StreamSide::kTeacher) {
    return step_ == nullptr ? absl::OkStatus() : step_->EndTeacherSide(spec_.worker, num_chunks);
  }
  if (step_ != nullptr) {
    absl::Status status = step_->EndWorker(spec_.worker, num_chunks).status();
    if (!status.ok()) return status;
  }
  if (side() == StreamSide::kWhole) return absl::OkStatus();
  for (const Pairing::Half& half : head_->pairing().EndStream(pairing_id_)) {
    if (step_ != nullptr) {
      step_->MarkReceived(spec_.worker, half.chunk.chunk_index).IgnoreError();
    }
    half.done(Pairing::TeacherAnswer(half.chunk, /*duplicate=*/false));
  }
  return absl::OkStatus();
}

uint64_t HeadStream::NumChunksCounted() const {
  if (step_ == nullptr) return num_computed_->load(std::memory_order_relaxed);
  return side() == StreamSide::kTeacher ? step_->NumPairsCounted(spec_.worker)
                                        : step_->NumChunksCounted(spec_.worker);
}

}  // namespace lmhead
