// The ranks of a follower process: a Follower each, with the devices and accounts of this machine.

#ifndef LMHEAD_SERVER_SHARD_FOLLOWER_PROCESS_H_
#define LMHEAD_SERVER_SHARD_FOLLOWER_PROCESS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/config/server_config.h"
#include "server/shard/follower.h"
#include "server/shard/hardware.h"
#include "server/shard/local_ranks.h"

namespace lmhead {

struct FollowerConfig {
  std::string leader;  // host:port of its --group_listen.
  int32_t first_rank = 0;
  int32_t num_ranks = 1;  // Of this process.
  BackendChoice backend = BackendChoice::kAuto;
  std::vector<int> devices;     // GPUs of the ranks, in turn.
  std::string collective_host;  // Address of this machine for Gloo.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string server_name;         // That the leader's certificate has; empty: the host of leader.
  std::string version;             // Release of this process.
  std::function<void()> on_ready;  // The leader has taken every rank in, for the first time.
};

// Thread-safe.
class FollowerProcess {
 public:
  // Starts the ranks, each on threads of its own. UNAVAILABLE for a device that is not there.
  static absl::StatusOr<std::unique_ptr<FollowerProcess>> Start(const FollowerConfig& config);
  ~FollowerProcess();
  FollowerProcess(const FollowerProcess&) = delete;
  FollowerProcess& operator=(const FollowerProcess&) = delete;

  // A rank has ended by itself, with an error.
  bool ended() const;

  // Ends all ranks. The first error of a rank that ended by itself, or OK.
  absl::Status Stop();

 private:
  FollowerProcess(const FollowerConfig& config, const Hardware& hardware);
  Follower::Options OptionsOf(int32_t index);
  void RankIsIn();

  const FollowerConfig config_;
  const Hardware hardware_;
  std::vector<std::unique_ptr<MemoryAccount>> accounts_;
  std::vector<std::unique_ptr<LocalMemory>> memory_;
  std::vector<std::unique_ptr<Follower>> followers_;
  std::vector<std::thread> threads_;
  std::atomic<int32_t> num_in_{0};
  mutable absl::Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_FOLLOWER_PROCESS_H_
