#include "proto/wire/message_io.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"

namespace lmhead {
namespace {

using Release = absl::AnyInvocable<void() &&>;

void RunRelease(void* release) {
  const std::unique_ptr<Release> owned(static_cast<Release*>(release));
  std::move (*owned)();
}

}  // namespace

grpc::ByteBuffer JoinBorrowed(const grpc::Slice& header, std::span<const std::byte> bulk,
                              Release release) {
  if (bulk.empty()) {
    std::move(release)();
    return grpc::ByteBuffer(&header, 1);
  }
  const grpc::Slice slices[] = {
      header, grpc::Slice(const_cast<std::byte*>(bulk.data()), bulk.size(), &RunRelease,
                          new Release(std::move(release)))};
  return grpc::ByteBuffer(slices, std::size(slices));
}

MessageReader::MessageReader(grpc::ByteBuffer* message)
    : total_bytes_(static_cast<int64_t>(message->Length())), slices_(message), in_(&slices_) {}

bool MessageReader::EnterOnly(uint32_t number, const google::protobuf::Descriptor* type) {
  const uint32_t tag = in_.ReadTag();
  if (tag != MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
    return Unusual(absl::StrFormat("tag %d is not that of a %s", tag, type->name()));
  }
  uint64_t bytes = 0;
  if (!ReadLength(&bytes)) return false;
  if (static_cast<int64_t>(bytes) != total_bytes_ - position()) {
    return Unusual(absl::StrFormat("a %s of %d bytes is stated, %d are left", type->name(), bytes,
                                   total_bytes_ - position()));
  }
  type_ = type;
  return true;
}

bool MessageReader::NextField(uint32_t* tag) {
  if (!unusual_.empty() || position() == total_bytes_) return false;
  *tag = in_.ReadTag();
  const uint32_t number = *tag >> 3;
  if (number == 0) return Unusual("no field tag");
  if (number <= last_number_) {
    return Unusual(absl::StrFormat("field %d comes after field %d", number, last_number_));
  }
  last_number_ = number;
  return true;
}

bool MessageReader::ReadVarint(uint64_t* value) {
  return in_.ReadVarint64(value) || Unusual("no whole varint");
}

bool MessageReader::ReadFixed(float* value) {
  uint32_t bits = 0;
  if (!in_.ReadLittleEndian32(&bits)) return Unusual("no whole 4-byte value");
  *value = std::bit_cast<float>(bits);
  return true;
}

bool MessageReader::ReadFixed(uint64_t* value) {
  return in_.ReadLittleEndian64(value) || Unusual("no whole 8-byte value");
}

bool MessageReader::ReadLength(uint64_t* bytes) {
  if (!ReadVarint(bytes)) return false;
  const auto left = static_cast<uint64_t>(total_bytes_ - position());
  if (*bytes > left) {
    return Unusual(absl::StrFormat("%d bytes are stated, %d are left", *bytes, left));
  }
  return true;
}

bool MessageReader::Gather(std::span<std::byte> to, ContentHash* hash) {
  while (!to.empty()) {
    const void* piece = nullptr;
    int piece_bytes = 0;
    if (!in_.GetDirectBufferPointer(&piece, &piece_bytes)) return Unusual("the message ends");
    const size_t taken = std::min(to.size(), static_cast<size_t>(piece_bytes));
    std::memcpy(to.data(), piece, taken);
    if (hash != nullptr) hash->Add(to.data(), taken);
    in_.Skip(static_cast<int>(taken));
    to = to.subspan(taken);
  }
  return true;
}

bool MessageReader::Unusual(std::string_view what) {
  if (!unusual_.empty()) return false;
  const auto* field =
      type_ == nullptr ? nullptr : type_->FindFieldByNumber(static_cast<int>(last_number_));
  unusual_ = field == nullptr
                 ? absl::StrFormat("at byte %d: %s", position(), what)
                 : absl::StrFormat("at byte %d, %s: %s", position(), field->name(), what);
  return false;
}

}  // namespace lmhead
