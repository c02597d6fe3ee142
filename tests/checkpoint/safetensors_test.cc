#include "server/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& contents) {
    std::string path = directory_.Path("file.safetensors");
    std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
    return path;
  }

  // A file of this header and data.
  std::string WriteParts(const std::string& header, const std::string& data) {
    const uint64_t size = header.size();
    return Write(std::string(reinterpret_cast<const char*>(&size), sizeof size) + header + data);
  }

  std::string ErrorOf(const std::string& header, const std::string& data = "") {
    const auto reader = SafetensorsReader::Open(WriteParts(header, data));
    EXPECT_EQ(reader.status().code(), absl::StatusCode::kInvalidArgument) << reader.status();
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr("file.safetensors"));
    return std::string(reader.status().message());
  }

  const TemporaryFolder directory_;
};

template <typename T>
std::string Bytes(std::vector<T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST_F(SafetensorsTest, ReadsTensorsMetadataAndRanges) {
  // The F64 tensor starts at an odd offset: the format does not promise alignment.
  const auto reader = SafetensorsReader::Open(
      WriteParts(R"({"__metadata__":{"case":"{\"a\":1}"},)"
                 R"("flag":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
                 R"("f64":{"dtype":"F64","shape":[2],"data_offsets":[1,17]},)"
                 R"("f32":{"dtype":"F32","shape":[2,2],"data_offsets":[17,33]},)"
                 R"("bf16":{"dtype":"BF16","shape":[1],"data_offsets":[33,35]},)"
                 R"("none":{"dtype":"I32","shape":[0,4],"data_offsets":[35,35]}})",
                 "\x01" + Bytes<double>({1.5, -2.5}) + Bytes<float>({1, 2, 3, 4}) +
                     Bytes<uint16_t>({0x3f80})));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->tensors().size(), 5u);
  EXPECT_EQ((*reader)->metadata().at("case"), "{\"a\":1}");
  EXPECT_THAT((*reader)->ReadAll<double>("f64").value(), ElementsAre(1.5, -2.5));
  EXPECT_THAT((*reader)->ReadAll<float>("f32").value(), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT((*reader)->ReadAll<uint16_t>("bf16").value(), ElementsAre(0x3f80));
  EXPECT_THAT((*reader)->ReadAll<int32_t>("none").value(), ElementsAre());
  const SafetensorsTensor& f32 = **(*reader)->Find("f32");
  EXPECT_THAT(f32.shape, ElementsAre(2, 2));
  std::vector<float> row(2);
  ASSERT_TRUE((*reader)->Read(f32, 8, std::as_writable_bytes(std::span<float>(row))).ok());
  EXPECT_THAT(row, ElementsAre(3, 4));
}

TEST_F(SafetensorsTest, ReadsAFileWithoutTensors) {
  const auto reader = SafetensorsReader::Open(WriteParts("{}", ""));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->tensors().empty());
}

TEST_F(SafetensorsTest, MissingFileAndMissingTensorAreNotFound) {
  const auto missing = SafetensorsReader::Open(directory_.Path("nothing"));
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  const auto reader = SafetensorsReader::Open(WriteParts("{}", ""));
  EXPECT_EQ((*reader)->Find("weight").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string((*reader)->ReadAll<float>("weight").status().message()),
              HasSubstr("weight"));
}

TEST_F(SafetensorsTest, RefusesAnotherDType) {
  const auto reader = SafetensorsReader::Open(
      WriteParts(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", Bytes<float>({1})));
  const auto values = (*reader)->ReadAll<int32_t>("x");
  EXPECT_EQ(values.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(values.status().message()), HasSubstr("F32"));
}

TEST_F(SafetensorsTest, EveryTruncationIsAnError) {
  const std::string path =
      WriteParts(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", Bytes<float>({1, 2}));
  std::ifstream in(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  ASSERT_TRUE(SafetensorsReader::Open(Write(whole)).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto reader = SafetensorsReader::Open(Write(whole.substr(0, size)));
    EXPECT_EQ(reader.status().code(), absl::StatusCode::kInvalidArgument) << size << " bytes";
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr("truncated")) << size;
  }
}

TEST_F(SafetensorsTest, AFileThatShrinksAfterOpenIsAnError) {
  const std::string path =
      WriteParts(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", Bytes<float>({1, 2}));
  const auto reader = SafetensorsReader::Open(path);
  ASSERT_TRUE(reader.ok());
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_THAT(std::string((*reader)->ReadAll<float>("x").status().message()),
              HasSubstr("truncated"));
}

TEST_F(SafetensorsTest, RefusesAHeaderBeyondTheBound) {
  for (const uint64_t size : {uint64_t{100'000'001}, std::numeric_limits<uint64_t>::max()}) {
    const auto reader = SafetensorsReader::Open(
        Write(std::string(reinterpret_cast<const char*>(&size), sizeof size) + "{}"));
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr("at most 100000000"));
  }
}

TEST_F(SafetensorsTest, RefusesBadHeaders) {
  EXPECT_THAT(ErrorOf("{\"x\":"), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf("{\"\xff\":1}"), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf(std::string(100'000, '[')), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[)" + std::string(1'000'000, '[') +
                      std::string(1'000'000, ']') + R"(],"data_offsets":[0,0]}})"),
              HasSubstr("shape holds array"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("wanted an object"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                      R"("x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
              HasSubstr("'x' twice"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"n":1}})"), HasSubstr("'n' is a number"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":7})"), HasSubstr("not an object"));
  EXPECT_THAT(ErrorOf(R"({"x":3})"), HasSubstr("tensor 'x'"));
  EXPECT_THAT(ErrorOf(R"({"x":{"shape":[0],"data_offsets":[0,0]}})"), HasSubstr("dtype"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F8","shape":[0],"data_offsets":[0,0]}})"),
              HasSubstr("unknown dtype 'F8'"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","data_offsets":[0,0]}})"), HasSubstr("shape"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}})"),
              HasSubstr("shape holds -1"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[1.5],"data_offsets":[0,0]}})"),
              HasSubstr("shape holds 1.5"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[1]}})"), HasSubstr("data_offsets"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "1234"),
              HasSubstr("wanted [start, stop]"));
}

TEST_F(SafetensorsTest, RefusesBadOffsets) {
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "1234"),
              HasSubstr("span 4 bytes, but F32 [2] takes 8"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],)"
                      R"("data_offsets":[0,0]}})"),
              HasSubstr("more than 2^63"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234"),
              HasSubstr("beyond the 4 bytes"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                      R"("y":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                      "1234"),
              HasSubstr("overlaps"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", "1234"),
              HasSubstr("hole"));
  EXPECT_THAT(ErrorOf(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "1234"),
              HasSubstr("2 bytes after the last tensor"));
}

}  // namespace
}  // namespace lmhead
