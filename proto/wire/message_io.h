// Pieces of the codec that know protobuf's encoding and gRPC's buffers, but no message of ours.

#ifndef LMHEAD_PROTO_WIRE_MESSAGE_IO_H_
#define LMHEAD_PROTO_WIRE_MESSAGE_IO_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>
#include <xxhash.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "proto/types/check.h"

namespace lmhead {

static_assert(std::endian::native == std::endian::little,
              "The wire is little-endian and arrays travel as they lie in memory");

using google::protobuf::internal::WireFormatLite;

// A field's tag: its number and its wire type.
constexpr uint32_t MakeTag(uint32_t number, WireFormatLite::WireType type) {
  return (number << 3) | static_cast<uint32_t>(type);
}
constexpr uint32_t VarintTag(uint32_t number) {
  return MakeTag(number, WireFormatLite::WIRETYPE_VARINT);
}
constexpr uint32_t LengthTag(uint32_t number) {
  return MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

// Counts the bytes that FieldWriter would write.
class FieldSizer {
 public:
  void Varint(uint64_t value) {
    bytes_ += google::protobuf::io::CodedOutputStream::VarintSize64(value);
  }
  void Raw(const void* data, size_t bytes) { bytes_ += bytes; }

  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// Writes into memory of known size.
class FieldWriter {
 public:
  explicit FieldWriter(std::span<uint8_t> out) : next_(out.data()), end_(out.data() + out.size()) {}

  void Varint(uint64_t value) {
    using google::protobuf::io::CodedOutputStream;
    LMHEAD_CHECK(CodedOutputStream::VarintSize64(value) <= room(), "header slice too small");
    next_ = CodedOutputStream::WriteVarint64ToArray(value, next_);
  }
  void Raw(const void* data, size_t bytes) {
    LMHEAD_CHECK(bytes <= room(), "header slice too small");
    if (bytes > 0) std::memcpy(next_, data, bytes);
    next_ += bytes;
  }

  size_t room() const { return static_cast<size_t>(end_ - next_); }

 private:
  uint8_t* next_;
  uint8_t* const end_;
};

// Fields as the generated code writes them; Sink is FieldSizer or FieldWriter.
template <typename Sink>
void PutTag(Sink& sink, uint32_t number, WireFormatLite::WireType type) {
  sink.Varint(MakeTag(number, type));
}

// Proto3 leaves a zero out.
template <typename Sink>
void PutVarintField(Sink& sink, uint32_t number, uint64_t value) {
  if (value == 0) return;
  PutTag(sink, number, WireFormatLite::WIRETYPE_VARINT);
  sink.Varint(value);
}

template <typename Sink, typename T>
void PutFixedField(Sink& sink, uint32_t number, const std::optional<T>& value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (!value.has_value()) return;
  PutTag(sink, number,
         sizeof(T) == 4 ? WireFormatLite::WIRETYPE_FIXED32 : WireFormatLite::WIRETYPE_FIXED64);
  sink.Raw(&*value, sizeof(T));
}

// The tag and the length of a field whose contents follow elsewhere.
template <typename Sink>
void PutLength(Sink& sink, uint32_t number, size_t bytes) {
  PutTag(sink, number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  sink.Varint(bytes);
}

// Proto3 leaves an empty array out.
template <typename Sink, typename T>
void PutArrayField(Sink& sink, uint32_t number, std::span<const T> elements) {
  if (elements.empty()) return;
  PutLength(sink, number, elements.size_bytes());
  sink.Raw(elements.data(), elements.size_bytes());
}

// A piece of a message: `header`, owned, then `borrowed`, which may be empty.
struct MessagePiece {
  grpc::Slice header;
  std::span<const std::byte> borrowed;
};

// A message of pieces, in order. `release` runs once nothing borrowed is held any more.
grpc::ByteBuffer JoinBorrowed(std::span<const MessagePiece> pieces,
                              absl::AnyInvocable<void() &&> release);

// XXH3-64 with seed 0 over pieces.
class ContentHash {
 public:
  ContentHash() : state_(XXH3_createState()) {
    LMHEAD_CHECK(state_ != nullptr, "out of memory");
    XXH3_64bits_reset(state_.get());
  }

  void Add(const void* data, size_t bytes) {
    if (bytes > 0) XXH3_64bits_update(state_.get(), data, bytes);
  }
  uint64_t Digest() const { return XXH3_64bits_digest(state_.get()); }

 private:
  struct FreeState {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, FreeState> state_;
};

// Cursor over a received message that expects fields in ascending order. The first thing it cannot
// follow is remembered in unusual(), and every method returns false from then on: the caller turns
// to the generated parser.
class MessageReader {
 public:
  // Reads `message`, which must stay unchanged.
  explicit MessageReader(grpc::ByteBuffer* message);

  // Enters field `number`, which must be a message of type `type` and all of what is read.
  bool EnterOnly(uint32_t number, const google::protobuf::Descriptor* type);

  // Reads the next tag into *tag. False at the end, and when the field number is not greater than
  // the one before.
  bool NextField(uint32_t* tag);

  bool ReadVarint(uint64_t* value);
  bool ReadFixed(float* value);
  bool ReadFixed(uint64_t* value);

  // The length of a field. False when more is stated than there is.
  bool ReadLength(uint64_t* bytes);

  // Copies the next to.size() bytes, piece by piece; each is added to `hash` while it is in cache.
  bool Gather(std::span<std::byte> to, ContentHash* hash);

  // Remembers what could not be followed, at the current position. Returns false.
  bool Unusual(std::string_view what);

  // Whether everything has been read as expected.
  bool Complete() const { return unusual_.empty() && position() == total_bytes_; }
  // "at byte 17, hidden_states: …"; empty while nothing unusual was met.
  const std::string& unusual() const { return unusual_; }

 private:
  int64_t position() const { return in_.CurrentPosition(); }

  const int64_t total_bytes_;
  grpc::ProtoBufferReader slices_;
  google::protobuf::io::CodedInputStream in_;
  const google::protobuf::Descriptor* type_ = nullptr;
  uint32_t last_number_ = 0;
  std::string unusual_;
};

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_MESSAGE_IO_H_
