// Bringing a head back from its checkpoint: what RestoreCheckpoint and a starting server share.

#ifndef LMHEAD_SERVER_RPC_RESTORE_H_
#define LMHEAD_SERVER_RPC_RESTORE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/head/head_registry.h"

namespace lmhead {

// Restores head `name` from the checkpoint of that name, or from its newest for an empty one. A
// head that is not there, or is poisoned (as one is whose rank has lost its shard), is created as
// the checkpoint describes it; an open step of a poisoned head is aborted. UNAVAILABLE while a rank
// is away. Other errors are those of CheckpointStore::Find and Restore, and of
// HeadRegistry::Create.
absl::StatusOr<std::shared_ptr<Head>> RestoreHead(HeadRegistry* heads, CheckpointStore* store,
                                                  const std::string& name,
                                                  const std::string& checkpoint);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_RESTORE_H_
