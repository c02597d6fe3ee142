// Files that the writer makes are what the reader reads, and incomplete ones are not finished.

#include "server/checkpoint/safetensors_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>

#include "server/checkpoint/durable_files.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

std::string Path(const std::string& name) { return ::testing::TempDir() + "/" + name; }

std::span<const std::byte> Bytes(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

TEST(SafetensorsWriterTest, ReaderReadsWhatWasAppendedInPieces) {
  const std::string path = Path("pieces.safetensors");
  std::remove(path.c_str());
  auto writer = SafetensorsWriter::Create(
      path,
      std::vector<SafetensorsWriter::Tensor>{{"b", SafetensorsDType::kF32, {2, 3}},
                                             {"a", SafetensorsDType::kF32, {4}},
                                             {"empty", SafetensorsDType::kBF16, {0, 7}}},
      {{"key", "value"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  std::vector<float> values(10);
  std::iota(values.begin(), values.end(), 0.5f);
  ASSERT_TRUE((*writer)->Append(Bytes(values).first(7)).ok());
  ASSERT_TRUE((*writer)->Append(Bytes(values).subspan(7)).ok());
  const absl::StatusOr<FileDigest> digest = (*writer)->Finish();
  ASSERT_TRUE(digest.ok()) << digest.status();
  EXPECT_EQ(*digest, *DigestFile(path));

  auto reader = SafetensorsReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(*(*reader)->ReadAll<float>("b"),
            std::vector<float>(values.begin(), values.begin() + 6));
  EXPECT_EQ(*(*reader)->ReadAll<float>("a"), std::vector<float>(values.begin() + 6, values.end()));
  EXPECT_EQ((*(*reader)->Find("empty"))->size_bytes, 0);
  EXPECT_EQ((*reader)->metadata().at("key"), "value");
}

TEST(SafetensorsWriterTest, TooFewAndTooManyBytesAreRefused) {
  const std::string path = Path("sizes.safetensors");
  std::remove(path.c_str());
  auto writer = SafetensorsWriter::Create(
      path, std::vector<SafetensorsWriter::Tensor>{{"a", SafetensorsDType::kF32, {4}}}, {});
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::vector<float> values(5);
  EXPECT_EQ((*writer)->Append(Bytes(values)).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE((*writer)->Append(Bytes(values).first(12)).ok());
  const absl::Status unfinished = (*writer)->Finish().status();
  EXPECT_EQ(unfinished.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unfinished.message()), HasSubstr("4 bytes"));
}

TEST(SafetensorsWriterTest, NothingIsOverwritten) {
  const std::string path = Path("there.safetensors");
  std::remove(path.c_str());
  ASSERT_TRUE(WriteFileDurably(path, "there").ok());
  EXPECT_EQ(SafetensorsWriter::Create(path, {}, {}).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(*ReadFile(path), "there");
}

TEST(SafetensorsWriterTest, AFullDiskIsSaidSo) {
  auto writer =
      SafetensorsWriter::Create("/dev/full/no", std::vector<SafetensorsWriter::Tensor>{}, {});
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kNotFound) << writer.status();
  EXPECT_EQ(FileError("writing", "/x", ENOSPC).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace lmhead
