#include "proto/wire/lane_codec.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

// As EncodeLanePart() writes it, and LanePartReader reads it; another order of fields is refused.
//
//   message = tag(part) length part
//   part    = [tag(command) varint] [tag(array) varint] [tag(offset) varint]   a zero is left out
//             tag(data) length byte...                                         not empty

namespace lmhead {
namespace {

using v1::LanePart;
using v1::LaneRequest;

static_assert(int{LaneRequest::kPartFieldNumber} == int{v1::LaneResponse::kPartFieldNumber});

// All of a LanePart but its data.
template <typename Sink>
void PutHeader(Sink& sink, const LanePartHeader& header, size_t data_bytes) {
  PutVarintField(sink, LanePart::kCommandFieldNumber, header.command);
  PutVarintField(sink, LanePart::kArrayFieldNumber, header.array);
  PutVarintField(sink, LanePart::kOffsetFieldNumber, header.offset);
  PutLength(sink, LanePart::kDataFieldNumber, data_bytes);
}

}  // namespace

grpc::ByteBuffer EncodeLanePart(const LanePartHeader& header, std::span<const std::byte> data) {
  LMHEAD_CHECK(!data.empty(), "a part without data");
  FieldSizer part;
  PutHeader(part, header, data.size());
  const size_t part_bytes = part.bytes() + data.size();
  FieldSizer outer;
  PutLength(outer, LaneRequest::kPartFieldNumber, part_bytes);
  const grpc::Slice slice(grpc_slice_malloc(outer.bytes() + part_bytes), grpc::Slice::STEAL_REF);
  FieldWriter writer({const_cast<uint8_t*>(slice.begin()), slice.size()});
  PutLength(writer, LaneRequest::kPartFieldNumber, part_bytes);
  PutHeader(writer, header, data.size());
  writer.Raw(data.data(), data.size());
  return {&slice, 1};
}

grpc::ByteBuffer EncodeLaneJoin(const v1::JoinLane& join) {
  LaneRequest message;
  *message.mutable_join() = join;
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

absl::StatusOr<v1::JoinLane> DecodeLaneJoin(grpc::ByteBuffer* message) {
  grpc::ProtoBufferReader bytes(message);
  LaneRequest parsed;
  if (!parsed.ParseFromZeroCopyStream(&bytes) || !parsed.has_join()) {
    return absl::InvalidArgumentError("the first message of a lane is not `join`");
  }
  return std::move(*parsed.mutable_join());
}

LanePartReader::LanePartReader(grpc::ByteBuffer* message) : reader_(message) { ReadHeader(); }

void LanePartReader::ReadHeader() {
  if (!reader_.EnterOnly(LaneRequest::kPartFieldNumber, LanePart::descriptor())) return;
  uint32_t tag = 0;
  while (reader_.NextField(&tag)) {
    uint64_t value = 0;
    switch (tag) {
      case VarintTag(LanePart::kCommandFieldNumber):
        if (!reader_.ReadVarint(&header_.command)) return;
        break;
      case VarintTag(LanePart::kArrayFieldNumber):
        if (!reader_.ReadVarint(&value)) return;
        header_.array = static_cast<uint32_t>(value);
        if (header_.array != value) reader_.Unusual("more than 32 bits");
        break;
      case VarintTag(LanePart::kOffsetFieldNumber):
        if (!reader_.ReadVarint(&header_.offset)) return;
        break;
      case LengthTag(LanePart::kDataFieldNumber):
        if (reader_.ReadLength(&num_bytes_) && num_bytes_ == 0) reader_.Unusual("no data");
        return;  // The last field.
      default:
        reader_.Unusual("a tag that no part has");
        return;
    }
  }
  reader_.Unusual("the message ends before its data");
}

absl::Status LanePartReader::status() const {
  if (reader_.unusual().empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a part of a lane: ", reader_.unusual()));
}

absl::Status LanePartReader::CopyTo(std::span<std::byte> to) {
  LMHEAD_CHECK(to.size() == num_bytes_, absl::StrCat(to.size(), " bytes for ", num_bytes_));
  reader_.Gather(to, nullptr);
  if (reader_.Complete()) return absl::OkStatus();
  if (absl::Status status = this->status(); !status.ok()) return status;
  return absl::InvalidArgumentError("a part of a lane: there is something after its data");
}

}  // namespace lmhead
