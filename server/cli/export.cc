// lmhead export: a running service's head back into a Hugging Face checkpoint.

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

ABSL_FLAG(std::string, from, "",
          "export: the checkpoint that is copied with the head's tensors replaced: a directory, or "
          "one .safetensors file.");

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// Rows of the service's tensor in the dtype of the file's.
class Source {
 public:
  Source(Client* client, std::string head, v1::TensorKind kind, DType dtype, int64_t cols,
         DType file_dtype, Progress* progress)
      : client_(client),
        head_(std::move(head)),
        kind_(kind),
        dtype_(dtype),
        cols_(cols),
        file_dtype_(file_dtype),
        progress_(progress) {}

  absl::Status Read(int64_t row_start, std::span<std::byte> out) {
    const int64_t rows = static_cast<int64_t>(out.size()) / (cols_ * BytesPerElement(file_dtype_));
    progress_->Add(rows);
    if (dtype_ == file_dtype_) {
      return client_->ReadWeights(head_, kind_, row_start, {out.data(), rows, cols_, dtype_});
    }
    block_.resize(static_cast<size_t>(rows * cols_ * BytesPerElement(dtype_)));
    absl::Status status =
        client_->ReadWeights(head_, kind_, row_start, {block_.data(), rows, cols_, dtype_});
    if (!status.ok()) return status;
    values_.resize(static_cast<size_t>(rows * cols_));
    ConvertElements(block_, dtype_, values_);
    ConvertElements(values_, file_dtype_, out);
    return absl::OkStatus();
  }

 private:
  Client* const client_;
  const std::string head_;
  const v1::TensorKind kind_;
  const DType dtype_;
  const int64_t cols_;
  const DType file_dtype_;
  Progress* const progress_;
  std::vector<std::byte> block_;
  std::vector<float> values_;
};

absl::Status CheckShape(const v1::HeadSpec& spec, const HuggingFaceHead& there) {
  if (spec.vocab_size() == there.vocab_size() && spec.hidden_size() == there.hidden_size() &&
      (spec.has_bias() || !there.bias.has_value())) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("head %s is [%d, %d] %s bias, %s has %s [%d, %d] %s bias", spec.name(),
                      spec.vocab_size(), spec.hidden_size(), spec.has_bias() ? "with" : "without",
                      there.weight.file, there.weight.name, there.vocab_size(), there.hidden_size(),
                      there.bias.has_value() ? "with" : "without"));
}

absl::Status Export(const std::string& from, const std::string& to) {
  const std::string name = absl::GetFlag(FLAGS_head);
  const absl::StatusOr<HuggingFaceHead> there =
      FindHuggingFaceHead(from, absl::GetFlag(FLAGS_tensor));
  if (!there.ok()) return there.status();
  absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(AddressFromFlags(), ClientOptionsFromFlags());
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::HeadInfo> info = (*client)->GetHead(name);
  if (!info.ok()) return info.status();
  const v1::HeadSpec& spec = info->spec();
  if (absl::Status status = CheckShape(spec, *there); !status.ok()) return status;
  // The float32 values where there are any: rounded once, to the file's dtype.
  const bool master = spec.trainable() && spec.weight_dtype() == v1::DTYPE_BFLOAT16 &&
                      there->weight.dtype != DType::kBFloat16;
  const DType dtype =
      master || spec.weight_dtype() == v1::DTYPE_FLOAT32 ? DType::kFloat32 : DType::kBFloat16;
  Progress progress(there->weight.name, there->vocab_size());
  Source weight(client->get(), name,
                master ? v1::TENSOR_KIND_MASTER_WEIGHT : v1::TENSOR_KIND_WEIGHT, dtype,
                there->hidden_size(), there->weight.dtype, &progress);
  Source bias(client->get(), name, v1::TENSOR_KIND_BIAS, DType::kFloat32, 1,
              there->bias.has_value() ? there->bias->dtype : DType::kFloat32, &progress);
  absl::Status status = WriteHuggingFaceCheckpoint(
      from, to, *there,
      [&](int64_t row, std::span<std::byte> rows) { return weight.Read(row, rows); },
      [&](int64_t row, std::span<std::byte> rows) { return bias.Read(row, rows); });
  if (status.ok())
    std::printf("%s has head %s of step %llu\n", to.c_str(), name.c_str(),
                static_cast<unsigned long long>(info->last_committed_step()));
  return status;
}

}  // namespace

int RunExport(absl::Span<char* const> positional) {
  const std::string from = absl::GetFlag(FLAGS_from);
  if (positional.size() != 1 || from.empty()) {
    std::fprintf(stderr,
                 "lmhead export: got %zu arguments and --from='%s', wanted the path to write and "
                 "--from=CHECKPOINT, which is copied\n",
                 positional.size(), from.c_str());
    return kExitUsage;
  }
  const absl::Status status = Export(from, positional[0]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "lmhead export: %s\n", std::string(status.message()).c_str());
  return kExitFailure;
}

}  // namespace lmhead
