// The LM head inside a Hugging Face checkpoint: where it is, and how to write it back.
//
// A checkpoint is a directory with config.json and either model.safetensors or several files listed
// by model.safetensors.index.json; or one .safetensors file alone. The head is lm_head.weight
// (embed_out.weight, output.weight), or, where the config ties it or it is absent, the input
// embedding.

#ifndef LMHEAD_SERVER_CHECKPOINT_HUGGING_FACE_H_
#define LMHEAD_SERVER_CHECKPOINT_HUGGING_FACE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/dtype.h"
#include "server/checkpoint/safetensors.h"

namespace lmhead {

// One tensor of a head and the file it lies in.
struct LocatedTensor {
  std::string name;
  std::string file;  // Path.
  SafetensorsTensor tensor;
  DType dtype = DType::kFloat32;
};

struct HuggingFaceHead {
  LocatedTensor weight;               // [vocab_size, hidden_size]
  std::optional<LocatedTensor> bias;  // [vocab_size]
  bool tied = false;                  // The weight is the input embedding.
  double logit_scale = 1.0;           // config: logit_scale, or 1 / logits_scaling.
  double softcap = 0.0;               // config: final_logit_softcapping.

  int64_t vocab_size() const { return weight.tensor.shape[0]; }
  int64_t hidden_size() const { return weight.tensor.shape[1]; }
};

// Finds the head in `path`. A `tensor_name` that is not empty is taken as its weight. NOT_FOUND
// naming what was looked for; INVALID_ARGUMENT when a file is not well-formed or the tensor is no
// float matrix.
absl::StatusOr<HuggingFaceHead> FindHuggingFaceHead(const std::string& path,
                                                    const std::string& tensor_name);

// Fills `rows` with rows [row_start, ...) of a head's tensor as they lie in the file, in its dtype.
using ReadHeadRows = absl::FunctionRef<absl::Status(int64_t row_start, std::span<std::byte> rows)>;

// Copies the checkpoint `from` to `to`, which must not exist, with the weight's values replaced by
// what `read` gives (and the bias's by `read_bias`), each in the dtype it had. Written beside its
// place and renamed: `to` is complete or absent.
absl::Status WriteHuggingFaceCheckpoint(const std::string& from, const std::string& to,
                                        const HuggingFaceHead& head, ReadHeadRows read,
                                        ReadHeadRows read_bias);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CHECKPOINT_HUGGING_FACE_H_
