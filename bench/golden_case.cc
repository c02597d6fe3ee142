#include "bench/golden_case.h"

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <map>
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
                                                          "per_token_temperature",
                                                          "loss",
                                                          "beta",
                                                          "kl_temperature",
                                                          "scale_by_temperature_squared",
                                                          "ce_weight",
                                                          "kl_weight",
                                                          "topk_mass",
                                                          "teacher_softcap",
                                                          "teacher_logit_scale"};

const std::set<std::string, std::less<>> kKnownTensors = {
    "hidden_states",  "weight",        "targets",           "bias",
    "class_weights",  "token_weights", "token_temperature", "teacher_hidden_states",
    "teacher_weight", "teacher_bias",  "topk_ids",          "topk_logprobs",
    "logprob_grad",   "entropy_grad"};

const std::set<std::string, std::less<>> kKnownOutputs = {
    "token_loss", "loss_sum", "num_valid_tokens",   "lse",         "logprob",
    "entropy",    "argmax",   "grad_hidden_states", "grad_weight", "grad_bias"};

// Values of `loss` that are a divergence.
const std::map<std::string, Divergence, std::less<>> kDivergences = {
    {"forward_kl", Divergence::kForwardKl},
    {"reverse_kl", Divergence::kReverseKl},
    {"jsd", Divergence::kJsd},
    {"mix", Divergence::kForwardKl},
    {"topk_kl", Divergence::kTopkForwardKl}};

const std::map<std::string, TopkMass, std::less<>> kTopkMasses = {
    {"renormalise", TopkMass::kRenormalise}, {"keep", TopkMass::kKeep}, {"tail", TopkMass::kTail}};

// Whether this program has the value of an option that names one of several.
bool IsKnownChoice(const std::string& option, const Json& value) {
  if (!value.is_string()) return option != "loss" && option != "topk_mass";
  const std::string text = value.get<std::string>();
  if (option == "topk_mass") return kTopkMasses.contains(text);
  return option != "loss" || text == "policy" || kDivergences.contains(text);
}

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
    if (!kKnownOptions.contains(key) || !IsKnownChoice(key, value)) {
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

reference::Distillation ParseDistillation(const Json& options, Divergence divergence) {
  reference::Distillation spec;
  spec.divergence = divergence;
  spec.kl_temperature = options.value("kl_temperature", 1.0);
  spec.scale_by_temperature_squared = options.value("scale_by_temperature_squared", false);
  spec.jsd_beta = options.value("beta", 0.0);
  spec.cross_entropy_weight = options.value("ce_weight", 0.0);
  spec.divergence_weight = options.value("kl_weight", 1.0);
  if (divergence == Divergence::kTopkForwardKl) {
    spec.topk_mass = kTopkMasses.at(options.at("topk_mass").get<std::string>());
  }
  return spec;
}

// The numbers of the options. REQUIRES: no unknown fields. Throws Json::exception when one has
// another type.
void ParseOptions(const Json& options, GoldenCase* golden) {
  golden->head.vocab_size = options.at("vocab_size").get<int64_t>();
  golden->head.hidden_size = options.at("hidden_size").get<int64_t>();
  golden->head.logit_scale = options.value("logit_scale", 1.0);
  golden->head.softcap = options.value("softcap", 0.0);
  golden->recipe.ignore_index = options.value("ignore_index", kDefaultIgnoreIndex);
  golden->recipe.label_smoothing = options.value("label_smoothing", 0.0);
  golden->recipe.z_loss = options.value("z_loss", 0.0);
  golden->recipe.temperature = options.value("temperature", 1.0);
  const std::string loss = options.value("loss", "");
  if (loss == "policy") golden->recipe.policy.emplace();
  const auto divergence = kDivergences.find(loss);
  if (divergence == kDivergences.end()) return;
  golden->recipe.distillation = ParseDistillation(options, divergence->second);
  if (!golden->recipe.has_teacher_head()) return;
  golden->teacher = reference::Head{.logit_scale = options.value("teacher_logit_scale", 1.0),
                                    .softcap = options.value("teacher_softcap", 0.0)};
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

// A tensor of numbers that a case may have.
struct Input {
  const char* name;
  bool wanted;
  int64_t count;
  std::vector<double>* values;
};

absl::Status ReadWanted(const SafetensorsReader& reader, std::initializer_list<Input> inputs) {
  for (const Input& input : inputs) {
    if (!input.wanted) continue;
    const auto values = ReadTensor<float>(reader, input.name, input.count);
    if (!values.ok()) return values.status();
    input.values->assign(values->begin(), values->end());
  }
  return absl::OkStatus();
}

// The columns of a tensor that must be a matrix.
absl::StatusOr<int64_t> ColumnsOf(const SafetensorsReader& reader, std::string_view name) {
  const auto tensor = reader.tensors().find(name);
  if (tensor != reader.tensors().end() && tensor->second.shape.size() == 2) {
    return tensor->second.shape[1];
  }
  return absl::InvalidArgumentError(absl::StrCat("no matrix '", std::string(name), "'"));
}

absl::Status ReadTeacher(const SafetensorsReader& reader, int64_t num_tokens, GoldenCase* golden) {
  const auto hidden_size = ColumnsOf(reader, "teacher_weight");
  if (!hidden_size.ok()) return hidden_size.status();
  reference::Head& teacher = *golden->teacher;
  teacher.hidden_size = *hidden_size;
  teacher.vocab_size = reader.tensors().find("teacher_weight")->second.shape[0];
  return ReadWanted(reader,
                    {{"teacher_weight", true, teacher.vocab_size * *hidden_size, &teacher.weight},
                     {"teacher_bias", reader.tensors().contains("teacher_bias"), teacher.vocab_size,
                      &teacher.bias},
                     {"teacher_hidden_states", true, num_tokens * *hidden_size,
                      &golden->tokens.teacher_hidden_states}});
}

absl::Status ReadTopkTeacher(const SafetensorsReader& reader, int64_t num_tokens,
                             GoldenCase* golden) {
  const auto top_k = ColumnsOf(reader, "topk_ids");
  if (!top_k.ok()) return top_k.status();
  golden->recipe.distillation->top_k = static_cast<int32_t>(*top_k);
  auto ids = ReadTensor<int32_t>(reader, "topk_ids", num_tokens * *top_k);
  if (!ids.ok()) return ids.status();
  golden->tokens.teacher_topk_ids = *std::move(ids);
  for (const int32_t id : golden->tokens.teacher_topk_ids) {
    if (id >= 0 && id < golden->head.vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("id ", id, " of topk_ids is not in [0, ", golden->head.vocab_size, ")"));
  }
  return ReadWanted(reader, {{"topk_logprobs", true, num_tokens * *top_k,
                              &golden->tokens.teacher_topk_logprobs}});
}

absl::Status ReadInputs(const SafetensorsReader& reader, const Json& options, GoldenCase* golden) {
  const int64_t num_tokens = options.at("num_tokens").get<int64_t>();
  const int64_t vocab_size = golden->head.vocab_size;
  const int64_t hidden_size = golden->head.hidden_size;
  if (num_tokens < 1 || hidden_size < 1 || vocab_size < 1) {
    return absl::InvalidArgumentError(
        "num_tokens, hidden_size and vocab_size must each be at least 1");
  }
  const bool has_policy = golden->recipe.policy.has_value();
  absl::Status status = ReadWanted(
      reader, {{"hidden_states", true, num_tokens * hidden_size, &golden->tokens.hidden_states},
               {"weight", true, vocab_size * hidden_size, &golden->head.weight},
               {"bias", reader.tensors().contains("bias"), vocab_size, &golden->head.bias},
               {"class_weights", options.value("class_weights", false), vocab_size,
                &golden->recipe.class_weights},
               {"token_weights", options.value("token_weights", false), num_tokens,
                &golden->tokens.token_weights},
               {"token_temperature", options.value("per_token_temperature", false), num_tokens,
                &golden->tokens.token_temperature},
               {"logprob_grad", has_policy, num_tokens, &golden->tokens.logprob_grad},
               {"entropy_grad", has_policy, num_tokens, &golden->tokens.entropy_grad}});
  if (!status.ok()) return status;
  auto targets = ReadTensor<int32_t>(reader, "targets", num_tokens);
  if (!targets.ok()) return targets.status();
  golden->tokens.targets = *std::move(targets);
  if (golden->teacher.has_value()) return ReadTeacher(reader, num_tokens, golden);
  if (!golden->recipe.distillation.has_value()) return absl::OkStatus();
  return ReadTopkTeacher(reader, num_tokens, golden);
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

namespace {

DistillationSpec DistillationOf(const reference::Distillation& spec) {
  DistillationSpec distillation{
      .divergence = spec.divergence,
      .kl_temperature = static_cast<float>(spec.kl_temperature),
      .scale_by_temperature_squared = spec.scale_by_temperature_squared,
      .top_k = spec.top_k,
      .topk_mass = spec.topk_mass,
      .cross_entropy_weight = static_cast<float>(spec.cross_entropy_weight),
      .divergence_weight = static_cast<float>(spec.divergence_weight),
      .vocabulary = spec.vocabulary};
  if (spec.divergence != Divergence::kJsd) return distillation;
  if (spec.jsd_beta == 0.0) {
    distillation.divergence = Divergence::kForwardKl;
  } else if (spec.jsd_beta == 1.0) {
    distillation.divergence = Divergence::kReverseKl;
  } else {
    distillation.jsd_beta = static_cast<float>(spec.jsd_beta);
  }
  return distillation;
}

}  // namespace

LossRecipe RecipeOf(const GoldenCase& golden, const std::string& teacher_head,
                    DType teacher_hidden_dtype) {
  LossRecipe recipe{.ignore_index = golden.recipe.ignore_index,
                    .label_smoothing = static_cast<float>(golden.recipe.label_smoothing),
                    .z_loss = static_cast<float>(golden.recipe.z_loss),
                    .class_weights = ToFloat(golden.recipe.class_weights),
                    .temperature = static_cast<float>(golden.recipe.temperature),
                    .per_token_temperature = !golden.tokens.token_temperature.empty(),
                    .token_weights = !golden.tokens.token_weights.empty()};
  if (golden.recipe.policy.has_value()) recipe.policy.emplace();
  if (!golden.recipe.distillation.has_value()) return recipe;
  recipe.distillation = DistillationOf(*golden.recipe.distillation);
  if (golden.teacher.has_value()) {
    recipe.distillation->teacher_head = teacher_head;
    recipe.distillation->teacher_hidden_dtype = teacher_hidden_dtype;
  }
  return recipe;
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
    golden.name = options->at("name").get<std::string>();
    if (!golden.unknown_fields.empty()) return golden;
    ParseOptions(*options, &golden);
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
