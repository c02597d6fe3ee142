// import and export against a real server: a Hugging Face checkpoint there and back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/local_server.h"
#include "proto/types/dtype.h"
#include "server/checkpoint/safetensors.h"
#include "server/checkpoint/safetensors_writer.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 11;
constexpr int64_t kHidden = 6;

CommandResult RunLmhead(const std::string& arguments) {
  return RunCommand(
      absl::StrCat("'", PathBesideTest("lmhead"), "' ", arguments, " 2>&1 </dev/null"));
}

// Bits of element i of a tensor; the values are exact in every dtype.
float Value(int64_t i) { return static_cast<float>(i % 17) * 0.25f - 2.0f; }

std::vector<std::byte> Elements(SafetensorsDType dtype, int64_t count, float factor) {
  std::vector<std::byte> bytes;
  for (int64_t i = 0; i < count; ++i) {
    const float value = Value(i) * factor;
    const uint16_t half =
        dtype == SafetensorsDType::kBF16 ? FloatToBFloat16(value) : FloatToFloat16(value);
    const bool wide = dtype == SafetensorsDType::kF32;
    const auto* first = wide ? reinterpret_cast<const std::byte*>(&value)
                             : reinterpret_cast<const std::byte*>(&half);
    bytes.insert(bytes.end(), first, first + (wide ? 4 : 2));
  }
  return bytes;
}

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string ReadWhole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class TransferTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = LocalServer::Start(PathBesideTest("lmhead"), {"--backend=cpu"});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::string Address() const { return "--address=" + server_->address(); }

  // A sharded checkpoint: an embedding in the first file, what `head_name` names in the second.
  std::string MakeCheckpoint(const std::string& config, const std::string& head_name,
                             SafetensorsDType dtype, bool bias) {
    std::string directory = root_.Path("hf");
    fs::create_directory(directory);
    WriteFile(directory + "/config.json", config);
    WriteFile(directory + "/tokenizer.json", "{\"kept\": true}");
    WriteTensors(directory + "/model-00001-of-00002.safetensors",
                 {{"model.embed_tokens.weight", dtype, {kVocab, kHidden}}}, 1.0f);
    std::string map = "\"model.embed_tokens.weight\": \"model-00001-of-00002.safetensors\"";
    if (!head_name.empty()) {
      std::vector<SafetensorsWriter::Tensor> tensors = {{head_name, dtype, {kVocab, kHidden}},
                                                        {"model.norm.weight", dtype, {kHidden}}};
      if (bias) tensors.push_back({"lm_head.bias", dtype, {kVocab}});
      WriteTensors(directory + "/model-00002-of-00002.safetensors", tensors, 2.0f);
      for (const auto& tensor : tensors) {
        map += ", \"" + tensor.name + "\": \"model-00002-of-00002.safetensors\"";
      }
    }
    WriteFile(directory + "/model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
    return directory;
  }

  static void WriteTensors(const std::string& path,
                           const std::vector<SafetensorsWriter::Tensor>& tensors, float factor) {
    auto writer = SafetensorsWriter::Create(path, tensors, {{"format", "pt"}});
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const auto& tensor : tensors) {
      int64_t count = 1;
      for (const int64_t size : tensor.shape) count *= size;
      ASSERT_TRUE((*writer)->Append(Elements(tensor.dtype, count, factor)).ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  }

  std::unique_ptr<Client> Connect() {
    auto client = Client::Connect(server_->address(), {});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  const TemporaryFolder root_;
  std::unique_ptr<LocalServer> server_;
};

TEST_F(TransferTest, AHeadComesInAndGoesBackUnchangedInEveryDType) {
  for (const auto dtype :
       {SafetensorsDType::kF32, SafetensorsDType::kBF16, SafetensorsDType::kF16}) {
    SCOPED_TRACE(std::string(SafetensorsDTypeName(dtype)));
    const std::string name(SafetensorsDTypeName(dtype));
    fs::remove_all(root_.Path("hf"));
    fs::remove_all(root_.Path("out"));
    const std::string directory = MakeCheckpoint(R"({"final_logit_softcapping": 30.0})",
                                                 "lm_head.weight", dtype, /*bias=*/true);
    const CommandResult imported =
        RunLmhead(absl::StrCat("import '", directory, "' --head=", name, " ", Address()));
    ASSERT_EQ(imported.exit_code, 0) << imported.output;
    const auto info = Connect()->GetHead(name);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_TRUE(info->weights_loaded());
    EXPECT_EQ(info->spec().softcap(), 30.0f);
    EXPECT_TRUE(info->spec().has_bias());

    const CommandResult exported = RunLmhead(absl::StrCat(
        "export '", root_.path(), "/out' --from='", directory, "' --head=", name, " ", Address()));
    ASSERT_EQ(exported.exit_code, 0) << exported.output;
    for (const auto& entry : fs::directory_iterator(directory)) {
      const std::string file = entry.path().filename();
      auto before = SafetensorsReader::Open(absl::StrCat(directory, "/", file));
      if (!before.ok()) {
        EXPECT_EQ(ReadWhole(root_.Path("out/" + file)), ReadWhole(entry.path())) << file;
        continue;
      }
      auto after = SafetensorsReader::Open(root_.Path("out/" + file));
      ASSERT_TRUE(after.ok()) << after.status();
      for (const auto& [tensor_name, tensor] : (*before)->tensors()) {
        std::vector<std::byte> a(tensor.size_bytes), b(tensor.size_bytes);
        ASSERT_TRUE((*before)->Read(tensor, 0, a).ok());
        const auto found = (*after)->Find(tensor_name);
        ASSERT_TRUE(found.ok()) << found.status();
        ASSERT_TRUE((*after)->Read(**found, 0, b).ok());
        EXPECT_EQ(a, b) << tensor_name;
      }
    }
  }
}

TEST_F(TransferTest, TheEmbeddingStandsInWhenItIsTied) {
  const std::string directory =
      MakeCheckpoint(R"({"tie_word_embeddings": true, "logits_scaling": 4.0})", "",
                     SafetensorsDType::kBF16, false);
  const CommandResult imported = RunLmhead(absl::StrCat(
      "import '", directory,
      "' --spec='{\"trainable\":true,\"optimizer\":{\"kind\":\"OPTIMIZER_KIND_ADAMW\"}}' ",
      Address()));
  ASSERT_EQ(imported.exit_code, 0) << imported.output;
  EXPECT_THAT(imported.output, HasSubstr("tied to the input embedding"));
  const auto client = Connect();
  const auto info = client->GetHead("lm");
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_TRUE(info->spec().trainable());
  EXPECT_EQ(info->spec().logit_scale(), 0.25f);
  std::vector<float> weight(kVocab * kHidden);
  ASSERT_TRUE(client
                  ->ReadWeights("lm", v1::TENSOR_KIND_MASTER_WEIGHT, 0,
                                {weight.data(), kVocab, kHidden, DType::kFloat32})
                  .ok());
  for (int64_t i = 0; i < kVocab * kHidden; ++i) ASSERT_EQ(weight[i], Value(i)) << i;
}

TEST_F(TransferTest, WhatCannotBeIsSaidAndNothingIsWritten) {
  const std::string directory =
      MakeCheckpoint("{}", "unusual.weight", SafetensorsDType::kF32, false);
  fs::remove(directory + "/model-00001-of-00002.safetensors");
  CommandResult result = RunLmhead("import '" + directory + "' " + Address());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("model-00001-of-00002.safetensors"));

  const std::string alone = directory + "/model-00002-of-00002.safetensors";
  result = RunLmhead("import '" + alone + "' " + Address());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("name the tensor with --tensor"));
  result = RunLmhead("import '" + alone + "' --tensor=model.norm.weight " + Address());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("wanted [vocab_size, hidden_size]"));
  result = RunLmhead("import '" + alone + "' --tensor=unusual.weight --spec='{\"nothing\":1}' " +
                     Address());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("--spec"));
  result = RunLmhead("import '" + alone + "' --tensor=unusual.weight " + Address());
  EXPECT_EQ(result.exit_code, 0) << result.output;

  result = RunLmhead("export '" + alone + "' --from='" + alone + "' --tensor=unusual.weight " +
                     Address());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("is there; choose another path"));
  EXPECT_EQ(RunLmhead("export").exit_code, 2);
  EXPECT_EQ(RunLmhead("import").exit_code, 2);
}

}  // namespace
}  // namespace lmhead
