// Bytes of the lanes between a leader and its followers (shard.proto), by hand like the chunks': a
// part is copied once at each end. docs/ARCHITECTURE.md, Replicas, has their use.
//
// Nothing that arrives is trusted; nothing is read or written out of range. The functions are
// thread-safe; a reader is one thread's.

#ifndef LMHEAD_PROTO_WIRE_LANE_CODEC_H_
#define LMHEAD_PROTO_WIRE_LANE_CODEC_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lmhead/v1/shard.pb.h"
#include "proto/wire/message_io.h"

namespace lmhead {

// Which bytes a part has (lmhead.v1.LanePart).
struct LanePartHeader {
  uint64_t command = 0;
  uint32_t array = 0;
  uint64_t offset = 0;  // Bytes.
};

// A LaneRequest or LaneResponse with this part. Copies `data`.
grpc::ByteBuffer EncodeLanePart(const LanePartHeader& header, std::span<const std::byte> data);

// A LaneRequest with `join`.
grpc::ByteBuffer EncodeLaneJoin(const v1::JoinLane& join);

// INVALID_ARGUMENT for any other message.
absl::StatusOr<v1::JoinLane> DecodeLaneJoin(grpc::ByteBuffer* message);

// A received part, before its bytes have a place.
class LanePartReader {
 public:
  // Reads all but the data. `message` must outlive the reader, unchanged.
  explicit LanePartReader(grpc::ByteBuffer* message);

  // INVALID_ARGUMENT for a message that EncodeLanePart() does not write; then the rest is
  // undefined.
  absl::Status status() const;

  const LanePartHeader& header() const { return header_; }
  uint64_t num_bytes() const { return num_bytes_; }

  // Copies the data. Called once. REQUIRES: to.size() == num_bytes().
  absl::Status CopyTo(std::span<std::byte> to);

 private:
  void ReadHeader();

  MessageReader reader_;
  LanePartHeader header_;
  uint64_t num_bytes_ = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_LANE_CODEC_H_
