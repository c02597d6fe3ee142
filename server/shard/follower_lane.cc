#include "server/shard/follower_lane.h"

#include <grpcpp/generic/generic_stub.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/status.h"

namespace lmhead {
namespace {

constexpr char kMethod[] = "/lmhead.v1.ShardService/Lane";

}  // namespace

void FollowerLane::Open(const std::shared_ptr<grpc::Channel>& channel, const v1::JoinLane& join,
                        const std::shared_ptr<Lanes>& lanes) {
  const std::shared_ptr<FollowerLane> lane(new FollowerLane(lanes));
  if (!lanes->Add(lane).ok()) return;  // There are as many as there should be.
  lane->SetSelf(lane);
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  stub.PrepareBidiStreamingCall(&lane->context_, kMethod, {}, lane.get());
  lane->AddHold();
  lane->Enter();  // Left when `join` is written.
  lane->StartWriting(EncodeLaneJoin(join));
  lane->StartReading();
  lane->StartCall();
}

void FollowerLane::OnDone(const grpc::Status& status) {
  const absl::Status reason = FromGrpcStatus(status);
  lanes()->Lose(absl::UnavailableError(absl::StrCat(
      "a lane has ended: ", reason.ok() ? "the leader has ended it" : reason.ToString())));
  Done();
}

}  // namespace lmhead
