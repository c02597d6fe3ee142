#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// weight * value, where a weight of 0 leaves even an infinite value out.
double Weighted(double weight, double value) { return weight == 0.0 ? 0.0 : weight * value; }

// Everything of one row but its gradients.
struct Row {
  bool finite = true;
  bool valid = true;
  double token_weight = 1.0;
  double temperature = 1.0;
  std::vector<double> logits;       // z, final.
  std::vector<double> derivatives;  // dz / d(hidden W^T + bias)
  std::vector<double> probs;        // p
  std::vector<double> target_mass;  // q
  double lse = 0.0;
  double cross_entropy = 0.0;
  double z_loss = 0.0;
};

class Oracle {
 public:
  Oracle(const Head& head, const Recipe& recipe, const Tokens& tokens)
      : head_(head), recipe_(recipe), tokens_(tokens) {}

  Result Run();

 private:
  Row Describe(int64_t token) const;
  void ComputeLogits(int64_t token, Row* row) const;
  void ComputeStatistics(int64_t token, Row* row);
  void ComputeTargetMass(int32_t target, Row* row) const;
  void AddToSums(int64_t token, const Row& row);
  void AddGradients(int64_t token, const Row& row);

  const Head& head_;
  const Recipe& recipe_;
  const Tokens& tokens_;
  Result result_;
};

Row Oracle::Describe(int64_t token) const {
  Row row;
  const double* hidden = &tokens_.hidden_states[token * head_.hidden_size];
  row.finite = std::all_of(hidden, hidden + head_.hidden_size,
                           [](double value) { return std::isfinite(value); });
  row.valid = row.finite && tokens_.targets[token] != recipe_.ignore_index;
  if (!tokens_.token_weights.empty()) row.token_weight = tokens_.token_weights[token];
  row.temperature =
      tokens_.token_temperature.empty() ? recipe_.temperature : tokens_.token_temperature[token];
  return row;
}

void Oracle::ComputeLogits(int64_t token, Row* row) const {
  const double* hidden = &tokens_.hidden_states[token * head_.hidden_size];
  row->logits.resize(head_.vocab_size);
  row->derivatives.resize(head_.vocab_size);
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    const double* weight = &head_.weight[j * head_.hidden_size];
    double z = 0.0;
    for (int64_t h = 0; h < head_.hidden_size; ++h) z += hidden[h] * weight[h];
    if (!head_.bias.empty()) z += head_.bias[j];
    const bool masked = z == -kInfinity;
    double derivative = head_.logit_scale;
    z *= head_.logit_scale;
    if (head_.softcap != 0.0) {
      const double tanh = std::tanh(z / head_.softcap);
      z = head_.softcap * tanh;
      derivative *= masked ? 0.0 : 1.0 - tanh * tanh;
    }
    row->logits[j] = masked ? -kInfinity : z / row->temperature;
    row->derivatives[j] = derivative / row->temperature;
  }
}

// The target distribution, which sums to one unless there are class weights or masked logits.
void Oracle::ComputeTargetMass(int32_t target, Row* row) const {
  const double share = recipe_.label_smoothing / static_cast<double>(head_.vocab_size);
  const auto class_weight = [&](int64_t j) {
    return recipe_.class_weights.empty() ? 1.0 : recipe_.class_weights[j];
  };
  row->target_mass.assign(head_.vocab_size, 0.0);
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    if (row->logits[j] != -kInfinity) row->target_mass[j] = share * class_weight(j);
  }
  row->target_mass[target] += (1.0 - recipe_.label_smoothing) * class_weight(target);
}

void Oracle::ComputeStatistics(int64_t token, Row* row) {
  const auto max = std::max_element(row->logits.begin(), row->logits.end());
  const bool all_masked = *max == -kInfinity;
  row->probs.assign(head_.vocab_size, 0.0);
  double sum = 0.0;
  for (const double z : row->logits) sum += all_masked ? 0.0 : std::exp(z - *max);
  const double log_sum = all_masked ? 0.0 : std::log(sum);
  row->lse = *max + log_sum;
  double entropy = all_masked ? 0.0 : log_sum;
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    if (row->logits[j] == -kInfinity) continue;
    row->probs[j] = std::exp(row->logits[j] - *max - log_sum);
    entropy -= row->probs[j] * (row->logits[j] - *max);
  }
  result_.lse[token] = row->lse;
  result_.entropy[token] = entropy;
  result_.argmax[token] = static_cast<int32_t>(max - row->logits.begin());
  if (!row->valid) return;

  const int32_t target = tokens_.targets[token];
  ComputeTargetMass(target, row);
  const auto logprob = [&](int64_t j) {
    if (all_masked) return -kInfinity;
    return std::min(0.0, row->logits[j] - *max - log_sum);
  };
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    row->cross_entropy -= Weighted(row->target_mass[j], logprob(j));
  }
  row->z_loss = Weighted(recipe_.z_loss, row->lse * row->lse);
  result_.logprob[token] = logprob(target);
  result_.token_loss[token] = row->cross_entropy + row->z_loss;
}

void Oracle::AddToSums(int64_t token, const Row& row) {
  LossSums& sums = result_.sums;
  ++sums.num_tokens;
  if (!row.finite) ++sums.num_nonfinite_rows;
  if (!row.valid) return;
  const int32_t target = tokens_.targets[token];
  ++sums.num_valid_tokens;
  if (result_.argmax[token] == target) ++sums.num_correct;
  sums.weight_sum +=
      row.token_weight * (recipe_.class_weights.empty() ? 1.0 : recipe_.class_weights[target]);
  sums.loss_sum += Weighted(row.token_weight, row.cross_entropy + row.z_loss);
  sums.cross_entropy_sum += Weighted(row.token_weight, row.cross_entropy);
  sums.z_loss_sum += Weighted(row.token_weight, row.z_loss);
  sums.entropy_sum += result_.entropy[token];
}

void Oracle::AddGradients(int64_t token, const Row& row) {
  const double coefficient = row.token_weight * tokens_.grad_scale;
  if (!row.valid || coefficient == 0.0 || row.lse == -kInfinity) return;
  double mass = 0.0;
  for (const double q : row.target_mass) mass += q;
  const double factor = mass + 2.0 * recipe_.z_loss * row.lse;
  const double* hidden = &tokens_.hidden_states[token * head_.hidden_size];
  double* grad_hidden = &result_.grad_hidden_states[token * head_.hidden_size];
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    const double dz =
        coefficient * (row.probs[j] * factor - row.target_mass[j]) * row.derivatives[j];
    if (!head_.bias.empty()) result_.grad_bias[j] += dz;
    for (int64_t h = 0; h < head_.hidden_size; ++h) {
      grad_hidden[h] += dz * head_.weight[j * head_.hidden_size + h];
      result_.grad_weight[j * head_.hidden_size + h] += dz * hidden[h];
    }
  }
}

Result Oracle::Run() {
  const int64_t num_tokens = tokens_.num_tokens();
  result_.token_loss.resize(num_tokens);
  result_.logprob.resize(num_tokens);
  result_.lse.resize(num_tokens);
  result_.entropy.resize(num_tokens);
  result_.argmax.resize(num_tokens);
  result_.grad_hidden_states.resize(num_tokens * head_.hidden_size);
  result_.grad_weight.resize(head_.vocab_size * head_.hidden_size);
  if (!head_.bias.empty()) result_.grad_bias.resize(head_.vocab_size);
  for (int64_t token = 0; token < num_tokens; ++token) {
    Row row = Describe(token);
    if (row.finite) {
      ComputeLogits(token, &row);
      ComputeStatistics(token, &row);
    }
    AddToSums(token, row);
    AddGradients(token, row);
  }
  return std::move(result_);
}

}  // namespace

std::vector<double> Upcast(ConstMatrixView matrix) {
  std::vector<double> values(matrix.rows * matrix.cols);
  for (size_t i = 0; i < values.size(); ++i) {
    switch (matrix.dtype) {
      case DType::kFloat32:
        values[i] = static_cast<const float*>(matrix.data)[i];
        break;
      case DType::kBFloat16:
        values[i] = BFloat16ToFloat(static_cast<const uint16_t*>(matrix.data)[i]);
        break;
      case DType::kFloat16:
        values[i] = Float16ToFloat(static_cast<const uint16_t*>(matrix.data)[i]);
        break;
    }
  }
  return values;
}

float RoundedTo(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat32:
      return value;
    case DType::kBFloat16:
      return BFloat16ToFloat(FloatToBFloat16(value));
    case DType::kFloat16:
      return Float16ToFloat(FloatToFloat16(value));
  }
  return value;
}

std::vector<double> RoundedTo(DType dtype, const std::vector<double>& values) {
  std::vector<double> rounded(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    rounded[i] = RoundedTo(dtype, static_cast<float>(values[i]));
  }
  return rounded;
}

Recipe::Recipe(const LossRecipe& recipe)
    : ignore_index(recipe.ignore_index),
      label_smoothing(recipe.label_smoothing),
      z_loss(recipe.z_loss),
      class_weights(recipe.class_weights.begin(), recipe.class_weights.end()),
      temperature(recipe.temperature) {}

void CheckInputs(const Head& head, const Recipe& recipe, const Tokens& tokens) {
  const auto is = [](size_t size, int64_t wanted) { return static_cast<int64_t>(size) == wanted; };
  const auto is_or_empty = [&](size_t size, int64_t wanted) {
    return size == 0 || is(size, wanted);
  };
  const int64_t num_tokens = tokens.num_tokens();
  LMHEAD_CHECK(is(head.weight.size(), head.vocab_size * head.hidden_size), "weight");
  LMHEAD_CHECK(is_or_empty(head.bias.size(), head.vocab_size), "bias");
  LMHEAD_CHECK(is(tokens.hidden_states.size(), num_tokens * head.hidden_size), "hidden_states");
  LMHEAD_CHECK(is_or_empty(tokens.token_weights.size(), num_tokens), "token_weights");
  LMHEAD_CHECK(is_or_empty(tokens.token_temperature.size(), num_tokens), "token_temperature");
  LMHEAD_CHECK(is_or_empty(recipe.class_weights.size(), head.vocab_size), "class_weights");
  for (const int32_t target : tokens.targets) {
    LMHEAD_CHECK(target == recipe.ignore_index || (0 <= target && target < head.vocab_size),
                 absl::StrCat("target ", target));
  }
}

Result ComputeLoss(const Head& head, const Recipe& recipe, const Tokens& tokens) {
  CheckInputs(head, recipe, tokens);
  return Oracle(head, recipe, tokens).Run();
}

void ApplyUpdate(const OptimizerSpec& spec, double weight_decay, double learning_rate,
                 double grad_multiplier, std::span<const double> grad, std::span<double> parameter,
                 OptimizerState* state) {
  LMHEAD_CHECK(grad.size() == parameter.size(), absl::StrCat(grad.size(), " gradients"));
  LMHEAD_CHECK(spec.kind != OptimizerKind::kNone, "no optimizer");
  state->exp_avg.resize(parameter.size());
  state->exp_avg_sq.resize(parameter.size());
  const auto update = static_cast<double>(++state->num_updates);
  const double correction1 = 1.0 - std::pow(spec.beta1, update);
  const double correction2 = 1.0 - std::pow(spec.beta2, update);
  for (size_t i = 0; i < parameter.size(); ++i) {
    double g = grad[i] * grad_multiplier;
    double& exp_avg = state->exp_avg[i];
    double& exp_avg_sq = state->exp_avg_sq[i];
    if (spec.kind == OptimizerKind::kSgd) {
      g += weight_decay * parameter[i];
      exp_avg = spec.momentum * exp_avg + g;
      parameter[i] -= learning_rate * exp_avg;
    } else {
      parameter[i] *= 1.0 - learning_rate * weight_decay;
      exp_avg = spec.beta1 * exp_avg + (1.0 - spec.beta1) * g;
      exp_avg_sq = spec.beta2 * exp_avg_sq + (1.0 - spec.beta2) * g * g;
      const double denominator = std::sqrt(exp_avg_sq) / std::sqrt(correction2) + spec.eps;
      parameter[i] -= learning_rate / correction1 * exp_avg / denominator;
    }
  }
}

}  // namespace lmhead::reference
