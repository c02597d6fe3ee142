// Between the messages of shard.proto and the domain's types.
//
// …FromProto() checks what it reads: INTERNAL for a message that no leader of this release sends.

#ifndef LMHEAD_SERVER_SHARD_SHARD_MESSAGES_H_
#define LMHEAD_SERVER_SHARD_SHARD_MESSAGES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lmhead/v1/shard.pb.h"
#include "proto/types/tensor_view.h"
#include "server/compute/backend.h"
#include "server/metrics/metrics.h"
#include "server/shard/lanes.h"

namespace lmhead {

absl::Status StatusFromReply(const v1::CommandReply& reply);
void StatusToReply(const absl::Status& status, v1::CommandReply* reply);

// The rows of a chunk but its outputs and hidden states, which travel on lanes; of these the shape.
// What the second returns points into the message.
v1::ShardChunk ShardChunkToProto(const ChunkRows& rows);
absl::StatusOr<ChunkRows> ShardChunkFromProto(const v1::ShardChunk& proto);

// Gives the chunk's rows room in `result` for the outputs that `spec` wants, all but
// grad_hidden_states, and points them there.
void AddOutputs(const OutputSpec& spec, v1::ShardChunkResult* result, ChunkRows* rows);

// Whether a batch has gradients of hidden states to answer.
inline bool WantsGradients(const OutputSpec& spec, BackwardMode mode) {
  return spec.grad_hidden_states && mode != BackwardMode::kNone;
}

// What lanes carry of a batch, by the numbers of lmhead.v1.LanePart; empty where a view is null:
// hidden states to the follower, and the memory of their gradients, which come from it.
Lanes::Arrays HiddenStatesOf(std::span<const ChunkRows> chunks);
Lanes::Places GradientsOf(std::span<const ChunkRows> chunks);

// Copies outputs to where the chunks want them. INTERNAL when one is missing or has another size.
absl::StatusOr<BatchOutput> ReadBatchResult(const v1::ShardBatchResult& result,
                                            const OutputSpec& spec,
                                            std::span<const ChunkRows> chunks);

// With and without the data. The view of the second points into the message.
v1::RowBlock RowBlockToProto(const ConstMatrixView& rows, bool with_data);
absl::StatusOr<ConstMatrixView> RowBlockFromProto(const v1::RowBlock& proto);

absl::StatusOr<BackwardMode> BackwardModeFromNumber(int32_t number);
absl::StatusOr<TensorKind> TensorKindFromNumber(int32_t number);

v1::MemoryReport MemoryToProto(const RankMemory& memory);
RankMemory MemoryFromProto(const v1::MemoryReport& proto, int32_t rank);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_SHARD_MESSAGES_H_
