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
  std::vector<ChunkRows> silent_chunks;
  BatchDone done;
  std::atomic<int32_t> num_pending = 0;
  absl::Mutex mu;
  absl::Status failure ABSL_GUARDED_BY(mu);
  BatchOutput output ABSL_GUARDED_BY(mu);  // Rank 0's.

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
    return absl::Status(status.code(), absl::StrCat("rank ", index, ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status ShardGroup::CheckShards() {
  for (int32_t rank = 0; broken_.ok() && rank < pool_->num_ranks(); ++rank) {
    const uint64_t session = pool_->rank(rank).session();
    if (session == sessions_[rank] || session == 0) continue;
    broken_ = absl::AbortedError(
        absl::StrCat("rank ", rank, " lost its shard of head ", spec_.name,
                     ": its process ended and another one took its place; delete the head, create "
                     "it again, and load its weights or restore a checkpoint"));
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
  const bool broadcast = pool_->broadcast_hidden_states();
  auto batch = std::make_shared<Batch>();
  batch->generation = pool_->generation();
  batch->silent_chunks = WithoutOutputs(input.chunks, broadcast);
  batch->done = std::move(done);
  batch->num_pending = pool_->num_ranks();
  {
    absl::MutexLock lock(&under_way_->mu);
    ++under_way_->num_batches;
  }
  BatchInput of_rank = input;
  of_rank.teacher = nullptr;
  of_rank.broadcast_hidden_states = broadcast;
  const HeadId teacher_id = teacher == nullptr ? 0 : teacher->id_;
  for (int32_t rank = 0; rank < pool_->num_ranks(); ++rank) {
    if (rank == 1) of_rank.chunks = batch->silent_chunks;
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
  } else if (rank == 0) {
    absl::MutexLock lock(&batch->mu);
    batch->output = *std::move(output);
  }
  if (batch->num_pending.fetch_sub(1) != 1) return;
  const std::shared_ptr<UnderWay> under_way = under_way_;
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

absl::StatusOr<double> ShardGroup::GradSquaredNorm() {
  if (absl::Status status = GetReady(); !status.ok()) return status;
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
  if (absl::Status status = GetReady(); !status.ok()) return status;
  absl::Status status = OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    rank.ApplyUpdate(id_, update, std::move(done));
  });
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
  // Of a follower that is away, when it is back: nobody reads them before.
  discard_pending_ = absl::IsUnavailable(status);
  return discard_pending_ ? absl::OkStatus() : status;
}

absl::Status ShardGroup::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                     ConstMatrixView rows) {
  if (absl::Status status = GetReady(); !status.ok()) return status;
  return OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
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

absl::Status ShardGroup::OnRowsOf(
    int64_t row_start, int64_t num_rows,
    absl::FunctionRef<void(Rank& rank, VocabRange rows, Rank::Done done)> call) {
  if (absl::Status status = CheckShards(); !status.ok()) return status;
  if (row_start < 0 || num_rows < 0 || num_rows > spec_.vocab_size - row_start) {
    return absl::InvalidArgumentError(absl::StrCat("head ", spec_.name, ": rows [", row_start, ", ",
                                                   row_start + num_rows, ") are not all in [0, ",
                                                   spec_.vocab_size, ")"));
  }
  return OnAllRanks([&](Rank& rank, int32_t index, Rank::Done done) {
    const VocabRange shard = ShardRange(spec_, pool_->num_ranks(), index);
    const VocabRange rows = {std::max(shard.start, row_start),
                             std::min(shard.stop, row_start + num_rows)};
    if (rows.size() <= 0) return done(absl::OkStatus());
    call(rank, rows, std::move(done));
  });
}

absl::Status ShardGroup::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  const auto* const data = static_cast<const std::byte*>(rows.data);
  const int64_t row_bytes = rows.cols * BytesPerElement(rows.dtype);
  return OnRowsOf(row_start, rows.rows, [&](Rank& rank, VocabRange part, Rank::Done done) {
    ConstMatrixView of_rank = rows;
    of_rank.data = data + (part.start - row_start) * row_bytes;
    of_rank.rows = part.size();
    rank.WriteRows(id_, kind, part.start, of_rank, std::move(done));
  });
}

absl::Status ShardGroup::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  auto* const data = static_cast<std::byte*>(rows.data);
  const int64_t row_bytes = rows.cols * BytesPerElement(rows.dtype);
  return OnRowsOf(row_start, rows.rows, [&](Rank& rank, VocabRange part, Rank::Done done) {
    MatrixView of_rank = rows;
    of_rank.data = data + (part.start - row_start) * row_bytes;
    of_rank.rows = part.size();
    rank.ReadRows(id_, kind, part.start, of_rank, std::move(done));
  });
}

}  // namespace lmhead
