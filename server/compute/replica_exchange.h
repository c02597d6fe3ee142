// What the replicas of a shard exchange between batches and updates: gradients to the owners of
// their rows, and new weights from them.
//
// Every rank calls them with the same arguments but the data, at the same point. A failure is the
// collective's; in device memory later ones are told by its Check().

#ifndef LMHEAD_SERVER_COMPUTE_REPLICA_EXCHANGE_H_
#define LMHEAD_SERVER_COMPUTE_REPLICA_EXCHANGE_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "proto/types/vocab_range.h"
#include "server/compute/collective.h"

namespace lmhead {

// Sums `data`, [shard.size(), cols], over the replicas: the rows that a replica owns are the sum
// there. The others are undefined.
absl::Status ReduceToOwners(Collective* peers, VocabRange shard, float* data, int64_t cols,
                            DeviceStream stream);

// `data`, shard.size() rows of row_bytes, becomes what the owners of its rows have.
absl::Status BroadcastFromOwners(Collective* peers, VocabRange shard, void* data, int64_t row_bytes,
                                 DeviceStream stream);

// The rows of a shard that are not owned, as far as there are any: those before and those after.
void ForEachNotOwned(VocabRange shard, VocabRange owned,
                     absl::FunctionRef<void(VocabRange rows)> body);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_REPLICA_EXCHANGE_H_
