// The golden cases: inputs, options and torch's float64 results, one safetensors file each.
//
// docs/NUMERICS.md tells what the files hold.

#ifndef LMHEAD_TESTS_CONFORMANCE_GOLDEN_CASE_H_
#define LMHEAD_TESTS_CONFORMANCE_GOLDEN_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/reference/reference.h"
#include "proto/types/loss_recipe.h"

namespace lmhead {

struct GoldenCase {
  std::string name;
  std::string loss;  // "cross_entropy", or the name of an objective that is not one.

  // The inputs, as the oracle takes them. Tensors are float32 values; options are exact doubles.
  reference::Head head;
  reference::Recipe recipe;
  reference::Tokens tokens;

  // What torch gives. Vectors that the case does not have are empty.
  std::vector<double> token_loss;
  std::vector<double> lse;
  std::vector<double> logprob;
  std::vector<double> entropy;
  std::vector<int32_t> argmax;
  std::vector<double> grad_hidden_states;
  std::vector<double> grad_weight;
  std::vector<double> grad_bias;
  double loss_sum = 0.0;
  int64_t num_valid_tokens = 0;
};

// Reads one file. Of a case with another loss, only the name and the loss are filled in.
absl::StatusOr<GoldenCase> ReadGoldenCase(const std::string& path);

// Paths of all cases of tests/golden, sorted; those with cross entropy alone when asked.
std::vector<std::string> GoldenPaths();
std::vector<std::string> CrossEntropyGoldenPaths();

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_GOLDEN_CASE_H_
