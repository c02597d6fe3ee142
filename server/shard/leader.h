// The leader's end of its followers: a gRPC server of its own, on a port for followers alone.
//
//   1. A follower opens Follow and says which rank it is, and its lanes when it gets batches. Its
//      RemoteRank is there from then on.
//   2. The owner is told, and connects the pool when all ranks are there (on its executor).
//   3. Connecting, the follower finds the other ranks through SetRendezvous and GetRendezvous.
//   4. A call or a lane that ends, or a silent call, takes its rank away: the group ends on all
//      ranks, named.
//
// Threads: gRPC's synchronous threads wait here, one a follower for as long as it is there, and one
// for each rendezvous; one thread writes to each follower; one pings all. Lanes run on gRPC's
// callback threads, woken by one thread a follower's call that has some.

#ifndef LMHEAD_SERVER_SHARD_LEADER_H_
#define LMHEAD_SERVER_SHARD_LEADER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/compute/rank_pool.h"
#include "server/shard/remote_rank.h"

namespace grpc {
class ServerContextBase;
class ServerCredentials;
}  // namespace grpc

namespace lmhead {

// Thread-safe.
class ShardLeader {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes a free one.
    std::shared_ptr<grpc::ServerCredentials> credentials;
    // OK when the caller may call the method ("Follow"). Any thread; must not block.
    std::function<absl::Status(const grpc::ServerContextBase& context, std::string_view method)>
        admit;
    std::string version;     // Followers have the same release,
    std::string backend;     // and the same backend: "cpu" or "cuda".
    std::string collective;  // What they are told to use: "gloo" or "nccl".
    absl::Duration timeout;  // Of the collective, which also bounds a follower's silence.
    // The ranks should be connected: a follower has come. Must not block.
    std::function<void()> request_connect;
  };

  // How long a follower may be silent when the collective's timeout is that long: less, so that the
  // error of a step names the follower that hangs and not one that waits for it.
  static absl::Duration SilenceLimit(absl::Duration timeout) { return timeout * 0.6; }

  // Starts listening. `remote` are those of the pool's ranks that followers hold; the pool outlives
  // the leader. UNAVAILABLE when the address is taken, naming it.
  static absl::StatusOr<std::unique_ptr<ShardLeader>> Start(const Options& options, RankPool* pool,
                                                            const std::vector<RemoteRank*>& remote);
  ~ShardLeader();
  ShardLeader(const ShardLeader&) = delete;
  ShardLeader& operator=(const ShardLeader&) = delete;

  // The followers' calls end, their ranks are away for good. May be called again.
  void Stop();

  int port() const;

 private:
  class Impl;
  explicit ShardLeader(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_LEADER_H_
