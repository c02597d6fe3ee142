// A lane at a follower: the client's side of ShardService.Lane.

#ifndef LMHEAD_SERVER_SHARD_FOLLOWER_LANE_H_
#define LMHEAD_SERVER_SHARD_FOLLOWER_LANE_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "server/shard/lane_stream.h"

namespace lmhead {

class FollowerLane final
    : public LaneStream<grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>> {
 public:
  // Opens a lane of `lanes` on a channel that nobody else uses. It ends with them, and is lost to
  // them when it ends before. Not while they are being closed.
  static void Open(const std::shared_ptr<grpc::Channel>& channel, const v1::JoinLane& join,
                   const std::shared_ptr<Lanes>& lanes);

  void OnDone(const grpc::Status& status) override;

 private:
  explicit FollowerLane(std::shared_ptr<Lanes> lanes) : LaneStream(std::move(lanes)) {}

  void ReadsAreOver() override { Stop(/*cancel=*/false); }  // OnDone knows why.
  void CancelCall() override { context_.TryCancel(); }
  void LetGo() override { RemoveHold(); }

  grpc::ClientContext context_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_FOLLOWER_LANE_H_
