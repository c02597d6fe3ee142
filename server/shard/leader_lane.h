// A lane at the leader: the server's side of ShardService.Lane.

#ifndef LMHEAD_SERVER_SHARD_LEADER_LANE_H_
#define LMHEAD_SERVER_SHARD_LEADER_LANE_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/shard/lane_stream.h"

namespace lmhead {

// Of a connection that has ended, and nobody said why.
absl::Status FollowerIsGone();

using LaneServerReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class LeaderLane final : public LaneStream<LaneServerReactor> {
 public:
  struct Options {
    // Whose lane it is; the error ends it. Like the next, on a gRPC thread: must not block.
    std::function<absl::StatusOr<std::shared_ptr<Lanes>>(const v1::JoinLane& join)> find_lanes;
    std::function<void()> on_complete;  // The lanes are all there.
  };

  // Starts the call's reactor, which keeps itself alive. A call that is not admitted ends at once.
  static LaneServerReactor* Start(grpc::CallbackServerContext* context, const Options& options,
                                  const absl::Status& admitted);

  void OnDone() override { Done(); }

 private:
  LeaderLane(grpc::CallbackServerContext* context, const Options& options);

  absl::StatusOr<bool> Take(grpc::ByteBuffer* message) override;
  // Whether all lanes are there now.
  absl::StatusOr<bool> Join(grpc::ByteBuffer* message);
  void Refuse(const absl::Status& reason);
  void ReadsAreOver() override;
  void CancelCall() override { context_->TryCancel(); }
  void LetGo() override;

  grpc::CallbackServerContext* const context_;
  const Options options_;
  absl::Status refusal_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_LEADER_LANE_H_
