#include "bench/plain_dense.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lmhead::bench {
namespace {

// What a matrix product's result is stored as.
template <typename Real>
Real Rounded(Real value, Arithmetic arithmetic) {
  if (arithmetic != Arithmetic::kBFloat16) return value;
  return BFloat16ToFloat(FloatToBFloat16(static_cast<float>(value)));
}

// One row on its way from logits to gradients. docs/NUMERICS.md has the formulas.
template <typename Real>
class PlainRow {
 public:
  PlainRow(const GoldenCase& golden, int64_t row, Arithmetic arithmetic)
      : golden_(golden),
        row_(row),
        arithmetic_(arithmetic),
        target_(golden.targets[row]),
        valid_(target_ != golden.recipe.ignore_index),
        temperature_(golden.token_temperature.empty() ? golden.recipe.temperature
                                                      : golden.token_temperature[row]) {
    ComputeLogits();
    ComputeStatistics();
  }

  bool valid() const { return valid_; }
  Real lse() const { return logits_max_ + std::log(sum_exp_); }
  Real logprob() const { return valid_ ? LogprobOf(target_) : Real{0.0}; }

  Real entropy() const {
    Real weighted = Real{0.0};
    for (size_t j = 0; j < logits_.size(); ++j) {
      if (logits_[j] != kMasked) weighted += Probability(j) * logits_[j];
    }
    return lse() - weighted;
  }

  int64_t argmax() const {
    return std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
  }

  Real token_loss() const {
    if (!valid_) return Real{0.0};
    Real loss = golden_.recipe.z_loss * lse() * lse();
    for (size_t j = 0; j < logits_.size(); ++j) {
      if (logits_[j] != kMasked && WantedProbability(j) != Real{0.0}) {
        loss -= WantedProbability(j) * LogprobOf(j);
      }
    }
    return loss;
  }

  Real token_weight() const {
    return golden_.token_weights.empty() ? Real{1.0} : golden_.token_weights[row_];
  }

  // Gradient with respect to the matrix product's output.
  std::vector<Real> GradLogits() const {
    std::vector<Real> grad(logits_.size(), Real{0.0});
    if (!valid_) return grad;
    Real wanted_sum = Real{0.0};
    for (size_t j = 0; j < grad.size(); ++j) {
      if (logits_[j] != kMasked) wanted_sum += WantedProbability(j);
    }
    for (size_t j = 0; j < grad.size(); ++j) {
      if (logits_[j] == kMasked) continue;
      Real value = token_weight() *
                   (Probability(j) * (wanted_sum + Real{2.0} * golden_.recipe.z_loss * lse()) -
                    WantedProbability(j));
      value /= temperature_;
      if (golden_.softcap > Real{0.0}) {
        const Real ratio = logits_[j] * temperature_ / golden_.softcap;
        value *= Real{1.0} - ratio * ratio;
      }
      grad[j] = Rounded(value * golden_.logit_scale, arithmetic_);
    }
    return grad;
  }

 private:
  static constexpr Real kMasked = -std::numeric_limits<Real>::infinity();

  void ComputeLogits() {
    const float* const hidden = &golden_.hidden_states[row_ * golden_.hidden_size];
    logits_.resize(golden_.vocab_size);
    for (int64_t j = 0; j < golden_.vocab_size; ++j) {
      Real logit = Real{0.0};
      for (int64_t k = 0; k < golden_.hidden_size; ++k) {
        logit += Real{hidden[k]} * golden_.weight[j * golden_.hidden_size + k];
      }
      if (!golden_.bias.empty()) logit += golden_.bias[j];
      logit = Rounded(logit, arithmetic_);
      const bool masked = logit == kMasked;
      logit *= golden_.logit_scale;
      if (golden_.softcap > Real{0.0}) logit = golden_.softcap * std::tanh(logit / golden_.softcap);
      logits_[j] = masked ? kMasked : logit / temperature_;
    }
  }

  void ComputeStatistics() {
    logits_max_ = *std::max_element(logits_.begin(), logits_.end());
    for (const Real logit : logits_) sum_exp_ += std::exp(logit - logits_max_);
  }

  Real LogprobOf(size_t j) const { return (logits_[j] - logits_max_) - std::log(sum_exp_); }
  Real Probability(size_t j) const { return std::exp(logits_[j] - logits_max_) / sum_exp_; }

  // The distribution that cross entropy is taken against, with smoothing and class weights in it.
  Real WantedProbability(size_t j) const {
    const LossRecipe& recipe = golden_.recipe;
    const Real class_weight = recipe.class_weights.empty() ? Real{1.0} : recipe.class_weights[j];
    Real wanted = recipe.label_smoothing / static_cast<Real>(golden_.vocab_size) * class_weight;
    if (static_cast<int64_t>(j) == target_)
      wanted += (Real{1.0} - recipe.label_smoothing) * class_weight;
    return wanted;
  }

  const GoldenCase& golden_;
  const int64_t row_;
  const Arithmetic arithmetic_;
  const int32_t target_;
  const bool valid_;
  const Real temperature_;
  std::vector<Real> logits_;
  Real logits_max_ = Real{0.0};
  Real sum_exp_ = Real{0.0};
};

// grad_hidden_states of one row, and what it adds to the gradients of weight and bias.
template <typename Real>
void Backpropagate(const GoldenCase& golden, int64_t row, const std::vector<Real>& grad_logits,
                   Arithmetic arithmetic, Outputs* outputs, std::vector<Real>* grad_weight,
                   std::vector<Real>* grad_bias) {
  const int64_t hidden_size = golden.hidden_size;
  std::vector<Real> grad_hidden(hidden_size, Real{0.0});
  for (int64_t j = 0; j < golden.vocab_size; ++j) {
    for (int64_t k = 0; k < hidden_size; ++k) {
      grad_hidden[k] += grad_logits[j] * golden.weight[j * hidden_size + k];
      (*grad_weight)[j * hidden_size + k] +=
          grad_logits[j] * golden.hidden_states[row * hidden_size + k];
    }
    (*grad_bias)[j] += grad_logits[j];
  }
  for (const Real value : grad_hidden) {
    (*outputs)["grad_hidden_states"].push_back(Rounded(value, arithmetic));
  }
}

template <typename Real>
Outputs Compute(const GoldenCase& golden, Arithmetic arithmetic) {
  Outputs outputs;
  std::vector<Real> grad_weight(golden.vocab_size * golden.hidden_size, Real{0});
  std::vector<Real> grad_bias(golden.vocab_size, Real{0});
  double loss_sum = 0.0;
  double num_valid_tokens = 0.0;
  for (int64_t row = 0; row < golden.num_tokens; ++row) {
    const PlainRow<Real> plain(golden, row, arithmetic);
    outputs["token_loss"].push_back(plain.token_loss());
    outputs["logprob"].push_back(plain.logprob());
    outputs["lse"].push_back(plain.lse());
    outputs["entropy"].push_back(plain.entropy());
    outputs["argmax"].push_back(static_cast<double>(plain.argmax()));
    loss_sum += static_cast<double>(plain.token_weight()) * plain.token_loss();
    num_valid_tokens += plain.valid() ? 1.0 : 0.0;
    Backpropagate(golden, row, plain.GradLogits(), arithmetic, &outputs, &grad_weight, &grad_bias);
  }
  outputs["loss_sum"] = {loss_sum};
  outputs["num_valid_tokens"] = {num_valid_tokens};
  outputs["grad_weight"].assign(grad_weight.begin(), grad_weight.end());
  if (!golden.bias.empty()) outputs["grad_bias"].assign(grad_bias.begin(), grad_bias.end());
  return outputs;
}

}  // namespace

Outputs ComputePlainDense(const GoldenCase& golden, Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kDouble ? Compute<double>(golden, arithmetic)
                                           : Compute<float>(golden, arithmetic);
}

}  // namespace lmhead::bench
