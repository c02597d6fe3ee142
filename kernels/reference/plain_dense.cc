#include "kernels/reference/plain_dense.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/reference/objectives.h"

namespace lmhead::reference {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

std::vector<float> Narrow(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

struct PlainHead {
  explicit PlainHead(const Head& head)
      : vocab_size(head.vocab_size),
        hidden_size(head.hidden_size),
        weight(Narrow(head.weight)),
        bias(Narrow(head.bias)),
        logit_scale(static_cast<float>(head.logit_scale)),
        softcap(static_cast<float>(head.softcap)) {}

  // z2 of one row, whose product is rounded to `dtype`.
  std::vector<float> Logits(const float* hidden, DType dtype) const;

  // dz2 / d(product) where z2 is `logit`.
  float Derivative(float logit) const;

  const int64_t vocab_size;
  const int64_t hidden_size;
  const std::vector<float> weight;
  const std::vector<float> bias;
  const float logit_scale;
  const float softcap;
};

std::vector<float> PlainHead::Logits(const float* hidden, DType dtype) const {
  std::vector<float> logits(vocab_size);
  for (int64_t j = 0; j < vocab_size; ++j) {
    float z = 0.0f;
    for (int64_t h = 0; h < hidden_size; ++h) z += hidden[h] * weight[j * hidden_size + h];
    if (!bias.empty()) z += bias[j];
    z = RoundedTo(dtype, z);
    const bool masked = z == kMasked;
    z *= logit_scale;
    if (softcap != 0.0f) z = softcap * std::tanh(z / softcap);
    logits[j] = masked ? kMasked : z;
  }
  return logits;
}

float PlainHead::Derivative(float logit) const {
  if (softcap == 0.0f) return logit_scale;
  if (logit == kMasked) return 0.0f;
  const float ratio = logit / softcap;
  return logit_scale * (1.0f - ratio * ratio);
}

// The inputs in float32; what only the policy needs stays where it is.
struct Inputs {
  Inputs(const Head& h, const Recipe& r, const Tokens& t, DType logits)
      : head(h),
        recipe(r),
        class_weights(Narrow(r.class_weights)),
        hidden_states(Narrow(t.hidden_states)),
        teacher_hidden_states(Narrow(t.teacher_hidden_states)),
        tokens(t),
        grad_scale(static_cast<float>(t.grad_scale)),
        logits_dtype(logits) {}

  float ClassWeight(int64_t j) const { return class_weights.empty() ? 1.0f : class_weights[j]; }

  const PlainHead head;
  const Recipe& recipe;
  const std::vector<float> class_weights;
  const std::vector<float> hidden_states;
  const std::vector<float> teacher_hidden_states;
  const Tokens& tokens;
  const float grad_scale;
  const DType logits_dtype;
};

float ValueOr(const std::vector<double>& values, int64_t token, double otherwise) {
  return static_cast<float>(values.empty() ? otherwise : values[token]);
}

std::vector<float> Over(std::vector<float> logits, double temperature) {
  for (float& logit : logits) logit /= static_cast<float>(temperature);
  return logits;
}

// One row on its way from logits to gradients.
class PlainRow {
 public:
  PlainRow(const Inputs& inputs, const PlainHead* teacher, int64_t token);

  bool valid() const { return target_ != in_.recipe.ignore_index; }
  float weight() const { return ValueOr(in_.tokens.token_weights, token_, 1.0); }
  const LogSoftmax<float>& softmax() const { return softmax_; }
  float target_logprob() const { return softmax_.LogProb(target_); }
  std::vector<int32_t> Largest(int32_t count) const;

  // Adds the objective's parts. REQUIRES: valid().
  void AddObjective();

  float cross_entropy() const { return cross_entropy_; }
  float z_loss() const { return z_loss_; }
  float divergence() const { return divergence_.value; }
  float dropped_teacher_mass() const { return divergence_.dropped_teacher_mass; }
  const PolicyTerm<float>& policy() const { return policy_; }
  float token_loss() const { return cross_entropy_ + z_loss_ + divergence() + policy_.value; }

  // The gradient with respect to the product's output, as it is stored. REQUIRES: AddObjective().
  std::vector<float> GradLogits() const;

 private:
  float TargetMass(int64_t j) const;
  void AddCrossEntropy(float weight);
  void AddDivergence();
  void AddPolicy();

  const Inputs& in_;
  const PlainHead* const teacher_;
  const int64_t token_;
  const int32_t target_;
  const float temperature_;
  const std::vector<float> logits_;
  const LogSoftmax<float> softmax_;
  float cross_entropy_ = 0.0f;
  float z_loss_ = 0.0f;
  DivergenceTerm<float> divergence_;  // Weighted.
  PolicyTerm<float> policy_;
  std::vector<float> grad_;  // With respect to logits_.
};

PlainRow::PlainRow(const Inputs& inputs, const PlainHead* teacher, int64_t token)
    : in_(inputs),
      teacher_(teacher),
      token_(token),
      target_(inputs.tokens.targets[token]),
      temperature_(ValueOr(inputs.tokens.token_temperature, token, inputs.recipe.temperature)),
      logits_(in_.head.Logits(&in_.hidden_states[token * in_.head.hidden_size], in_.logits_dtype)),
      softmax_(Over(logits_, temperature_)),
      grad_(logits_.size()) {}

std::vector<int32_t> PlainRow::Largest(int32_t count) const {
  if (count == 0) return {};
  std::vector<int32_t> order(logits_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits_[a] > logits_[b]; });
  order.resize(count);
  return order;
}

// The distribution that cross entropy is taken against, with smoothing and class weights in it.
float PlainRow::TargetMass(int64_t j) const {
  const auto smoothing = static_cast<float>(in_.recipe.label_smoothing);
  const float share = smoothing / static_cast<float>(in_.head.vocab_size);
  const float mass = logits_[j] == kMasked ? 0.0f : share;
  return (j == target_ ? mass + (1.0f - smoothing) : mass) * in_.ClassWeight(j);
}

void PlainRow::AddCrossEntropy(float weight) {
  const auto z_loss = static_cast<float>(in_.recipe.z_loss);
  float cross_entropy = 0.0f;
  float mass = 0.0f;
  for (int64_t j = 0; j < in_.head.vocab_size; ++j) {
    cross_entropy -= Weighted(TargetMass(j), softmax_.LogProb(j));
    mass += TargetMass(j);
  }
  cross_entropy_ = Weighted(weight, cross_entropy);
  z_loss_ = Weighted(weight * z_loss, softmax_.lse * softmax_.lse);
  const float factor = mass + Weighted(2.0f * z_loss, softmax_.lse);
  for (int64_t j = 0; j < in_.head.vocab_size; ++j) {
    const float grad = Weighted(softmax_.Prob(j), factor) - TargetMass(j);
    grad_[j] += weight * grad / temperature_;
  }
}

void PlainRow::AddDivergence() {
  const Distillation& spec = *in_.recipe.distillation;
  const std::vector<float> student = Over(logits_, spec.kl_temperature);
  if (teacher_ != nullptr) {
    const float* const hidden = &in_.teacher_hidden_states[token_ * teacher_->hidden_size];
    divergence_ = DivergenceOf(
        spec, student, Over(teacher_->Logits(hidden, in_.logits_dtype), spec.kl_temperature));
  } else {
    const size_t first = token_ * spec.top_k;
    const auto logprobs = in_.tokens.teacher_topk_logprobs.begin() + first;
    divergence_ = TopkDivergenceOf<float>(
        spec, student, std::span(in_.tokens.teacher_topk_ids).subspan(first, spec.top_k),
        {logprobs, logprobs + spec.top_k});
  }
  const auto weight = static_cast<float>(spec.Weight());
  const float grad_weight = weight / static_cast<float>(spec.kl_temperature);
  divergence_.value = Weighted(weight, divergence_.value);
  for (size_t j = 0; j < grad_.size(); ++j) grad_[j] += grad_weight * divergence_.grad_logits[j];
}

void PlainRow::AddPolicy() {
  const Policy& spec = *in_.recipe.policy;
  if (spec.kind == PolicyKind::kCoefficients) {
    policy_.logprob_grad = ValueOr(in_.tokens.logprob_grad, token_, 0.0);
    policy_.entropy_grad = ValueOr(in_.tokens.entropy_grad, token_, 0.0);
    policy_.value =
        Weighted(policy_.logprob_grad, target_logprob()) + policy_.entropy_grad * softmax_.entropy;
  } else {
    policy_ = ClippedPolicyOf(spec, target_logprob(), softmax_.entropy,
                              ValueOr(in_.tokens.old_logprob, token_, 0.0),
                              ValueOr(in_.tokens.advantage, token_, 0.0),
                              ValueOr(in_.tokens.reference_logprob, token_, 0.0));
  }
  for (int64_t j = 0; j < in_.head.vocab_size; ++j) {
    const float p = softmax_.Prob(j);
    const float of_logprob = policy_.logprob_grad * ((j == target_ ? 1.0f : 0.0f) - p);
    const float of_entropy = -Weighted(p, softmax_.LogProb(j) + softmax_.entropy);
    grad_[j] += (of_logprob + policy_.entropy_grad * of_entropy) / temperature_;
  }
}

void PlainRow::AddObjective() {
  const auto& distillation = in_.recipe.distillation;
  if (in_.recipe.policy.has_value()) return AddPolicy();
  AddCrossEntropy(distillation.has_value() ? static_cast<float>(distillation->cross_entropy_weight)
                                           : 1.0f);
  if (distillation.has_value()) AddDivergence();
}

std::vector<float> PlainRow::GradLogits() const {
  std::vector<float> grad(grad_.size());
  const float coefficient = weight() * in_.grad_scale;
  if (coefficient == 0.0f || softmax_.all_masked) return grad;
  for (size_t j = 0; j < grad.size(); ++j) {
    grad[j] = RoundedTo(in_.logits_dtype, coefficient * grad_[j] * in_.head.Derivative(logits_[j]));
  }
  return grad;
}

class PlainDense {
 public:
  PlainDense(const Inputs& inputs, const PlainHead* teacher, int32_t top_k)
      : in_(inputs),
        teacher_(teacher),
        top_k_(top_k),
        grad_hidden_states_(inputs.hidden_states.size()),
        grad_weight_(inputs.head.weight.size()),
        grad_bias_(inputs.head.bias.size()) {}

  Result Run();

 private:
  bool IsFinite(int64_t token) const;
  void AddRow(int64_t token);
  void AddToSums(const PlainRow& row, int64_t token);
  void AddGradients(int64_t token, const std::vector<float>& grad_logits);

  const Inputs& in_;
  const PlainHead* const teacher_;
  const int32_t top_k_;
  std::vector<float> grad_hidden_states_;
  std::vector<float> grad_weight_;
  std::vector<float> grad_bias_;
  Result result_;
};

bool PlainDense::IsFinite(int64_t token) const {
  const auto all_finite = [&](const std::vector<float>& values, int64_t cols) {
    const auto start = values.begin() + token * cols;
    return std::all_of(start, start + cols, [](float value) { return std::isfinite(value); });
  };
  return all_finite(in_.hidden_states, in_.head.hidden_size) &&
         (teacher_ == nullptr || all_finite(in_.teacher_hidden_states, teacher_->hidden_size));
}

void PlainDense::AddRow(int64_t token) {
  PlainRow row(in_, teacher_, token);
  result_.lse[token] = row.softmax().lse;
  result_.entropy[token] = row.softmax().entropy;
  result_.argmax[token] = static_cast<int32_t>(row.softmax().argmax);
  for (const int32_t id : row.Largest(top_k_)) {
    result_.topk_ids.push_back(id);
    result_.topk_logprobs.push_back(row.softmax().LogProb(id));
  }
  if (!row.valid()) return;
  row.AddObjective();
  result_.logprob[token] = row.target_logprob();
  result_.token_loss[token] = row.token_loss();
  AddToSums(row, token);
  AddGradients(token, row.GradLogits());
}

void PlainDense::AddToSums(const PlainRow& row, int64_t token) {
  LossSums& sums = result_.sums;
  const int32_t target = in_.tokens.targets[token];
  ++sums.num_valid_tokens;
  if (row.softmax().argmax == target) ++sums.num_correct;
  sums.entropy_sum += result_.entropy[token];
  sums.dropped_teacher_mass_sum += row.dropped_teacher_mass();
  sums.num_clipped += row.policy().clipped ? 1 : 0;
  sums.old_policy_kl_sum += row.policy().old_policy_kl;
  const double weight = row.weight();
  sums.weight_sum += weight * in_.ClassWeight(target);
  sums.loss_sum += Weighted<double>(weight, row.token_loss());
  sums.cross_entropy_sum += Weighted<double>(weight, row.cross_entropy());
  sums.z_loss_sum += Weighted<double>(weight, row.z_loss());
  sums.divergence_sum += Weighted<double>(weight, row.divergence());
  sums.policy_sum += Weighted<double>(weight, row.policy().value);
}

void PlainDense::AddGradients(int64_t token, const std::vector<float>& grad_logits) {
  const int64_t hidden_size = in_.head.hidden_size;
  const float* const hidden = &in_.hidden_states[token * hidden_size];
  float* const grad_hidden = &grad_hidden_states_[token * hidden_size];
  for (int64_t j = 0; j < in_.head.vocab_size; ++j) {
    const float dz = grad_logits[j];
    const float* const weight = &in_.head.weight[j * hidden_size];
    float* const grad_weight = &grad_weight_[j * hidden_size];
    for (int64_t h = 0; h < hidden_size; ++h) grad_hidden[h] += dz * weight[h];
    for (int64_t h = 0; h < hidden_size; ++h) grad_weight[h] += dz * hidden[h];
    if (!grad_bias_.empty()) grad_bias_[j] += dz;
  }
}

Result PlainDense::Run() {
  const int64_t num_tokens = in_.tokens.num_tokens();
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
    result_.topk_ids.resize((token + 1) * top_k_);
    result_.topk_logprobs.resize((token + 1) * top_k_);
  }
  result_.grad_hidden_states.assign(grad_hidden_states_.begin(), grad_hidden_states_.end());
  result_.grad_weight.assign(grad_weight_.begin(), grad_weight_.end());
  result_.grad_bias.assign(grad_bias_.begin(), grad_bias_.end());
  return std::move(result_);
}

}  // namespace

Result ComputePlainDense(const Head& head, const Recipe& recipe, const Tokens& tokens,
                         DType logits_dtype, const Head* teacher, int32_t top_k) {
  CheckInputs(head, recipe, tokens, teacher);
  const Inputs inputs(head, recipe, tokens, logits_dtype);
  if (teacher == nullptr) return PlainDense(inputs, nullptr, top_k).Run();
  const PlainHead plain_teacher(*teacher);
  return PlainDense(inputs, &plain_teacher, top_k).Run();
}

}  // namespace lmhead::reference
