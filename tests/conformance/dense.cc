#include "tests/conformance/dense.h"

#include <algorithm>
#include <cmath>

#include "proto/types/loss_recipe.h"

namespace lmhead {
namespace {

float RoundTo(DType dtype, float value) {
  return dtype == DType::kBFloat16 ? BFloat16ToFloat(FloatToBFloat16(value)) : value;
}

// Sum of exp(z - max) in sixteen running sums, as a vectorised softmax does it.
float SumExp(const std::vector<float>& logits, float max) {
  float lanes[16] = {};
  for (size_t j = 0; j < logits.size(); ++j) lanes[j % 16] += std::exp(logits[j] - max);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

std::vector<float> LogitsOf(const DenseInputs& in, int64_t token, DType dtype) {
  std::vector<float> logits(in.vocab_size);
  for (int64_t j = 0; j < in.vocab_size; ++j) {
    float z = 0.0f;
    for (int64_t h = 0; h < in.hidden_size; ++h) {
      z += in.hidden_states[token * in.hidden_size + h] * in.weight[j * in.hidden_size + h];
    }
    logits[j] = RoundTo(dtype, in.bias.empty() ? z : z + in.bias[j]);
  }
  return logits;
}

}  // namespace

DenseResult ComputeDense(const DenseInputs& in, DType logits_dtype) {
  DenseResult result;
  result.lse.resize(in.num_tokens);
  result.logprob.resize(in.num_tokens);
  result.grad_hidden_states.resize(in.num_tokens * in.hidden_size);
  result.grad_weight.resize(in.vocab_size * in.hidden_size);
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    const std::vector<float> logits = LogitsOf(in, token, logits_dtype);
    const float max = *std::max_element(logits.begin(), logits.end());
    const float log_sum = std::log(SumExp(logits, max));
    result.lse[token] = max + log_sum;
    const int32_t target = in.targets[token];
    if (target == kDefaultIgnoreIndex) continue;
    result.logprob[token] = logits[target] - max - log_sum;
    for (int64_t j = 0; j < in.vocab_size; ++j) {
      const float prob = std::exp(logits[j] - max - log_sum);
      const float dz =
          RoundTo(logits_dtype, in.coefficients[token] * (j == target ? prob - 1.0f : prob));
      for (int64_t h = 0; h < in.hidden_size; ++h) {
        const int64_t column = j * in.hidden_size + h;
        result.grad_hidden_states[token * in.hidden_size + h] += dz * in.weight[column];
        result.grad_weight[column] += dz * in.hidden_states[token * in.hidden_size + h];
      }
    }
  }
  return result;
}

}  // namespace lmhead
