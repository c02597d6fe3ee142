// One golden case: inputs, options and the results they should give, from a safetensors file.
//
// Inputs are tensors hidden_states, weight, targets and, as the options ask, bias, token_weights,
// token_temperature and class_weights. Options are JSON in the file's metadata under "case".
// Results are the tensors out.*, in double precision.

#ifndef LMHEAD_BENCH_GOLDEN_CASE_H_
#define LMHEAD_BENCH_GOLDEN_CASE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/types/loss_recipe.h"

namespace lmhead::bench {

// Outputs by name (token_loss, loss_sum, lse, grad_weight, ...), row-major; counts and indices as
// numbers, too.
using Outputs = std::map<std::string, std::vector<double>>;

struct GoldenCase {
  std::string name;
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  LossRecipe recipe;

  std::vector<float> hidden_states;  // [num_tokens, hidden_size]
  std::vector<float> weight;         // [vocab_size, hidden_size]
  std::vector<float> bias;           // [vocab_size] or empty, like the next two.
  std::vector<float> token_weights;  // [num_tokens]
  std::vector<float> token_temperature;
  std::vector<int32_t> targets;  // [num_tokens]

  Outputs expected;

  // Options and tensors that this program does not know, such as "loss=forward_kl". When there are
  // any, the case cannot be run.
  std::vector<std::string> unknown_fields;
};

// INVALID_ARGUMENT naming the file and the field when it is not a case. A case with unknown fields
// is no error.
absl::StatusOr<GoldenCase> LoadGoldenCase(const std::string& path);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_GOLDEN_CASE_H_
