// The calls of lmhead.v1.LmHeadService that keep a head, and bring one back.

#include "proto/wire/status.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/rpc/info.h"
#include "server/rpc/restore.h"
#include "server/rpc/service.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

absl::Status NoStore() {
  return absl::FailedPreconditionError(
      "this server keeps no checkpoints; start it with --checkpoint_dir=DIRECTORY");
}

}  // namespace

absl::StatusOr<std::shared_ptr<Head>> RestoreHead(HeadRegistry* heads, CheckpointStore* store,
                                                  const std::string& name,
                                                  const std::string& checkpoint) {
  absl::StatusOr<StoredCheckpoint> stored = store->Find(name, checkpoint);
  if (!stored.ok()) return stored.status();
  const HeadSnapshot& snapshot = stored->manifest.snapshot;
  absl::StatusOr<std::shared_ptr<Head>> head = heads->Find(name);
  if (head.ok()) {
    const absl::Status state = (*head)->CheckState();
    if (absl::IsAborted(state)) {
      // This one alone: another restore may have put a sound head in its place by now.
      absl::Status deleted = heads->Delete(**head);
      if (!deleted.ok()) return deleted;
      head = absl::NotFoundError(name);
    } else if (!state.ok()) {
      return state;
    }
  }
  if (!head.ok()) head = heads->Create(snapshot.spec);
  if (!head.ok()) return head.status();
  if (absl::Status status = store->Restore(**head, *stored); !status.ok()) return status;
  spdlog::info("head {}: restored from checkpoint {} of step {}, written {} by lmhead {}", name,
               stored->name, snapshot.last_committed_step, stored->manifest.created_at,
               stored->manifest.version);
  return head;
}

grpc::Status LmHeadServiceImpl::SaveCheckpoint(grpc::ServerContext* context,
                                               const v1::SaveCheckpointRequest* request,
                                               v1::SaveCheckpointResponse* response) {
  if (env_.checkpoints == nullptr) return ToGrpcStatus(NoStore());
  absl::StatusOr<std::shared_ptr<Head>> head = env_.heads->Find(request->head());
  if (!head.ok()) return ToGrpcStatus(head.status());
  absl::StatusOr<SavedCheckpoint> saved = env_.checkpoints->Save(**head, request->name());
  if (!saved.ok()) return ToGrpcStatus(saved.status());
  response->set_name(saved->name);
  response->set_step(saved->step);
  response->set_num_bytes(saved->num_bytes);
  spdlog::info("head {}: checkpoint {} of step {}, {} bytes", request->head(), saved->name,
               saved->step, saved->num_bytes);
  return grpc::Status::OK;
}

grpc::Status LmHeadServiceImpl::RestoreCheckpoint(grpc::ServerContext* context,
                                                  const v1::RestoreCheckpointRequest* request,
                                                  v1::RestoreCheckpointResponse* response) {
  if (env_.checkpoints == nullptr) return ToGrpcStatus(NoStore());
  absl::StatusOr<std::shared_ptr<Head>> head =
      RestoreHead(env_.heads, env_.checkpoints, request->head(), request->name());
  if (!head.ok()) return ToGrpcStatus(head.status());
  *response->mutable_head() = HeadStatusToProto((*head)->Status());
  return grpc::Status::OK;
}

}  // namespace lmhead
