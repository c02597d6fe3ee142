#include "tests/conformance/golden_case.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "server/checkpoint/safetensors.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

// Reads tensors of one file, keeping the first error.
class CaseReader {
 public:
  explicit CaseReader(const SafetensorsReader& file) : file_(file) {}

  // The tensor, or nothing when the file does not have it.
  template <typename T>
  std::vector<T> Read(std::string_view name) {
    if (!status_.ok() || file_.tensors().find(name) == file_.tensors().end()) return {};
    absl::StatusOr<std::vector<T>> values = file_.ReadAll<T>(name);
    if (!values.ok()) {
      status_ = values.status();
      return {};
    }
    return *std::move(values);
  }

  std::vector<double> ReadFloats(std::string_view name) {
    const std::vector<float> values = Read<float>(name);
    return {values.begin(), values.end()};
  }

  template <typename T>
  T ReadScalar(std::string_view name) {
    const std::vector<T> values = Read<T>(name);
    if (status_.ok() && values.size() != 1) {
      status_ = absl::InvalidArgumentError(absl::StrCat(std::string(name), " is not one number"));
    }
    return values.empty() ? T{} : values[0];
  }

  const absl::Status& status() const { return status_; }

 private:
  const SafetensorsReader& file_;
  absl::Status status_;
};

void ReadInputs(const nlohmann::json& options, CaseReader* reader, GoldenCase* golden) {
  golden->head.vocab_size = options.at("vocab_size");
  golden->head.hidden_size = options.at("hidden_size");
  golden->head.logit_scale = options.value("logit_scale", 1.0);
  golden->head.softcap = options.value("softcap", 0.0);
  golden->head.weight = reader->ReadFloats("weight");
  golden->head.bias = reader->ReadFloats("bias");
  golden->recipe.ignore_index = options.value("ignore_index", kDefaultIgnoreIndex);
  golden->recipe.label_smoothing = options.value("label_smoothing", 0.0);
  golden->recipe.z_loss = options.value("z_loss", 0.0);
  golden->recipe.temperature = options.value("temperature", 1.0);
  golden->recipe.class_weights = reader->ReadFloats("class_weights");
  golden->tokens.hidden_states = reader->ReadFloats("hidden_states");
  golden->tokens.targets = reader->Read<int32_t>("targets");
  golden->tokens.token_weights = reader->ReadFloats("token_weights");
  golden->tokens.token_temperature = reader->ReadFloats("token_temperature");
}

void ReadResults(CaseReader* reader, GoldenCase* golden) {
  golden->token_loss = reader->Read<double>("out.token_loss");
  golden->lse = reader->Read<double>("out.lse");
  golden->logprob = reader->Read<double>("out.logprob");
  golden->entropy = reader->Read<double>("out.entropy");
  golden->argmax = reader->Read<int32_t>("out.argmax");
  golden->grad_hidden_states = reader->Read<double>("out.grad_hidden_states");
  golden->grad_weight = reader->Read<double>("out.grad_weight");
  golden->grad_bias = reader->Read<double>("out.grad_bias");
  golden->loss_sum = reader->ReadScalar<double>("out.loss_sum");
  golden->num_valid_tokens = reader->ReadScalar<int32_t>("out.num_valid_tokens");
}

}  // namespace

absl::StatusOr<GoldenCase> ReadGoldenCase(const std::string& path) {
  absl::StatusOr<std::unique_ptr<SafetensorsReader>> file = SafetensorsReader::Open(path);
  if (!file.ok()) return file.status();
  const auto found = (*file)->metadata().find("case");
  if (found == (*file)->metadata().end()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no case in its metadata"));
  }
  const nlohmann::json options = nlohmann::json::parse(found->second);
  GoldenCase golden;
  golden.name = options.at("name");
  golden.loss = options.value("loss", "cross_entropy");
  if (golden.loss != "cross_entropy") return golden;
  CaseReader reader(**file);
  ReadInputs(options, &reader, &golden);
  ReadResults(&reader, &golden);
  if (!reader.status().ok()) return reader.status();
  return golden;
}

std::vector<std::string> GoldenPaths() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(GoldenFolder())) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<std::string> CrossEntropyGoldenPaths() {
  std::vector<std::string> paths = GoldenPaths();
  std::erase_if(paths, [](const std::string& path) {
    const absl::StatusOr<GoldenCase> golden = ReadGoldenCase(path);
    LMHEAD_CHECK(golden.ok(), golden.status().ToString());
    return golden->loss != "cross_entropy";
  });
  return paths;
}

}  // namespace lmhead
