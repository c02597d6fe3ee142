#include "bench/golden_case.h"

#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
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
  golden->num_tokens = options.at("num_tokens").get<int64_t>();
  golden->hidden_size = options.at("hidden_size").get<int64_t>();
  golden->vocab_size = options.at("vocab_size").get<int64_t>();
  golden->logit_scale = options.value("logit_scale", 1.0f);
  golden->softcap = options.value("softcap", 0.0f);
  LossRecipe& recipe = golden->recipe;
  recipe.ignore_index = options.value("ignore_index", kDefaultIgnoreIndex);
  recipe.label_smoothing = options.value("label_smoothing", 0.0f);
  recipe.z_loss = options.value("z_loss", 0.0f);
  recipe.temperature = options.value("temperature", 1.0f);
  recipe.per_token_temperature = options.value("per_token_temperature", false);
  recipe.token_weights = options.value("token_weights", false);
}

// Reads a tensor that must have exactly `count` elements.
template <typename T>
absl::Status ReadTensor(const SafetensorsReader& reader, std::string_view name, int64_t count,
                        std::vector<T>* values) {
  auto read = reader.ReadAll<T>(name);
  if (!read.ok()) return read.status();
  if (static_cast<int64_t>(read->size()) != count) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", std::string(name), "' has ",
                                                   read->size(), " elements, wanted ", count));
  }
  *values = *std::move(read);
  return absl::OkStatus();
}

absl::Status ReadInputs(const SafetensorsReader& reader, const Json& options, GoldenCase* golden) {
  const int64_t tokens = golden->num_tokens;
  const int64_t vocab = golden->vocab_size;
  struct Input {
    const char* name;
    bool wanted;
    int64_t count;
    std::vector<float>* values;
  };
  const Input inputs[] = {
      {"hidden_states", true, tokens * golden->hidden_size, &golden->hidden_states},
      {"weight", true, vocab * golden->hidden_size, &golden->weight},
      {"bias", reader.tensors().contains("bias"), vocab, &golden->bias},
      {"class_weights", options.value("class_weights", false), vocab,
       &golden->recipe.class_weights},
      {"token_weights", golden->recipe.token_weights, tokens, &golden->token_weights},
      {"token_temperature", golden->recipe.per_token_temperature, tokens,
       &golden->token_temperature}};
  for (const Input& input : inputs) {
    if (!input.wanted) continue;
    absl::Status status = ReadTensor(reader, input.name, input.count, input.values);
    if (!status.ok()) return status;
  }
  return ReadTensor(reader, "targets", tokens, &golden->targets);
}

absl::Status CheckRanges(const GoldenCase& golden) {
  if (golden.num_tokens < 1 || golden.hidden_size < 1 || golden.vocab_size < 1) {
    return absl::InvalidArgumentError(
        "num_tokens, hidden_size and vocab_size must each be at least 1");
  }
  for (const int32_t target : golden.targets) {
    if (target != golden.recipe.ignore_index && (target < 0 || target >= golden.vocab_size)) {
      return absl::InvalidArgumentError(absl::StrCat("target ", target, " is neither in [0, ",
                                                     golden.vocab_size, ") nor ignore_index"));
    }
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
    if (status.ok()) status = CheckRanges(golden);
    if (status.ok()) status = ReadExpected(**reader, &golden);
    if (!status.ok()) return BadCase(path, std::string(status.message()));
  } catch (const Json::exception& error) {
    return BadCase(path, error.what());
  }
  return golden;
}

}  // namespace lmhead::bench
