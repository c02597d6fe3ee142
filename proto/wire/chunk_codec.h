// Bytes of the ComputeLoss stream: chunks and results by hand around borrowed buffers, everything
// else through the generated code. docs/WIRE_FORMAT.md has the grammar.
//
// Sending copies nothing of the hidden states: a message is one small header slice and one slice
// that borrows the caller's memory, and two more when it carries both sides' hidden states.
// Receiving copies once: from gRPC's slices straight to where the caller wants the elements. Bytes
// written equal those of the generated code for the same message. Bytes read may be any valid
// encoding: what is not in the grammar's order goes through the generated parser, with the same
// result, slower.
//
// Nothing that arrives is trusted. Every error says what was wrong and where; nothing is read or
// written out of range; nothing is thrown. All functions are thread-safe.

#ifndef LMHEAD_PROTO_WIRE_CHUNK_CODEC_H_
#define LMHEAD_PROTO_WIRE_CHUNK_CODEC_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lmhead/v1/loss.pb.h"
#include "proto/types/loss_recipe.h"

namespace lmhead {

// A chunk whose arrays live elsewhere (lmhead.v1.Chunk). An empty span is an absent field.
struct ChunkView {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  std::optional<float> grad_scale;   // Absent means 1.
  std::optional<uint64_t> checksum;  // As stated by the sender.

  std::span<const int32_t> targets;
  std::span<const float> token_weights;
  std::span<const float> token_temperature;
  std::span<const float> logprob_grad;
  std::span<const float> entropy_grad;
  std::span<const float> old_logprob;
  std::span<const float> advantage;
  std::span<const int32_t> topk_ids;     // [num_tokens, top_k]
  std::span<const float> topk_logprobs;  // [num_tokens, top_k]
  std::span<const float> reference_logprob;
  std::span<const std::byte> teacher_hidden_states;
  std::span<const std::byte> hidden_states;
};

// XXH3-64 of a chunk's contents, as docs/WIRE_FORMAT.md defines it. Reads every element.
uint64_t ChunkChecksum(const ChunkView& chunk);

// Runs once, when gRPC holds the borrowed memory no longer; until then the memory must not change.
// It may run on a gRPC thread, before Encode… returns (no bulk bytes), or long after the write is
// done: gRPC reports a write when it has passed flow control, not when its bytes have left. It must
// not block.
using ReleaseBorrowed = absl::AnyInvocable<void() &&>;

// A ComputeLossRequest with this chunk. Borrows hidden_states and teacher_hidden_states until
// `release` runs; everything else is copied into the header slice.
// REQUIRES: the view holds what DecodeRequest guarantees of a decoded chunk.
grpc::ByteBuffer EncodeRequest(const ChunkView& chunk, ReleaseBorrowed release);

// A ComputeLossRequest with `open`, `end` or `received`.
grpc::ByteBuffer EncodeRequest(const v1::StreamOpen& open);
grpc::ByteBuffer EncodeRequest(const v1::StreamEnd& end);
grpc::ByteBuffer EncodeRequest(const v1::ResultReceived& received);

// What a server received: a chunk in the caller's destination.
struct DecodedChunk {
  ChunkView view;                // Spans point into the destination, each 64-byte aligned.
  uint64_t actual_checksum = 0;  // Of what arrived; equals view.checksum when that was stated.
  int64_t bytes_used = 0;        // Of the destination, from its start.
};
using DecodedRequest =
    std::variant<v1::StreamOpen, v1::StreamEnd, v1::ResultReceived, DecodedChunk>;

// Decodes one message and clears it: gRPC's memory is free again when this returns, also on error.
// A chunk's arrays are gathered into `destination`, whose contents are undefined after an error.
//
// Guarantees of a decoded chunk: num_tokens is in [1, kChunkTokensMax]; each per-token array is
// absent or has num_tokens elements (the top-k arrays: the same multiple of num_tokens);
// hidden_states and teacher_hidden_states are absent or a multiple of num_tokens bytes. Which
// fields must be there, their width and their values are the caller's to check.
//
// INVALID_ARGUMENT when the message is malformed, breaks a guarantee, or is larger than
// `destination`; DATA_LOSS naming the chunk when it states a checksum that differs from its
// contents.
// REQUIRES: destination.data() is 64-byte aligned.
absl::StatusOr<DecodedRequest> DecodeRequest(grpc::ByteBuffer* message,
                                             std::span<std::byte> destination);

// Bytes of destination that a chunk needs: num_tokens rows with num_token_fields arrays of 4-byte
// elements, and wide_bytes of hidden states. Each further wide array (top-k arrays, teacher hidden
// states) takes its bytes, rounded up to 64.
int64_t DestinationBytes(int64_t num_tokens, int64_t num_token_fields, int64_t wide_bytes);

// A result whose arrays live elsewhere (lmhead.v1.ChunkResult). An empty span is an absent field.
struct ResultView {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  bool duplicate = false;
  LossSums sums;
  StageTimings timings;

  std::span<const float> token_loss;
  std::span<const float> logprob;
  std::span<const float> lse;
  std::span<const float> entropy;
  std::span<const int32_t> argmax;
  std::span<const int32_t> topk_ids;     // [num_tokens, top_k]
  std::span<const float> topk_logprobs;  // [num_tokens, top_k]
  std::span<const std::byte> grad_hidden_states;
};

// A ComputeLossResponse with this result. Borrows grad_hidden_states until `release` runs;
// everything else is copied into the header slice.
grpc::ByteBuffer EncodeResponse(const ResultView& result, ReleaseBorrowed release);

// A ComputeLossResponse with `opened` or `ended`.
grpc::ByteBuffer EncodeResponse(const v1::StreamOpened& opened);
grpc::ByteBuffer EncodeResponse(const v1::StreamEnded& ended);

// Where the outputs of one result go. Null or empty means that it was not asked for.
struct ResultDestination {
  float* token_loss = nullptr;  // [num_tokens], like the four below.
  float* logprob = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  int32_t* argmax = nullptr;
  int32_t* topk_ids = nullptr;  // [num_tokens, top_k], like the one below.
  float* topk_logprobs = nullptr;
  int32_t top_k = 0;
  std::span<std::byte> grad_hidden_states;  // Exactly as many bytes as the result must carry.
};

// Looks up where the outputs of a chunk of num_tokens rows go. An error (no such chunk, another
// number of rows) becomes the error of DecodeResponse. May be called twice for one message, with
// equal arguments.
using FindResultDestination =
    absl::FunctionRef<absl::StatusOr<ResultDestination>(uint64_t chunk_index, int64_t num_tokens)>;

// The scalars of a result; its arrays are where `find` said.
struct DecodedResult {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  bool duplicate = false;
  LossSums sums;
  StageTimings timings;
};
using DecodedResponse = std::variant<v1::StreamOpened, v1::StreamEnded, DecodedResult>;

// Decodes one message and clears it. The outputs of a result are gathered into the places `find`
// gives; after an error their contents are undefined.
//
// POSTCONDITION: exactly the wanted outputs were there, each of the wanted size; any other message
// is INTERNAL, since the server broke the protocol.
absl::StatusOr<DecodedResponse> DecodeResponse(grpc::ByteBuffer* message,
                                               FindResultDestination find);

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_CHUNK_CODEC_H_
