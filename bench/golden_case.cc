#include "bench/golden_case.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/safetensors.h"

namespace lmhead::bench {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kOutputPrefix = "out.";

const std::set<std::string, std::less<>> kKnownOptions = {"name",
                                                          "num_tokens",
                                                          "hidden_size",
                                                          "vocab_size",
                                                          "ignore_index",
                                                          "class_weights",
                                                          "label_smoothing",
                                                          "z_loss",
                                                          "softcap",
                                                          "logit_scale",
                                                          "temperature",
                                                          "token_weights",
                                                          "per_token_temperature"};

const std::set<std::string, std::less<>> kKnownTensors = {
    "hidden_states", "weight",        "targets",          "bias",
    "class_weights", "token_weights", "token_temperature"};

const std::set<std::string, std::less<>> kKnownOutputs = {
    "token_loss", "loss_sum", "num_valid_tokens",   "lse",         "logprob",
    "entropy",    "argmax",   "grad_hidden_states", "grad_weight", "grad_bias"};

absl::Status BadCase(const std::string& path, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": not a golden case: ", std::string(why)));
}

absl::StatusOr<Json> ReadOptions(const std::string& path, const SafetensorsReader& reader) {
  const auto text = reader.metadata().find("case");
  if (text == reader.metadata().end()) return BadCase(path, "no metadata 'case'");
  Json options = Json::parse(text->second, nullptr, /*allow_exceptions=*/false);
  if (!options.is_object()) return BadCase(path, "metadata 'case' is not a JSON object");
  return options;
}

std::vector<std::string> UnknownFields(const Json& options, const SafetensorsReader& reader) {
  std::vector<std::string> unknown;
  for (const auto& [key, value] : options.items()) {
    if (!kKnownOptions.contains(key)) {
      unknown.push_back(
          absl::StrCat(key, "=", value.is_string() ? value.get<std::string>() : value.dump()));
    }
  }
  for (const auto& [name, tensor] : reader.tensors()) {
    const bool known = name.starts_with(kOutputPrefix)
                           ? kKnownOutputs.contains(name.substr(kOutputPrefix.size()))
                           : kKnownTensors.contains(name);
    if (!known) unknown.push_back(name);
  }
  return unknown;
}

// The numbers of the options. Throws Json::exception when one has another type.
void ParseOptions(const Json& options, GoldenCase* golden) {
  golden->name = options.at("name").get<std::string>();
  golden->head.vocab_size = options.at("vocab_size").get<int64_t>();
  golden->head.hidden_size = options.at("hidden_size").get<int64_t>();
  golden->head.logit_scale = options.value("logit_scale", 1.0);
  golden->head.softcap = options.value("softcap", 0.0);
  golden->recipe.ignore_index = options.value("ignore_index", kDefaultIgnoreIndex);
  golden->recipe.label_smoothing = options.value("label_smoothing", 0.0);
  golden->recipe.z_loss = options.value("z_loss", 0.0);
  golden->recipe.temperature = options.value("temperature", 1.0);
}

// Reads a tensor that must have exactly `count` elements.
template <typename T>
absl::StatusOr<std::vector<T>> ReadTensor(const SafetensorsReader& reader, std::string_view name,
                                          int64_t count) {
  auto values = reader.ReadAll<T>(name);
  if (values.ok() && static_cast<int64_t>(values->size()) != count) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", std::string(name), "' has ",
                                                   values->size(), " elements, wanted ", count));
  }
  return values;
}

absl::Status ReadInputs(const SafetensorsReader& reader, const Json& options, GoldenCase* golden) {
  const int64_t num_tokens = options.at("num_tokens").get<int64_t>();
  const int64_t vocab_size = golden->head.vocab_size;
  const int64_t hidden_size = golden->head.hidden_size;
  if (num_tokens < 1 || hidden_size < 1 || vocab_size < 1) {
    return absl::InvalidArgumentError(
        "num_tokens, hidden_size and vocab_size must each be at least 1");
  }
  struct Input {
    const char* name;
    bool wanted;
    int64_t count;
    std::vector<double>* values;
  };
  const Input inputs[] = {
      {"hidden_states", true, num_tokens * hidden_size, &golden->tokens.hidden_states},
      {"weight", true, vocab_size * hidden_size, &golden->head.weight},
      {"bias", reader.tensors().contains("bias"), vocab_size, &golden->head.bias},
      {"class_weights", options.value("class_weights", false), vocab_size,
       &golden->recipe.class_weights},
      {"token_weights", options.value("token_weights", false), num_tokens,
       &golden->tokens.token_weights},
      {"token_temperature", options.value("per_token_temperature", false), num_tokens,
       &golden->tokens.token_temperature}};
  for (const Input& input : inputs) {
    if (!input.wanted) continue;
    const auto values = ReadTensor<float>(reader, input.name, input.count);
    if (!values.ok()) return values.status();
    input.values->assign(values->begin(), values->end());
  }
  auto targets = ReadTensor<int32_t>(reader, "targets", num_tokens);
  if (!targets.ok()) return targets.status();
  golden->tokens.targets = *std::move(targets);
  return absl::OkStatus();
}

absl::Status CheckTargets(const GoldenCase& golden) {
  for (const int32_t target : golden.tokens.targets) {
    if (target == golden.recipe.ignore_index) continue;
    if (target >= 0 && target < golden.head.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat("target ", target, " is neither in [0, ",
                                                   golden.head.vocab_size, ") nor ignore_index"));
  }
  return absl::OkStatus();
}

absl::Status ReadExpected(const SafetensorsReader& reader, GoldenCase* golden) {
  for (const auto& [name, tensor] : reader.tensors()) {
    if (!name.starts_with(kOutputPrefix)) continue;
    std::vector<double>& values = golden->expected[name.substr(kOutputPrefix.size())];
    if (tensor.dtype == SafetensorsDType::kI32) {
      const auto read = reader.ReadAll<int32_t>(name);
      if (!read.ok()) return read.status();
      values.assign(read->begin(), read->end());
    } else {
      auto read = reader.ReadAll<double>(name);
      if (!read.ok()) return read.status();
      values = *std::move(read);
    }
  }
  if (golden->expected.empty()) return absl::InvalidArgumentError("no tensors 'out.*'");
  return absl::OkStatus();
}

}  // namespace

std::vector<float> ToFloat(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

LossRecipe RecipeOf(const GoldenCase& golden) {
  return {.ignore_index = golden.recipe.ignore_index,
          .label_smoothing = static_cast<float>(golden.recipe.label_smoothing),
          .z_loss = static_cast<float>(golden.recipe.z_loss),
          .class_weights = ToFloat(golden.recipe.class_weights),
          .temperature = static_cast<float>(golden.recipe.temperature),
          .per_token_temperature = !golden.tokens.token_temperature.empty(),
          .token_weights = !golden.tokens.token_weights.empty()};
}

absl::StatusOr<std::vector<std::string>> ListGoldenCases(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> files;
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path().string());
  }
  if (error) return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(folder, ": no case files (*.safetensors) in it"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<GoldenCase> LoadGoldenCase(const std::string& path) {
  const auto reader = SafetensorsReader::Open(path);
  if (!reader.ok()) return reader.status();
  const absl::StatusOr<Json> options = ReadOptions(path, **reader);
  if (!options.ok()) return options.status();
  GoldenCase golden;
  golden.unknown_fields = UnknownFields(*options, **reader);
  try {
    ParseOptions(*options, &golden);
    if (!golden.unknown_fields.empty()) return golden;
    absl::Status status = ReadInputs(**reader, *options, &golden);
    if (status.ok()) status = CheckTargets(golden);
    if (status.ok()) status = ReadExpected(**reader, &golden);
    if (!status.ok()) return BadCase(path, std::string(status.message()));
  } catch (const Json::exception& error) {
    return BadCase(path, error.what());
  }
  return golden;
}

}  // namespace lmhead::bench
