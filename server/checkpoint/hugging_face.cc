#include "server/checkpoint/hugging_face.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/checkpoint/durable_files.h"
#include "server/checkpoint/safetensors_writer.h"

namespace lmhead {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr int64_t kBlockBytes = int64_t{16} << 20;

// As transformers' models name them, the usual ones first.
constexpr std::array<const char*, 3> kHeadNames = {"lm_head.weight", "embed_out.weight",
                                                   "output.weight"};
constexpr std::array<const char*, 6> kEmbeddingNames = {"model.embed_tokens.weight",
                                                        "transformer.wte.weight",
                                                        "model.language_model.embed_tokens.weight",
                                                        "gpt_neox.embed_in.weight",
                                                        "model.decoder.embed_tokens.weight",
                                                        "wte.weight"};

absl::StatusOr<Json> ReadJson(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (json.is_object()) return json;
  return absl::InvalidArgumentError(absl::StrCat(path, " is not a JSON object"));
}

// The files of a checkpoint, opened.
class Files {
 public:
  static absl::StatusOr<Files> Open(const std::string& path) {
    Files files;
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      absl::Status status = files.Add(path);
      if (!status.ok()) return status;
      return files;
    }
    files.config_ = absl::StrCat(path, "/config.json");
    const std::string index = absl::StrCat(path, "/", kIndexName);
    if (!fs::exists(index, error)) {
      absl::Status status = files.Add(absl::StrCat(path, "/model.safetensors"));
      if (!status.ok()) return status;
      return files;
    }
    absl::Status status = files.AddIndex(path, index);
    if (!status.ok()) return status;
    return files;
  }

  const LocatedTensor* Find(const std::string& name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : &it->second;
  }

  // Empty when there is none: a file alone.
  const std::string& config() const { return config_; }
  size_t num_tensors() const { return tensors_.size(); }

 private:
  absl::Status Add(const std::string& file) {
    absl::StatusOr<std::unique_ptr<SafetensorsReader>> reader = SafetensorsReader::Open(file);
    if (!reader.ok()) return reader.status();
    for (const auto& [name, tensor] : (*reader)->tensors()) {
      tensors_[name] = {.name = name, .file = file, .tensor = tensor};
    }
    return absl::OkStatus();
  }

  absl::Status AddIndex(const std::string& path, const std::string& index) {
    absl::StatusOr<Json> json = ReadJson(index);
    if (!json.ok()) return json.status();
    const auto map = json->find("weight_map");
    if (map == json->end() || !map->is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(index, " has no weight_map"));
    }
    std::set<std::string> names;
    for (const auto& [tensor, file] : map->items()) {
      const std::string name = file.is_string() ? file.get<std::string>() : "";
      if (name.empty() || name.find('/') != std::string::npos) {
        return absl::InvalidArgumentError(absl::StrCat(index, ": ", tensor, " is in ", file.dump(),
                                                       ", wanted a name within the directory"));
      }
      names.insert(name);
    }
    for (const std::string& name : names) {
      if (absl::Status status = Add(absl::StrCat(path, "/", name)); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  std::string config_;
  std::map<std::string, LocatedTensor> tensors_;
};

absl::Status SetDType(LocatedTensor* located) {
  switch (located->tensor.dtype) {
    case SafetensorsDType::kF32:
      located->dtype = DType::kFloat32;
      return absl::OkStatus();
    case SafetensorsDType::kBF16:
      located->dtype = DType::kBFloat16;
      return absl::OkStatus();
    case SafetensorsDType::kF16:
      located->dtype = DType::kFloat16;
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          located->file, ": ", located->name, " is ",
          std::string(SafetensorsDTypeName(located->tensor.dtype)), ", wanted F32, BF16 or F16"));
  }
}

bool TiesEmbeddings(const Json& config) {
  const auto tied = config.find("tie_word_embeddings");
  return tied != config.end() && tied->is_boolean() && tied->get<bool>();
}

// A number of the config that is there and not null.
std::optional<double> Number(const Json& config, const char* name) {
  const auto it = config.find(name);
  if (it == config.end() || !it->is_number()) return std::nullopt;
  return it->get<double>();
}

absl::StatusOr<const LocatedTensor*> FindWeight(const Files& files, const std::string& path,
                                                const std::string& name, bool tied_by_config,
                                                bool* tied) {
  *tied = false;
  std::vector<std::string> looked;
  const auto find = [&](const std::string& candidate) {
    looked.push_back(candidate);
    return files.Find(candidate);
  };
  if (!name.empty()) {
    if (const LocatedTensor* found = find(name)) {
      *tied =
          std::find(kEmbeddingNames.begin(), kEmbeddingNames.end(), name) != kEmbeddingNames.end();
      return found;
    }
  } else {
    for (const char* candidate : kHeadNames) {
      const LocatedTensor* found = tied_by_config ? nullptr : find(candidate);
      if (found != nullptr) return found;
    }
    for (const char* candidate : kEmbeddingNames) {
      if (const LocatedTensor* found = find(candidate)) {
        *tied = true;
        return found;
      }
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "no LM head in ", path, " among its ", files.num_tensors(), " tensors: looked for ",
      absl::StrJoin(looked, ", "), "; name the tensor with --tensor"));
}

}  // namespace

absl::StatusOr<HuggingFaceHead> FindHuggingFaceHead(const std::string& path,
                                                    const std::string& tensor_name) {
  absl::StatusOr<Files> files = Files::Open(path);
  if (!files.ok()) return files.status();
  Json config = Json::object();
  if (!files->config().empty()) {
    absl::StatusOr<Json> read = ReadJson(files->config());
    if (!read.ok() && !absl::IsNotFound(read.status())) return read.status();
    if (read.ok()) config = *std::move(read);
  }
  HuggingFaceHead head;
  absl::StatusOr<const LocatedTensor*> weight =
      FindWeight(*files, path, tensor_name, TiesEmbeddings(config), &head.tied);
  if (!weight.ok()) return weight.status();
  head.weight = **weight;
  if (absl::Status status = SetDType(&head.weight); !status.ok()) return status;
  if (head.weight.tensor.shape.size() != 2 || head.weight.tensor.size_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        head.weight.file, ": ", head.weight.name, " has shape [",
        absl::StrJoin(head.weight.tensor.shape, ", "), "], wanted [vocab_size, hidden_size]"));
  }
  std::string bias_name = head.weight.name;
  if (absl::EndsWith(bias_name, ".weight") && !head.tied) {
    bias_name.replace(bias_name.size() - 6, 6, "bias");
    if (const LocatedTensor* bias = files->Find(bias_name)) {
      head.bias = *bias;
      if (absl::Status status = SetDType(&*head.bias); !status.ok()) return status;
      if (head.bias->tensor.shape != std::vector<int64_t>{head.vocab_size()}) {
        return absl::InvalidArgumentError(absl::StrCat(
            head.bias->file, ": ", bias_name, " does not have ", head.vocab_size(), " elements"));
      }
    }
  }
  head.logit_scale = Number(config, "logit_scale").value_or(1.0);
  if (const auto scaling = Number(config, "logits_scaling")) head.logit_scale = 1.0 / *scaling;
  head.softcap = Number(config, "final_logit_softcapping").value_or(0.0);
  return head;
}

namespace {

// Appends a tensor of `reader` to `writer` as it is.
absl::Status CopyTensor(const SafetensorsReader& reader, const SafetensorsTensor& tensor,
                        SafetensorsWriter* writer) {
  std::vector<std::byte> block;
  for (int64_t done = 0; done < tensor.size_bytes; done += static_cast<int64_t>(block.size())) {
    block.resize(static_cast<size_t>(std::min(kBlockBytes, tensor.size_bytes - done)));
    if (absl::Status status = reader.Read(tensor, done, block); !status.ok()) return status;
    if (absl::Status status = writer->Append(block); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Appends a tensor whose values `read` gives.
absl::Status ReplaceTensor(const SafetensorsTensor& tensor, ReadHeadRows read,
                           SafetensorsWriter* writer) {
  const int64_t num_rows = tensor.shape[0];
  const int64_t row_bytes = tensor.size_bytes / num_rows;
  const int64_t block_rows = std::max<int64_t>(1, kBlockBytes / row_bytes);
  std::vector<std::byte> block;
  for (int64_t row = 0; row < num_rows; row += block_rows) {
    block.resize(static_cast<size_t>(std::min(block_rows, num_rows - row) * row_bytes));
    if (absl::Status status = read(row, block); !status.ok()) return status;
    if (absl::Status status = writer->Append(block); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RewriteFile(const std::string& from, const std::string& to,
                         const HuggingFaceHead& head, ReadHeadRows read, ReadHeadRows read_bias) {
  absl::StatusOr<std::unique_ptr<SafetensorsReader>> reader = SafetensorsReader::Open(from);
  if (!reader.ok()) return reader.status();
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, tensor] : (*reader)->tensors()) tensors.push_back(tensor);
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.offset_bytes < b.offset_bytes; });
  std::vector<SafetensorsWriter::Tensor> declared;
  for (const SafetensorsTensor& tensor : tensors) {
    declared.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  std::map<std::string, std::string> metadata((*reader)->metadata().begin(),
                                              (*reader)->metadata().end());
  absl::StatusOr<std::unique_ptr<SafetensorsWriter>> writer =
      SafetensorsWriter::Create(to, declared, metadata);
  if (!writer.ok()) return writer.status();
  for (const SafetensorsTensor& tensor : tensors) {
    absl::Status status;
    if (tensor.name == head.weight.name) {
      status = ReplaceTensor(tensor, read, writer->get());
    } else if (head.bias.has_value() && tensor.name == head.bias->name) {
      status = ReplaceTensor(tensor, read_bias, writer->get());
    } else {
      status = CopyTensor(**reader, tensor, writer->get());
    }
    if (!status.ok()) return status;
  }
  return (*writer)->Finish().status();
}

bool HoldsHead(const HuggingFaceHead& head, const std::string& file) {
  return file == head.weight.file || (head.bias.has_value() && file == head.bias->file);
}

absl::Status CopyDirectory(const std::string& from, const std::string& to,
                           const HuggingFaceHead& head, ReadHeadRows read, ReadHeadRows read_bias) {
  std::error_code error;
  if (!fs::create_directory(to, error)) return FileError("creating", to, error.value());
  for (const fs::directory_entry& entry : fs::directory_iterator(from, error)) {
    const std::string source = entry.path();
    const std::string target = absl::StrCat(to, "/", entry.path().filename().string());
    if (HoldsHead(head, absl::StrCat(from, "/", entry.path().filename().string()))) {
      absl::Status status = RewriteFile(source, target, head, read, read_bias);
      if (!status.ok()) return status;
      continue;
    }
    fs::copy(source, target, fs::copy_options::recursive, error);
    if (error) return FileError("copying", source, error.value());
  }
  if (error) return FileError("reading", from, error.value());
  return SyncDirectory(to);
}

}  // namespace

absl::Status WriteHuggingFaceCheckpoint(const std::string& from, const std::string& to,
                                        const HuggingFaceHead& head, ReadHeadRows read,
                                        ReadHeadRows read_bias) {
  std::error_code error;
  if (fs::exists(to, error)) {
    return absl::AlreadyExistsError(absl::StrCat(to, " is there; choose another path"));
  }
  const std::string temporary = absl::StrCat(to, ".partial");
  fs::remove_all(temporary, error);
  absl::Status status = fs::is_directory(from, error)
                            ? CopyDirectory(from, temporary, head, read, read_bias)
                            : RewriteFile(from, temporary, head, read, read_bias);
  if (status.ok() && rename(temporary.c_str(), to.c_str()) != 0) {
    status = FileError("renaming to", to, errno);
  }
  if (!status.ok()) {
    fs::remove_all(temporary, error);
    return status;
  }
  const std::string parent = fs::absolute(to, error).parent_path();
  return SyncDirectory(parent);
}

}  // namespace lmhead
