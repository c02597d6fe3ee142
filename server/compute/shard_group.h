// A head whose vocabulary rows are split over the ranks of a pool, and that may be there in several
// replicas: one ComputeBackend made of the ranks'.
//
// The ranks of a replica get every call in the same order. The same rank code runs whether a rank
// is a thread here or a follower process:
//   * ComputeBatch: goes to one replica, the one with the least to do. Each of its ranks computes
//     the whole batch on its rows, BatchInput.outputs is the same for all. Its rank 0 alone has
//     output pointers in its chunks, writes the outputs and answers the sums; the others' pointers
//     and grad_hidden_states are null. With broadcast_hidden_states rank 0 alone has hidden states,
//     too. The teacher of a rank is that rank's backend of the teacher's group.
//   * GradSquaredNorm: each rank answers the sum over the rows that it owns, the group adds them.
//     With replicas, each has the gradient of its batches: the sum over the replicas is the head's.
//     ReduceGradients() brings it to the owners of the rows, here and in ApplyUpdate() whenever
//     gradients have been added since.
//   * ReadRows, WriteRows: each range is cut by ShardRange(); a rank gets rows of its own range
//   alone.
//   * AddGradRows: every rank of replica 0 gets all rows and leaves out those of the others.
//   * WriteRows, ReadRows: weights are written to all replicas and read from the first, what only
//     the owner of a row has goes there and comes from there, gradients are added up.
// A rank that fails in a batch ends the collective for all (RankPool::Fail), so that none waits for
// it; the error of the batches under way names it. The next call connects the ranks anew. What
// nothing mends (an update that some ranks did and others did not, a shard that went with its
// follower) is answered, ABORTED, by every call that follows.

#ifndef LMHEAD_SERVER_COMPUTE_SHARD_GROUP_H_
#define LMHEAD_SERVER_COMPUTE_SHARD_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/head_spec.h"
#include "proto/types/vocab_range.h"
#include "server/compute/backend.h"
#include "server/compute/rank_pool.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

class ShardGroup final : public ComputeBackend {
 public:
  // Connects the pool if need be and makes the head's shard on every rank; a rank that has no room
  // fails it, named, and the shards of the others go again. `pool` must outlive the group.
  // REQUIRES: spec is validated; plan is spec's plan for the pool's ranks_per_replica() ranks and
  //     num_replicas() replicas.
  static absl::StatusOr<std::unique_ptr<ShardGroup>> Create(RankPool* pool, const HeadSpec& spec,
                                                            const MemoryPlan& plan);
  ~ShardGroup() override;

  void ComputeBatch(const BatchInput& input, BatchDone done) override;
  absl::Status ReduceGradients() override;
  absl::StatusOr<double> GradSquaredNorm() override;
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override;
  absl::Status DiscardGradients() override;
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows) override;
  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) override;
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) override;
  absl::Status CheckState() override { return GetReady(); }
  int64_t num_updates() const override { return num_updates_; }
  void set_num_updates(int64_t num_updates) override;

 private:
  struct Batch;     // One under way.
  struct UnderWay;  // How many there are.
  using RankCall = absl::FunctionRef<void(Rank& rank, int32_t index, Rank::Done done)>;

  ShardGroup(RankPool* pool, const HeadSpec& spec);

  // OK while the shards of all ranks are there; ABORTED, for good, when one was lost.
  absl::Status CheckShards();

  // CheckShards(), connected, and no gradients left from before a failure. UNAVAILABLE while a
  // follower is away.
  absl::Status GetReady();

  // Makes the call on every rank and waits for all. The error of the lowest rank that failed,
  // named.
  absl::Status OnAllRanks(RankCall call);

  // The same for a call in which ranks wait for one another: one that fails ends the group for all,
  // and its error is the answer.
  absl::Status OnAllRanksTogether(RankCall call);

  // Who has rows of a tensor: of each rank, which ones the call is about.
  enum class Holder : uint8_t { kEveryReplica, kFirstReplica, kOwner };
  VocabRange RowsHeldBy(Holder holder, int32_t rank) const;
  absl::Status OnRowsOf(
      Holder holder, int64_t row_start, int64_t num_rows,
      absl::FunctionRef<void(int32_t rank, VocabRange rows, Rank::Done done)> call);
  absl::Status ReadRowsFrom(Holder holder, TensorKind kind, int64_t row_start, MatrixView rows);
  absl::Status ReadGradRows(TensorKind kind, int64_t row_start, MatrixView rows);
  void AwaitBatches();
  void FinishRank(const std::shared_ptr<Batch>& batch, int32_t rank,
                  absl::StatusOr<BatchOutput> output);

  RankPool* const pool_;
  const HeadSpec spec_;
  const HeadId id_;
  std::vector<uint64_t> sessions_;  // Of the ranks when they made their shards.
  absl::Status broken_;             // First failure that nothing mends.
  bool discard_pending_ = false;    // A follower was away when gradients were discarded.
  bool grad_changed_ = false;       // Of several replicas: since ReduceGradients().
  absl::Status grad_broken_;        // Of ReduceGradients(), until DiscardGradients().
  int64_t num_updates_ = 0;
  const std::shared_ptr<UnderWay> under_way_;  // Batches; the last of them may outlive the group.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_SHARD_GROUP_H_
