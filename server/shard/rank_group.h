// All that a server computes with: one rank or several, here and in followers, in one replica or
// several, and the shard groups made of them.

#ifndef LMHEAD_SERVER_SHARD_RANK_GROUP_H_
#define LMHEAD_SERVER_SHARD_RANK_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/compute/rank_pool.h"
#include "server/compute/timed_collective.h"
#include "server/config/server_config.h"
#include "server/memory/arena.h"
#include "server/metrics/metrics.h"
#include "server/shard/hardware.h"
#include "server/shard/leader.h"
#include "server/shard/local_ranks.h"

namespace lmhead {

// Thread-safe, except MakeHead() and Connect(): the executor's thread.
class RankGroup {
 public:
  struct Options {
    RankConfig config;
    std::string version;
    std::shared_ptr<grpc::ServerCredentials> credentials;  // Of --group_listen.
    // Whether a caller of it may: ShardLeader::Options::admit.
    std::function<absl::Status(const grpc::ServerContextBase& context, std::string_view method)>
        admit;
    // The ranks should be connected: calls Connect() on the executor's thread. Asked again every
    // second until they are. Any thread, must not block.
    std::function<void()> request_connect;
    std::function<void(bool ready)> on_ready;  // Told when ready() changes; any thread.
  };

  // Makes the ranks of this process and listens for the followers. Connects nothing yet.
  static absl::StatusOr<std::unique_ptr<RankGroup>> Start(const Hardware& hardware,
                                                          const Options& options);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // A head on all ranks. The group must outlive it.
  absl::StatusOr<std::unique_ptr<ComputeBackend>> MakeHead(const HeadSpec& spec,
                                                           const MemoryPlan& plan);

  // Connects the ranks unless they are; see RankPool::Connect().
  absl::Status Connect();

  // Every rank is there and connected.
  bool ready() const;

  // The ranks are not asked to be connected any more, and the followers' are away for good, so that
  // nothing waits for them. May be called again.
  void Stop();

  int32_t ranks_per_replica() const {
    return options_.config.num_ranks / options_.config.num_replicas;
  }
  int32_t num_replicas() const { return options_.config.num_replicas; }

  // What each replica has been given to compute, in total. None without replicas.
  std::vector<RankPool::ReplicaWork> ReadReplicaWork() const;
  // Bytes of the batches on their way to replicas in followers.
  int64_t ReadReplicaBatchBytes() const;

  const std::string& group_address() const { return group_address_; }  // Empty without followers.

  // Of the ranks in this process, in their order.
  const std::vector<MemoryAccount*>& accounts() const { return account_views_; }

  // Of rank 0.
  const CollectiveTimes& collective_times() const { return collective_times_; }

  // Of every rank.
  std::vector<RankMemory> ReadMemory() const;
  std::vector<Hardware::Device> ReadDevices() const;

 private:
  RankGroup(const Hardware& hardware, const Options& options);
  absl::Status MakeRanks();
  void WarnOfSharedDevices() const;
  absl::Status StartLeader();
  void AskUntilConnected() const;

  const Hardware hardware_;
  const Options options_;
  std::vector<std::unique_ptr<MemoryAccount>> accounts_;
  std::vector<MemoryAccount*> account_views_;
  std::vector<std::unique_ptr<LocalMemory>> local_memory_;
  CollectiveTimes collective_times_;
  std::vector<RemoteRank*> remote_;  // The pool's.
  std::string collective_;
  std::unique_ptr<RankPool> pool_;  // Null for one rank.
  std::unique_ptr<ShardLeader> leader_;
  std::string group_address_;
  absl::Notification stopped_;
  std::thread asking_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_RANK_GROUP_H_
