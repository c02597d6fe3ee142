// A rank of this process: a thread, its ends of the collectives, and its shards.

#ifndef LMHEAD_SERVER_COMPUTE_LOCAL_RANK_H_
#define LMHEAD_SERVER_COMPUTE_LOCAL_RANK_H_

#include <cstdint>
#include <map>
#include <memory>
#include <queue>
#include <span>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/compute/rank.h"

namespace lmhead {

// Calls return at once; what they ask for runs on the rank's thread. Thread-safe.
class LocalRank final : public Rank {
 public:
  // The ranks of the replica, and the peers in the other replicas (RankContext): they know rank and
  // size and are not connected yet. Null for a group of one.
  struct Collectives {
    std::unique_ptr<Collective> shards;
    std::unique_ptr<Collective> peers;
  };

  LocalRank(Collectives collectives, RankBackendFactory make_backend);
  ~LocalRank() override;  // Aborts the collectives, answers what is queued, ends the thread.

  void Connect(uint64_t generation, RendezvousStore* store, Done done) override;
  void Abort(const absl::Status& reason) override;
  uint64_t session() const override { return session_; }
  void CreateHead(HeadId head, const HeadSpec& spec, const MemoryPlan& plan, Done done) override;
  void DestroyHead(HeadId head, Done done) override;
  void ComputeBatch(HeadId head, HeadId teacher, const BatchInput& input,
                    ComputeBackend::BatchDone done) override;
  // Of a batch whose data may still be on its way: `wait`, on the rank's thread, returns when it is
  // there. Its error is the batch's.
  void ComputeBatchAfter(std::function<absl::Status()> wait, HeadId head, HeadId teacher,
                         const BatchInput& input, ComputeBackend::BatchDone done);
  void ReduceGradients(HeadId head, Done done) override;
  void GradSquaredNorm(HeadId head, SumDone done) override;
  void ApplyUpdate(HeadId head, const OptimizerUpdate& update, Done done) override;
  void DiscardGradients(HeadId head, Done done) override;
  void AddGradRows(HeadId head, std::span<const int32_t> row_ids, int64_t row_start,
                   ConstMatrixView rows, Done done) override;
  void WriteRows(HeadId head, TensorKind kind, int64_t row_start, ConstMatrixView rows,
                 Done done) override;
  void ReadRows(HeadId head, TensorKind kind, int64_t row_start, MatrixView rows,
                Done done) override;
  void SetNumUpdates(HeadId head, int64_t num_updates, Done done) override;

  // Destroys every head but those of `keep`, and waits until all that was queued before is done.
  void KeepHeads(std::span<const HeadId> keep);

 private:
  void Post(std::function<void()> work);
  void PostCall(HeadId head, std::function<absl::Status(ComputeBackend&)> call, Done done);
  void Loop();
  absl::Status ConnectAll(RendezvousStore* store);  // On the rank's thread, like the next.
  absl::StatusOr<ComputeBackend*> Find(HeadId head) const;

  const Collectives collectives_;
  const RankContext context_;
  const RankBackendFactory make_backend_;
  const uint64_t session_;                                   // Random.
  std::map<HeadId, std::unique_ptr<ComputeBackend>> heads_;  // The rank's thread's.
  absl::Mutex mu_;
  std::queue<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // Last: starts when everything else is there.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_LOCAL_RANK_H_
