#include <gmock/gmock.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <variant>

#include "proto/types/limits.h"
#include "proto/wire/chunk_codec.h"
#include "tests/wire/wire_test_util.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kRoom = 4096;

absl::StatusOr<DecodedRequest> Decode(const std::string& bytes, Destination& destination,
                                      size_t slice_bytes = 1000) {
  grpc::ByteBuffer buffer = BufferOf(bytes, slice_bytes);
  return DecodeRequest(&buffer, destination.span());
}

// The bytes of the generated code for what was decoded: equal contents have equal bytes.
std::string Reencoded(const DecodedRequest& decoded) {
  if (const auto* chunk = std::get_if<DecodedChunk>(&decoded)) {
    return RequestBytes(MessageOf(chunk->view));
  }
  v1::ComputeLossRequest request;
  if (const auto* open = std::get_if<v1::StreamOpen>(&decoded)) *request.mutable_open() = *open;
  if (const auto* end = std::get_if<v1::StreamEnd>(&decoded)) *request.mutable_end() = *end;
  if (const auto* received = std::get_if<v1::ResultReceived>(&decoded)) {
    *request.mutable_received() = *received;
  }
  return request.SerializeAsString();
}

v1::Chunk SmallChunk() {
  v1::Chunk chunk;
  chunk.set_chunk_index(7);
  chunk.set_num_tokens(3);
  chunk.set_grad_scale(0.5f);
  for (int i = 0; i < 3; ++i) {
    chunk.add_targets(10 + i);
    chunk.add_token_weights(0.25f * static_cast<float>(i));
  }
  chunk.set_hidden_states("0123456789abcdef01234567");
  return chunk;
}

TEST(RequestEncoding, BytesEqualProtobufs) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    v1::Chunk chunk = RandomChunk(random, 1 + static_cast<int64_t>(random() % 200), 6);
    if (Coin(random)) chunk.set_checksum(random());
    int releases = 0;
    const grpc::ByteBuffer buffer = EncodeRequest(ViewOfMessage(chunk), [&] { ++releases; });
    ASSERT_EQ(BytesOf(buffer), RequestBytes(chunk));
  }
}

TEST(RequestEncoding, OpenAndEndBytesEqualProtobufs) {
  v1::ComputeLossRequest open;
  open.mutable_open()->set_head("lm");
  open.mutable_open()->mutable_recipe()->set_ignore_index(-1);
  EXPECT_EQ(BytesOf(EncodeRequest(open.open())), open.SerializeAsString());
  v1::ComputeLossRequest end;
  end.mutable_end()->set_num_chunks(0);
  EXPECT_EQ(BytesOf(EncodeRequest(end.end())), end.SerializeAsString());
}

TEST(RequestEncoding, BorrowsHiddenStatesUntilTheLastReferenceGoes) {
  const v1::Chunk chunk = SmallChunk();
  int releases = 0;
  std::vector<grpc::Slice> slices;
  {
    const grpc::ByteBuffer buffer = EncodeRequest(ViewOfMessage(chunk), [&] { ++releases; });
    ASSERT_TRUE(buffer.Dump(&slices).ok());
  }
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), chunk.hidden_states().data());
  EXPECT_EQ(slices[1].size(), chunk.hidden_states().size());
  EXPECT_EQ(releases, 0);
  slices.clear();
  EXPECT_EQ(releases, 1);
}

TEST(RequestEncoding, ReleasesAtOnceWhenNothingIsBorrowed) {
  v1::Chunk chunk = SmallChunk();
  chunk.clear_hidden_states();
  int releases = 0;
  const grpc::ByteBuffer buffer = EncodeRequest(ViewOfMessage(chunk), [&] { ++releases; });
  EXPECT_EQ(releases, 1);
  EXPECT_EQ(BytesOf(buffer), RequestBytes(chunk));
}

TEST(RequestDecoding, GathersRandomChunksFromSlicesOfAnySize) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    v1::Chunk chunk = RandomChunk(random, 1 + static_cast<int64_t>(random() % 20), 6);
    if (Coin(random)) chunk.set_checksum(ChunkChecksum(ViewOfMessage(chunk)));
    Destination destination(kRoom);
    const auto decoded = Decode(RequestBytes(chunk), destination, 1 + random() % 100);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    ASSERT_EQ(Reencoded(*decoded), RequestBytes(chunk));
    EXPECT_EQ(std::get<DecodedChunk>(*decoded).actual_checksum,
              ChunkChecksum(ViewOfMessage(chunk)));
  }
}

TEST(RequestEncoding, BorrowsTheHiddenStatesOfBothSides) {
  v1::Chunk chunk = SmallChunk();
  chunk.set_teacher_hidden_states("teacher's hidden states, not a multiple");
  int releases = 0;
  std::vector<grpc::Slice> slices;
  {
    grpc::ByteBuffer buffer = EncodeRequest(ViewOfMessage(chunk), [&] { ++releases; });
    EXPECT_EQ(BytesOf(buffer), RequestBytes(chunk));
    ASSERT_TRUE(buffer.Dump(&slices).ok());
  }
  ASSERT_EQ(slices.size(), 4u);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), chunk.teacher_hidden_states().data());
  EXPECT_EQ(static_cast<const void*>(slices[3].begin()), chunk.hidden_states().data());
  slices.pop_back();
  EXPECT_EQ(releases, 0);  // The other piece is still held.
  slices.clear();
  EXPECT_EQ(releases, 1);
}

TEST(RequestDecoding, PiecesLieAlignedInsideTheDestination) {
  Destination destination(kRoom);
  const auto decoded = Decode(RequestBytes(SmallChunk()), destination);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& chunk = std::get<DecodedChunk>(*decoded);
  const std::byte* start = destination.span().data();
  EXPECT_EQ(reinterpret_cast<const std::byte*>(chunk.view.targets.data()), start);
  EXPECT_EQ(reinterpret_cast<const std::byte*>(chunk.view.token_weights.data()), start + 64);
  EXPECT_EQ(chunk.view.hidden_states.data(), start + 128);
  EXPECT_EQ(chunk.bytes_used, 128 + 24);
  EXPECT_EQ(chunk.bytes_used, DestinationBytes(3, 2, 24));
}

TEST(RequestDecoding, ClearsTheMessageAlsoOnError) {
  Destination destination(kRoom);
  grpc::ByteBuffer good = BufferOf(RequestBytes(SmallChunk()), 10);
  EXPECT_TRUE(DecodeRequest(&good, destination.span()).ok());
  EXPECT_FALSE(good.Valid());
  grpc::ByteBuffer bad = BufferOf("\x7b", 10);
  EXPECT_FALSE(DecodeRequest(&bad, destination.span()).ok());
  EXPECT_FALSE(bad.Valid());
}

TEST(RequestDecoding, OpenAndEndGoThroughTheGeneratedCode) {
  Destination destination(0);
  v1::ComputeLossRequest open;
  open.mutable_open()->set_head("lm");
  open.mutable_open()->set_step(3);
  const auto opened = Decode(open.SerializeAsString(), destination, 2);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(std::get<v1::StreamOpen>(*opened).head(), "lm");
  v1::ComputeLossRequest end;
  end.mutable_end()->set_num_chunks(5);
  const auto ended = Decode(end.SerializeAsString(), destination, 1);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(std::get<v1::StreamEnd>(*ended).num_chunks(), 5u);
}

// --- Other encodings of the same message --------------------------------------------------------

// The request whose chunk has exactly these bytes.
std::string Wrap(const std::string& chunk_bytes) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.WriteTag((15 << 3) | 2);
    out.WriteVarint64(chunk_bytes.size());
    out.WriteString(chunk_bytes);
  }
  return bytes;
}

// Encodings of one field each, in ascending order.
std::vector<std::string> FieldsOf(const v1::Chunk& chunk) {
  std::vector<std::string> fields;
  const auto* reflection = chunk.GetReflection();
  std::vector<const google::protobuf::FieldDescriptor*> present;
  reflection->ListFields(chunk, &present);
  for (const auto* field : present) {
    v1::Chunk only = chunk;
    for (const auto* other : present) {
      if (other != field) reflection->ClearField(&only, other);
    }
    fields.push_back(only.SerializeAsString());
  }
  return fields;
}

TEST(RequestDecoding, TakesFieldsInAnyOrder) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    v1::Chunk chunk = RandomChunk(random, 5, 6);
    chunk.set_checksum(ChunkChecksum(ViewOfMessage(chunk)));
    std::vector<std::string> fields = FieldsOf(chunk);
    std::shuffle(fields.begin(), fields.end(), random);
    std::string bytes;
    for (const std::string& field : fields) bytes += field;
    Destination destination(kRoom);
    const auto decoded = Decode(Wrap(bytes), destination);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(Reencoded(*decoded), RequestBytes(chunk));
  }
}

TEST(RequestDecoding, SkipsUnknownFields) {
  const v1::Chunk chunk = SmallChunk();
  const std::string unknown = "\xf2\x3f\x03xyz";  // Field 1022, 3 bytes.
  for (const std::string& bytes :
       {Wrap(unknown + chunk.SerializeAsString()), Wrap(chunk.SerializeAsString() + unknown),
        RequestBytes(chunk) + unknown, unknown + RequestBytes(chunk)}) {
    Destination destination(kRoom);
    const auto decoded = Decode(bytes, destination);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(Reencoded(*decoded), RequestBytes(chunk));
  }
}

TEST(RequestDecoding, TakesUnpackedAndSplitArrays) {
  v1::Chunk chunk = SmallChunk();
  chunk.clear_targets();
  v1::Chunk packed;
  packed.add_targets(12);
  // Two elements one by one, tag 10 of wire type fixed32, then a packed one.
  const std::string unpacked("\x55\x0a\x00\x00\x00\x55\x0b\x00\x00\x00", 10);
  Destination destination(kRoom);
  const auto decoded =
      Decode(Wrap(chunk.SerializeAsString() + unpacked + packed.SerializeAsString()), destination);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(Reencoded(*decoded), RequestBytes(SmallChunk()));
}

TEST(RequestDecoding, TheLastScalarWinsAndChunksMerge) {
  v1::Chunk other;
  other.set_chunk_index(99);
  other.set_hidden_states("something else altogether");
  const v1::Chunk chunk = SmallChunk();
  for (const std::string& bytes : {Wrap(other.SerializeAsString() + chunk.SerializeAsString()),
                                   RequestBytes(other) + RequestBytes(chunk)}) {
    Destination destination(kRoom);
    const auto decoded = Decode(bytes, destination);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(Reencoded(*decoded), RequestBytes(chunk));
  }
}

TEST(RequestDecoding, TheLastKindWins) {
  v1::ComputeLossRequest end;
  end.mutable_end()->set_num_chunks(5);
  Destination destination(kRoom);
  const auto decoded = Decode(RequestBytes(SmallChunk()) + end.SerializeAsString(), destination);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(Reencoded(*decoded), end.SerializeAsString());
}

// --- Nothing is trusted -------------------------------------------------------------------------

// What the generated parser and the rules of the header make of `bytes`: the canonical bytes, or
// nothing when they must be refused.
std::optional<std::string> Oracle(const std::string& bytes) {
  v1::ComputeLossRequest request;
  if (!request.ParseFromString(bytes)) return std::nullopt;
  if (request.kind_case() == v1::ComputeLossRequest::KIND_NOT_SET) return std::nullopt;
  if (!request.has_chunk()) {
    request.GetReflection()->MutableUnknownFields(&request)->Clear();
    return request.SerializeAsString();
  }
  const v1::Chunk& chunk = request.chunk();
  const ChunkView view = ViewOfMessage(chunk);
  const auto tokens = static_cast<uint64_t>(chunk.num_tokens());
  if (chunk.num_tokens() < 1 || chunk.num_tokens() > kChunkTokensMax) return std::nullopt;
  for (const size_t size :
       {view.targets.size(), view.token_weights.size(), view.token_temperature.size(),
        view.logprob_grad.size(), view.entropy_grad.size(), view.old_logprob.size(),
        view.advantage.size(), view.reference_logprob.size()}) {
    if (size != 0 && size != tokens) return std::nullopt;
  }
  for (const size_t size : {view.topk_ids.size(), view.topk_logprobs.size(),
                            view.hidden_states.size(), view.teacher_hidden_states.size()}) {
    if (size % tokens != 0) return std::nullopt;
  }
  if (view.topk_ids.size() != view.topk_logprobs.size()) return std::nullopt;
  if (view.checksum.has_value() && *view.checksum != ChunkChecksum(view)) return std::nullopt;
  return RequestBytes(MessageOf(view));
}

void ExpectLikeOracle(const std::string& bytes) {
  Destination destination(kRoom);
  const auto decoded = Decode(bytes, destination, 37);
  const std::optional<std::string> expected = Oracle(bytes);
  ASSERT_EQ(decoded.ok(), expected.has_value()) << decoded.status();
  if (expected.has_value()) {
    ASSERT_EQ(Reencoded(*decoded), *expected);
  } else {
    ASSERT_TRUE(absl::IsInvalidArgument(decoded.status()) || absl::IsDataLoss(decoded.status()))
        << decoded.status();
    ASSERT_FALSE(decoded.status().message().empty());
  }
}

std::vector<v1::Chunk> ChunksToBreak() {
  std::vector<v1::Chunk> chunks = {SmallChunk()};
  chunks.push_back(SmallChunk());
  chunks.back().set_checksum(ChunkChecksum(ViewOfMessage(chunks.back())));
  for (uint64_t seed = 1000; seed < 1006; ++seed) {
    Random random(seed);
    chunks.push_back(RandomChunk(random, 1 + static_cast<int64_t>(seed % 3), 4));
  }
  return chunks;
}

TEST(RequestDecoding, EveryTruncationIsACleanError) {
  for (const v1::Chunk& chunk : ChunksToBreak()) {
    const std::string bytes = RequestBytes(chunk);
    for (size_t length = 0; length < bytes.size(); ++length) {
      SCOPED_TRACE(testing::Message() << chunk.ShortDebugString() << " cut to " << length);
      Destination destination(kRoom);
      const auto decoded = Decode(bytes.substr(0, length), destination, 5);
      ASSERT_TRUE(absl::IsInvalidArgument(decoded.status())) << decoded.status();
    }
  }
}

TEST(RequestDecoding, EveryTruncationOfTheChunkAloneDecodesLikeTheGeneratedParser) {
  for (const v1::Chunk& chunk : ChunksToBreak()) {
    const std::string bytes = chunk.SerializeAsString();
    for (size_t length = 0; length < bytes.size(); ++length) {
      SCOPED_TRACE(testing::Message() << chunk.ShortDebugString() << " cut to " << length);
      ExpectLikeOracle(Wrap(bytes.substr(0, length)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(RequestDecoding, EveryFlippedByteDecodesLikeTheGeneratedParser) {
  for (const v1::Chunk& chunk : ChunksToBreak()) {
    const std::string bytes = RequestBytes(chunk);
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (int flip = 1; flip < 256; flip = flip < 16 ? flip + 1 : flip + 17) {
        SCOPED_TRACE(testing::Message()
                     << chunk.ShortDebugString() << " byte " << at << " flipped by " << flip);
        std::string flipped = bytes;
        flipped[at] = static_cast<char>(flipped[at] ^ flip);
        ExpectLikeOracle(flipped);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RequestDecoding, RandomBytesDecodeLikeTheGeneratedParser) {
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    std::string bytes = RandomBytes(random, static_cast<int64_t>(random() % 60));
    if (Coin(random)) bytes = Wrap(bytes);
    ExpectLikeOracle(bytes);
    if (HasFatalFailure()) return;
  }
}

TEST(RequestDecoding, OverlongVarintsAreRefusedOrEqual) {
  const std::string chunk = SmallChunk().SerializeAsString();
  for (int padding = 1; padding <= 12; ++padding) {
    SCOPED_TRACE(padding);
    // The length of the chunk with `padding` needless bytes.
    std::string bytes = "\x7a";
    bytes.push_back(static_cast<char>(chunk.size() | 0x80));
    for (int i = 1; i < padding; ++i) bytes.push_back(static_cast<char>(0x80));
    bytes.push_back('\0');
    Destination destination(kRoom);
    const auto decoded = Decode(bytes + chunk, destination);
    if (decoded.ok()) {
      EXPECT_EQ(Reencoded(*decoded), RequestBytes(SmallChunk()));
    }
    EXPECT_TRUE(padding < 10 || absl::IsInvalidArgument(decoded.status())) << decoded.status();
  }
}

TEST(RequestDecoding, SaysWhereAMessageBreaks) {
  Destination destination(kRoom);
  const std::string bytes = RequestBytes(SmallChunk());
  // The last field is 24 bytes; its length byte becomes 25.
  std::string longer = bytes;
  longer[bytes.size() - 25] = 25;
  EXPECT_THAT(std::string(Decode(longer, destination).status().message()),
              AllOf(HasSubstr("hidden_states"), HasSubstr("25 bytes are stated, 24 are left")));
  EXPECT_THAT(std::string(Decode("", destination).status().message()),
              HasSubstr("none of open, end, received and chunk"));
}

TEST(RequestDecoding, RefusesWhatDoesNotFitTheDestination) {
  const v1::Chunk chunk = SmallChunk();
  const auto needed = static_cast<size_t>(DestinationBytes(3, 2, 24));
  std::vector<std::string> fields = FieldsOf(chunk);
  std::string reversed;
  for (const std::string& field : fields) reversed.insert(0, field);
  for (const std::string& bytes : {RequestBytes(chunk), Wrap(reversed)}) {
    Destination exact(needed);
    EXPECT_TRUE(Decode(bytes, exact).ok());
    for (size_t room = 0; room < needed; ++room) {
      Destination destination(room);
      const auto decoded = Decode(bytes, destination);
      ASSERT_TRUE(absl::IsInvalidArgument(decoded.status())) << decoded.status();
      ASSERT_THAT(std::string(decoded.status().message()),
                  AllOf(HasSubstr("chunk 7"), HasSubstr("does not fit")));
    }
  }
}

TEST(RequestDecoding, RefusesArraysThatDisagreeWithNumTokens) {
  struct Case {
    void (*change)(v1::Chunk*);
    const char* says;
  };
  const Case cases[] = {
      {[](v1::Chunk* c) { c->set_num_tokens(0); }, "num_tokens is 0, want 1 to"},
      {[](v1::Chunk* c) { c->set_num_tokens(-3); }, "num_tokens is -3"},
      {[](v1::Chunk* c) { c->set_num_tokens(kChunkTokensMax + 1); }, "num_tokens is 16385"},
      {[](v1::Chunk* c) { c->set_num_tokens(INT64_MIN); }, "num_tokens is -9223372036854775808"},
      {[](v1::Chunk* c) { c->set_num_tokens(4); }, "targets has 3 elements"},
      {[](v1::Chunk* c) { c->add_targets(1); }, "targets has 4 elements"},
      {[](v1::Chunk* c) { c->add_token_weights(1); }, "token_weights has 4 elements"},
      {[](v1::Chunk* c) { c->add_token_temperature(1); }, "token_temperature has 1 elements"},
      {[](v1::Chunk* c) { c->add_logprob_grad(1); }, "logprob_grad has 1 elements"},
      {[](v1::Chunk* c) { c->add_entropy_grad(1); }, "entropy_grad has 1 elements"},
      {[](v1::Chunk* c) { c->add_old_logprob(1); }, "old_logprob has 1 elements"},
      {[](v1::Chunk* c) { c->add_advantage(1); }, "advantage has 1 elements"},
      {[](v1::Chunk* c) { c->add_topk_ids(1); }, "topk_ids has 1 elements"},
      {[](v1::Chunk* c) { c->add_topk_logprobs(1); }, "topk_logprobs has 1 elements"},
      {[](v1::Chunk* c) {
         for (int i = 0; i < 6; ++i) c->add_topk_ids(i);
       },
       "topk_ids has 6 elements, topk_logprobs has 0"},
      {[](v1::Chunk* c) { c->set_hidden_states("1234567"); }, "hidden_states has 7 bytes"},
      {[](v1::Chunk* c) { c->set_teacher_hidden_states("12"); },
       "teacher_hidden_states has 2 bytes"},
  };
  for (const Case& test : cases) {
    v1::Chunk chunk = SmallChunk();
    test.change(&chunk);
    Destination destination(kRoom);
    const auto decoded = Decode(RequestBytes(chunk), destination);
    EXPECT_TRUE(absl::IsInvalidArgument(decoded.status())) << decoded.status();
    EXPECT_THAT(std::string(decoded.status().message()),
                AllOf(HasSubstr("chunk 7: "), HasSubstr(test.says)));
  }
}

// --- The checksum -------------------------------------------------------------------------------

TEST(Checksum, IsXxh3OfGradScaleAndTheArraysInFieldOrder) {
  const v1::Chunk chunk = SmallChunk();
  std::string contents("\x00\x00\x00\x3f", 4);  // 0.5f, little-endian.
  contents.append(reinterpret_cast<const char*>(chunk.targets().data()), 12);
  contents.append(reinterpret_cast<const char*>(chunk.token_weights().data()), 12);
  contents += chunk.hidden_states();
  EXPECT_EQ(ChunkChecksum(ViewOfMessage(chunk)), XXH3_64bits(contents.data(), contents.size()));
}

TEST(Checksum, AnAbsentGradScaleCountsAsOne) {
  v1::Chunk absent = SmallChunk();
  absent.clear_grad_scale();
  v1::Chunk one = SmallChunk();
  one.set_grad_scale(1.0f);
  EXPECT_EQ(ChunkChecksum(ViewOfMessage(absent)), ChunkChecksum(ViewOfMessage(one)));
  EXPECT_NE(ChunkChecksum(ViewOfMessage(absent)), ChunkChecksum(ViewOfMessage(SmallChunk())));
}

TEST(Checksum, DoesNotDependOnTheIndex) {
  v1::Chunk other = SmallChunk();
  other.set_chunk_index(8);
  EXPECT_EQ(ChunkChecksum(ViewOfMessage(other)), ChunkChecksum(ViewOfMessage(SmallChunk())));
}

TEST(Checksum, ADifferenceIsDataLossNamingTheChunk) {
  v1::Chunk chunk = SmallChunk();
  chunk.set_checksum(ChunkChecksum(ViewOfMessage(chunk)) ^ 1);
  Destination destination(kRoom);
  const auto decoded = Decode(RequestBytes(chunk), destination);
  EXPECT_TRUE(absl::IsDataLoss(decoded.status())) << decoded.status();
  EXPECT_THAT(std::string(decoded.status().message()), HasSubstr("chunk 7"));
}

}  // namespace
}  // namespace lmhead
