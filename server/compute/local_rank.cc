#include "server/compute/local_rank.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/compute/rendezvous.h"

namespace lmhead {
namespace {

uint64_t RandomSession() {
  std::random_device random;
  const uint64_t id = (uint64_t{random()} << 32) | random();
  return id == 0 ? 1 : id;
}

RankContext ContextOf(const LocalRank::Collectives& collectives) {
  RankContext context = {.collective = collectives.shards.get(), .peers = collectives.peers.get()};
  if (context.collective != nullptr) {
    context.rank = context.collective->rank();
    context.num_ranks = context.collective->size();
  }
  if (context.peers != nullptr) {
    context.replica = context.peers->rank();
    context.num_replicas = context.peers->size();
  }
  return context;
}

}  // namespace

LocalRank::LocalRank(Collectives collectives, RankBackendFactory make_backend)
    : collectives_(std::move(collectives)),
      context_(ContextOf(collectives_)),
      make_backend_(std::move(make_backend)),
      session_(RandomSession()),
      thread_([this] { Loop(); }) {}

LocalRank::~LocalRank() {
  Abort(absl::CancelledError("the rank ends"));
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void LocalRank::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopping_ || !queue_.empty();
      };
      mu_.Await(absl::Condition(&ready));
      if (queue_.empty()) break;
      work = std::move(queue_.front());
      queue_.pop();
    }
    work();
  }
  heads_.clear();  // Backends end on the thread they lived on.
}

void LocalRank::Post(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  queue_.push(std::move(work));
}

absl::StatusOr<ComputeBackend*> LocalRank::Find(HeadId head) const {
  const auto found = heads_.find(head);
  if (found != heads_.end()) return found->second.get();
  return absl::NotFoundError(absl::StrCat("it has no shard of head number ", head));
}

void LocalRank::PostCall(HeadId head, std::function<absl::Status(ComputeBackend&)> call,
                         Done done) {
  Post([this, head, call = std::move(call), done = std::move(done)] {
    absl::StatusOr<ComputeBackend*> backend = Find(head);
    done(backend.ok() ? call(**backend) : backend.status());
  });
}

void LocalRank::Connect(uint64_t generation, RendezvousStore* store, Done done) {
  Post([this, store, done = std::move(done)] { done(ConnectAll(store)); });
}

absl::Status LocalRank::ConnectAll(RendezvousStore* store) {
  if (context_.collective != nullptr) {
    PrefixedStore of_replica(store, absl::StrCat("replica_", context_.replica, "/"));
    absl::Status status = context_.collective->Connect(&of_replica);
    if (!status.ok()) return status;
  }
  if (context_.peers == nullptr) return absl::OkStatus();
  PrefixedStore of_peers(store, absl::StrCat("peers_", context_.rank, "/"));
  return context_.peers->Connect(&of_peers);
}

void LocalRank::Abort(const absl::Status& reason) {
  if (context_.collective != nullptr) context_.collective->Abort(reason);
  if (context_.peers != nullptr) context_.peers->Abort(reason);
}

void LocalRank::CreateHead(HeadId head, const HeadSpec& spec, const MemoryPlan& plan, Done done) {
  Post([this, head, spec, plan, done = std::move(done)] {
    absl::StatusOr<std::unique_ptr<ComputeBackend>> backend = make_backend_(spec, plan, context_);
    const absl::Status status = backend.status();
    if (backend.ok()) heads_[head] = *std::move(backend);
    done(status);
  });
}

void LocalRank::DestroyHead(HeadId head, Done done) {
  Post([this, head, done = std::move(done)] {
    heads_.erase(head);
    done(absl::OkStatus());
  });
}

void LocalRank::KeepHeads(std::span<const HeadId> keep) {
  absl::Notification finished;
  Post([&] {
    for (auto it = heads_.begin(); it != heads_.end();) {
      const bool kept = std::find(keep.begin(), keep.end(), it->first) != keep.end();
      it = kept ? std::next(it) : heads_.erase(it);
    }
    finished.Notify();
  });
  finished.WaitForNotification();
}

void LocalRank::ComputeBatch(HeadId head, HeadId teacher, const BatchInput& input,
                             ComputeBackend::BatchDone done) {
  ComputeBatchAfter([] { return absl::OkStatus(); }, head, teacher, input, std::move(done));
}

void LocalRank::ComputeBatchAfter(std::function<absl::Status()> wait, HeadId head, HeadId teacher,
                                  const BatchInput& input, ComputeBackend::BatchDone done) {
  Post([this, wait = std::move(wait), head, teacher, batch = input,
        done = std::move(done)]() mutable {
    if (absl::Status status = wait(); !status.ok()) return done(status);
    absl::StatusOr<ComputeBackend*> backend = Find(head);
    if (!backend.ok()) return done(backend.status());
    if (teacher != 0) {
      absl::StatusOr<ComputeBackend*> found = Find(teacher);
      if (!found.ok()) return done(found.status());
      batch.teacher = *found;
    }
    (*backend)->ComputeBatch(batch, std::move(done));
  });
}

void LocalRank::ReduceGradients(HeadId head, Done done) {
  PostCall(
      head, [](ComputeBackend& backend) { return backend.ReduceGradients(); }, std::move(done));
}

void LocalRank::GradSquaredNorm(HeadId head, SumDone done) {
  Post([this, head, done = std::move(done)] {
    absl::StatusOr<ComputeBackend*> backend = Find(head);
    done(backend.ok() ? (*backend)->GradSquaredNorm() : backend.status());
  });
}

void LocalRank::ApplyUpdate(HeadId head, const OptimizerUpdate& update, Done done) {
  PostCall(
      head, [update](ComputeBackend& backend) { return backend.ApplyUpdate(update); },
      std::move(done));
}

void LocalRank::DiscardGradients(HeadId head, Done done) {
  PostCall(
      head, [](ComputeBackend& backend) { return backend.DiscardGradients(); }, std::move(done));
}

void LocalRank::AddGradRows(HeadId head, std::span<const int32_t> row_ids, int64_t row_start,
                            ConstMatrixView rows, Done done) {
  PostCall(
      head,
      [row_ids, row_start, rows](ComputeBackend& backend) {
        return backend.AddGradRows(row_ids, row_start, rows);
      },
      std::move(done));
}

void LocalRank::WriteRows(HeadId head, TensorKind kind, int64_t row_start, ConstMatrixView rows,
                          Done done) {
  PostCall(
      head,
      [kind, row_start, rows](ComputeBackend& backend) {
        return backend.WriteRows(kind, row_start, rows);
      },
      std::move(done));
}

void LocalRank::ReadRows(HeadId head, TensorKind kind, int64_t row_start, MatrixView rows,
                         Done done) {
  PostCall(
      head,
      [kind, row_start, rows](ComputeBackend& backend) {
        return backend.ReadRows(kind, row_start, rows);
      },
      std::move(done));
}

void LocalRank::SetNumUpdates(HeadId head, int64_t num_updates, Done done) {
  PostCall(
      head,
      [num_updates](ComputeBackend& backend) {
        backend.set_num_updates(num_updates);
        return absl::OkStatus();
      },
      std::move(done));
}

}  // namespace lmhead
