// A follower's end: one rank that a leader elsewhere drives.
//
// Calls the leader, and again whenever the call has ended, until stopped. The shards stay between
// calls: a follower that was stopped for a while, or whose network was, goes on where it was. The
// rank runs on its own thread (LocalRank), never on gRPC's.

#ifndef LMHEAD_SERVER_SHARD_FOLLOWER_H_
#define LMHEAD_SERVER_SHARD_FOLLOWER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lmhead/v1/shard.pb.h"
#include "server/compute/local_rank.h"
#include "server/memory/memory_plan.h"
#include "server/shard/local_ranks.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace lmhead {

class Follower {
 public:
  struct Options {
    std::string leader;  // host:port
    std::shared_ptr<grpc::ChannelCredentials> credentials;
    std::string server_name;  // That the leader's certificate has; empty: the host of leader.
    v1::JoinGroup join;       // All but the session.
    BackendKind backend = BackendKind::kCpu;
    std::optional<int> device;  // CUDA's number, when that is the backend.
    // Makes the rank when the leader has said what group it is in.
    std::function<absl::StatusOr<std::unique_ptr<LocalRank>>(const GroupFacts& group)> make_rank;
    // Of the rank, for the leader's metrics.
    std::function<v1::MemoryReport()> read_memory;
    std::function<void()> on_step_end;  // The rank's gradient has been used or thrown away.
    std::function<void()> on_welcome;   // The leader has taken the rank in.
  };

  explicit Follower(Options options);
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  // Follows until Stop(), then OK. Otherwise what cannot be mended by calling again: another
  // release or backend than the leader's, a rank that is not a follower's, a rank that could not be
  // made.
  absl::Status Run();

  // Any thread; may be called before Run().
  void Stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_FOLLOWER_H_
