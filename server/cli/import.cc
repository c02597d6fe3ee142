// lmhead import: a Hugging Face checkpoint's LM head into a running service.

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "lmhead/v1/service.pb.h"
#include "server/checkpoint/hugging_face.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/cli/transfer.h"

ABSL_FLAG(
    std::string, spec, "",
    "import: what the new head is besides its shape, as JSON of lmhead.v1.HeadSpec, such as "
    "'{\"trainable\":true,\"optimizer\":{\"kind\":\"OPTIMIZER_KIND_ADAMW\"}}'. Empty: frozen.");

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// The specification that the checkpoint and --spec make together.
absl::StatusOr<v1::HeadSpec> MakeSpec(const HuggingFaceHead& head, const std::string& name) {
  v1::HeadSpec spec;
  const std::string json = absl::GetFlag(FLAGS_spec);
  if (!json.empty()) {
    const auto parsed = google::protobuf::util::JsonStringToMessage(json, &spec);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--spec is no lmhead.v1.HeadSpec: ", std::string(parsed.message())));
    }
  }
  spec.set_name(name);
  spec.set_vocab_size(head.vocab_size());
  spec.set_hidden_size(head.hidden_size());
  spec.set_has_bias(head.bias.has_value());
  if (spec.weight_dtype() == v1::DTYPE_UNSPECIFIED) {
    spec.set_weight_dtype(head.weight.dtype == DType::kFloat32 ? v1::DTYPE_FLOAT32
                                                               : v1::DTYPE_BFLOAT16);
  }
  if (spec.logit_scale() == 0.0f) spec.set_logit_scale(static_cast<float>(head.logit_scale));
  if (spec.softcap() == 0.0f) spec.set_softcap(static_cast<float>(head.softcap));
  if (spec.optimizer().kind() == v1::OPTIMIZER_KIND_UNSPECIFIED && !spec.trainable()) {
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
  }
  return spec;
}

// Makes the head, or checks that the one there has the checkpoint's shape.
absl::Status FindOrCreate(Client& client, const HuggingFaceHead& head, const std::string& name) {
  const absl::StatusOr<v1::HeadInfo> there = client.GetHead(name);
  if (absl::IsNotFound(there.status())) {
    const absl::StatusOr<v1::HeadSpec> spec = MakeSpec(head, name);
    if (!spec.ok()) return spec.status();
    return client.CreateHead(*spec).status();
  }
  if (!there.ok()) return there.status();
  const v1::HeadSpec& spec = there->spec();
  if (spec.vocab_size() == head.vocab_size() && spec.hidden_size() == head.hidden_size() &&
      spec.has_bias() == head.bias.has_value()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "head %s is [%d, %d] %s bias, the checkpoint's is [%d, %d] %s bias", name, spec.vocab_size(),
      spec.hidden_size(), spec.has_bias() ? "with" : "without", head.vocab_size(),
      head.hidden_size(), head.bias.has_value() ? "with" : "without"));
}

absl::Status Send(Client& client, const std::string& name, const LocatedTensor& located,
                  v1::TensorKind kind) {
  absl::StatusOr<std::unique_ptr<SafetensorsReader>> reader = SafetensorsReader::Open(located.file);
  if (!reader.ok()) return reader.status();
  const bool is_bias = kind == v1::TENSOR_KIND_BIAS;
  const int64_t rows = located.tensor.shape[0];
  const int64_t cols = is_bias ? 1 : located.tensor.shape[1];
  const int64_t row_bytes = cols * BytesPerElement(located.dtype);
  Progress progress(located.name, rows);
  std::vector<std::byte> block;
  std::vector<float> upcast;
  return ForRowBlocks(rows, row_bytes, [&](int64_t row, int64_t count) {
    block.resize(static_cast<size_t>(count * row_bytes));
    absl::Status status = (*reader)->Read(located.tensor, row * row_bytes, block);
    if (!status.ok()) return status;
    ConstMatrixView view = {block.data(), count, cols, located.dtype};
    if (is_bias) {  // Always float32 in the service.
      upcast.resize(static_cast<size_t>(count));
      ConvertElements(block, located.dtype, upcast);
      view = {upcast.data(), count, cols, DType::kFloat32};
    }
    status = client.LoadWeights(name, kind, row, view);
    progress.Add(count);
    return status;
  });
}

absl::Status Import(const std::string& path) {
  const std::string name = absl::GetFlag(FLAGS_head);
  const absl::StatusOr<HuggingFaceHead> head =
      FindHuggingFaceHead(path, absl::GetFlag(FLAGS_tensor));
  if (!head.ok()) return head.status();
  absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(AddressFromFlags(), ClientOptionsFromFlags());
  if (!client.ok()) return client.status();
  std::printf("%s of %s: [%lld, %lld] %s%s\n", head->weight.name.c_str(), path.c_str(),
              static_cast<long long>(head->vocab_size()),
              static_cast<long long>(head->hidden_size()),
              std::string(DTypeName(head->weight.dtype)).c_str(),
              head->tied ? ", tied to the input embedding" : "");
  if (absl::Status status = FindOrCreate(**client, *head, name); !status.ok()) return status;
  absl::Status status = Send(**client, name, head->weight, v1::TENSOR_KIND_WEIGHT);
  if (status.ok() && head->bias.has_value()) {
    status = Send(**client, name, *head->bias, v1::TENSOR_KIND_BIAS);
  }
  if (status.ok()) std::printf("head %s is loaded\n", name.c_str());
  return status;
}

}  // namespace

int RunImport(absl::Span<char* const> positional) {
  if (positional.size() != 1) {
    std::fprintf(stderr, "lmhead import: got %zu arguments, wanted the path of a checkpoint\n",
                 positional.size());
    return kExitUsage;
  }
  const absl::Status status = Import(positional[0]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "lmhead import: %s\n", std::string(status.message()).c_str());
  return kExitFailure;
}

}  // namespace lmhead
