#include "server/head/head_snapshot.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/head/head.h"

namespace lmhead {
namespace {

// Empty when a snapshot of `saved` can become the state of `here`, else what differs. Schedules,
// batch sizes and what only reserves memory may differ.
std::string SnapshotDifference(const HeadSpec& saved, const HeadSpec& here) {
  const auto differs = [](const char* field, auto got, auto wanted) {
    return absl::StrCat(field, " is ", got, " in the checkpoint and ", wanted, " in the head");
  };
  if (saved.vocab_size != here.vocab_size)
    return differs("vocab_size", saved.vocab_size, here.vocab_size);
  if (saved.hidden_size != here.hidden_size)
    return differs("hidden_size", saved.hidden_size, here.hidden_size);
  if (saved.weight_dtype != here.weight_dtype) {
    return differs("weight_dtype", std::string(DTypeName(saved.weight_dtype)),
                   std::string(DTypeName(here.weight_dtype)));
  }
  if (saved.has_bias != here.has_bias) return differs("has_bias", saved.has_bias, here.has_bias);
  if (saved.trainable != here.trainable)
    return differs("trainable", saved.trainable, here.trainable);
  if (saved.logit_scale != here.logit_scale)
    return differs("logit_scale", saved.logit_scale, here.logit_scale);
  if (saved.softcap != here.softcap) return differs("softcap", saved.softcap, here.softcap);
  if (saved.optimizer.kind != here.optimizer.kind) {
    return differs("optimizer.kind", static_cast<int>(saved.optimizer.kind),
                   static_cast<int>(here.optimizer.kind));
  }
  if ((saved.optimizer.momentum > 0.0) != (here.optimizer.momentum > 0.0)) {
    return differs("optimizer.momentum", saved.optimizer.momentum, here.optimizer.momentum);
  }
  return {};
}

}  // namespace

absl::Status Head::Snapshot(
    absl::FunctionRef<absl::Status(const HeadSnapshot&, TensorReader)> save) {
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (absl::Status status = CheckLoaded(); !status.ok()) return status;
  HeadSnapshot snapshot = {.spec = spec_,
                           .last_committed_step = steps_.last_committed_step(),
                           .last_commit = last_commit_,
                           .num_ranks = environment_.num_ranks};
  absl::Status status = RunOnBackend([&](ComputeBackend& backend) {
    snapshot.num_updates = backend.num_updates();
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return save(snapshot, [this](TensorKind kind, int64_t row_start, MatrixView rows) {
    return RunOnBackend(
        [&](ComputeBackend& backend) { return backend.ReadRows(kind, row_start, rows); });
  });
}

absl::Status Head::Restore(const HeadSnapshot& snapshot,
                           absl::FunctionRef<absl::Status(TensorWriter)> load) {
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (const std::shared_ptr<Step> open = steps_.open(); open != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec_.name, ": step ", open->number(),
                     " is open; a checkpoint is restored between steps, commit or abort it first"));
  }
  if (const std::string difference = SnapshotDifference(snapshot.spec, spec_);
      !difference.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec_.name, ": the checkpoint is of another head: ", difference));
  }
  // Before anything of the head is overwritten.
  if (absl::Status status = CheckState(); !status.ok()) return status;
  absl::Status status = load([this](TensorKind kind, int64_t row_start, ConstMatrixView rows) {
    return RunOnBackend(
        [&](ComputeBackend& backend) { return backend.WriteRows(kind, row_start, rows); });
  });
  if (status.ok()) {
    status = RunOnBackend([&](ComputeBackend& backend) {
      backend.set_num_updates(snapshot.num_updates);
      return backend.CheckState();
    });
  }
  if (!status.ok()) {
    return Poison(absl::Status(
        status.code(), absl::StrCat("a checkpoint was restored in part: ", status.message())));
  }
  steps_.Restore(snapshot.last_committed_step);
  last_commit_ = snapshot.last_commit;
  absl::MutexLock lock(&mu_);
  loaded_rows_.Add(0, spec_.vocab_size);
  return absl::OkStatus();
}

std::optional<CommittedStep> Head::RestoredCommit(uint64_t step, uint64_t incarnation,
                                                  const CommitParameters& parameters) const {
  if (!last_commit_.has_value() || incarnation == environment_.incarnation ||
      last_commit_->incarnation != incarnation || last_commit_->result.step != step ||
      !(last_commit_->parameters == parameters)) {
    return std::nullopt;
  }
  CommittedStep result = last_commit_->result;
  result.repeated = true;
  return result;
}

}  // namespace lmhead
