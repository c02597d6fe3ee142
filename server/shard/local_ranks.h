// Makes the ranks of this process: backend, device, account and collective of each.

#ifndef LMHEAD_SERVER_SHARD_LOCAL_RANKS_H_
#define LMHEAD_SERVER_SHARD_LOCAL_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/compute/collective_times.h"
#include "server/compute/local_rank.h"
#include "server/memory/arena.h"
#include "server/metrics/metrics.h"
#include "server/shard/hardware.h"

namespace lmhead {

// A group, as every rank of it must know it.
struct GroupFacts {
  int32_t num_ranks = 1;     // Of all replicas.
  int32_t num_replicas = 1;  // Divides num_ranks.
  std::string collective;    // "gloo" or "nccl"
  absl::Duration timeout;    // Of a wait for another rank.

  int32_t ranks_per_replica() const { return num_ranks / num_replicas; }
  friend bool operator==(const GroupFacts&, const GroupFacts&) = default;
};

// "gloo" or "nccl" for what --collective says. auto: NCCL when there is one and each GPU of this
// process has one rank, Gloo otherwise. UNAVAILABLE when NCCL was asked for and cannot be.
absl::StatusOr<std::string> ChooseCollective(CollectiveChoice choice, const Hardware& hardware);

// A head, or a rank's shard of it. `index` counts the ranks of this process.
absl::StatusOr<std::unique_ptr<ComputeBackend>> MakeBackend(const Hardware& hardware, int32_t index,
                                                            MemoryAccount* account,
                                                            const HeadSpec& spec,
                                                            const MemoryPlan& plan,
                                                            const RankContext& context);

// Rank `rank` of the group. `host` is the address of this machine for Gloo. `account` outlives it,
// and so does `times`, null when nobody asks how long its collectives take.
absl::StatusOr<std::unique_ptr<LocalRank>> MakeLocalRank(const Hardware& hardware, int32_t index,
                                                         int32_t rank, const GroupFacts& group,
                                                         const std::string& host,
                                                         MemoryAccount* account,
                                                         CollectiveTimes* times);

// What the account and the device of a rank of this process say. Ranks on the processor share the
// process's memory, which the first of them reports. Thread-safe.
class LocalMemory {
 public:
  LocalMemory(const Hardware::Device& device, BackendKind kind, int32_t index,
              const MemoryAccount* account)
      : device_(device), kind_(kind), index_(index), account_(*account) {}

  // Budgets are left out.
  RankMemory Read(int32_t rank);

 private:
  void ReadDevice(RankMemory* memory);

  const Hardware::Device device_;
  const BackendKind kind_;
  const int32_t index_;
  const MemoryAccount& account_;
  absl::Mutex mu_;
  int64_t device_peak_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_LOCAL_RANKS_H_
