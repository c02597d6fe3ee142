#include "proto/wire/message_io.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace lmhead {
namespace {

using Release = absl::AnyInvocable<void() &&>;

// Runs when its last holder is gone.
class SharedRelease {
 public:
  explicit SharedRelease(Release release) : release_(std::move(release)) {}
  ~SharedRelease() { std::move(release_)(); }
  SharedRelease(const SharedRelease&) = delete;
  SharedRelease& operator=(const SharedRelease&) = delete;

 private:
  Release release_;
};
using Holder = std::shared_ptr<SharedRelease>;

void DropHolder(void* holder) { delete static_cast<Holder*>(holder); }

}  // namespace

grpc::ByteBuffer JoinBorrowed(std::span<const MessagePiece> pieces, Release release) {
  const Holder holder = std::make_shared<SharedRelease>(std::move(release));
  std::vector<grpc::Slice> slices;
  for (const auto& [header, borrowed] : pieces) {
    slices.push_back(header);
    if (borrowed.empty()) continue;
    slices.emplace_back(const_cast<std::byte*>(borrowed.data()), borrowed.size(), &DropHolder,
                        new Holder(holder));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
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
