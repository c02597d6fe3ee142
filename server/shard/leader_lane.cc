#include "server/shard/leader_lane.h"

#include "proto/wire/status.h"
#include "spdlog/spdlog.h"

namespace lmhead {

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
  if (absl::Status status = Join(message); !status.ok()) {
    spdlog::warn("Lane from {} refused: {}", context_->peer(), status.ToString());
    Refuse(status);
    return false;
  }
  Write();
  if (lanes()->complete()) options_.on_complete();
  return true;
}

absl::Status LeaderLane::Join(grpc::ByteBuffer* message) {
  const absl::StatusOr<v1::JoinLane> join = DecodeLaneJoin(message);
  if (!join.ok()) return join.status();
  absl::StatusOr<std::shared_ptr<Lanes>> lanes = options_.find_lanes(*join);
  if (!lanes.ok()) return lanes.status();
  if (absl::Status status = (*lanes)->Add(self()); !status.ok()) return status;
  SetLanes(*std::move(lanes));
  return absl::OkStatus();
}

void LeaderLane::Refuse(const absl::Status& reason) {
  refusal_ = reason;
  Stop(/*cancel=*/false);
}

void LeaderLane::ReadsAreOver() {
  Fail(absl::UnavailableError("a lane of it has ended, or its connection"));
}

void LeaderLane::LetGo() {
  Finish(refusal_.ok() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "the lane has ended")
                       : ToGrpcStatus(refusal_));
}

}  // namespace lmhead
