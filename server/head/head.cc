#include "server/head/head.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

const char* TensorName(TensorKind kind) {
  switch (kind) {
    case TensorKind::kWeight:
      return "weight";
    case TensorKind::kBias:
      return "bias";
    case TensorKind::kGradWeight:
      return "grad_weight";
    case TensorKind::kGradBias:
      return "grad_bias";
    case TensorKind::kMasterWeight:
      return "master_weight";
    case TensorKind::kWeightExpAvg:
      return "exp_avg of the weight";
    case TensorKind::kWeightExpAvgSq:
      return "exp_avg_sq of the weight";
    case TensorKind::kBiasExpAvg:
      return "exp_avg of the bias";
    case TensorKind::kBiasExpAvgSq:
      return "exp_avg_sq of the bias";
  }
  return "unknown tensor";
}

absl::Status CheckCommitParameters(const CommitParameters& parameters, bool trainable) {
  if (!std::isfinite(parameters.learning_rate) || parameters.learning_rate < 0.0) {
    return absl::InvalidArgumentError(absl::StrCat("learning_rate is ", parameters.learning_rate,
                                                   ", wanted a finite number of at least 0"));
  }
  const double multiplier = parameters.grad_multiplier;
  if (!std::isfinite(multiplier) || (trainable && multiplier == 0.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("grad_multiplier is ", multiplier, ", wanted a finite number other than 0"));
  }
  return absl::OkStatus();
}

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

}  // namespace

absl::StatusOr<std::shared_ptr<Head>> Head::Create(HeadSpec spec, const MemoryPlan& plan,
                                                   const BackendFactory& make_backend,
                                                   const HeadEnvironment& environment) {
  spec.batch_tokens = plan.batch_tokens;
  std::shared_ptr<Head> head(new Head(std::move(spec), plan, environment));
  absl::Status status;
  environment.executor->Run([&] {
    absl::StatusOr<std::unique_ptr<ComputeBackend>> backend = make_backend(head->spec_, plan);
    status = backend.status();
    if (backend.ok()) head->backend_ = *std::move(backend);
  });
  if (!status.ok()) return status;
  return head;
}

Head::Head(HeadSpec spec, const MemoryPlan& plan, const HeadEnvironment& environment)
    : spec_(std::move(spec)),
      plan_(plan),
      environment_(environment),
      steps_(spec_.name),
      pairing_(absl::StrCat("head ", spec_.name), environment_.pair_timeout),
      loaded_rows_(spec_.vocab_size) {
  if (spec_.weight_init.kind != WeightInitKind::kNone) loaded_rows_.Add(0, spec_.vocab_size);
}

Head::~Head() { Close(); }

HeadStatus Head::Status() const {
  const std::shared_ptr<Step> open = steps_.open();
  HeadStatus status = {.spec = spec_,
                       .plan = plan_,
                       .last_committed_step = steps_.last_committed_step(),
                       .open_step = open == nullptr ? 0 : open->number()};
  absl::MutexLock lock(&mu_);
  status.weights_loaded = loaded_rows_.IsFull();
  status.poisoned_by = std::string(poisoned_.message());
  status.last_step_tokens = last_step_tokens_;
  return status;
}

// --- What every call checks ---

absl::Status Head::CheckUsableLocked() const {
  if (closed_) return absl::NotFoundError(absl::StrCat("head ", spec_.name, " was deleted"));
  return poisoned_;
}

absl::Status Head::CheckUsable() const {
  absl::MutexLock lock(&mu_);
  return CheckUsableLocked();
}

absl::Status Head::CheckIncarnation(uint64_t incarnation) const {
  if (incarnation == environment_.incarnation) return absl::OkStatus();
  if (incarnation == 0) {
    return absl::InvalidArgumentError(
        "incarnation is 0, wanted the one that BeginStep answered for this step");
  }
  return absl::FailedPreconditionError(
      absl::StrCat("incarnation ", incarnation, " is not this server's (", environment_.incarnation,
                   "): the server was restarted, begin the step again"));
}

absl::Status Head::CheckLoaded() const {
  absl::MutexLock lock(&mu_);
  const int64_t missing = loaded_rows_.FirstMissing();
  if (missing == spec_.vocab_size) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("weight of head ", spec_.name, ": row ", missing, " of ", spec_.vocab_size,
                   " has not been loaded; load it by LoadWeights"));
}

absl::Status Head::Poison(const absl::Status& error) {
  absl::MutexLock lock(&mu_);
  if (poisoned_.ok()) {
    poisoned_ = absl::AbortedError(
        absl::StrCat("head ", spec_.name, " is poisoned: ", error.message(),
                     "; restore a checkpoint (RestoreCheckpoint), or delete and create it again"));
  }
  return poisoned_;
}

// --- The way to the backend ---

absl::Status Head::SubmitTask(ChunkTask task, Head* teacher) {
  if (teacher == nullptr) return QueueTask(std::move(task));
  absl::StatusOr<ComputeBackend*> backend = teacher->LendBackend();
  if (!backend.ok()) return backend.status();
  task.teacher = *backend;
  absl::Status status = QueueTask(std::move(task));
  teacher->ReturnBackend();
  return status;
}

absl::Status Head::QueueTask(ChunkTask task) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckUsableLocked(); !status.ok()) return status;
  task.backend = backend_.get();
  environment_.executor->Submit(std::move(task));
  return absl::OkStatus();
}

absl::Status Head::RunOnBackend(absl::FunctionRef<absl::Status(ComputeBackend&)> work) {
  absl::Status status;
  environment_.executor->Run([&] { status = work(*backend_); });
  return status;
}

absl::Status Head::CheckState() {
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  absl::Status status;
  environment_.executor->Run([&] { status = CheckStateOnExecutor(); });
  return status;
}

absl::Status Head::CheckStateOnExecutor() {
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  absl::Status status = backend_->CheckState();
  return absl::IsAborted(status) ? Poison(status) : status;
}

void Head::BookResult(Step* step, const std::string& worker, const ComputedChunk& chunk) {
  if (step != nullptr && !chunk.duplicate) {
    step->ChunkAccumulated(worker, chunk.chunk_index, chunk.sums);
  }
  Metrics& metrics = *environment_.metrics;
  metrics.CountChunk(chunk.duplicate ? ChunkOutcome::kDuplicate : ChunkOutcome::kAccepted);
  metrics.AddTokens(chunk.sums.num_tokens, chunk.sums.num_valid_tokens);
  metrics.AddNonfiniteRows(chunk.sums.num_nonfinite_rows);
  metrics.ObserveStage(ChunkStage::kQueue, chunk.timings.queue_seconds);
  metrics.ObserveStage(ChunkStage::kUpload, chunk.timings.upload_seconds);
  metrics.ObserveStage(ChunkStage::kCompute, chunk.timings.compute_seconds);
  metrics.ObserveStage(ChunkStage::kDownload, chunk.timings.download_seconds);
}

void Head::BookFailure(Step* step, const std::string& worker, const ComputedChunk& chunk,
                       const absl::Status& error) {
  environment_.metrics->CountChunk(ChunkOutcome::kFailed);
  if (step != nullptr && !chunk.duplicate) step->ChunkFailed(worker, chunk.chunk_index, error);
  discard_needed_.store(true);
  if (const std::shared_ptr<Step> open = steps_.open(); open != nullptr) open->Poison(error);
}

// --- Steps ---

absl::StatusOr<Head::BegunStep> Head::BeginStep(uint64_t step, std::vector<std::string> workers,
                                                uint64_t incarnation) {
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (incarnation != 0) {
    if (absl::Status status = CheckIncarnation(incarnation); !status.ok()) return status;
  }
  if (absl::Status status = CheckLoaded(); !status.ok()) return status;
  absl::StatusOr<StepSequence::Begun> begun = steps_.Begin(step, std::move(workers));
  if (!begun.ok()) return begun.status();
  if (!begun->already_open) {
    environment_.account->ResetStepPeaks();
    for (MemoryAccount* account : environment_.other_accounts) account->ResetStepPeaks();
    // A batch of an evaluation may have failed between two steps.
    if (discard_needed_.load()) {
      if (absl::Status status = DiscardGradients(); !status.ok()) return status;
    }
  }
  return BegunStep{.incarnation = environment_.incarnation, .already_open = begun->already_open};
}

absl::StatusOr<PreparedStep> Head::PrepareStep(uint64_t number, uint64_t incarnation,
                                               absl::Time deadline,
                                               absl::FunctionRef<bool()> cancelled) {
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (absl::Status status = CheckIncarnation(incarnation); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Step>> found = steps_.FindOpenOrCommitted(number);
  if (!found.ok()) return found.status();
  Step& step = **found;
  step.NoteCall();
  if (absl::Status status = step.AwaitComplete(deadline, cancelled); !status.ok()) return status;
  step.NoteCall();

  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (const std::optional<PreparedStep> stored = step.prepared()) {
    // Of a step that was aborted since, the abort is the answer.
    absl::Status status = step.AwaitComplete(absl::InfinitePast(), cancelled);
    if (!status.ok()) return status;
    return *stored;
  }
  if (absl::Status status = step.AwaitComplete(absl::InfinitePast(), cancelled); !status.ok()) {
    return status;
  }
  double grad_squared_norm = 0.0;
  if (spec_.trainable) {
    absl::Status status = RunOnBackend([&](ComputeBackend& backend) {
      absl::StatusOr<double> norm = backend.GradSquaredNorm();
      if (norm.ok()) grad_squared_norm = *norm;
      return norm.status();
    });
    if (!status.ok()) {
      step.Poison(status);
      return step.failure();
    }
  }
  return step.Prepare(grad_squared_norm);
}

absl::StatusOr<CommittedStep> Head::CommitStep(uint64_t number, uint64_t incarnation,
                                               const CommitParameters& parameters) {
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (auto restored = RestoredCommit(number, incarnation, parameters)) return *restored;
  if (absl::Status status = CheckIncarnation(incarnation); !status.ok()) return status;
  if (absl::Status status = CheckCommitParameters(parameters, spec_.trainable); !status.ok()) {
    return status;
  }
  absl::StatusOr<std::shared_ptr<Step>> found = steps_.FindOpenOrCommitted(number);
  if (!found.ok()) return found.status();
  absl::StatusOr<std::optional<CommittedStep>> stored = (*found)->CheckCommit(parameters);
  if (!stored.ok()) return stored.status();
  if (stored->has_value()) return **stored;
  return ApplyCommit(**found, parameters);
}

absl::StatusOr<CommittedStep> Head::ApplyCommit(Step& step, const CommitParameters& parameters) {
  CommittedStep result = {.step = step.number()};
  if (!spec_.trainable) {
    if (absl::Status status = step.StartCommit(); !status.ok()) return status;
  } else {
    absl::Status started;
    absl::Status status = RunOnBackend([&](ComputeBackend& backend) {
      // Here, where every batch before it has been booked.
      started = step.StartCommit();
      if (!started.ok()) return started;
      absl::Status applied = backend.ApplyUpdate({.learning_rate = parameters.learning_rate,
                                                  .grad_multiplier = parameters.grad_multiplier});
      result.num_updates = static_cast<uint64_t>(backend.num_updates());
      return applied;
    });
    if (!started.ok()) return started;
    if (!status.ok()) {
      step.CommitFailed();
      return Poison(absl::Status(status.code(), absl::StrCat("the update of step ", step.number(),
                                                             " failed: ", status.message())));
    }
    result.grad_norm =
        std::sqrt(step.prepared()->grad_squared_norm) * std::abs(parameters.grad_multiplier);
  }
  step.Commit(parameters, result);
  last_commit_ = {
      .incarnation = environment_.incarnation, .parameters = parameters, .result = result};
  steps_.Close();
  environment_.metrics->CountStep(StepOutcome::kCommitted, SecondsSince(step.begun_at()));
  absl::MutexLock lock(&mu_);
  last_step_tokens_ = step.prepared()->sums.num_tokens;
  return result;
}

absl::StatusOr<bool> Head::AbortStep(uint64_t number, uint64_t incarnation,
                                     const std::string& reason) {
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (absl::Status status = CheckIncarnation(incarnation); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Step>> found = steps_.FindEver(number);
  if (!found.ok()) return found.status();
  return AbortAndDiscard(**found, reason);
}

absl::StatusOr<bool> Head::AbortAndDiscard(Step& step, const std::string& reason) {
  absl::StatusOr<bool> aborted = step.Abort(reason);
  if (!aborted.ok() || !*aborted) return aborted;
  step.AwaitNoneInFlight();
  if (absl::Status status = DiscardGradients(); !status.ok()) return status;
  environment_.metrics->CountStep(StepOutcome::kAborted, SecondsSince(step.begun_at()));
  steps_.Close();
  return true;
}

absl::Status Head::DiscardGradients() {
  discard_needed_.store(false);
  if (!spec_.trainable) return absl::OkStatus();
  absl::Status status =
      RunOnBackend([](ComputeBackend& backend) { return backend.DiscardGradients(); });
  if (status.ok()) return status;
  return Poison(absl::Status(
      status.code(), absl::StrCat("its gradient could not be discarded: ", status.message())));
}

std::optional<std::string> Head::AbortOverdueStep(absl::Time now, const StepLimits& limits) {
  const std::shared_ptr<Step> step = steps_.open();
  if (step == nullptr) return std::nullopt;
  const std::optional<std::string> reason = step->Overdue(now, limits);
  if (!reason.has_value()) return std::nullopt;
  const absl::StatusOr<bool> aborted = AbortStep(step->number(), environment_.incarnation, *reason);
  if (!aborted.ok() || !*aborted) return std::nullopt;  // Committed, aborted or closed meanwhile.
  return absl::StrCat("step ", step->number(), ": ", *reason);
}

uint64_t Head::AbandonStep(const std::string& reason) {
  const std::shared_ptr<Step> step = steps_.open();
  if (step == nullptr) return 0;
  const absl::StatusOr<bool> aborted = step->Abort(reason);
  if (!aborted.ok() || !*aborted) return 0;
  environment_.metrics->CountStep(StepOutcome::kAborted, SecondsSince(step->begun_at()));
  return step->number();
}

std::vector<std::string> Head::WorkersOf(uint64_t number) const {
  const absl::StatusOr<std::shared_ptr<Step>> step = steps_.FindEver(number);
  return step.ok() ? (*step)->workers() : std::vector<std::string>();
}

// --- Weights ---

absl::StatusOr<TensorShape> Head::ShapeOf(TensorKind kind) const {
  const bool is_bias = kind == TensorKind::kBias || kind == TensorKind::kGradBias;
  const bool is_training_state = kind == TensorKind::kGradWeight || kind == TensorKind::kGradBias ||
                                 kind == TensorKind::kMasterWeight;
  if ((is_bias && !spec_.has_bias) || (is_training_state && !spec_.trainable)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "head ", spec_.name, " has no ", TensorName(kind), ": it ",
        is_bias && !spec_.has_bias ? "was created without a bias" : "is not trainable"));
  }
  return TensorShape{.rows = spec_.vocab_size,
                     .cols = is_bias ? 1 : spec_.hidden_size,
                     .dtype = kind == TensorKind::kWeight ? spec_.weight_dtype : DType::kFloat32};
}

absl::Status Head::CheckTensorRange(TensorKind kind, int64_t row_start, int64_t num_rows) const {
  absl::StatusOr<TensorShape> shape = ShapeOf(kind);
  if (!shape.ok()) return shape.status();
  if (row_start >= 0 && num_rows >= 1 && num_rows <= shape->rows &&
      row_start <= shape->rows - num_rows) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(TensorName(kind), " of head ", spec_.name, ": got ", num_rows, " rows from row ",
                   row_start, ", wanted at least one within its ", shape->rows, " rows"));
}

absl::Status Head::WriteRows(TensorKind kind, int64_t row_start, int64_t num_rows, DType dtype,
                             std::string_view data) {
  if (kind != TensorKind::kWeight && kind != TensorKind::kBias) {
    return absl::InvalidArgumentError(
        absl::StrCat(TensorName(kind), " of head ", spec_.name, " is read only"));
  }
  if (absl::Status status = CheckTensorRange(kind, row_start, num_rows); !status.ok())
    return status;
  if (kind == TensorKind::kBias && dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat("bias of head ", spec_.name, ": got ",
                                                   std::string(DTypeName(dtype)),
                                                   " rows, wanted float32"));
  }
  const ConstMatrixView rows = {data.data(), num_rows, ShapeOf(kind)->cols, dtype};
  if (static_cast<int64_t>(data.size()) != rows.size_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat(TensorName(kind), " of head ", spec_.name, ": rows from ", row_start,
                     " on have ", data.size(), " bytes, wanted ", rows.size_bytes(), ": ", num_rows,
                     " rows of ", rows.cols, " ", std::string(DTypeName(dtype)), " elements"));
  }
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (const std::shared_ptr<Step> open = steps_.open(); open != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec_.name, ": step ", open->number(),
                     " is open; weights are loaded between steps, commit or abort it first"));
  }
  absl::Status status = RunOnBackend(
      [&](ComputeBackend& backend) { return backend.WriteRows(kind, row_start, rows); });
  if (status.ok() && kind == TensorKind::kWeight) {
    absl::MutexLock lock(&mu_);
    loaded_rows_.Add(row_start, row_start + num_rows);
  }
  return status;
}

absl::Status Head::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  if (absl::Status status = CheckTensorRange(kind, row_start, rows.rows); !status.ok())
    return status;
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  const bool is_gradient = kind == TensorKind::kGradWeight || kind == TensorKind::kGradBias;
  if (is_gradient && steps_.open() == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        TensorName(kind), " of head ", spec_.name, ": no step is open, so there is no gradient"));
  }
  return RunOnBackend(
      [&](ComputeBackend& backend) { return backend.ReadRows(kind, row_start, rows); });
}

void Head::Close() {
  absl::MutexLock control(&control_mu_);
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    teaching_over_ = true;
    const auto none_lent = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return num_lent_ == 0; };
    mu_.Await(absl::Condition(&none_lent));
  }
  if (const std::shared_ptr<Step> open = steps_.open(); open != nullptr) {
    // Also counts the step; what becomes of the gradient does not matter any more.
    if (absl::StatusOr<bool> aborted = open->Abort("the head was deleted");
        aborted.ok() && *aborted) {
      environment_.metrics->CountStep(StepOutcome::kAborted, SecondsSince(open->begun_at()));
      steps_.Close();
    }
  }
  environment_.executor->Run([this] { backend_.reset(); });
}

}  // namespace lmhead
