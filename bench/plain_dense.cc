#include "bench/plain_dense.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lmhead::bench {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

float Rounded(float value, DType dtype) {
  return dtype == DType::kBFloat16 ? BFloat16ToFloat(FloatToBFloat16(value)) : value;
}

// One row on its way from logits to gradients. docs/NUMERICS.md has the formulas.
class PlainRow {
 public:
  PlainRow(const GoldenCase& golden, int64_t row, DType dtype)
      : golden_(golden),
        row_(row),
        dtype_(dtype),
        target_(golden.targets[row]),
        valid_(target_ != golden.recipe.ignore_index),
        temperature_(golden.token_temperature.empty() ? golden.recipe.temperature
                                                      : golden.token_temperature[row]) {
    ComputeLogits();
    ComputeStatistics();
  }

  bool valid() const { return valid_; }
  float lse() const { return logits_max_ + std::log(sum_exp_); }
  float logprob() const { return valid_ ? LogprobOf(target_) : 0.0f; }

  float entropy() const {
    float weighted = 0.0f;
    for (size_t j = 0; j < logits_.size(); ++j) {
      if (logits_[j] != kMasked) weighted += Probability(j) * logits_[j];
    }
    return lse() - weighted;
  }

  int64_t argmax() const {
    return std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
  }

  float token_loss() const {
    if (!valid_) return 0.0f;
    float loss = golden_.recipe.z_loss * lse() * lse();
    for (size_t j = 0; j < logits_.size(); ++j) {
      if (logits_[j] != kMasked && WantedProbability(j) != 0.0f) {
        loss -= WantedProbability(j) * LogprobOf(j);
      }
    }
    return loss;
  }

  float token_weight() const {
    return golden_.token_weights.empty() ? 1.0f : golden_.token_weights[row_];
  }

  // Gradient with respect to the matrix product's output.
  std::vector<float> GradLogits() const {
    std::vector<float> grad(logits_.size(), 0.0f);
    if (!valid_) return grad;
    float wanted_sum = 0.0f;
    for (size_t j = 0; j < grad.size(); ++j) {
      if (logits_[j] != kMasked) wanted_sum += WantedProbability(j);
    }
    for (size_t j = 0; j < grad.size(); ++j) {
      if (logits_[j] == kMasked) continue;
      float value =
          token_weight() * (Probability(j) * (wanted_sum + 2.0f * golden_.recipe.z_loss * lse()) -
                            WantedProbability(j));
      value /= temperature_;
      if (golden_.softcap > 0.0f) {
        const float ratio = logits_[j] * temperature_ / golden_.softcap;
        value *= 1.0f - ratio * ratio;
      }
      grad[j] = Rounded(value * golden_.logit_scale, dtype_);
    }
    return grad;
  }

 private:
  void ComputeLogits() {
    const float* const hidden = &golden_.hidden_states[row_ * golden_.hidden_size];
    logits_.resize(golden_.vocab_size);
    for (int64_t j = 0; j < golden_.vocab_size; ++j) {
      float logit = 0.0f;
      for (int64_t k = 0; k < golden_.hidden_size; ++k) {
        logit += hidden[k] * golden_.weight[j * golden_.hidden_size + k];
      }
      if (!golden_.bias.empty()) logit += golden_.bias[j];
      logit = Rounded(logit, dtype_);
      const bool masked = logit == kMasked;
      logit *= golden_.logit_scale;
      if (golden_.softcap > 0.0f) logit = golden_.softcap * std::tanh(logit / golden_.softcap);
      logits_[j] = masked ? kMasked : logit / temperature_;
    }
  }

  void ComputeStatistics() {
    logits_max_ = *std::max_element(logits_.begin(), logits_.end());
    for (const float logit : logits_) sum_exp_ += std::exp(logit - logits_max_);
  }

  float LogprobOf(size_t j) const { return (logits_[j] - logits_max_) - std::log(sum_exp_); }
  float Probability(size_t j) const { return std::exp(logits_[j] - logits_max_) / sum_exp_; }

  // The distribution that cross entropy is taken against, with smoothing and class weights in it.
  float WantedProbability(size_t j) const {
    const LossRecipe& recipe = golden_.recipe;
    const float class_weight = recipe.class_weights.empty() ? 1.0f : recipe.class_weights[j];
    float wanted = recipe.label_smoothing / static_cast<float>(golden_.vocab_size) * class_weight;
    if (static_cast<int64_t>(j) == target_)
      wanted += (1.0f - recipe.label_smoothing) * class_weight;
    return wanted;
  }

  const GoldenCase& golden_;
  const int64_t row_;
  const DType dtype_;
  const int32_t target_;
  const bool valid_;
  const float temperature_;
  std::vector<float> logits_;
  float logits_max_ = 0.0f;
  float sum_exp_ = 0.0f;
};

// grad_hidden_states of one row, and what it adds to the gradients of weight and bias.
void Backpropagate(const GoldenCase& golden, int64_t row, const std::vector<float>& grad_logits,
                   DType dtype, Outputs* outputs, std::vector<float>* grad_weight,
                   std::vector<float>* grad_bias) {
  const int64_t hidden_size = golden.hidden_size;
  std::vector<float> grad_hidden(hidden_size, 0.0f);
  for (int64_t j = 0; j < golden.vocab_size; ++j) {
    for (int64_t k = 0; k < hidden_size; ++k) {
      grad_hidden[k] += grad_logits[j] * golden.weight[j * hidden_size + k];
      (*grad_weight)[j * hidden_size + k] +=
          grad_logits[j] * golden.hidden_states[row * hidden_size + k];
    }
    (*grad_bias)[j] += grad_logits[j];
  }
  for (const float value : grad_hidden) {
    (*outputs)["grad_hidden_states"].push_back(Rounded(value, dtype));
  }
}

}  // namespace

Outputs ComputePlainDense(const GoldenCase& golden, DType dtype) {
  Outputs outputs;
  std::vector<float> grad_weight(golden.vocab_size * golden.hidden_size, 0.0f);
  std::vector<float> grad_bias(golden.vocab_size, 0.0f);
  double loss_sum = 0.0;
  double num_valid_tokens = 0.0;
  for (int64_t row = 0; row < golden.num_tokens; ++row) {
    const PlainRow plain(golden, row, dtype);
    outputs["token_loss"].push_back(plain.token_loss());
    outputs["logprob"].push_back(plain.logprob());
    outputs["lse"].push_back(plain.lse());
    outputs["entropy"].push_back(plain.entropy());
    outputs["argmax"].push_back(static_cast<double>(plain.argmax()));
    loss_sum += static_cast<double>(plain.token_weight()) * plain.token_loss();
    num_valid_tokens += plain.valid() ? 1.0 : 0.0;
    Backpropagate(golden, row, plain.GradLogits(), dtype, &outputs, &grad_weight, &grad_bias);
  }
  outputs["loss_sum"] = {loss_sum};
  outputs["num_valid_tokens"] = {num_valid_tokens};
  outputs["grad_weight"].assign(grad_weight.begin(), grad_weight.end());
  if (!golden.bias.empty()) outputs["grad_bias"].assign(grad_bias.begin(), grad_bias.end());
  return outputs;
}

}  // namespace lmhead::bench
