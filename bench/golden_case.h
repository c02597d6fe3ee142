// One golden case: inputs, options and the results they should give, from a safetensors file.
//
// Inputs are tensors hidden_states, weight, targets and, as the options ask, bias, token_weights,
// token_temperature and class_weights. Options are JSON in the file's metadata under "case". Of
// them `loss` is the objective: absent for cross entropy, or
//
//   forward_kl, reverse_kl, jsd, mix   tensors teacher_hidden_states, teacher_weight, teacher_bias;
//                                      mix is cross entropy and the forward KL
//   topk_kl                            tensors topk_ids, topk_logprobs
//   policy                             tensors logprob_grad, entropy_grad
//
// Results are the tensors out.*, in double precision.

#ifndef LMHEAD_BENCH_GOLDEN_CASE_H_
#define LMHEAD_BENCH_GOLDEN_CASE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/reference/compare.h"
#include "kernels/reference/reference.h"
#include "proto/types/loss_recipe.h"

namespace lmhead::bench {

struct GoldenCase {
  std::string name;

  // The inputs, as the oracle takes them. Tensors are float32 values; options are exact.
  reference::Head head;
  reference::Recipe recipe;
  reference::Tokens tokens;
  std::optional<reference::Head> teacher;  // Exactly when recipe.has_teacher_head().

  reference::Outputs expected;

  // Options and tensors that this program does not know, such as "loss=hinge". When there are any,
  // the case cannot be run and its tensors are not read.
  std::vector<std::string> unknown_fields;

  const reference::Head* teacher_head() const { return teacher.has_value() ? &*teacher : nullptr; }
};

// The values of a tensor, which are float32 ones.
std::vector<float> ToFloat(const std::vector<double>& values);

// The recipe as a backend takes it; the teacher's head, if there is one, and the dtype of its
// hidden states are as given.
LossRecipe RecipeOf(const GoldenCase& golden, const std::string& teacher_head = "teacher",
                    DType teacher_hidden_dtype = DType::kFloat32);

// The case files of a folder, by name. NOT_FOUND without any.
absl::StatusOr<std::vector<std::string>> ListGoldenCases(const std::string& folder);

// INVALID_ARGUMENT naming the file and the field when it is not a case. A case with unknown fields
// is no error.
absl::StatusOr<GoldenCase> LoadGoldenCase(const std::string& path);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_GOLDEN_CASE_H_
