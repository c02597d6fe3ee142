// The same computation as a trainer with dense logits does it in plain float32, or with logits and
// their gradient rounded to bfloat16: the yardstick of "not worse than twice dense".

#ifndef LMHEAD_TESTS_CONFORMANCE_DENSE_H_
#define LMHEAD_TESTS_CONFORMANCE_DENSE_H_

#include <cstdint>
#include <vector>

#include "proto/types/dtype.h"

namespace lmhead {

struct DenseInputs {
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  std::vector<float> hidden_states;
  std::vector<float> weight;
  std::vector<float> bias;  // Empty, or [vocab_size].
  std::vector<int32_t> targets;
  std::vector<float> coefficients;  // Token weight times grad_scale; 0 for an ignored row.
};

struct DenseResult {
  std::vector<float> lse;
  std::vector<float> logprob;
  std::vector<float> grad_hidden_states;
  std::vector<float> grad_weight;
};

// Cross entropy with full logits, held in `logits_dtype` (float32 or bfloat16) between the passes.
DenseResult ComputeDense(const DenseInputs& inputs, DType logits_dtype);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_DENSE_H_
