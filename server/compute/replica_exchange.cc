#include "server/compute/replica_exchange.h"

#include <cstddef>

namespace lmhead {

absl::Status ReduceToOwners(Collective* peers, VocabRange shard, float* data, int64_t cols,
                            DeviceStream stream) {
  for (int32_t replica = 0; replica < peers->size(); ++replica) {
    const VocabRange owned = OwnedRange(shard, peers->size(), replica);
    if (owned.size() == 0) continue;
    absl::Status status = peers->Reduce(data + (owned.start - shard.start) * cols,
                                        owned.size() * cols, replica, stream);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status BroadcastFromOwners(Collective* peers, VocabRange shard, void* data, int64_t row_bytes,
                                 DeviceStream stream) {
  for (int32_t replica = 0; replica < peers->size(); ++replica) {
    const VocabRange owned = OwnedRange(shard, peers->size(), replica);
    if (owned.size() == 0) continue;
    auto* const rows = static_cast<std::byte*>(data) + (owned.start - shard.start) * row_bytes;
    absl::Status status = peers->Broadcast(rows, owned.size() * row_bytes, replica, stream);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void ForEachNotOwned(VocabRange shard, VocabRange owned,
                     absl::FunctionRef<void(VocabRange rows)> body) {
  const VocabRange before = {shard.start, owned.start};
  const VocabRange after = {owned.stop, shard.stop};
  if (before.size() > 0) body(before);
  if (after.size() > 0) body(after);
}

}  // namespace lmhead
