#include "proto/wire/lane_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "lmhead/v1/shard.pb.h"
#include "tests/wire/wire_test_util.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> DataOf(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string RandomText(Random& random, size_t bytes) {
  std::string text(bytes, '\0');
  FillBytes(random, text.data(), bytes);
  return text;
}

// Zeros, small and largest numbers alike.
uint64_t RandomNumber(Random& random) { return random() >> (random() % 65 % 64); }

v1::LaneRequest MessageOf(const LanePartHeader& header, const std::string& data) {
  v1::LaneRequest message;
  message.mutable_part()->set_command(header.command);
  message.mutable_part()->set_array(header.array);
  message.mutable_part()->set_offset(header.offset);
  message.mutable_part()->set_data(data);
  return message;
}

TEST(LaneCodec, BytesEqualProtobufsAndAreReadBack) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const LanePartHeader header = {.command = Coin(random) ? RandomNumber(random) : 0,
                                   .array = static_cast<uint32_t>(RandomNumber(random)),
                                   .offset = Coin(random) ? RandomNumber(random) : 0};
    const std::string data = RandomText(random, 1 + random() % 100'000);
    const std::string bytes = BytesOf(EncodeLanePart(header, DataOf(data)));
    EXPECT_TRUE(bytes == MessageOf(header, data).SerializeAsString());
    grpc::ByteBuffer received = BufferOf(bytes, 1 + random() % 5000);
    LanePartReader part(&received);
    ASSERT_TRUE(part.status().ok()) << part.status();
    EXPECT_EQ(part.header().command, header.command);
    EXPECT_EQ(part.header().array, header.array);
    EXPECT_EQ(part.header().offset, header.offset);
    ASSERT_EQ(part.num_bytes(), data.size());
    std::vector<std::byte> read(data.size());
    ASSERT_TRUE(part.CopyTo(read).ok());
    EXPECT_TRUE(std::ranges::equal(read, DataOf(data)));
  }
}

// Whether the bytes are a part: all of it, its data included.
absl::Status Read(const std::string& bytes, size_t slice_bytes) {
  grpc::ByteBuffer received = BufferOf(bytes, slice_bytes);
  LanePartReader part(&received);
  if (!part.status().ok()) return part.status();
  std::vector<std::byte> data(part.num_bytes());
  return part.CopyTo(data);
}

TEST(LaneCodec, WhatIsCutShortOrChangedIsRefusedOrAnotherPart) {
  const std::string bytes =
      BytesOf(EncodeLanePart({.command = 300, .array = 2, .offset = 70'000}, DataOf("some data")));
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(Read(bytes.substr(0, length), 3).ok()) << length << " bytes";
  }
  EXPECT_FALSE(Read(bytes + "x", 3).ok());
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = bytes;
      changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
      Read(changed, 4).IgnoreError();  // The sanitizers see what it touches.
    }
  }
}

TEST(LaneCodec, MessagesThatAreNoPartsAreRefused) {
  v1::LaneRequest join;
  join.mutable_join()->set_rank(1);
  for (const std::string& bytes :
       {std::string(), std::string("\x0a\x00", 2), join.SerializeAsString(),
        MessageOf({.command = 1}, "").SerializeAsString(), std::string(40, '\xff')}) {
    const absl::Status status = Read(bytes, 7);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("a part of a lane: "));
  }
}

TEST(LaneCodec, AJoinIsReadBackAndNothingElseIsOne) {
  v1::JoinLane join;
  join.set_rank(3);
  join.set_session(std::numeric_limits<uint64_t>::max());
  join.set_call(9);
  grpc::ByteBuffer message = EncodeLaneJoin(join);
  const auto read = DecodeLaneJoin(&message);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), join.SerializeAsString());
  grpc::ByteBuffer part = EncodeLanePart({.command = 1}, DataOf("x"));
  EXPECT_EQ(DecodeLaneJoin(&part).status().code(), absl::StatusCode::kInvalidArgument);
  grpc::ByteBuffer garbage = BufferOf(std::string(9, '\xff'), 4);
  EXPECT_EQ(DecodeLaneJoin(&garbage).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lmhead
