#include "kernels/reference/plain_dense.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace lmhead::reference {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

std::vector<float> Narrow(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// The inputs in float32.
struct Inputs {
  Inputs(const Head& head, const Recipe& recipe, const Tokens& tokens, DType logits)
      : vocab_size(head.vocab_size),
        hidden_size(head.hidden_size),
        weight(Narrow(head.weight)),
        bias(Narrow(head.bias)),
        logit_scale(static_cast<float>(head.logit_scale)),
        softcap(static_cast<float>(head.softcap)),
        ignore_index(recipe.ignore_index),
        label_smoothing(static_cast<float>(recipe.label_smoothing)),
        z_loss(static_cast<float>(recipe.z_loss)),
        class_weights(Narrow(recipe.class_weights)),
        temperature(static_cast<float>(recipe.temperature)),
        hidden_states(Narrow(tokens.hidden_states)),
        targets(tokens.targets),
        token_weights(Narrow(tokens.token_weights)),
        token_temperature(Narrow(tokens.token_temperature)),
        grad_scale(static_cast<float>(tokens.grad_scale)),
        logits_dtype(logits) {}

  float ClassWeight(int64_t j) const { return class_weights.empty() ? 1.0f : class_weights[j]; }

  const int64_t vocab_size;
  const int64_t hidden_size;
  const std::vector<float> weight;
  const std::vector<float> bias;
  const float logit_scale;
  const float softcap;
  const int32_t ignore_index;
  const float label_smoothing;
  const float z_loss;
  const std::vector<float> class_weights;
  const float temperature;
  const std::vector<float> hidden_states;
  const std::vector<int32_t>& targets;
  const std::vector<float> token_weights;
  const std::vector<float> token_temperature;
  const float grad_scale;
  const DType logits_dtype;
};

// One row on its way from logits to gradients.
class PlainRow {
 public:
  PlainRow(const Inputs& inputs, int64_t token);

  bool valid() const { return target_ != in_.ignore_index; }
  float weight() const { return in_.token_weights.empty() ? 1.0f : in_.token_weights[token_]; }
  float lse() const { return logits_max_ + log_sum_; }
  float target_logprob() const { return Logprob(target_); }
  float z_loss() const { return in_.z_loss == 0.0f ? 0.0f : in_.z_loss * lse() * lse(); }
  int64_t argmax() const;
  float Entropy() const;
  float CrossEntropy() const;

  // The gradient with respect to the product's output, as it is stored. REQUIRES: valid().
  std::vector<float> GradLogits() const;

 private:
  void ComputeLogits();
  void ComputeStatistics();
  float Logprob(int64_t j) const;
  float Probability(int64_t j) const { return std::exp(Logprob(j)); }
  float TargetMass(int64_t j) const;
  float Derivative(int64_t j) const;

  const Inputs& in_;
  const int64_t token_;
  const int32_t target_;
  const float temperature_;
  std::vector<float> logits_;
  float logits_max_ = kMasked;
  float log_sum_ = 0.0f;
};

PlainRow::PlainRow(const Inputs& inputs, int64_t token)
    : in_(inputs),
      token_(token),
      target_(inputs.targets[token]),
      temperature_(inputs.token_temperature.empty() ? inputs.temperature
                                                    : inputs.token_temperature[token]) {
  ComputeLogits();
  ComputeStatistics();
}

void PlainRow::ComputeLogits() {
  const float* const hidden = &in_.hidden_states[token_ * in_.hidden_size];
  logits_.resize(in_.vocab_size);
  for (int64_t j = 0; j < in_.vocab_size; ++j) {
    const float* const weight = &in_.weight[j * in_.hidden_size];
    float z = 0.0f;
    for (int64_t h = 0; h < in_.hidden_size; ++h) z += hidden[h] * weight[h];
    if (!in_.bias.empty()) z += in_.bias[j];
    z = RoundedTo(in_.logits_dtype, z);
    const bool masked = z == kMasked;
    z *= in_.logit_scale;
    if (in_.softcap != 0.0f) z = in_.softcap * std::tanh(z / in_.softcap);
    logits_[j] = masked ? kMasked : z / temperature_;
  }
}

void PlainRow::ComputeStatistics() {
  logits_max_ = logits_[argmax()];
  if (logits_max_ == kMasked) return;
  float lanes[16] = {};  // Running sums, as a vectorised softmax has them.
  for (size_t j = 0; j < logits_.size(); ++j) lanes[j % 16] += std::exp(logits_[j] - logits_max_);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  log_sum_ = std::log(sum);
}

int64_t PlainRow::argmax() const {
  return std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
}

float PlainRow::Logprob(int64_t j) const {
  if (logits_[j] == kMasked) return kMasked;
  return std::min(0.0f, logits_[j] - logits_max_ - log_sum_);
}

// Relative to the maximum, so that a common offset of the logits does not make it coarse.
float PlainRow::Entropy() const {
  float entropy = log_sum_;
  for (int64_t j = 0; j < in_.vocab_size; ++j) {
    if (logits_[j] != kMasked) entropy -= Probability(j) * (logits_[j] - logits_max_);
  }
  return entropy;
}

// The distribution that cross entropy is taken against, with smoothing and class weights in it.
float PlainRow::TargetMass(int64_t j) const {
  const float share = in_.label_smoothing / static_cast<float>(in_.vocab_size);
  const float mass = logits_[j] == kMasked ? 0.0f : share;
  return (j == target_ ? mass + (1.0f - in_.label_smoothing) : mass) * in_.ClassWeight(j);
}

float PlainRow::CrossEntropy() const {
  float loss = 0.0f;
  for (int64_t j = 0; j < in_.vocab_size; ++j) {
    if (const float mass = TargetMass(j); mass != 0.0f) loss -= mass * Logprob(j);
  }
  return loss;
}

// Of the logit, with respect to the product's output.
float PlainRow::Derivative(int64_t j) const {
  const float derivative = in_.logit_scale / temperature_;
  if (in_.softcap == 0.0f) return derivative;
  if (logits_[j] == kMasked) return 0.0f;
  const float ratio = logits_[j] * temperature_ / in_.softcap;
  return derivative * (1.0f - ratio * ratio);
}

std::vector<float> PlainRow::GradLogits() const {
  std::vector<float> grad(in_.vocab_size);
  const float coefficient = weight() * in_.grad_scale;
  if (coefficient == 0.0f || logits_max_ == kMasked) return grad;
  float factor = 2.0f * in_.z_loss * lse();
  float mass = 0.0f;
  for (int64_t j = 0; j < in_.vocab_size; ++j) mass += TargetMass(j);
  factor += mass;
  for (int64_t j = 0; j < in_.vocab_size; ++j) {
    const float grad_logit = coefficient * (Probability(j) * factor - TargetMass(j));
    grad[j] = RoundedTo(in_.logits_dtype, grad_logit * Derivative(j));
  }
  return grad;
}

class PlainDense {
 public:
  explicit PlainDense(const Inputs& inputs)
      : in_(inputs),
        grad_hidden_states_(inputs.hidden_states.size()),
        grad_weight_(inputs.weight.size()),
        grad_bias_(inputs.bias.size()) {}

  Result Run();

 private:
  bool IsFinite(int64_t token) const;
  void AddRow(int64_t token);
  void AddToSums(int64_t token, const PlainRow& row);
  void AddGradients(int64_t token, const std::vector<float>& grad_logits);

  const Inputs& in_;
  std::vector<float> grad_hidden_states_;
  std::vector<float> grad_weight_;
  std::vector<float> grad_bias_;
  Result result_;
};

bool PlainDense::IsFinite(int64_t token) const {
  const float* const hidden = &in_.hidden_states[token * in_.hidden_size];
  return std::all_of(hidden, hidden + in_.hidden_size,
                     [](float value) { return std::isfinite(value); });
}

void PlainDense::AddRow(int64_t token) {
  const PlainRow row(in_, token);
  result_.lse[token] = row.lse();
  result_.entropy[token] = row.Entropy();
  result_.argmax[token] = static_cast<int32_t>(row.argmax());
  if (!row.valid()) return;
  result_.logprob[token] = row.target_logprob();
  AddToSums(token, row);
  AddGradients(token, row.GradLogits());
}

void PlainDense::AddToSums(int64_t token, const PlainRow& row) {
  LossSums& sums = result_.sums;
  const int32_t target = in_.targets[token];
  const float cross_entropy = row.CrossEntropy();
  const float token_loss = cross_entropy + row.z_loss();
  result_.token_loss[token] = token_loss;
  ++sums.num_valid_tokens;
  if (row.argmax() == target) ++sums.num_correct;
  sums.entropy_sum += result_.entropy[token];
  const double weight = row.weight();
  if (weight == 0.0) return;  // Even an infinite loss is left out.
  sums.weight_sum += weight * in_.ClassWeight(target);
  sums.loss_sum += weight * token_loss;
  sums.cross_entropy_sum += weight * cross_entropy;
  sums.z_loss_sum += weight * row.z_loss();
}

void PlainDense::AddGradients(int64_t token, const std::vector<float>& grad_logits) {
  const int64_t hidden_size = in_.hidden_size;
  const float* const hidden = &in_.hidden_states[token * hidden_size];
  float* const grad_hidden = &grad_hidden_states_[token * hidden_size];
  for (int64_t j = 0; j < in_.vocab_size; ++j) {
    const float dz = grad_logits[j];
    const float* const weight = &in_.weight[j * hidden_size];
    float* const grad_weight = &grad_weight_[j * hidden_size];
    for (int64_t h = 0; h < hidden_size; ++h) grad_hidden[h] += dz * weight[h];
    for (int64_t h = 0; h < hidden_size; ++h) grad_weight[h] += dz * hidden[h];
    if (!grad_bias_.empty()) grad_bias_[j] += dz;
  }
}

Result PlainDense::Run() {
  const auto num_tokens = static_cast<int64_t>(in_.targets.size());
  result_.token_loss.resize(num_tokens);
  result_.logprob.resize(num_tokens);
  result_.lse.resize(num_tokens);
  result_.entropy.resize(num_tokens);
  result_.argmax.resize(num_tokens);
  result_.sums.num_tokens = num_tokens;
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (IsFinite(token)) {
      AddRow(token);
    } else {
      ++result_.sums.num_nonfinite_rows;
    }
  }
  result_.grad_hidden_states.assign(grad_hidden_states_.begin(), grad_hidden_states_.end());
  result_.grad_weight.assign(grad_weight_.begin(), grad_weight_.end());
  result_.grad_bias.assign(grad_bias_.begin(), grad_bias_.end());
  return std::move(result_);
}

}  // namespace

Result ComputePlainDense(const Head& head, const Recipe& recipe, const Tokens& tokens,
                         DType logits_dtype) {
  CheckInputs(head, recipe, tokens);
  const Inputs inputs(head, recipe, tokens, logits_dtype);
  return PlainDense(inputs).Run();
}

}  // namespace lmhead::reference
