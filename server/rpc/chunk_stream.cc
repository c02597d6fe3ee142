#include "server/rpc/chunk_stream.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "proto/wire/status.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr int64_t kSlotAlignment = 64;

int64_t RoundUp(int64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Wide arrays of a chunk and its outputs (hidden states, teacher hidden states, top-k arrays both
// ways): together they take at most chunk_bytes_max, but each may start up to an alignment later.
constexpr int64_t kWideArrays = 6;

// The part of a slot that a message is decoded into; the rest is for the outputs. The top-k ones
// share the room of the wide arrays, which max_chunk_tokens has counted them among.
std::span<std::byte> DecodeSpace(StagingSlot* slot) {
  return {slot->data, static_cast<size_t>(slot->size_bytes - OutputBytes(kChunkTokensMax, 0))};
}

absl::StatusOr<StreamSpec> StreamSpecFromProto(const v1::StreamOpen& open, int64_t vocab_size) {
  StreamSpec spec = {.step = open.step(),
                     .worker = open.worker(),
                     .incarnation = open.incarnation(),
                     .stream_index = open.stream_index(),
                     .teacher_side = open.teacher_side()};
  absl::StatusOr<DType> dtype = DTypeFromProto(open.hidden_dtype(), "hidden_dtype");
  if (!dtype.ok()) return dtype.status();
  spec.hidden_dtype = *dtype;
  absl::StatusOr<LossRecipe> recipe = LossRecipeFromProto(open.recipe(), vocab_size);
  if (!recipe.ok()) return recipe.status();
  spec.recipe = *std::move(recipe);
  absl::StatusOr<OutputSpec> outputs = OutputSpecFromProto(open.outputs());
  if (!outputs.ok()) return outputs.status();
  spec.outputs = *outputs;
  // A step knows its workers; in an evaluation the name is all that joins the sides.
  if (spec.side() != StreamSide::kWhole) {
    if (absl::Status status = ValidateName("worker", spec.worker); !status.ok()) return status;
  }
  return spec;
}

// The teacher that a stream's recipe names; null when it names none.
absl::StatusOr<std::shared_ptr<Head>> FindTeacher(const HeadRegistry& heads,
                                                  const LossRecipe& recipe) {
  if (!recipe.has_teacher_head()) return std::shared_ptr<Head>();
  absl::StatusOr<std::shared_ptr<Head>> teacher = heads.Find(recipe.distillation->teacher_head);
  if (teacher.ok()) return teacher;
  return absl::Status(teacher.status().code(), absl::StrCat("recipe.distillation.teacher_head: ",
                                                            teacher.status().message()));
}

std::string StreamName(const v1::StreamOpen& open) {
  const char* const side = open.teacher_side() ? "teacher's side of " : "";
  if (open.step() == 0) return absl::StrCat(side, "evaluation stream of head ", open.head());
  return absl::StrCat(side, "stream ", open.stream_index(), " of worker ", open.worker(),
                      " in step ", open.step(), " of head ", open.head());
}

}  // namespace

int64_t StagingSlotBytes(int64_t chunk_bytes_max) {
  return RoundUp(DestinationBytes(kChunkTokensMax, kTokenFieldsMax, chunk_bytes_max)) +
         kWideArrays * kSlotAlignment + OutputBytes(kChunkTokensMax, 0);
}

ChunkStream* ChunkStream::Start(grpc::CallbackServerContext* context,
                                const StreamEnvironment& env) {
  std::shared_ptr<ChunkStream> stream(new ChunkStream(context, env));
  stream->self_ = stream;
  absl::Status status = stream->call_.status();
  if (status.ok()) status = env.streams->Admit(stream);
  if (!status.ok()) {
    absl::MutexLock lock(&stream->mu_);
    stream->Fail(status, /*after_answers=*/false);
  }
  stream->Pump();
  return stream.get();
}

ChunkStream::ChunkStream(grpc::CallbackServerContext* context, const StreamEnvironment& env)
    : context_(context),
      env_(env),
      call_(env.guard->Admit(*context, "ComputeLoss")),
      log_fields_{.request_id = call_.request_id()},
      stalled_after_(absl::Now() + env.stall_timeout) {}

ChunkStream::~ChunkStream() = default;

// --- The pump ---

void ChunkStream::Pump() {
  const std::shared_ptr<ChunkStream> alive = shared_from_this();
  {
    absl::MutexLock lock(&mu_);
    if (pumping_) return;
    pumping_ = true;
  }
  for (;;) {
    Action action;
    {
      absl::MutexLock lock(&mu_);
      action = NextAction();
      if (action == Action::kNone) {
        pumping_ = false;
        return;
      }
    }
    Perform(action);
  }
}

ChunkStream::Action ChunkStream::NextAction() {
  if (!spare_slots_.empty()) return Action::kReleaseSlots;
  if (finished_) return Action::kNone;
  if (std::exchange(cancel_, false)) return Action::kCancel;
  if (!writing_) {
    if (const Action action = NextWrite(); action != Action::kNone) return action;
  }
  return NextRead();
}

// In the order of arrival; of a paired stream whichever is there. There the order would be a
// deadlock: a chunk that waits for its other side would hold back the results of later ones, whose
// `received` may be what the other side waits for before it sends that chunk.
std::map<uint64_t, ChunkStream::Pending>::iterator ChunkStream::NextAnswer() {
  const auto answered = [](const auto& entry) { return entry.second.answer.has_value(); };
  const bool in_order = head_stream_ == nullptr || head_stream_->side() == StreamSide::kWhole;
  if (!in_order) return std::find_if(pending_.begin(), pending_.end(), answered);
  return !pending_.empty() && answered(*pending_.begin()) ? pending_.begin() : pending_.end();
}

ChunkStream::Action ChunkStream::NextWrite() {
  const auto next = NextAnswer();
  const bool has_answer = next != pending_.end();
  // A chunk that could not be computed ends the stream in its turn.
  if (!IsOver() && has_answer && !next->second.answer->ok()) {
    Fail(next->second.answer->status(), /*after_answers=*/false);
  }
  if (IsOver() || (failure_.has_value() && pending_.empty())) return StartFinish(*failure_);
  if (opened_.has_value()) {
    control_ = std::exchange(opened_, std::nullopt);
  } else if (has_answer) {
    outgoing_ = std::move(next->second);
    pending_.erase(next);
  } else if (phase_ == Phase::kEnded && pending_.empty() && !ended_written_) {
    ended_written_ = true;
    v1::StreamEnded ended;
    ended.set_num_chunks_counted(head_stream_->NumChunksCounted());
    control_ = EncodeResponse(ended);
    head_stream_->Detach();  // Before the client knows: it may open the next stream at once.
  } else if (ended_written_ && reading_ == Reading::kClosed) {
    return StartFinish(absl::OkStatus());
  } else {
    return Action::kNone;
  }
  writing_ = true;
  write_started_ = absl::Now();
  stalled_after_ = write_started_ + env_.stall_timeout;
  return Action::kWrite;
}

ChunkStream::Action ChunkStream::NextRead() {
  if (failure_.has_value() || reading_ != Reading::kIdle) return Action::kNone;
  if (phase_ == Phase::kChunks) {
    const size_t num_inflight = pending_.size() + (writing_ ? 1 : 0);
    if (num_inflight >= static_cast<size_t>(window_)) return Action::kNone;
    if (read_slot_ == nullptr) {
      reading_ = Reading::kAwaitingSlot;
      return Action::kAcquireSlot;
    }
  }
  reading_ = Reading::kStarted;
  return Action::kRead;
}

ChunkStream::Action ChunkStream::StartFinish(const absl::Status& status) {
  finished_ = true;
  final_status_ = call_.ToGrpcStatus(status);
  if (reading_ != Reading::kStarted && read_slot_ != nullptr) {
    spare_slots_.push_back(std::exchange(read_slot_, nullptr));
  }
  if (!status.ok()) {
    const LogScope scope(log_fields_);
    const auto level = absl::IsCancelled(status) ? spdlog::level::debug : spdlog::level::warn;
    spdlog::log(level, "{} ended: {}", name_, status.ToString());
  }
  return Action::kFinish;
}

void ChunkStream::Perform(Action action) {
  switch (action) {
    case Action::kNone:
      return;
    case Action::kReleaseSlots: {
      std::vector<StagingSlot*> slots;
      {
        absl::MutexLock lock(&mu_);
        slots.swap(spare_slots_);
      }
      for (StagingSlot* slot : slots) env_.slots->Release(slot);
      return;
    }
    case Action::kAcquireSlot:
      return AcquireSlot();
    case Action::kRead:
      read_message_.Clear();
      return StartRead(&read_message_);
    case Action::kWrite:
      return Write();
    case Action::kCancel:
      return context_->TryCancel();
    case Action::kFinish:
      return FinishStream();
  }
}

void ChunkStream::AcquireSlot() {
  const uint64_t wait = env_.slots->Acquire(
      [self = shared_from_this()](StagingSlot* slot) { self->SlotReady(slot); });
  absl::MutexLock lock(&mu_);
  slot_wait_ = wait;
}

void ChunkStream::Write() {
  if (control_.has_value()) {
    write_message_ = *std::exchange(control_, std::nullopt);
  } else {
    const ComputedChunk& chunk = **outgoing_.answer;
    const ResultView view = {.chunk_index = chunk.chunk_index,
                             .num_tokens = chunk.num_tokens,
                             .duplicate = chunk.duplicate,
                             .sums = chunk.sums,
                             .timings = chunk.timings,
                             .token_loss = chunk.token_loss,
                             .logprob = chunk.logprob,
                             .lse = chunk.lse,
                             .entropy = chunk.entropy,
                             .argmax = chunk.argmax,
                             .topk_ids = chunk.topk_ids,
                             .topk_logprobs = chunk.topk_logprobs,
                             .grad_hidden_states = chunk.grad_hidden_states};
    write_message_ =
        EncodeResponse(view, [pool = env_.slots, slot = outgoing_.slot] { pool->Release(slot); });
    outgoing_ = {};
  }
  env_.metrics->AddBytes(0, static_cast<int64_t>(write_message_.Length()));
  StartWrite(&write_message_);
}

void ChunkStream::FinishStream() {
  std::shared_ptr<HeadStream> head_stream;
  uint64_t wait = 0;
  {
    absl::MutexLock lock(&mu_);
    head_stream = head_stream_;
    wait = slot_wait_;
  }
  if (wait != 0) env_.slots->CancelWait(wait);
  // Before the client knows: it may open the next stream at once.
  if (head_stream != nullptr) head_stream->Detach();
  env_.streams->Remove(this);
  Finish(final_status_);
}

// --- Events ---

void ChunkStream::Fail(const absl::Status& status, bool after_answers) {
  if (IsOver() || (after_answers && failure_.has_value())) return;
  failure_ = status;
  failure_waits_ = after_answers;
  if (after_answers) return;
  for (auto& [sequence, pending] : pending_) {
    // What is still being computed keeps its slot until then.
    if (!pending.answer.has_value() || pending.slot == nullptr) continue;
    spare_slots_.push_back(std::exchange(pending.slot, nullptr));
  }
}

void ChunkStream::WakeLocked() {
  if (!pumping_) env_.streams->Wake(shared_from_this());
}

void ChunkStream::SlotReady(StagingSlot* slot) {
  {
    absl::MutexLock lock(&mu_);
    if (!IsOver()) {
      read_slot_ = std::exchange(slot, nullptr);
      reading_ = Reading::kIdle;
      WakeLocked();
    }
  }
  if (slot != nullptr) env_.slots->Release(slot);
}

void ChunkStream::AnswerReady(uint64_t sequence, absl::StatusOr<ComputedChunk> answer) {
  StagingSlot* unwanted = nullptr;
  {
    absl::MutexLock lock(&mu_);
    Pending& pending = pending_.at(sequence);
    pending.answer = std::move(answer);
    if (IsOver()) {
      unwanted = std::exchange(pending.slot, nullptr);
    } else {
      WakeLocked();
    }
  }
  if (unwanted != nullptr) env_.slots->Release(unwanted);
}

void ChunkStream::CheckStalled(absl::Time now) {
  std::shared_ptr<HeadStream> head_stream;
  {
    absl::MutexLock lock(&mu_);
    head_stream = head_stream_;
  }
  // Answers streams, this one or others, so without the lock.
  if (head_stream != nullptr) head_stream->ExpireUnpaired(now);
  {
    absl::MutexLock lock(&mu_);
    if (finished_ || now < stalled_after_) return;
    const std::string seconds = absl::FormatDuration(env_.stall_timeout);
    if (writing_) {
      spdlog::warn("{}: its client has not taken an answer for {}; cancelling it", name_, seconds);
      cancel_ = true;
      Fail(absl::CancelledError("the client has not read"), /*after_answers=*/false);
    } else {
      Fail(absl::DeadlineExceededError(absl::StrCat(
               "the client has kept the stream waiting for ", seconds,
               phase_ == Phase::kOpening ? ": no `open` came" : ": not closed after `ended`")),
           /*after_answers=*/false);
    }
  }
  Pump();
}

void ChunkStream::End(const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    Fail(status, /*after_answers=*/false);
  }
  Pump();
}

void ChunkStream::OnReadDone(bool ok) {
  Phase phase;
  StagingSlot* slot = nullptr;
  std::shared_ptr<HeadStream> head_stream;
  {
    absl::MutexLock lock(&mu_);
    phase = phase_;
    slot = std::exchange(read_slot_, nullptr);
    head_stream = head_stream_;
    if (!ok) {
      reading_ = Reading::kClosed;
      if (slot != nullptr) spare_slots_.push_back(slot);
      if (context_->IsCancelled()) {
        Fail(absl::CancelledError("the client is gone"), /*after_answers=*/false);
      } else if (phase != Phase::kEnded) {
        Fail(absl::FailedPreconditionError(
                 phase == Phase::kOpening
                     ? "the client closed the stream before it sent `open`"
                     : "the client closed the stream without `end`, or sent a message over the "
                       "limit; chunks that were answered are "
                       "counted: open a stream again and send what is missing, then `end`"),
             /*after_answers=*/true);
      }
    }
  }
  if (!ok) return Pump();
  env_.metrics->AddBytes(static_cast<int64_t>(read_message_.Length()), 0);
  absl::Status status;
  if (phase == Phase::kOpening) {
    status = HandleOpen();
  } else if (phase == Phase::kChunks) {
    status = HandleChunkOrEnd(*head_stream, slot);
  } else {
    status = absl::InvalidArgumentError("got a message after `end`; wanted the stream closed");
  }
  {
    absl::MutexLock lock(&mu_);
    reading_ = Reading::kIdle;
    if (!status.ok()) Fail(status, /*after_answers=*/phase != Phase::kOpening);
  }
  Pump();
}

void ChunkStream::OnWriteDone(bool ok) {
  write_message_.Clear();
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    // After `ended` it is still the client's turn: to close.
    stalled_after_ = ended_written_ ? absl::Now() + env_.stall_timeout : absl::InfiniteFuture();
    env_.metrics->ObserveStage(ChunkStage::kWrite,
                               absl::ToDoubleSeconds(absl::Now() - write_started_));
    if (!ok) Fail(absl::CancelledError("the client is gone"), /*after_answers=*/false);
  }
  Pump();
}

void ChunkStream::OnCancel() { End(absl::CancelledError("the client is gone")); }

void ChunkStream::OnDone() {
  std::shared_ptr<HeadStream> head_stream;  // Detached and destroyed without the lock.
  {
    absl::MutexLock lock(&mu_);
    head_stream = std::move(head_stream_);
  }
  const std::shared_ptr<ChunkStream> self = std::move(self_);
}

// --- Messages ---

absl::Status ChunkStream::CheckOpen(const v1::StreamOpen& open) const {
  // A step that is open may come to its end while the server drains; an evaluation has none.
  if (open.step() == 0) {
    if (absl::Status status = call_.CheckTakesNew("new evaluation"); !status.ok()) return status;
    if (open.worker().empty()) return absl::OkStatus();
  }
  return call_.CheckWorker(open.worker());
}

absl::Status ChunkStream::HandleOpen() {
  absl::StatusOr<DecodedRequest> request = DecodeRequest(&read_message_, {});
  const v1::StreamOpen* open = request.ok() ? std::get_if<v1::StreamOpen>(&*request) : nullptr;
  if (open == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the first message of a stream must be `open`",
                     request.ok() ? "" : absl::StrCat(": ", request.status().message())));
  }
  {
    absl::MutexLock lock(&mu_);
    log_fields_.head = open->head().substr(0, kNameLengthMax);
    log_fields_.step = open->step();
    log_fields_.worker = open->worker().substr(0, kNameLengthMax);
  }
  if (absl::Status status = CheckOpen(*open); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(open->head());
  if (!head.ok()) return head.status();
  absl::StatusOr<StreamSpec> spec = StreamSpecFromProto(*open, (*head)->spec().vocab_size);
  if (!spec.ok()) return spec.status();
  const auto on_abort = [weak = weak_from_this()](const absl::Status& status) {
    const std::shared_ptr<ChunkStream> stream = weak.lock();
    if (stream == nullptr) return;
    absl::MutexLock lock(&stream->mu_);
    stream->Fail(status, /*after_answers=*/false);
    stream->WakeLocked();
  };
  absl::StatusOr<std::shared_ptr<Head>> teacher = FindTeacher(*env_.heads, spec->recipe);
  if (!teacher.ok()) return teacher.status();
  absl::StatusOr<std::shared_ptr<HeadStream>> stream =
      (*head)->OpenStream(*std::move(spec), on_abort, *std::move(teacher));
  if (!stream.ok()) return stream.status();
  int32_t window = env_.max_inflight_chunks;
  if ((*stream)->side() != StreamSide::kWhole) {
    absl::StatusOr<int32_t> reserved =
        env_.streams->ReserveWindow(this, (*stream)->side() == StreamSide::kTeacher, window);
    if (!reserved.ok()) {
      (*stream)->Detach();
      return reserved.status();
    }
    window = *reserved;
  }

  v1::StreamOpened opened;
  opened.set_incarnation(env_.incarnation);
  opened.set_max_chunk_tokens((*stream)->max_chunk_tokens());
  opened.set_max_inflight_chunks(window);
  opened.set_schedule(ScheduleToProto((*stream)->schedule()));
  absl::MutexLock lock(&mu_);
  head_stream_ = *std::move(stream);
  window_ = window;
  name_ = StreamName(*open);
  opened_ = EncodeResponse(opened);
  phase_ = Phase::kChunks;
  stalled_after_ = absl::InfiniteFuture();
  return absl::OkStatus();
}

absl::Status ChunkStream::HandleChunkOrEnd(HeadStream& head_stream, StagingSlot* slot) {
  const absl::Time start = absl::Now();
  absl::StatusOr<DecodedRequest> request = DecodeRequest(&read_message_, DecodeSpace(slot));
  absl::Status status = request.status();
  if (request.ok()) {
    if (const auto* chunk = std::get_if<DecodedChunk>(&*request)) {
      env_.metrics->ObserveStage(ChunkStage::kReceive, absl::ToDoubleSeconds(absl::Now() - start));
      status = HandleChunk(head_stream, *chunk, slot);
      if (status.ok()) return status;  // The slot is the chunk's now.
      absl::MutexLock lock(&mu_);
      log_fields_.chunk = chunk->view.chunk_index;
    } else if (const auto* end = std::get_if<v1::StreamEnd>(&*request)) {
      status = head_stream.End(end->num_chunks());
      absl::MutexLock lock(&mu_);
      spare_slots_.push_back(slot);
      if (status.ok()) phase_ = Phase::kEnded;
      return status;
    } else if (const auto* received = std::get_if<v1::ResultReceived>(&*request)) {
      status = head_stream.Received(received->chunk_index());
      absl::MutexLock lock(&mu_);
      spare_slots_.push_back(slot);
      return status;
    } else {
      status = absl::InvalidArgumentError("the stream is open already; got a second `open`");
    }
  }
  env_.metrics->CountChunk(ChunkOutcome::kRejected);
  absl::MutexLock lock(&mu_);
  spare_slots_.push_back(slot);
  return status;
}

absl::Status ChunkStream::HandleChunk(HeadStream& head_stream, const DecodedChunk& decoded,
                                      StagingSlot* slot) {
  const ChunkView& view = decoded.view;
  const std::span<std::byte> space = {slot->data, static_cast<size_t>(slot->size_bytes)};
  ArrivedChunk chunk = {.chunk_index = view.chunk_index,
                        .num_tokens = view.num_tokens,
                        .grad_scale = view.grad_scale.value_or(1.0f),
                        .checksum = decoded.actual_checksum,
                        .targets = view.targets,
                        .token_weights = view.token_weights,
                        .token_temperature = view.token_temperature,
                        .logprob_grad = view.logprob_grad,
                        .entropy_grad = view.entropy_grad,
                        .old_logprob = view.old_logprob,
                        .advantage = view.advantage,
                        .reference_logprob = view.reference_logprob,
                        .teacher_topk_ids = view.topk_ids,
                        .teacher_topk_logprobs = view.topk_logprobs,
                        .teacher_hidden_states = view.teacher_hidden_states,
                        .output_space = space.subspan(RoundUp(decoded.bytes_used))};
  if (!view.hidden_states.empty()) {
    chunk.hidden_states =
        space.subspan(view.hidden_states.data() - slot->data, view.hidden_states.size());
  }
  uint64_t sequence = 0;
  {
    absl::MutexLock lock(&mu_);
    sequence = next_sequence_++;
    pending_[sequence].slot = slot;
  }
  absl::Status status = head_stream.Submit(
      chunk, [self = shared_from_this(), sequence](absl::StatusOr<ComputedChunk> answer) {
        self->AnswerReady(sequence, std::move(answer));
      });
  if (status.ok()) return status;
  absl::MutexLock lock(&mu_);
  pending_.erase(sequence);
  return status;
}

}  // namespace lmhead
