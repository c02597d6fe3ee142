// Every bound of the service, in one place. Defaults that a flag may change are named kDefault….

#ifndef LMHEAD_PROTO_TYPES_LIMITS_H_
#define LMHEAD_PROTO_TYPES_LIMITS_H_

#include <cstdint>

namespace lmhead {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;

// Names of heads and workers.
inline constexpr int64_t kNameLengthMax = 128;

// Shape of a head. The product with 8 bytes an element stays far below 2^63.
inline constexpr int64_t kVocabSizeMax = int64_t{1} << 30;
inline constexpr int64_t kHiddenSizeMax = int64_t{1} << 20;

// Wide fields of one chunk: hidden states, teacher hidden states, top-k arrays and top-k outputs.
// What the client cuts to, and the most a server takes unless told.
inline constexpr int64_t kClientChunkBytes = 4 * kMiB;
inline constexpr int64_t kDefaultChunkBytesMax = 8 * kMiB;
inline constexpr int64_t kChunkTokensMax = 16384;

// Ranks of a server, over all replicas of its heads.
inline constexpr int32_t kRanksMax = 1024;

// Connections that carry the batches of a replica elsewhere (docs/BENCHMARKS.md, Replicas).
inline constexpr int32_t kLanesOfARank = 4;
// Longest part of an array on one of them: so long is a copy that a failed batch waits for.
inline constexpr int64_t kLanePartBytes = kMiB;

// Entries a token of top-k outputs and of top-k teachers.
inline constexpr int32_t kTopKMax = 1024;

// What a message holds beside its wide fields (hidden states, teacher hidden states, their
// gradient, top-k arrays: all together at most the server's chunk_bytes_max): at most 16 per-token
// fields of 4 bytes, and the framing.
inline constexpr int64_t kTokenFieldsMax = 16;
inline constexpr int64_t kMessageHeaderBytesMax = kTokenFieldsMax * 4 * kChunkTokensMax + 64 * kKiB;

// A control message: the largest is StreamOpen with the class weights of a large vocabulary.
inline constexpr int64_t kControlMessageBytesMax = 8 * kMiB;
static_assert(kClientChunkBytes + kMessageHeaderBytesMax <= kControlMessageBytesMax,
              "A chunk cut by the client fits the message limit of every channel");

// Keepalive, the same on both ends: a client pings an idle or silent connection this often and
// gives it up when no answer comes; the server accepts pings that often, and twice as often,
// without taking them for abuse.
inline constexpr int kKeepaliveMilliseconds = 20'000;
inline constexpr int kKeepaliveTimeoutMilliseconds = 20'000;
inline constexpr int kLeastPingIntervalMilliseconds = kKeepaliveMilliseconds / 2;

// Rows of LoadWeights and ReadWeights messages.
inline constexpr int64_t kWeightMessageBytes = 4 * kMiB;

// Staging slots are the server's in-flight chunks; each open stream holds at least one.
inline constexpr int32_t kDefaultStagingSlots = 16;
inline constexpr int32_t kDefaultInflightChunksMax = 8;

// Step bookkeeping.
inline constexpr int64_t kWorkersMax = 4096;
inline constexpr uint64_t kChunksPerWorkerMax = uint64_t{1} << 20;
inline constexpr int32_t kStreamsPerWorkerMax = 64;

// Text of an error on the wire. Three times that (percent-encoded) fits the 8 KiB of HTTP/2
// metadata that a gRPC peer accepts.
inline constexpr int64_t kStatusMessageBytesMax = 2 * kKiB;

// Rows of a compute batch: the most a head may ask for.
inline constexpr int64_t kBatchTokensMax = int64_t{1} << 20;

// Rows of a compute batch unless the head or a flag says otherwise.
inline constexpr int64_t kDefaultBatchTokensCpu = 1024;
inline constexpr int64_t kDefaultBatchTokensCuda = 4096;

}  // namespace lmhead

#endif  // LMHEAD_PROTO_TYPES_LIMITS_H_
