// The grammar, in the encoding of protobuf (tag = field number and wire type; LEN =
// length-prefixed). Fields come in ascending order; a zero scalar, an empty array and empty bytes
// are left out.
//
//   request  := tag(15, LEN) length chunk
//   chunk    := [1: varint chunk_index] [2: varint num_tokens]
//               [3: fixed32 grad_scale] [4: fixed64 checksum]
//               array(10) … array(19)            per-token fields, packed, 4-byte elements
//               [99: LEN teacher_hidden_states]  borrowed by the encoder
//               [100: LEN hidden_states]         borrowed by the encoder
//   response := tag(15, LEN) length result
//   result   := [1: varint chunk_index] [2: varint num_tokens] [3: varint duplicate]
//               4: LEN sums  5: LEN timings      through the generated code
//               array(10) … array(16)            per-token outputs, packed, 4-byte elements
//               [100: LEN grad_hidden_states]    borrowed by the encoder
//   array(n) := [tag(n, LEN) length elements]    little-endian
//
// Every other message, and every other encoding of these two, goes through the generated code.

#include "proto/wire/chunk_codec.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "proto/types/check.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "proto/wire/message_io.h"

namespace lmhead {
namespace {

constexpr uint32_t kBulkMessageField = 15;  // `chunk` of the request, `result` of the response.
constexpr uint32_t kTeacherField = 99;      // teacher_hidden_states.
constexpr uint32_t kBulkField = 100;        // hidden_states, grad_hidden_states.
constexpr size_t kPlaceAlignment = 64;

constexpr uint32_t kGradScaleTag = MakeTag(3, WireFormatLite::WIRETYPE_FIXED32);
constexpr uint32_t kChecksumTag = MakeTag(4, WireFormatLite::WIRETYPE_FIXED64);

// Calls visit(number, name, span) for each array of a chunk but the borrowed ones, ascending.
template <typename View, typename Visit>
void ForEachHeaderArray(View& chunk, Visit visit) {
  visit(10, "targets", chunk.targets);
  visit(11, "token_weights", chunk.token_weights);
  visit(12, "token_temperature", chunk.token_temperature);
  visit(13, "logprob_grad", chunk.logprob_grad);
  visit(14, "entropy_grad", chunk.entropy_grad);
  visit(15, "old_logprob", chunk.old_logprob);
  visit(16, "advantage", chunk.advantage);
  visit(17, "topk_ids", chunk.topk_ids);
  visit(18, "topk_logprobs", chunk.topk_logprobs);
  visit(19, "reference_logprob", chunk.reference_logprob);
}

template <typename View, typename Visit>
void ForEachArray(View& chunk, Visit visit) {
  ForEachHeaderArray(chunk, visit);
  visit(kTeacherField, "teacher_hidden_states", chunk.teacher_hidden_states);
  visit(kBulkField, "hidden_states", chunk.hidden_states);
}

template <typename Visit>
void ForEachHeaderArray(const ResultView& result, Visit visit) {
  visit(10, "token_loss", result.token_loss);
  visit(11, "logprob", result.logprob);
  visit(12, "lse", result.lse);
  visit(13, "entropy", result.entropy);
  visit(14, "argmax", result.argmax);
  visit(15, "topk_ids", result.topk_ids);
  visit(16, "topk_logprobs", result.topk_logprobs);
}

// --- Encoding ---------------------------------------------------------------------------------

template <typename Sink>
void PutScalars(Sink& sink, const ChunkView& chunk) {
  PutVarintField(sink, 1, chunk.chunk_index);
  PutVarintField(sink, 2, static_cast<uint64_t>(chunk.num_tokens));
  PutFixedField(sink, 3, chunk.grad_scale);
  PutFixedField(sink, 4, chunk.checksum);
}

template <typename Sink>
void PutScalars(Sink& sink, const ResultView& result) {
  PutVarintField(sink, 1, result.chunk_index);
  PutVarintField(sink, 2, static_cast<uint64_t>(result.num_tokens));
  PutVarintField(sink, 3, result.duplicate ? 1 : 0);
  const std::string sums = LossSumsToProto(result.sums).SerializeAsString();
  PutLength(sink, 4, sums.size());
  sink.Raw(sums.data(), sums.size());
  const std::string timings = StageTimingsToProto(result.timings).SerializeAsString();
  PutLength(sink, 5, timings.size());
  sink.Raw(timings.data(), timings.size());
}

// A field whose bytes travel in a slice of their own.
struct BorrowedField {
  uint32_t number;
  std::span<const std::byte> bytes;
};

// Bytes of the field's tag and length; 0 for one that is left out.
size_t PrefixBytes(const BorrowedField& field) {
  if (field.bytes.empty()) return 0;
  FieldSizer sizer;
  PutLength(sizer, field.number, field.bytes.size());
  return sizer.bytes();
}

template <typename Sink, typename View>
void PutAllButBorrowed(Sink& sink, const View& view) {
  PutScalars(sink, view);
  ForEachHeaderArray(view, [&](uint32_t number, const char*, const auto& elements) {
    PutArrayField(sink, number, elements);
  });
}

// Writes `put(writer)` into a new slice of exactly `bytes`.
template <typename Put>
grpc::Slice WriteSlice(size_t bytes, Put put) {
  grpc::Slice slice(bytes);
  // The slice is new, so that nobody else sees it while it is written.
  FieldWriter writer({const_cast<uint8_t*>(slice.begin()), slice.size()});
  put(writer);
  LMHEAD_CHECK(writer.room() == 0, "predicted size differs from written size");
  return slice;
}

// `fields` are ascending, and come after everything else of the view.
template <typename View>
grpc::ByteBuffer EncodeBorrowed(const View& view, std::initializer_list<BorrowedField> fields,
                                ReleaseBorrowed release) {
  FieldSizer header;
  PutAllButBorrowed(header, view);
  size_t inner_bytes = header.bytes();
  for (const BorrowedField& field : fields) inner_bytes += PrefixBytes(field) + field.bytes.size();
  FieldSizer outer;
  PutLength(outer, kBulkMessageField, inner_bytes);

  // The first borrowed field shares the slice of what comes before it.
  std::vector<MessagePiece> pieces;
  const auto begin = [&](FieldWriter& writer) {
    PutLength(writer, kBulkMessageField, inner_bytes);
    PutAllButBorrowed(writer, view);
  };
  const size_t begin_bytes = outer.bytes() + header.bytes();
  for (const BorrowedField& field : fields) {
    if (field.bytes.empty()) continue;
    const bool first = pieces.empty();
    const size_t bytes = (first ? begin_bytes : 0) + PrefixBytes(field);
    pieces.push_back({WriteSlice(bytes,
                                 [&](FieldWriter& writer) {
                                   if (first) begin(writer);
                                   PutLength(writer, field.number, field.bytes.size());
                                 }),
                      field.bytes});
  }
  if (pieces.empty()) pieces.push_back({WriteSlice(begin_bytes, begin), {}});
  return JoinBorrowed(pieces, std::move(release));
}

grpc::ByteBuffer EncodeGenerated(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// --- Decoding, both ways ----------------------------------------------------------------------

std::string Malformed(const char* type, size_t bytes, const std::string& unusual) {
  return absl::StrFormat("a %s of %d bytes is not valid: %s", type, bytes, unusual);
}

// Parses all of `message` with the generated code. False when it is no valid encoding.
bool ParseGenerated(grpc::ByteBuffer* message, google::protobuf::MessageLite* parsed) {
  grpc::ProtoBufferReader reader(message);
  return parsed->ParseFromZeroCopyStream(&reader);
}

// --- Decoding requests ------------------------------------------------------------------------

// Hands out aligned pieces of the destination, from its start.
class Placer {
 public:
  explicit Placer(std::span<std::byte> destination) : destination_(destination) {}

  // Empty when there is no room.
  std::span<std::byte> Place(size_t bytes) {
    const size_t start = (used_ + kPlaceAlignment - 1) / kPlaceAlignment * kPlaceAlignment;
    if (start > destination_.size() || bytes > destination_.size() - start) return {};
    used_ = start + bytes;
    return destination_.subspan(start, bytes);
  }

  size_t used() const { return used_; }
  size_t size() const { return destination_.size(); }

 private:
  const std::span<std::byte> destination_;
  size_t used_ = 0;
};

template <typename T>
std::span<const T> ElementsOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

std::string NoRoom(const char* name, uint64_t bytes, const Placer& placer) {
  return absl::StrFormat(
      "%s of %d bytes does not fit: the server takes chunks of %d bytes, %d are taken already; cut "
      "into smaller chunks",
      name, bytes, placer.size(), placer.used());
}

// Gathers the array that `tag` begins.
bool ReadArray(uint32_t tag, MessageReader& reader, Placer& placer, ContentHash& hash,
               ChunkView& chunk) {
  bool known = false;
  bool good = false;
  ForEachArray(chunk,
               [&]<typename T>(uint32_t number, const char* name, std::span<const T>& elements) {
                 if (tag != LengthTag(number)) return;
                 known = true;
                 uint64_t bytes = 0;
                 if (!reader.ReadLength(&bytes)) return;
                 if (bytes % sizeof(T) != 0) {
                   reader.Unusual(absl::StrFormat("%d bytes are no whole 4-byte elements", bytes));
                   return;
                 }
                 const std::span<std::byte> place = placer.Place(bytes);
                 if (place.size() != bytes) {
                   reader.Unusual(NoRoom(name, bytes, placer));
                   return;
                 }
                 good = reader.Gather(place, &hash);
                 elements = ElementsOf<T>(place);
               });
  return known ? good : reader.Unusual(absl::StrFormat("unexpected tag %d", tag));
}

bool ReadChunkScalar(uint32_t tag, MessageReader& reader, ChunkView& chunk) {
  uint64_t varint = 0;
  switch (tag) {
    case VarintTag(1):
      return reader.ReadVarint(&chunk.chunk_index);
    case VarintTag(2):
      if (!reader.ReadVarint(&varint)) return false;
      chunk.num_tokens = static_cast<int64_t>(varint);
      return true;
    case kGradScaleTag:
      return reader.ReadFixed(&chunk.grad_scale.emplace());
    case kChecksumTag:
      return reader.ReadFixed(&chunk.checksum.emplace());
    default:
      return reader.Unusual(absl::StrFormat("unexpected tag %d", tag));
  }
}

void AddGradScale(const ChunkView& chunk, ContentHash& hash) {
  const float grad_scale = chunk.grad_scale.value_or(1.0f);
  hash.Add(&grad_scale, sizeof(grad_scale));
}

// By the grammar. False when the message departs from it; the reader says where.
bool ReadChunk(MessageReader& reader, std::span<std::byte> destination, DecodedChunk* decoded) {
  constexpr uint32_t kFirstArrayTag = LengthTag(10);
  if (!reader.EnterOnly(kBulkMessageField, v1::Chunk::descriptor())) return false;
  Placer placer(destination);
  ContentHash hash;
  bool scalars_hashed = false;
  ChunkView& chunk = decoded->view;
  uint32_t tag = 0;
  while (reader.NextField(&tag)) {
    if (tag < kFirstArrayTag) {
      if (!ReadChunkScalar(tag, reader, chunk)) return false;
      continue;
    }
    if (!scalars_hashed) AddGradScale(chunk, hash);
    scalars_hashed = true;
    if (!ReadArray(tag, reader, placer, hash, chunk)) return false;
  }
  if (!scalars_hashed) AddGradScale(chunk, hash);
  decoded->actual_checksum = hash.Digest();
  decoded->bytes_used = static_cast<int64_t>(placer.used());
  return reader.Complete();
}

template <typename T>
std::span<const T> Elements(const google::protobuf::RepeatedField<T>& field) {
  return {field.data(), static_cast<size_t>(field.size())};
}
std::span<const std::byte> Elements(const std::string& field) {
  return std::as_bytes(std::span(field));
}

ChunkView ViewOf(const v1::Chunk& chunk) {
  ChunkView view;
  view.chunk_index = chunk.chunk_index();
  view.num_tokens = chunk.num_tokens();
  if (chunk.has_grad_scale()) view.grad_scale = chunk.grad_scale();
  if (chunk.has_checksum()) view.checksum = chunk.checksum();
  view.targets = Elements(chunk.targets());
  view.token_weights = Elements(chunk.token_weights());
  view.token_temperature = Elements(chunk.token_temperature());
  view.logprob_grad = Elements(chunk.logprob_grad());
  view.entropy_grad = Elements(chunk.entropy_grad());
  view.old_logprob = Elements(chunk.old_logprob());
  view.advantage = Elements(chunk.advantage());
  view.topk_ids = Elements(chunk.topk_ids());
  view.topk_logprobs = Elements(chunk.topk_logprobs());
  view.reference_logprob = Elements(chunk.reference_logprob());
  view.teacher_hidden_states = Elements(chunk.teacher_hidden_states());
  view.hidden_states = Elements(chunk.hidden_states());
  return view;
}

// Copies a parsed chunk into the destination.
absl::StatusOr<DecodedChunk> PlaceChunk(const v1::Chunk& parsed, std::span<std::byte> destination) {
  DecodedChunk decoded{.view = ViewOf(parsed)};
  decoded.actual_checksum = ChunkChecksum(decoded.view);
  Placer placer(destination);
  absl::Status status;
  ForEachArray(decoded.view, [&]<typename T>(uint32_t, const char* name,
                                             std::span<const T>& elements) {
    const std::span<std::byte> place = placer.Place(elements.size_bytes());
    if (place.size() != elements.size_bytes()) {
      status.Update(absl::InvalidArgumentError(absl::StrFormat(
          "chunk %d: %s", decoded.view.chunk_index, NoRoom(name, elements.size_bytes(), placer))));
    }
    if (!place.empty()) std::memcpy(place.data(), elements.data(), place.size());
    elements = ElementsOf<T>(place);
  });
  if (!status.ok()) return status;
  decoded.bytes_used = static_cast<int64_t>(placer.used());
  return decoded;
}

// Whether an array of a chunk has one element a token. The others are as wide as the recipe and the
// heads say: of those only whole rows are asked for here.
bool IsPerToken(uint32_t number) { return number < 17 || number == 19; }

absl::Status CheckArrays(const ChunkView& chunk) {
  const auto num_tokens = static_cast<uint64_t>(chunk.num_tokens);
  absl::Status status;
  ForEachArray(chunk, [&](uint32_t number, const char* name, const auto& elements) {
    if (IsPerToken(number) ? (elements.empty() || elements.size() == num_tokens)
                           : elements.size() % num_tokens == 0) {
      return;
    }
    status.Update(absl::InvalidArgumentError(
        absl::StrFormat("chunk %d: %s has %d %s, want %s num_tokens = %d", chunk.chunk_index, name,
                        elements.size(), number < 99 ? "elements" : "bytes",
                        IsPerToken(number) ? "one for each of" : "a multiple of", num_tokens)));
  });
  if (chunk.topk_ids.size() != chunk.topk_logprobs.size()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrFormat("chunk %d: topk_ids has %d elements, topk_logprobs has %d",
                        chunk.chunk_index, chunk.topk_ids.size(), chunk.topk_logprobs.size())));
  }
  return status;
}

absl::Status CheckChunk(const DecodedChunk& decoded) {
  const ChunkView& chunk = decoded.view;
  if (chunk.num_tokens < 1 || chunk.num_tokens > kChunkTokensMax) {
    return absl::InvalidArgumentError(absl::StrFormat("chunk %d: num_tokens is %d, want 1 to %d",
                                                      chunk.chunk_index, chunk.num_tokens,
                                                      kChunkTokensMax));
  }
  if (absl::Status status = CheckArrays(chunk); !status.ok()) return status;
  if (chunk.checksum.has_value() && *chunk.checksum != decoded.actual_checksum) {
    return absl::DataLossError(absl::StrFormat(
        "chunk %d: the checksum of what arrived is 0x%016x, the message states 0x%016x: its "
        "contents changed on the way",
        chunk.chunk_index, decoded.actual_checksum, *chunk.checksum));
  }
  return absl::OkStatus();
}

absl::StatusOr<DecodedRequest> DecodeRequestGenerated(grpc::ByteBuffer* message,
                                                      std::span<std::byte> destination,
                                                      const std::string& unusual) {
  v1::ComputeLossRequest parsed;
  if (!ParseGenerated(message, &parsed)) {
    return absl::InvalidArgumentError(Malformed("ComputeLossRequest", message->Length(), unusual));
  }
  switch (parsed.kind_case()) {
    case v1::ComputeLossRequest::kOpen:
      return DecodedRequest(std::move(*parsed.mutable_open()));
    case v1::ComputeLossRequest::kEnd:
      return DecodedRequest(std::move(*parsed.mutable_end()));
    case v1::ComputeLossRequest::kReceived:
      return DecodedRequest(std::move(*parsed.mutable_received()));
    case v1::ComputeLossRequest::kChunk:
      break;
    case v1::ComputeLossRequest::KIND_NOT_SET:
      return absl::InvalidArgumentError(absl::StrFormat(
          "a ComputeLossRequest of %d bytes holds none of open, end, received and chunk",
          message->Length()));
  }
  absl::StatusOr<DecodedChunk> decoded = PlaceChunk(parsed.chunk(), destination);
  if (!decoded.ok()) return decoded.status();
  if (absl::Status status = CheckChunk(*decoded); !status.ok()) return status;
  return DecodedRequest(*decoded);
}

// --- Decoding responses -----------------------------------------------------------------------

// Where one output goes; an empty place means not asked for.
struct OutputPlace {
  uint32_t number;
  const char* name;
  std::span<std::byte> place;
  bool filled = false;
};
using OutputPlaces = std::array<OutputPlace, 8>;

template <typename T>
std::span<std::byte> TokensAt(T* start, int64_t num_tokens) {
  if (start == nullptr) return {};
  return std::as_writable_bytes(std::span(start, static_cast<size_t>(num_tokens)));
}

OutputPlaces PlacesOf(const ResultDestination& to, int64_t num_tokens) {
  return {{{10, "token_loss", TokensAt(to.token_loss, num_tokens)},
           {11, "logprob", TokensAt(to.logprob, num_tokens)},
           {12, "lse", TokensAt(to.lse, num_tokens)},
           {13, "entropy", TokensAt(to.entropy, num_tokens)},
           {14, "argmax", TokensAt(to.argmax, num_tokens)},
           {15, "topk_ids", TokensAt(to.topk_ids, num_tokens * to.top_k)},
           {16, "topk_logprobs", TokensAt(to.topk_logprobs, num_tokens * to.top_k)},
           {kBulkField, "grad_hidden_states", to.grad_hidden_states}}};
}

std::string WrongSize(const OutputPlace& output, uint64_t bytes) {
  if (output.place.empty()) {
    return absl::StrFormat("%s of %d bytes was not asked for", output.name, bytes);
  }
  return absl::StrFormat("%s has %d bytes, want %d", output.name, bytes, output.place.size());
}

// The outputs that were asked for and are not there; empty when all are.
std::string Missing(const OutputPlaces& outputs) {
  for (const OutputPlace& output : outputs) {
    if (!output.filled && !output.place.empty()) {
      return absl::StrFormat("%s is missing", output.name);
    }
  }
  return "";
}

bool ReadOutput(uint32_t tag, MessageReader& reader, OutputPlaces& outputs) {
  const auto output = std::find_if(outputs.begin(), outputs.end(), [&](const OutputPlace& o) {
    return tag == LengthTag(o.number);
  });
  if (output == outputs.end()) return reader.Unusual(absl::StrFormat("unexpected tag %d", tag));
  uint64_t bytes = 0;
  if (!reader.ReadLength(&bytes)) return false;
  if (bytes != output->place.size()) return reader.Unusual(WrongSize(*output, bytes));
  output->filled = true;
  return reader.Gather(output->place, nullptr);
}

// A small message inside the result.
template <typename Message>
bool ReadSmall(MessageReader& reader, Message* message) {
  std::array<std::byte, 256> bytes;
  uint64_t size = 0;
  if (!reader.ReadLength(&size)) return false;
  if (size > bytes.size()) return reader.Unusual(absl::StrFormat("%d bytes", size));
  if (!reader.Gather(std::span(bytes).first(size), nullptr)) return false;
  return message->ParseFromArray(bytes.data(), static_cast<int>(size)) ||
         reader.Unusual("no valid message");
}

bool ReadResultScalar(uint32_t tag, MessageReader& reader, DecodedResult* result) {
  uint64_t varint = 0;
  v1::LossSums sums;
  v1::StageTimings timings;
  switch (tag) {
    case VarintTag(1):
      return reader.ReadVarint(&result->chunk_index);
    case VarintTag(2):
      if (!reader.ReadVarint(&varint)) return false;
      result->num_tokens = static_cast<int64_t>(varint);
      return true;
    case VarintTag(3):
      if (!reader.ReadVarint(&varint)) return false;
      result->duplicate = varint != 0;
      return true;
    case LengthTag(4):
      if (!ReadSmall(reader, &sums)) return false;
      result->sums = LossSumsFromProto(sums);
      return true;
    case LengthTag(5):
      if (!ReadSmall(reader, &timings)) return false;
      result->timings = StageTimingsFromProto(timings);
      return true;
    default:
      return reader.Unusual(absl::StrFormat("unexpected tag %d", tag));
  }
}

// Looks the places up, once the scalars are known.
bool FindPlaces(MessageReader& reader, FindResultDestination find, const DecodedResult& result,
                std::optional<OutputPlaces>& outputs) {
  if (outputs.has_value()) return true;
  const absl::StatusOr<ResultDestination> to = find(result.chunk_index, result.num_tokens);
  if (!to.ok()) return reader.Unusual("no such chunk");
  outputs = PlacesOf(*to, result.num_tokens);
  return true;
}

// By the grammar. False when the message departs from it; the reader says where.
bool ReadResult(MessageReader& reader, FindResultDestination find, DecodedResult* result) {
  constexpr uint32_t kFirstArrayTag = LengthTag(10);
  if (!reader.EnterOnly(kBulkMessageField, v1::ChunkResult::descriptor())) return false;
  std::optional<OutputPlaces> outputs;
  uint32_t tag = 0;
  while (reader.NextField(&tag)) {
    if (tag < kFirstArrayTag) {
      if (!ReadResultScalar(tag, reader, result)) return false;
      continue;
    }
    if (!FindPlaces(reader, find, *result, outputs)) return false;
    if (!ReadOutput(tag, reader, *outputs)) return false;
  }
  if (!FindPlaces(reader, find, *result, outputs) || !reader.Complete()) return false;
  const std::string missing = Missing(*outputs);
  return missing.empty() || reader.Unusual(missing);
}

absl::Status BadResult(uint64_t chunk_index, const std::string& what) {
  return absl::InternalError(
      absl::StrFormat("the server's result for chunk %d: %s", chunk_index, what));
}

// Copies one parsed array to its place.
absl::Status PlaceOutput(uint64_t chunk_index, std::span<const std::byte> elements,
                         OutputPlace& output) {
  if (elements.size() != output.place.size()) {
    return BadResult(chunk_index, elements.empty() ? absl::StrFormat("%s is missing", output.name)
                                                   : WrongSize(output, elements.size()));
  }
  if (!elements.empty()) std::memcpy(output.place.data(), elements.data(), elements.size());
  return absl::OkStatus();
}

absl::StatusOr<DecodedResult> PlaceResult(const v1::ChunkResult& parsed,
                                          FindResultDestination find) {
  const uint64_t index = parsed.chunk_index();
  const absl::StatusOr<ResultDestination> to = find(index, parsed.num_tokens());
  if (!to.ok()) return to.status();
  OutputPlaces outputs = PlacesOf(*to, parsed.num_tokens());
  const std::array<std::span<const std::byte>, std::tuple_size_v<OutputPlaces>> arrays = {
      std::as_bytes(Elements(parsed.token_loss())),    std::as_bytes(Elements(parsed.logprob())),
      std::as_bytes(Elements(parsed.lse())),           std::as_bytes(Elements(parsed.entropy())),
      std::as_bytes(Elements(parsed.argmax())),        std::as_bytes(Elements(parsed.topk_ids())),
      std::as_bytes(Elements(parsed.topk_logprobs())), Elements(parsed.grad_hidden_states())};
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (absl::Status status = PlaceOutput(index, arrays[i], outputs[i]); !status.ok()) {
      return status;
    }
  }
  return DecodedResult{.chunk_index = index,
                       .num_tokens = parsed.num_tokens(),
                       .duplicate = parsed.duplicate(),
                       .sums = LossSumsFromProto(parsed.sums()),
                       .timings = StageTimingsFromProto(parsed.timings())};
}

absl::StatusOr<DecodedResponse> DecodeResponseGenerated(grpc::ByteBuffer* message,
                                                        FindResultDestination find,
                                                        const std::string& unusual) {
  v1::ComputeLossResponse parsed;
  if (!ParseGenerated(message, &parsed)) {
    return absl::InternalError(Malformed("ComputeLossResponse", message->Length(), unusual));
  }
  switch (parsed.kind_case()) {
    case v1::ComputeLossResponse::kOpened:
      return DecodedResponse(std::move(*parsed.mutable_opened()));
    case v1::ComputeLossResponse::kEnded:
      return DecodedResponse(std::move(*parsed.mutable_ended()));
    case v1::ComputeLossResponse::kResult:
      break;
    case v1::ComputeLossResponse::KIND_NOT_SET:
      return absl::InternalError(absl::StrFormat(
          "a ComputeLossResponse of %d bytes holds none of opened, ended and result",
          message->Length()));
  }
  const absl::StatusOr<DecodedResult> result = PlaceResult(parsed.result(), find);
  if (!result.ok()) return result.status();
  return DecodedResponse(*result);
}

// CodedInputStream and the generated parser count in int.
bool TooLargeToParse(const grpc::ByteBuffer& message) {
  return message.Length() > static_cast<size_t>(std::numeric_limits<int>::max());
}

}  // namespace

uint64_t ChunkChecksum(const ChunkView& chunk) {
  ContentHash hash;
  AddGradScale(chunk, hash);
  ForEachArray(chunk, [&](uint32_t, const char*, const auto& elements) {
    hash.Add(elements.data(), elements.size_bytes());
  });
  return hash.Digest();
}

grpc::ByteBuffer EncodeRequest(const ChunkView& chunk, ReleaseBorrowed release) {
  return EncodeBorrowed(
      chunk, {{kTeacherField, chunk.teacher_hidden_states}, {kBulkField, chunk.hidden_states}},
      std::move(release));
}

grpc::ByteBuffer EncodeRequest(const v1::StreamOpen& open) {
  v1::ComputeLossRequest request;
  *request.mutable_open() = open;
  return EncodeGenerated(request);
}

grpc::ByteBuffer EncodeRequest(const v1::StreamEnd& end) {
  v1::ComputeLossRequest request;
  *request.mutable_end() = end;
  return EncodeGenerated(request);
}

grpc::ByteBuffer EncodeRequest(const v1::ResultReceived& received) {
  v1::ComputeLossRequest request;
  *request.mutable_received() = received;
  return EncodeGenerated(request);
}

grpc::ByteBuffer EncodeResponse(const ResultView& result, ReleaseBorrowed release) {
  return EncodeBorrowed(result, {{kBulkField, result.grad_hidden_states}}, std::move(release));
}

grpc::ByteBuffer EncodeResponse(const v1::StreamOpened& opened) {
  v1::ComputeLossResponse response;
  *response.mutable_opened() = opened;
  return EncodeGenerated(response);
}

grpc::ByteBuffer EncodeResponse(const v1::StreamEnded& ended) {
  v1::ComputeLossResponse response;
  *response.mutable_ended() = ended;
  return EncodeGenerated(response);
}

absl::StatusOr<DecodedRequest> DecodeRequest(grpc::ByteBuffer* message,
                                             std::span<std::byte> destination) {
  LMHEAD_CHECK(reinterpret_cast<uintptr_t>(destination.data()) % kPlaceAlignment == 0,
               "the destination is not 64-byte aligned");
  const absl::Cleanup clear = [message] { message->Clear(); };
  if (TooLargeToParse(*message)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a ComputeLossRequest of %d bytes is too large", message->Length()));
  }
  std::string unusual;
  {
    MessageReader reader(message);
    DecodedChunk decoded;
    if (ReadChunk(reader, destination, &decoded)) {
      if (absl::Status status = CheckChunk(decoded); !status.ok()) return status;
      return DecodedRequest(decoded);
    }
    unusual = reader.unusual();
  }
  return DecodeRequestGenerated(message, destination, unusual);
}

int64_t DestinationBytes(int64_t num_tokens, int64_t num_token_fields, int64_t wide_bytes) {
  constexpr auto kAlignment = static_cast<int64_t>(kPlaceAlignment);
  const int64_t field_bytes = (4 * num_tokens + kAlignment - 1) / kAlignment * kAlignment;
  return num_token_fields * field_bytes + wide_bytes;
}

absl::StatusOr<DecodedResponse> DecodeResponse(grpc::ByteBuffer* message,
                                               FindResultDestination find) {
  const absl::Cleanup clear = [message] { message->Clear(); };
  if (TooLargeToParse(*message)) {
    return absl::InternalError(
        absl::StrFormat("a ComputeLossResponse of %d bytes is too large", message->Length()));
  }
  std::string unusual;
  {
    MessageReader reader(message);
    DecodedResult result;
    if (ReadResult(reader, find, &result)) return DecodedResponse(result);
    unusual = reader.unusual();
  }
  return DecodeResponseGenerated(message, find, unusual);
}

}  // namespace lmhead
