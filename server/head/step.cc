#include "server/head/step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/types/limits.h"

namespace lmhead {
namespace {

// How much of a long list an error message shows.
constexpr size_t kNamesShownMax = 8;
constexpr size_t kRangesShownMax = 4;

// How often AwaitComplete asks whether its caller is still there.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(50);

std::string JoinNames(const std::vector<std::string>& names) {
  const size_t num_shown = std::min(names.size(), kNamesShownMax);
  std::string text = absl::StrJoin(names.begin(), names.begin() + num_shown, ", ");
  if (num_shown < names.size()) absl::StrAppend(&text, " and ", names.size() - num_shown, " more");
  return text;
}

// Sorts; refuses an empty list and doubles.
absl::Status NormaliseWorkers(std::vector<std::string>* workers) {
  if (workers->empty()) {
    return absl::InvalidArgumentError("a step needs at least one worker, got none");
  }
  if (workers->size() > kWorkersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", workers->size(), " workers, at most ", kWorkersMax));
  }
  std::sort(workers->begin(), workers->end());
  const auto twice = std::adjacent_find(workers->begin(), workers->end());
  if (twice == workers->end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("worker ", *twice, " is named twice"));
}

std::string StepName(const std::string& head, uint64_t number) {
  return absl::StrCat("step ", number, " of head ", head);
}

}  // namespace

Step::Step(std::string head, uint64_t number, std::vector<std::string> workers)
    : head_(std::move(head)),
      number_(number),
      workers_(std::move(workers)),
      begun_at_(absl::Now()),
      last_call_(begun_at_) {
  for (const std::string& worker : workers_) ledger_[worker].last_seen = begun_at_;
}

std::string Step::Name() const { return StepName(head_, number_); }

StepState Step::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

absl::Status Step::failure() const {
  absl::MutexLock lock(&mu_);
  return failure_;
}

absl::Status Step::abort_status() const {
  absl::MutexLock lock(&mu_);
  return abort_status_;
}

LossSums Step::sums() const {
  absl::MutexLock lock(&mu_);
  return sums_;
}

absl::StatusOr<Step::Worker*> Step::FindWorker(const std::string& name) {
  const auto it = ledger_.find(name);
  if (it != ledger_.end()) return &it->second;
  return absl::InvalidArgumentError(absl::StrCat("worker '", name.substr(0, kNameLengthMax),
                                                 "' is not one of ", Name(),
                                                 ", which was begun with ", JoinNames(workers_)));
}

// --- Streams ---

absl::Status Step::AttachStream(const std::string& worker, uint32_t stream_index,
                                AbortListener on_abort, StreamSide side) {
  absl::MutexLock lock(&mu_);
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  if (state_ == StepState::kCommitted) {
    return absl::FailedPreconditionError(absl::StrCat(Name(), " is committed; begin the next one"));
  }
  absl::StatusOr<Worker*> found = FindWorker(worker);
  if (!found.ok()) return found.status();
  if (stream_index >= kStreamsPerWorkerMax) {
    return absl::InvalidArgumentError(absl::StrCat("stream_index ", stream_index, " of worker ",
                                                   worker, ": wanted less than ",
                                                   kStreamsPerWorkerMax));
  }
  const StreamKey key = {worker, side == StreamSide::kTeacher, stream_index};
  const bool inserted = streams_.try_emplace(key, std::move(on_abort)).second;
  if (inserted) {
    ++(*found)->num_streams;
    if (side != StreamSide::kWhole) {
      const bool was_complete = (*found)->IsComplete();
      (*found)->is_paired = true;
      CountIfComplete(**found, was_complete);
    }
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(
      absl::StrCat("stream ", stream_index, " of worker ", worker, " in ", Name(),
                   " is open already; use another stream_index, or close the first one"));
}

void Step::DetachStream(const std::string& worker, uint32_t stream_index, StreamSide side) {
  absl::MutexLock lock(&mu_);
  if (streams_.erase({worker, side == StreamSide::kTeacher, stream_index}) == 0) return;
  Worker& state = ledger_.find(worker)->second;
  --state.num_streams;
  state.last_seen = absl::Now();
}

// --- The ledger ---

absl::Status Step::CheckTakesChunks() const {
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  if (state_ == StepState::kOpen) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(Name(), state_ == StepState::kPrepared ? " is prepared" : " is committed",
                   " and takes no more chunks"));
}

absl::StatusOr<ChunkVerdict> Step::AcceptChunk(const std::string& worker_name, uint64_t chunk_index,
                                               uint64_t checksum,
                                               std::optional<uint64_t> teacher_checksum) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckTakesChunks(); !status.ok()) return status;
  absl::StatusOr<Worker*> found = FindWorker(worker_name);
  if (!found.ok()) return found.status();
  Worker& worker = **found;
  worker.last_seen = absl::Now();
  if (chunk_index >= kChunksPerWorkerMax) {
    return absl::InvalidArgumentError(absl::StrCat("chunk_index ", chunk_index, " of worker ",
                                                   worker_name, " in ", Name(),
                                                   ": wanted less than ", kChunksPerWorkerMax));
  }
  if (worker.num_chunks.has_value() && chunk_index >= *worker.num_chunks) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk_index ", chunk_index, " of worker ", worker_name, " in ", Name(),
                     ": the worker has ended with ", *worker.num_chunks, " chunks"));
  }
  const auto [entry, inserted] = worker.chunks.try_emplace(
      chunk_index, LedgerEntry{.checksum = checksum, .teacher_checksum = teacher_checksum});
  if (inserted) {
    worker.chunk_index_end = std::max(worker.chunk_index_end, chunk_index + 1);
    ++num_in_flight_;
    return ChunkVerdict::kNew;
  }
  if (entry->second.checksum == checksum) {
    if (entry->second.teacher_checksum == teacher_checksum) return ChunkVerdict::kDuplicate;
    return OtherTeacherContents(worker_name, chunk_index);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "chunk ", chunk_index, " of worker ", worker_name, " in ", Name(),
      " was received before with other contents (checksum ", absl::Hex(entry->second.checksum),
      ", now ", absl::Hex(checksum), "); a chunk that is sent again must be the same"));
}

absl::Status Step::OtherTeacherContents(const std::string& worker, uint64_t chunk_index) const {
  return absl::InvalidArgumentError(absl::StrCat(
      "chunk ", chunk_index, " of worker ", worker, " in ", Name(),
      " was received before with other contents on its teacher's side; a chunk that is "
      "sent again must be the same"));
}

void Step::ChunkAccumulated(const std::string& worker_name, uint64_t chunk_index,
                            const LossSums& sums) {
  absl::MutexLock lock(&mu_);
  Worker& worker = ledger_.find(worker_name)->second;
  const bool was_complete = worker.IsComplete();
  LedgerEntry& entry = worker.chunks.at(chunk_index);
  entry.accumulated = true;
  if (entry.teacher_checksum.has_value()) ++worker.num_pairs;
  worker.last_seen = absl::Now();
  ++worker.num_accumulated;
  --num_in_flight_;
  sums_ += sums;
  CountIfComplete(worker, was_complete);
}

void Step::ChunkFailed(const std::string& worker, uint64_t chunk_index, const absl::Status& error) {
  absl::MutexLock lock(&mu_);
  --num_in_flight_;
  PoisonLocked(absl::Status(error.code(), absl::StrCat("chunk ", chunk_index, " of worker ", worker,
                                                       ": ", error.message())));
}

void Step::Poison(const absl::Status& error) {
  absl::MutexLock lock(&mu_);
  PoisonLocked(error);
}

void Step::PoisonLocked(const absl::Status& error) {
  if (state_ == StepState::kCommitted || state_ == StepState::kAborted || !failure_.ok()) return;
  failure_ = absl::AbortedError(
      absl::StrCat(Name(), " is poisoned: ", error.message(), "; abort it and begin it again"));
}

void Step::CountIfComplete(Worker& worker, bool was_complete) {
  if (worker.IsComplete() == was_complete) return;
  num_complete_workers_ += was_complete ? -1 : 1;
}

absl::StatusOr<uint64_t> Step::EndWorker(const std::string& worker_name, uint64_t num_chunks) {
  absl::MutexLock lock(&mu_);
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  absl::StatusOr<Worker*> found = FindWorker(worker_name);
  if (!found.ok()) return found.status();
  Worker& worker = **found;
  const std::string where = absl::StrCat("end of worker ", worker_name, " in ", Name());
  if (worker.num_chunks.has_value() && *worker.num_chunks != num_chunks) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": got num_chunks ", num_chunks,
                                                   ", stated before was ", *worker.num_chunks));
  }
  if (num_chunks > kChunksPerWorkerMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": got num_chunks ", num_chunks, ", at most ", kChunksPerWorkerMax));
  }
  if (num_chunks < worker.chunk_index_end) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": got num_chunks ", num_chunks,
                                                   ", but chunk ", worker.chunk_index_end - 1,
                                                   " has been received"));
  }
  const bool was_complete = worker.IsComplete();
  worker.num_chunks = num_chunks;
  worker.last_seen = absl::Now();
  CountIfComplete(worker, was_complete);
  return worker.num_accumulated;
}

absl::Status Step::EndTeacherSide(const std::string& worker_name, uint64_t num_chunks) {
  absl::MutexLock lock(&mu_);
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  absl::StatusOr<Worker*> found = FindWorker(worker_name);
  if (!found.ok()) return found.status();
  Worker& worker = **found;
  worker.last_seen = absl::Now();
  const std::string where =
      absl::StrCat("end of the teacher's side of worker ", worker_name, " in ", Name());
  if (worker.num_teacher_chunks.has_value() && *worker.num_teacher_chunks != num_chunks) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": got num_chunks ", num_chunks,
                                                   ", stated before was ",
                                                   *worker.num_teacher_chunks));
  }
  if (num_chunks > kChunksPerWorkerMax || num_chunks < worker.num_pairs) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": got num_chunks ", num_chunks, ", wanted ", worker.num_pairs,
                     ", which have been counted, to ", kChunksPerWorkerMax));
  }
  const bool was_complete = worker.IsComplete();
  worker.num_teacher_chunks = num_chunks;
  CountIfComplete(worker, was_complete);
  return absl::OkStatus();
}

absl::Status Step::MarkReceived(const std::string& worker_name, uint64_t chunk_index) {
  absl::MutexLock lock(&mu_);
  absl::StatusOr<Worker*> found = FindWorker(worker_name);
  if (!found.ok()) return found.status();
  const auto entry = (*found)->chunks.find(chunk_index);
  if (entry == (*found)->chunks.end() || !entry->second.accumulated ||
      !entry->second.teacher_checksum.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`received` for chunk ", chunk_index, " of worker ", worker_name, " in ",
                     Name(), ": no such chunk of paired streams has been answered"));
  }
  entry->second.received = true;
  return absl::OkStatus();
}

absl::StatusOr<bool> Step::IsReceived(const std::string& worker_name, uint64_t chunk_index,
                                      uint64_t teacher_checksum) const {
  absl::MutexLock lock(&mu_);
  const auto worker = ledger_.find(worker_name);
  if (worker == ledger_.end()) return false;
  const auto entry = worker->second.chunks.find(chunk_index);
  if (entry != worker->second.chunks.end()) {
    if (entry->second.teacher_checksum != teacher_checksum) {
      return OtherTeacherContents(worker_name, chunk_index);
    }
    if (entry->second.received) return true;
  }
  if (absl::Status status = CheckTakesChunks(); !status.ok()) return status;
  return false;
}

absl::StatusOr<ChunkVerdict> Step::AcceptPiece(const std::string& worker, uint64_t index,
                                               uint64_t checksum) {
  absl::MutexLock lock(&mu_);
  absl::StatusOr<Worker*> found = FindWorker(worker);
  if (!found.ok()) return found.status();
  (*found)->last_seen = absl::Now();
  if (const auto known = (*found)->pieces.find(index); known != (*found)->pieces.end()) {
    if (known->second == checksum) return ChunkVerdict::kDuplicate;
    return absl::InvalidArgumentError(absl::StrCat(
        "gradient piece ", index, " of worker ", worker, " in ", Name(),
        " was received before with other contents; a repeated piece must be the same"));
  }
  if (index >= kChunksPerWorkerMax) {
    return absl::InvalidArgumentError(absl::StrCat("gradient piece ", index, " of worker ", worker,
                                                   " in ", Name(), ": wanted an index below ",
                                                   kChunksPerWorkerMax));
  }
  if (absl::Status status = CheckTakesChunks(); !status.ok()) return status;
  return ChunkVerdict::kNew;
}

void Step::PieceAccumulated(const std::string& worker, uint64_t index, uint64_t checksum) {
  absl::MutexLock lock(&mu_);
  ledger_[worker].pieces.emplace(index, checksum);
}

uint64_t Step::NumChunksCounted(const std::string& worker) const {
  absl::MutexLock lock(&mu_);
  const auto it = ledger_.find(worker);
  return it == ledger_.end() ? 0 : it->second.num_accumulated;
}

uint64_t Step::NumPairsCounted(const std::string& worker) const {
  absl::MutexLock lock(&mu_);
  const auto it = ledger_.find(worker);
  return it == ledger_.end() ? 0 : it->second.num_pairs;
}

// --- Signs of life ---

void Step::NoteCall() {
  absl::MutexLock lock(&mu_);
  last_call_ = absl::Now();
}

std::optional<std::string> Step::Overdue(absl::Time now, const StepLimits& limits) const {
  absl::MutexLock lock(&mu_);
  if (state_ == StepState::kCommitted || state_ == StepState::kAborted) return std::nullopt;
  if (limits.step_timeout > absl::ZeroDuration() && now - begun_at_ > limits.step_timeout) {
    return absl::StrCat("it has been open for longer than ",
                        absl::FormatDuration(limits.step_timeout), " (--step_timeout_seconds)");
  }
  if (limits.worker_lease <= absl::ZeroDuration()) return std::nullopt;
  const std::string lease =
      absl::StrCat(absl::FormatDuration(limits.worker_lease), " (--worker_lease_seconds)");
  absl::Time last_sign = last_call_;
  for (const auto& [name, worker] : ledger_) {
    if (worker.num_streams > 0) {
      last_sign = now;
    } else if (worker.IsComplete()) {
      last_sign = std::max(last_sign, worker.last_seen);
    } else if (now - worker.last_seen > limits.worker_lease) {
      return absl::StrCat("worker ", name, " has had no stream and sent nothing for longer than ",
                          lease);
    } else {
      last_sign = now;  // Its own lease runs.
    }
  }
  if (now - last_sign <= limits.worker_lease) return std::nullopt;
  return absl::StrCat("every worker has ended, but none has called ",
                      state_ == StepState::kOpen ? "PrepareStep" : "CommitStep",
                      " for longer than ", lease);
}

// --- Prepare, commit, abort ---

namespace {

// "chunks 3, 7-9 and more" of those below `num_chunks` that `has` does not know.
std::string MissingChunks(uint64_t num_chunks, absl::FunctionRef<bool(uint64_t)> has) {
  std::vector<std::string> ranges;
  for (uint64_t i = 0; i < num_chunks && ranges.size() <= kRangesShownMax; ++i) {
    if (has(i)) continue;
    const uint64_t first = i;
    while (i + 1 < num_chunks && !has(i + 1)) ++i;
    ranges.push_back(first == i ? absl::StrCat(first) : absl::StrCat(first, "-", i));
  }
  const bool more = ranges.size() > kRangesShownMax;
  if (more) ranges.pop_back();
  return absl::StrCat(absl::StrJoin(ranges, ", "), more ? " and more" : "");
}

}  // namespace

std::string Step::Lacking(const std::string& name, const Worker& worker) {
  std::vector<std::string> lacking;
  if (const std::string missing = MissingChunks(
          *worker.num_chunks, [&worker](uint64_t i) { return worker.chunks.contains(i); });
      !missing.empty()) {
    lacking.push_back(absl::StrCat("chunks ", missing, " have not arrived"));
  }
  if (const uint64_t num = worker.chunks.size() - worker.num_accumulated; num > 0) {
    lacking.push_back(absl::StrCat(num, " still being computed"));
  }
  if (worker.is_paired && !worker.num_teacher_chunks.has_value()) {
    lacking.push_back("its teacher's side has not ended");
  } else if (worker.is_paired && worker.num_teacher_chunks != worker.num_pairs) {
    lacking.push_back(absl::StrCat("its teacher's side has ended with ", *worker.num_teacher_chunks,
                                   " chunks, of which ", worker.num_pairs,
                                   " met their student's side"));
  }
  return absl::StrCat("worker ", name, " (", *worker.num_chunks,
                      " chunks): ", absl::StrJoin(lacking, ", "));
}

absl::Status Step::CheckCompleteLocked() const {
  if (num_complete_workers_ == workers_.size()) return absl::OkStatus();
  std::vector<std::string> not_ended;
  std::vector<std::string> incomplete;
  for (const auto& [name, worker] : ledger_) {
    if (!worker.num_chunks.has_value()) {
      not_ended.push_back(name);
    } else if (!worker.IsComplete() && incomplete.size() < kRangesShownMax) {
      incomplete.push_back(Lacking(name, worker));
    }
  }
  std::string what;
  if (!not_ended.empty())
    absl::StrAppend(&what, "workers that have not ended: ", JoinNames(not_ended));
  if (!incomplete.empty()) {
    absl::StrAppend(&what, what.empty() ? "" : "; ", absl::StrJoin(incomplete, "; "));
  }
  return absl::FailedPreconditionError(absl::StrCat(Name(), " is not complete: ", what));
}

absl::Status Step::CheckComplete() const {
  absl::MutexLock lock(&mu_);
  return CheckCompleteLocked();
}

absl::Status Step::AwaitComplete(absl::Time deadline, absl::FunctionRef<bool()> cancelled) const {
  const auto decided = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return state_ != StepState::kOpen || !failure_.ok() || num_complete_workers_ == workers_.size();
  };
  absl::MutexLock lock(&mu_);
  while (!mu_.AwaitWithDeadline(absl::Condition(&decided),
                                std::min(deadline, absl::Now() + kCancelPoll))) {
    if (absl::Now() >= deadline) return CheckCompleteLocked();
    // Asking may take a while; the workers need the lock meanwhile.
    mu_.Unlock();
    const bool gone = cancelled();
    mu_.Lock();
    if (gone) return absl::CancelledError(absl::StrCat("waiting for ", Name(), " was cancelled"));
  }
  if (state_ == StepState::kAborted) return abort_status_;
  return failure_;
}

absl::StatusOr<PreparedStep> Step::Prepare(double grad_squared_norm) {
  absl::MutexLock lock(&mu_);
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  PreparedStep result = {.sums = sums_, .grad_squared_norm = grad_squared_norm};
  for (const auto& [name, worker] : ledger_) result.num_chunks += worker.num_accumulated;
  prepared_ = result;
  state_ = StepState::kPrepared;
  return result;
}

std::optional<PreparedStep> Step::prepared() const {
  absl::MutexLock lock(&mu_);
  return prepared_;
}

absl::StatusOr<std::optional<CommittedStep>> Step::CheckCommit(
    const CommitParameters& parameters) const {
  absl::MutexLock lock(&mu_);
  if (committed_.has_value()) {
    if (!(committed_->first == parameters)) {
      return absl::InvalidArgumentError(absl::StrCat(
          Name(), " is committed with learning_rate ", committed_->first.learning_rate,
          " and grad_multiplier ", committed_->first.grad_multiplier, "; got learning_rate ",
          parameters.learning_rate, " and grad_multiplier ", parameters.grad_multiplier));
    }
    CommittedStep result = committed_->second;
    result.repeated = true;
    return result;
  }
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  if (state_ == StepState::kOpen) {
    return absl::FailedPreconditionError(
        absl::StrCat(Name(), " is not prepared; call PrepareStep before CommitStep"));
  }
  if (sums_.num_nonfinite_rows > 0 && !parameters.allow_nonfinite_rows) {
    return absl::FailedPreconditionError(absl::StrCat(
        sums_.num_nonfinite_rows, " rows of ", Name(),
        " had a NaN or an infinity in their hidden states and were left out of the gradient; abort "
        "the step, or commit it with allow_nonfinite_rows"));
  }
  if (!std::isfinite(prepared_->grad_squared_norm)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the squared gradient of ", Name(), " sums to ", prepared_->grad_squared_norm,
                     ", wanted a finite number: the update would turn weights into NaN; abort the "
                     "step, and look for infinite losses, NaN in the weight and a grad_scale that "
                     "is too large"));
  }
  return std::nullopt;
}

absl::Status Step::StartCommit() {
  absl::MutexLock lock(&mu_);
  if (state_ == StepState::kAborted) return abort_status_;
  if (!failure_.ok()) return failure_;
  committing_ = true;
  return absl::OkStatus();
}

void Step::CommitFailed() {
  absl::MutexLock lock(&mu_);
  committing_ = false;
}

void Step::Commit(const CommitParameters& parameters, const CommittedStep& result) {
  absl::MutexLock lock(&mu_);
  committed_ = {parameters, result};
  state_ = StepState::kCommitted;
}

absl::StatusOr<bool> Step::Abort(const std::string& reason) {
  decltype(streams_) listeners;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    if (state_ == StepState::kAborted) return false;
    if (state_ == StepState::kCommitted || committing_) {
      return absl::FailedPreconditionError(absl::StrCat(
          Name(), state_ == StepState::kCommitted ? " is committed" : " is being committed",
          " and cannot be aborted"));
    }
    state_ = StepState::kAborted;
    abort_status_ = absl::AbortedError(
        absl::StrCat(Name(), " was aborted: ", reason.empty() ? "no reason given" : reason.c_str(),
                     "; begin it again"));
    status = abort_status_;
    listeners.swap(streams_);
  }
  for (const auto& [stream, on_abort] : listeners) {
    if (on_abort) on_abort(status);
  }
  return true;
}

void Step::AwaitNoneInFlight() const {
  const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return num_in_flight_ == 0; };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&none));
}

// --- StepSequence ---

absl::StatusOr<StepSequence::Begun> StepSequence::Begin(uint64_t number,
                                                        std::vector<std::string> workers) {
  if (number == 0) return absl::InvalidArgumentError("got step 0; steps start at 1");
  if (absl::Status status = NormaliseWorkers(&workers); !status.ok()) return status;
  absl::MutexLock lock(&mu_);
  if (open_ != nullptr) {
    if (open_->number() != number) return NotOpen(number);
    if (absl::Status status = open_->failure(); !status.ok()) return status;
    if (open_->workers() != workers) {
      return absl::FailedPreconditionError(
          absl::StrCat(StepName(head_, number), " is open with workers ",
                       JoinNames(open_->workers()), "; got ", JoinNames(workers)));
    }
    return Begun{.step = open_, .already_open = true};
  }
  const uint64_t last = last_number_;
  if (number <= last) {
    return absl::FailedPreconditionError(absl::StrCat("got ", StepName(head_, number),
                                                      ", wanted one greater than ", last,
                                                      ", the last committed one"));
  }
  open_ = std::make_shared<Step>(head_, number, std::move(workers));
  return Begun{.step = open_};
}

absl::Status StepSequence::NotOpen(uint64_t number) const {
  std::string why = open_ != nullptr ? absl::StrCat("step ", open_->number(), " is open")
                                     : std::string("no step is open");
  if (last_aborted_ != nullptr && last_aborted_->number() == number) {
    absl::StrAppend(&why, "; ", last_aborted_->abort_status().message());
  } else if (last_number_ != 0) {
    absl::StrAppend(&why, "; step ", last_number_, " was committed last");
  }
  return absl::FailedPreconditionError(
      absl::StrCat(StepName(head_, number), " is not open: ", why));
}

absl::StatusOr<std::shared_ptr<Step>> StepSequence::FindOpen(uint64_t number) const {
  absl::MutexLock lock(&mu_);
  if (open_ != nullptr && open_->number() == number) return open_;
  return NotOpen(number);
}

absl::StatusOr<std::shared_ptr<Step>> StepSequence::FindOpenOrCommitted(uint64_t number) const {
  absl::MutexLock lock(&mu_);
  for (const auto& step : {open_, last_committed_}) {
    if (step != nullptr && step->number() == number) return step;
  }
  return NotOpen(number);
}

absl::StatusOr<std::shared_ptr<Step>> StepSequence::FindEver(uint64_t number) const {
  absl::MutexLock lock(&mu_);
  for (const auto& step : {open_, last_committed_, last_aborted_}) {
    if (step != nullptr && step->number() == number) return step;
  }
  return NotOpen(number);
}

void StepSequence::Close() {
  absl::MutexLock lock(&mu_);
  std::shared_ptr<Step> step = std::move(open_);
  open_ = nullptr;
  if (step->state() == StepState::kAborted) {
    last_aborted_ = std::move(step);
    return;
  }
  // The number may have been aborted before and begun again.
  if (last_aborted_ != nullptr && last_aborted_->number() == step->number())
    last_aborted_ = nullptr;
  last_number_ = step->number();
  last_committed_ = std::move(step);
}

void StepSequence::Restore(uint64_t number) {
  absl::MutexLock lock(&mu_);
  last_number_ = number;
  last_committed_ = nullptr;
  last_aborted_ = nullptr;
}

std::shared_ptr<Step> StepSequence::open() const {
  absl::MutexLock lock(&mu_);
  return open_;
}

uint64_t StepSequence::last_committed_step() const {
  absl::MutexLock lock(&mu_);
  return last_number_;
}

}  // namespace lmhead
