// The ranks of a server: made once, shared by all its heads, connected to one another.
//
// They form num_replicas() replicas of ranks_per_replica() ranks each, every one of which has all
// rows of every head: rank r is rank r % ranks_per_replica() of replica r / ranks_per_replica().
//
// The pool connects the ranks' collectives when they are needed, ends them on every rank when one
// of them fails, and connects them anew when all are there again. What a failure takes with it:
//   * A rank that fails in a batch or is late ends the batches under way on all ranks, with an
//   error
//     that names it. Weights are as they were; the step is lost, the next one connects anew.
//   * A follower that is gone and comes back as the same process still holds its shards.
//   * A follower that comes back as another process has lost them, and every head that existed then
//     is unusable for good: it has to be restored from a checkpoint, or deleted, created and loaded
//     again.
//
// Thread-safe, except that the calls of ShardGroups come from one thread, the executor's.

#ifndef LMHEAD_SERVER_COMPUTE_RANK_POOL_H_
#define LMHEAD_SERVER_COMPUTE_RANK_POOL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/compute/rank.h"
#include "server/compute/rendezvous.h"

namespace lmhead {

class RankPool {
 public:
  struct Options {
    int32_t num_replicas = 1;  // Divides the number of ranks.
    // By replica. False: every rank of it reads the hidden states of a batch from host memory.
    // True: its rank 0 does, and broadcasts them; needed when another one is in another process.
    // Empty: false for all.
    std::vector<bool> broadcast_hidden_states;
    // Told when connected() changes. Any thread; must not block.
    std::function<void(bool connected)> on_change;
  };

  // What a replica has been given to compute, in total.
  struct ReplicaWork {
    int64_t num_batches = 0;
    int64_t num_tokens = 0;
  };

  // Ranks 0 to n-1, at least two.
  RankPool(std::vector<std::unique_ptr<Rank>> ranks, const Options& options);
  ~RankPool();  // Aborts the group, then ends the ranks.
  RankPool(const RankPool&) = delete;
  RankPool& operator=(const RankPool&) = delete;

  int32_t num_ranks() const { return static_cast<int32_t>(ranks_.size()); }
  Rank& rank(int32_t rank) { return *ranks_[rank]; }
  int32_t num_replicas() const { return options_.num_replicas; }
  int32_t ranks_per_replica() const { return num_ranks() / num_replicas(); }
  bool broadcast_hidden_states(int32_t replica) const {
    return !options_.broadcast_hidden_states.empty() && options_.broadcast_hidden_states[replica];
  }
  std::string NameOf(int32_t rank) const {
    return RankName(rank, ranks_per_replica(), num_replicas());
  }

  // Connects the ranks unless they are, and waits for it, as long as their collectives' timeout.
  // Otherwise UNAVAILABLE naming a rank that is away or did not come.
  absl::Status Connect();

  // Whether the ranks are connected, and how often they have been.
  bool connected() const;
  uint64_t generation() const;

  // Ends the group of that generation on all ranks, unless it has ended; the first reason stays,
  // naming `rank`. Any thread; does not wait for anything.
  void Fail(uint64_t generation, int32_t rank, const absl::Status& error);

  // Why the last group ended; OK while one stands or none has been.
  absl::Status failure() const;

  // Where the ranks of the try under way find each other, for ranks elsewhere; null when that
  // generation is not being connected.
  std::shared_ptr<InProcessStore> store(uint64_t generation) const;

  // Chooses the replica with the fewest tokens under way for a batch of so many, among equals the
  // one that was given the fewest so far. FinishWork() when the batch has ended. Any thread.
  int32_t StartWork(int64_t num_tokens);
  void FinishWork(int32_t replica, int64_t num_tokens);
  ReplicaWork work(int32_t replica) const;

  // Numbers of the heads that exist; never used again.
  HeadId AddHead();
  void RemoveHead(HeadId head);
  std::vector<HeadId> heads() const;

 private:
  absl::Status CheckPresent() const;

  const std::vector<std::unique_ptr<Rank>> ranks_;
  const Options options_;
  absl::Mutex connect_mu_;  // Held over Connect().
  mutable absl::Mutex mu_;
  std::shared_ptr<InProcessStore> store_ ABSL_GUARDED_BY(mu_);  // Of the try under way.
  uint64_t generation_ ABSL_GUARDED_BY(mu_) = 0;
  bool connected_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  HeadId last_head_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<HeadId> heads_ ABSL_GUARDED_BY(mu_);

  struct Load {
    ReplicaWork total;
    int64_t tokens_under_way = 0;
  };
  mutable absl::Mutex load_mu_;
  std::vector<Load> loads_ ABSL_GUARDED_BY(load_mu_);  // By replica.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_RANK_POOL_H_
