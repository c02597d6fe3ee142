#include "server/shard/leader_lane.h"

#include <utility>

#include "proto/wire/status.h"
#include "spdlog/spdlog.h"

namespace lmhead {

absl::Status FollowerIsGone() { return absl::UnavailableError("it is gone, or its connection"); }

LaneServerReactor* LeaderLane::Start(grpc::CallbackServerContext* context, const Options& options,
                                     const absl::Status& admitted) {
  const std::shared_ptr<LeaderLane> lane(new LeaderLane(context, options));
  lane->SetSelf(lane);
  if (admitted.ok()) {
    lane->StartReading();
  } else {
    lane->Refuse(admitted);
  }
  return lane.get();
}

LeaderLane::LeaderLane(grpc::CallbackServerContext* context, const Options& options)
    : LaneStream(nullptr), context_(context), options_(options) {}

absl::StatusOr<bool> LeaderLane::Take(grpc::ByteBuffer* message) {
  if (lanes() != nullptr) return LaneStream::Take(message);
  const absl::StatusOr<bool> is_last = Join(message);
  if (!is_last.ok()) {
    spdlog::warn("Lane from {} refused: {}", context_->peer(), is_last.status().ToString());
    Refuse(is_last.status());
    return false;
  }
  Write();
  if (*is_last) options_.on_complete();
  return true;
}

absl::StatusOr<bool> LeaderLane::Join(grpc::ByteBuffer* message) {
  const absl::StatusOr<v1::JoinLane> join = DecodeLaneJoin(message);
  if (!join.ok()) return join.status();
  absl::StatusOr<std::shared_ptr<Lanes>> lanes = options_.find_lanes(*join);
  if (!lanes.ok()) return lanes.status();
  absl::StatusOr<bool> is_last = (*lanes)->Add(self());
  if (is_last.ok()) SetLanes(*std::move(lanes));
  return is_last;
}

void LeaderLane::Refuse(const absl::Status& reason) {
  refusal_ = reason;
  Stop(/*cancel=*/false);
}

void LeaderLane::ReadsAreOver() { Fail(FollowerIsGone()); }

void LeaderLane::LetGo() {
  Finish(refusal_.ok() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "the lane has ended")
                       : ToGrpcStatus(refusal_));
}

}  // namespace lmhead
