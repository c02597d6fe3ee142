#include "server/compute/shard_group.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "server/compute/tensor_rows.h"

namespace lmhead {
namespace {

// The chunks of a rank that writes no outputs, and with `broadcast` gets the hidden states from
// rank 0.
std::vector<ChunkRows> WithoutOutputs(std::span<const ChunkRows> chunks, bool broadcast) {
  std::vector<ChunkRows> silent(chunks.begin(), chunks.end());
  for (ChunkRows& chunk : silent) {
    chunk.grad_hidden_states = {};
    chunk.token_loss = chunk.logprob = chunk.lse = chunk.entropy = nullptr;
    chunk.argmax = chunk.topk_ids = nullptr;
    chunk.topk_logprobs = nullptr;
    if (!broadcast) continue;
    chunk.hidden_states.data = nullptr;
    chunk.teacher_hidden_states.data = nullptr;
  }
  return silent;
}

}  // namespace

struct ShardGroup::UnderWay {
  absl::Mutex mu;
  int32_t num_batches ABSL_GUARDED_BY(mu) = 0;
};

struct ShardGroup::Batch {
  uint64_t generation = 0;
  int32_t replica = 0;
  int64_t num_tokens = 0;
  std::vector<ChunkRows> silent_chunks;
  BatchDone done;
  std::atomic<int32_t> num_pending = 0;
  absl::Mutex mu;
  absl::Status failure ABSL_GUARDED_BY(mu);
  BatchOutput output ABSL_GUARDED_BY(mu);  // That of the replica's rank 0.

  absl::StatusOr<BatchOutput> Result() {
    absl::MutexLock lock(&mu);
    if (!failure.ok()) return failure;
    return std::move(output);
  }
};

absl::StatusOr<std::unique_ptr<ShardGroup>> ShardGroup::Create(RankPool* pool, const HeadSpec& spec,
                                                               const MemoryPlan& plan) {
  if (absl::Status status = pool->Connect(); !status.ok()) return status;
  std::unique_ptr<ShardGroup> group(new ShardGroup(pool, spec));
  absl::Status status = group->OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    rank.CreateHead(group->id_, spec, plan, std::move(done));
  });
  if (!status.ok()) return status;
  return group;
}

ShardGroup::ShardGroup(RankPool* pool, const HeadSpec& spec)
    : pool_(pool), spec_(spec), id_(pool->AddHead()), under_way_(std::make_shared<UnderWay>()) {
  for (int32_t rank = 0; rank < pool->num_ranks(); ++rank) {
    sessions_.push_back(pool->rank(rank).session());
  }
}

ShardGroup::~ShardGroup() {
  AwaitBatches();
  pool_->RemoveHead(id_);
  OnAllRanks([this](Rank& rank, int32_t index, Rank::Done done) {
    rank.DestroyHead(id_, std::move(done));
  }).IgnoreError();  // A follower that is away drops it when it is back.
}

// --- What every call does ----------------------------------------------------------------------

absl::Status ShardGroup::OnAllRanks(RankCall call) {
  const int32_t num_ranks = pool_->num_ranks();
  std::vector<absl::Status> results(num_ranks);
  absl::BlockingCounter pending(num_ranks);
  for (int32_t index = 0; index < num_ranks; ++index) {
    call(pool_->rank(index), index, [&results, &pending, index](const absl::Status& status) {
      results[index] = status;
      pending.DecrementCount();
    });
  }
  pending.Wait();
  for (int32_t index = 0; index < num_ranks; ++index) {
    const absl::Status& status = results[index];
    if (status.ok()) continue;
    return absl::Status(status.code(), absl::StrCat(pool_->NameOf(index), ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status ShardGroup::OnAllRanksTogether(RankCall call) {
  const uint64_t generation = pool_->generation();
  absl::Status status = OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    call(rank, index,
         [this, generation, index, done = std::move(done)](const absl::Status& result) {
           if (!result.ok()) pool_->Fail(generation, index, result);
           done(result);
         });
  });
  const absl::Status first = pool_->failure();
  return status.ok() || first.ok() ? status : first;
}

absl::Status ShardGroup::CheckShards() {
  for (int32_t rank = 0; broken_.ok() && rank < pool_->num_ranks(); ++rank) {
    const uint64_t session = pool_->rank(rank).session();
    if (session == sessions_[rank] || session == 0) continue;
    broken_ =
        absl::AbortedError(absl::StrCat(pool_->NameOf(rank), " lost its shard of head ", spec_.name,
                                        ": its process ended and another one took its place"));
  }
  return broken_;
}

absl::Status ShardGroup::GetReady() {
  if (absl::Status status = CheckShards(); !status.ok()) return status;
  if (absl::Status status = pool_->Connect(); !status.ok()) return status;
  // Another process may have come in meanwhile.
  if (absl::Status status = CheckShards(); !status.ok()) return status;
  return discard_pending_ ? DiscardGradients() : absl::OkStatus();
}

// --- One batch ---------------------------------------------------------------------------------

void ShardGroup::ComputeBatch(const BatchInput& input, BatchDone done) {
  auto* const teacher = static_cast<ShardGroup*>(input.teacher);
  absl::Status status = teacher == nullptr ? absl::OkStatus() : teacher->CheckShards();
  if (status.ok()) status = GetReady();
  if (!status.ok()) {
    AwaitBatches();  // They have failed as well, and answer first.
    return done(status);
  }
  const int32_t num_ranks = pool_->ranks_per_replica();
  auto batch = std::make_shared<Batch>();
  batch->generation = pool_->generation();
  for (const ChunkRows& chunk : input.chunks) batch->num_tokens += chunk.hidden_states.rows;
  batch->replica = pool_->StartWork(batch->num_tokens);
  const bool broadcast = pool_->broadcast_hidden_states(batch->replica);
  if (num_ranks > 1) batch->silent_chunks = WithoutOutputs(input.chunks, broadcast);
  batch->done = std::move(done);
  batch->num_pending = num_ranks;
  grad_changed_ |= input.mode == BackwardMode::kHiddenAndWeight;
  {
    absl::MutexLock lock(&under_way_->mu);
    ++under_way_->num_batches;
  }
  BatchInput of_rank = input;
  of_rank.teacher = nullptr;
  of_rank.broadcast_hidden_states = broadcast;
  const HeadId teacher_id = teacher == nullptr ? 0 : teacher->id_;
  for (int32_t index = 0; index < num_ranks; ++index) {
    if (index == 1) of_rank.chunks = batch->silent_chunks;
    const int32_t rank = batch->replica * num_ranks + index;
    pool_->rank(rank).ComputeBatch(id_, teacher_id, of_rank,
                                   [this, batch, rank](absl::StatusOr<BatchOutput> output) {
                                     FinishRank(batch, rank, std::move(output));
                                   });
  }
}

void ShardGroup::FinishRank(const std::shared_ptr<Batch>& batch, int32_t rank,
                            absl::StatusOr<BatchOutput> output) {
  if (!output.ok()) {
    // The others may wait for this rank. The pool knows who failed first.
    pool_->Fail(batch->generation, rank, output.status());
    const absl::Status first = pool_->failure();
    absl::MutexLock lock(&batch->mu);
    if (batch->failure.ok()) batch->failure = first.ok() ? output.status() : first;
  } else if (rank % pool_->ranks_per_replica() == 0) {
    absl::MutexLock lock(&batch->mu);
    batch->output = *std::move(output);
  }
  if (batch->num_pending.fetch_sub(1) != 1) return;
  const std::shared_ptr<UnderWay> under_way = under_way_;
  pool_->FinishWork(batch->replica, batch->num_tokens);
  batch->done(batch->Result());
  absl::MutexLock lock(&under_way->mu);
  --under_way->num_batches;
}

void ShardGroup::AwaitBatches() {
  absl::MutexLock lock(&under_way_->mu);
  under_way_->mu.Await(absl::Condition(
      +[](int32_t* num_batches) { return *num_batches == 0; }, &under_way_->num_batches));
}

// --- The step ----------------------------------------------------------------------------------

absl::Status ShardGroup::ReduceGradients() {
  if (absl::Status status = GetReady(); !status.ok()) return status;
  if (!grad_broken_.ok()) return grad_broken_;
  if (pool_->num_replicas() == 1 || !grad_changed_) return absl::OkStatus();
  grad_broken_ = OnAllRanksTogether([this](Rank& rank, int32_t index, Rank::Done done) {
    rank.ReduceGradients(id_, std::move(done));
  });
  grad_changed_ = !grad_broken_.ok();
  return grad_broken_;
}

absl::StatusOr<double> ShardGroup::GradSquaredNorm() {
  if (absl::Status status = ReduceGradients(); !status.ok()) return status;
  std::vector<double> sums(pool_->num_ranks());
  absl::Status status = OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    rank.GradSquaredNorm(id_, [&sums, index, done = std::move(done)](absl::StatusOr<double> sum) {
      if (sum.ok()) sums[index] = *sum;
      done(sum.status());
    });
  });
  if (!status.ok()) return status;
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

absl::Status ShardGroup::ApplyUpdate(const OptimizerUpdate& update) {
  if (absl::Status status = ReduceGradients(); !status.ok()) return status;
  const auto apply = [&](Rank& rank, int32_t index, Rank::Done done) {
    rank.ApplyUpdate(id_, update, std::move(done));
  };
  absl::Status status = pool_->num_replicas() > 1 ? OnAllRanksTogether(apply) : OnAllRanks(apply);
  if (status.ok()) {
    ++num_updates_;
  } else {
    broken_ =
        absl::AbortedError(absl::StrCat("the ranks' weights differ since an update that not "
                                        "all of them did: ",
                                        status.message()));
  }
  return status.ok() ? status : broken_;
}

absl::Status ShardGroup::DiscardGradients() {
  if (absl::Status status = CheckShards(); !status.ok()) return status;
  absl::Status status = OnAllRanks([this](Rank& rank, int32_t index, Rank::Done done) {
    rank.DiscardGradients(id_, std::move(done));
  });
  grad_changed_ = false;
  if (status.ok() || absl::IsUnavailable(status)) grad_broken_ = absl::OkStatus();
  // Of a follower that is away, when it is back: nobody reads them before.
  discard_pending_ = absl::IsUnavailable(status);
  return discard_pending_ ? absl::OkStatus() : status;
}

absl::Status ShardGroup::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                     ConstMatrixView rows) {
  if (absl::Status status = GetReady(); !status.ok()) return status;
  grad_changed_ = true;
  return OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    if (index >= pool_->ranks_per_replica()) return done(absl::OkStatus());
    rank.AddGradRows(id_, row_ids, row_start, rows, std::move(done));
  });
}

void ShardGroup::set_num_updates(int64_t num_updates) {
  num_updates_ = num_updates;
  absl::Status status = CheckShards();
  if (!status.ok()) return;
  status = OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    rank.SetNumUpdates(id_, num_updates, std::move(done));
  });
  if (!status.ok()) {
    broken_ = absl::AbortedError(
        absl::StrCat("the ranks' numbers of updates differ: ", status.message()));
  }
}

// --- Rows --------------------------------------------------------------------------------------

VocabRange ShardGroup::RowsHeldBy(Holder holder, int32_t rank) const {
  const int32_t num_ranks = pool_->ranks_per_replica();
  const int32_t replica = rank / num_ranks;
  const VocabRange shard = ShardRange(spec_, num_ranks, rank % num_ranks);
  if (holder == Holder::kOwner) return OwnedRange(shard, pool_->num_replicas(), replica);
  return holder == Holder::kFirstReplica && replica > 0 ? VocabRange() : shard;
}

absl::Status ShardGroup::OnRowsOf(
    Holder holder, int64_t row_start, int64_t num_rows,
    absl::FunctionRef<void(int32_t rank, VocabRange rows, Rank::Done done)> call) {
  if (absl::Status status = CheckShards(); !status.ok()) return status;
  if (row_start < 0 || num_rows < 0 || num_rows > spec_.vocab_size - row_start) {
    return absl::InvalidArgumentError(absl::StrCat("head ", spec_.name, ": rows [", row_start, ", ",
                                                   row_start + num_rows, ") are not all in [0, ",
                                                   spec_.vocab_size, ")"));
  }
  return OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    const VocabRange rows =
        Intersection(RowsHeldBy(holder, index), {row_start, row_start + num_rows});
    if (rows.size() == 0) return done(absl::OkStatus());
    call(index, rows, std::move(done));
  });
}

absl::Status ShardGroup::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  const Holder holder = IsMoment(kind) ? Holder::kOwner : Holder::kEveryReplica;
  return OnRowsOf(holder, row_start, rows.rows,
                  [&](int32_t rank, VocabRange part, Rank::Done done) {
                    pool_->rank(rank).WriteRows(id_, kind, part.start,
                                                PartOf(rows, part.start - row_start, part.size()),
                                                std::move(done));
                  });
}

absl::Status ShardGroup::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  if (IsGradient(kind)) return ReadGradRows(kind, row_start, rows);
  const bool owned = IsMoment(kind) || kind == TensorKind::kMasterWeight;
  return ReadRowsFrom(owned ? Holder::kOwner : Holder::kFirstReplica, kind, row_start, rows);
}

absl::Status ShardGroup::ReadRowsFrom(Holder holder, TensorKind kind, int64_t row_start,
                                      MatrixView rows) {
  return OnRowsOf(holder, row_start, rows.rows,
                  [&](int32_t rank, VocabRange part, Rank::Done done) {
                    pool_->rank(rank).ReadRows(id_, kind, part.start,
                                               PartOf(rows, part.start - row_start, part.size()),
                                               std::move(done));
                  });
}

// Whether they have been reduced or not: the sum over the replicas, in their order.
absl::Status ShardGroup::ReadGradRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  if (!grad_broken_.ok()) return grad_broken_;
  if (pool_->num_replicas() == 1) {
    return ReadRowsFrom(Holder::kFirstReplica, kind, row_start, rows);
  }
  const int64_t num_elements = rows.rows * rows.cols;  // Float32: the ranks take no other dtype.
  std::vector<float> parts(static_cast<size_t>(num_elements * pool_->num_replicas()));
  const auto rows_of = [&](int32_t replica) {
    return MatrixView{parts.data() + num_elements * replica, rows.rows, rows.cols, rows.dtype};
  };
  absl::Status status =
      OnRowsOf(Holder::kEveryReplica, row_start, rows.rows,
               [&](int32_t rank, VocabRange part, Rank::Done done) {
                 const MatrixView of_replica = rows_of(rank / pool_->ranks_per_replica());
                 pool_->rank(rank).ReadRows(id_, kind, part.start,
                                            PartOf(of_replica, part.start - row_start, part.size()),
                                            std::move(done));
               });
  if (!status.ok()) return status;
  auto* const sums = static_cast<float*>(rows.data);
  for (int64_t i = 0; i < num_elements; ++i) {
    float sum = 0.0f;
    for (int32_t replica = 0; replica < pool_->num_replicas(); ++replica) {
      sum += parts[replica * num_elements + i];
    }
    sums[i] = sum;
  }
  return absl::OkStatus();
}

}  // namespace lmhead
