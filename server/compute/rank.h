// One rank of a shard group, as the one who drives it sees it.
//
// A rank is a place (a thread, its device and its ends of the collectives) that holds a shard of
// every head. LocalRank is one of this process; RemoteRank (server/shard) is one of a follower,
// which runs a LocalRank of its own. Calls are queued and run in their order, one at a time; each
// answers exactly once, on any thread, in bounded time: a rank that is gone answers with the
// reason. What a call's arguments point to must stay until then.
//
// Thread-compatible, except Abort().

#ifndef LMHEAD_SERVER_COMPUTE_RANK_H_
#define LMHEAD_SERVER_COMPUTE_RANK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/head_spec.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Number of a head among those of a group; 0 is none.
using HeadId = uint64_t;

// What errors and logs call a rank of all replicas: "rank 3", with replicas "rank 3 (replica 1)".
inline std::string RankName(int32_t rank, int32_t ranks_per_replica, int32_t num_replicas) {
  if (num_replicas == 1) return absl::StrCat("rank ", rank);
  return absl::StrCat("rank ", rank, " (replica ", rank / ranks_per_replica, ")");
}

// Makes a rank's shard of a head. Runs on the rank's thread.
using RankBackendFactory = std::function<absl::StatusOr<std::unique_ptr<ComputeBackend>>(
    const HeadSpec& spec, const MemoryPlan& plan, const RankContext& context)>;

class Rank {
 public:
  using Done = std::function<void(absl::Status)>;
  using SumDone = std::function<void(absl::StatusOr<double>)>;

  virtual ~Rank() = default;

  // Connects the rank's ends of its collectives. The group's generation is for logs and for ranks
  // elsewhere, which find the store by it.
  virtual void Connect(uint64_t generation, RendezvousStore* store, Done done) = 0;

  // Ends the collectives with a reason; pending calls that wait in one fail. Any thread; does not
  // block.
  virtual void Abort(const absl::Status& reason) = 0;

  // Identity of what holds the shards: another one after a restart means that they are lost.
  // 0 while nothing is there.
  virtual uint64_t session() const = 0;

  // --- Those of ComputeBackend, for the shard of a head ---

  virtual void CreateHead(HeadId head, const HeadSpec& spec, const MemoryPlan& plan, Done done) = 0;
  virtual void DestroyHead(HeadId head, Done done) = 0;

  // `teacher` takes the place of input.teacher. A rank whose chunks have no hidden states gets them
  // by a broadcast; one that has them, and pointers for the outputs, may be in a follower.
  virtual void ComputeBatch(HeadId head, HeadId teacher, const BatchInput& input,
                            ComputeBackend::BatchDone done) = 0;

  virtual void ReduceGradients(HeadId head, Done done) = 0;

  // Sum over the rows that the rank owns.
  virtual void GradSquaredNorm(HeadId head, SumDone done) = 0;
  virtual void ApplyUpdate(HeadId head, const OptimizerUpdate& update, Done done) = 0;
  virtual void DiscardGradients(HeadId head, Done done) = 0;
  virtual void AddGradRows(HeadId head, std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows, Done done) = 0;

  // The rows lie in the rank's range.
  virtual void WriteRows(HeadId head, TensorKind kind, int64_t row_start, ConstMatrixView rows,
                         Done done) = 0;
  virtual void ReadRows(HeadId head, TensorKind kind, int64_t row_start, MatrixView rows,
                        Done done) = 0;
  virtual void SetNumUpdates(HeadId head, int64_t num_updates, Done done) = 0;

  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

 protected:
  Rank() = default;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_RANK_H_
