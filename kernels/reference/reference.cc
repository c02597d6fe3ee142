#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/reference/objectives.h"
#include "proto/types/check.h"

namespace lmhead::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Logits of one row after softcap, and their derivatives.
struct Logits {
  std::vector<double> values;       // z2
  std::vector<double> derivatives;  // dz2 / d(hidden W^T + bias)

  std::vector<double> Over(double temperature) const {
    std::vector<double> divided = values;
    for (double& value : divided) value /= temperature;
    return divided;
  }
};

Logits LogitsOf(const Head& head, const double* hidden) {
  Logits logits{.values = std::vector<double>(head.vocab_size),
                .derivatives = std::vector<double>(head.vocab_size)};
  for (int64_t j = 0; j < head.vocab_size; ++j) {
    const double* weight = &head.weight[j * head.hidden_size];
    double z = 0.0;
    for (int64_t h = 0; h < head.hidden_size; ++h) z += hidden[h] * weight[h];
    if (!head.bias.empty()) z += head.bias[j];
    const bool masked = z == -kInfinity;
    double derivative = head.logit_scale;
    z *= head.logit_scale;
    if (head.softcap != 0.0) {
      const double tanh = std::tanh(z / head.softcap);
      z = head.softcap * tanh;
      derivative *= masked ? 0.0 : 1.0 - tanh * tanh;
    }
    logits.values[j] = masked ? -kInfinity : z;
    logits.derivatives[j] = derivative;
  }
  return logits;
}

bool AllFinite(const std::vector<double>& values, int64_t row, int64_t cols) {
  const auto start = values.begin() + row * cols;
  return std::all_of(start, start + cols, [](double value) { return std::isfinite(value); });
}

double ValueOr(const std::vector<double>& values, int64_t token, double otherwise) {
  return values.empty() ? otherwise : values[token];
}

// One row whose hidden states are finite.
struct Row {
  Row(Logits row_logits, double row_temperature)
      : logits(std::move(row_logits)),
        temperature(row_temperature),
        softmax(logits.Over(temperature)),
        grad(logits.values.size()) {}

  const Logits logits;
  const double temperature;
  const LogSoftmax<double> softmax;  // Of z = z2 / temperature.

  // Parts of the token's loss, with the recipe's weights.
  double cross_entropy = 0.0;
  double z_loss = 0.0;
  double divergence = 0.0;
  double policy = 0.0;

  std::vector<double> grad;  // Of the token's loss, with respect to z2.
};

class Oracle {
 public:
  Oracle(const Head& head, const Recipe& recipe, const Tokens& tokens, const Head* teacher,
         int32_t top_k)
      : head_(head), recipe_(recipe), tokens_(tokens), teacher_(teacher), top_k_(top_k) {}

  Result Run();

 private:
  bool IsFinite(int64_t token) const;
  double TemperatureOf(int64_t token) const {
    return ValueOr(tokens_.token_temperature, token, recipe_.temperature);
  }
  void Describe(int64_t token, const Row& row);
  void AddObjective(int64_t token, Row* row);
  std::vector<double> TargetMass(int32_t target, const Row& row) const;
  void AddCrossEntropy(int32_t target, double weight, Row* row) const;
  void AddDivergence(int64_t token, Row* row);
  void AddPolicy(int64_t token, Row* row);
  void AddToSums(int64_t token, const Row& row);
  void AddGradients(int64_t token, const Row& row);

  const Head& head_;
  const Recipe& recipe_;
  const Tokens& tokens_;
  const Head* const teacher_;
  const int32_t top_k_;
  Result result_;
};

bool Oracle::IsFinite(int64_t token) const {
  return AllFinite(tokens_.hidden_states, token, head_.hidden_size) &&
         (teacher_ == nullptr ||
          AllFinite(tokens_.teacher_hidden_states, token, teacher_->hidden_size));
}

// What every row that is finite has, also without a target.
void Oracle::Describe(int64_t token, const Row& row) {
  result_.lse[token] = row.softmax.lse;
  result_.entropy[token] = row.softmax.entropy;
  result_.argmax[token] = static_cast<int32_t>(row.softmax.argmax);
  if (top_k_ == 0) return;
  std::vector<int32_t> order(head_.vocab_size);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<double>& values = row.logits.values;
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  for (int32_t k = 0; k < top_k_; ++k) {
    result_.topk_ids[token * top_k_ + k] = order[k];
    result_.topk_logprobs[token * top_k_ + k] = row.softmax.LogProb(order[k]);
  }
}

// The target distribution, which sums to one unless there are class weights or masked logits.
std::vector<double> Oracle::TargetMass(int32_t target, const Row& row) const {
  const double share = recipe_.label_smoothing / static_cast<double>(head_.vocab_size);
  std::vector<double> mass(head_.vocab_size);
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    if (row.logits.values[j] == -kInfinity) continue;
    mass[j] = share * ValueOr(recipe_.class_weights, j, 1.0);
  }
  mass[target] += (1.0 - recipe_.label_smoothing) * ValueOr(recipe_.class_weights, target, 1.0);
  return mass;
}

void Oracle::AddCrossEntropy(int32_t target, double weight, Row* row) const {
  const std::vector<double> mass = TargetMass(target, *row);
  double cross_entropy = 0.0;
  double mass_sum = 0.0;
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    cross_entropy -= Weighted(mass[j], row->softmax.LogProb(j));
    mass_sum += mass[j];
  }
  const double lse = row->softmax.lse;
  row->cross_entropy = Weighted(weight, cross_entropy);
  row->z_loss = Weighted(weight * recipe_.z_loss, lse * lse);
  const double factor = mass_sum + Weighted(2.0 * recipe_.z_loss, lse);
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    const double grad = Weighted(row->softmax.Prob(j), factor) - mass[j];
    row->grad[j] += weight * grad / row->temperature;
  }
}

void Oracle::AddDivergence(int64_t token, Row* row) {
  const Distillation& spec = *recipe_.distillation;
  const std::vector<double> student = row->logits.Over(spec.kl_temperature);
  DivergenceTerm<double> term;
  if (teacher_ != nullptr) {
    const Logits teacher =
        LogitsOf(*teacher_, &tokens_.teacher_hidden_states[token * teacher_->hidden_size]);
    term = DivergenceOf(spec, student, teacher.Over(spec.kl_temperature));
  } else {
    const size_t first = token * spec.top_k;
    const std::vector<double>& logprobs = tokens_.teacher_topk_logprobs;
    term = TopkDivergenceOf<double>(
        spec, student, std::span(tokens_.teacher_topk_ids).subspan(first, spec.top_k),
        {logprobs.begin() + first, logprobs.begin() + first + spec.top_k});
  }
  row->divergence = Weighted(spec.Weight(), term.value);
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    row->grad[j] += spec.Weight() / spec.kl_temperature * term.grad_logits[j];
  }
  result_.sums.dropped_teacher_mass_sum += term.dropped_teacher_mass;
}

void Oracle::AddPolicy(int64_t token, Row* row) {
  const Policy& spec = *recipe_.policy;
  const int32_t target = tokens_.targets[token];
  const double logprob = row->softmax.LogProb(target);
  const double entropy = row->softmax.entropy;
  PolicyTerm<double> term;
  if (spec.kind == PolicyKind::kCoefficients) {
    term.logprob_grad = tokens_.logprob_grad[token];
    term.entropy_grad = tokens_.entropy_grad[token];
    term.value = Weighted(term.logprob_grad, logprob) + term.entropy_grad * entropy;
  } else {
    term =
        ClippedPolicyOf(spec, logprob, entropy, tokens_.old_logprob[token],
                        tokens_.advantage[token], ValueOr(tokens_.reference_logprob, token, 0.0));
    if (term.clipped) ++result_.sums.num_clipped;
    result_.sums.old_policy_kl_sum += term.old_policy_kl;
  }
  row->policy = term.value;
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    const double p = row->softmax.Prob(j);
    const double of_logprob = term.logprob_grad * ((j == target ? 1.0 : 0.0) - p);
    const double of_entropy = -Weighted(p, row->softmax.LogProb(j) + entropy);
    row->grad[j] += (of_logprob + term.entropy_grad * of_entropy) / row->temperature;
  }
}

void Oracle::AddObjective(int64_t token, Row* row) {
  result_.logprob[token] = row->softmax.LogProb(tokens_.targets[token]);
  if (recipe_.policy.has_value()) {
    AddPolicy(token, row);
  } else {
    const double weight =
        recipe_.distillation.has_value() ? recipe_.distillation->cross_entropy_weight : 1.0;
    AddCrossEntropy(tokens_.targets[token], weight, row);
  }
  if (recipe_.distillation.has_value()) AddDivergence(token, row);
  result_.token_loss[token] = row->cross_entropy + row->z_loss + row->divergence + row->policy;
}

void Oracle::AddToSums(int64_t token, const Row& row) {
  LossSums& sums = result_.sums;
  const int32_t target = tokens_.targets[token];
  const double weight = ValueOr(tokens_.token_weights, token, 1.0);
  ++sums.num_valid_tokens;
  if (result_.argmax[token] == target) ++sums.num_correct;
  sums.weight_sum += weight * ValueOr(recipe_.class_weights, target, 1.0);
  sums.loss_sum += Weighted(weight, result_.token_loss[token]);
  sums.cross_entropy_sum += Weighted(weight, row.cross_entropy);
  sums.z_loss_sum += Weighted(weight, row.z_loss);
  sums.divergence_sum += Weighted(weight, row.divergence);
  sums.policy_sum += Weighted(weight, row.policy);
  sums.entropy_sum += result_.entropy[token];
}

void Oracle::AddGradients(int64_t token, const Row& row) {
  const double coefficient = ValueOr(tokens_.token_weights, token, 1.0) * tokens_.grad_scale;
  if (coefficient == 0.0 || row.softmax.all_masked) return;
  const double* hidden = &tokens_.hidden_states[token * head_.hidden_size];
  double* grad_hidden = &result_.grad_hidden_states[token * head_.hidden_size];
  for (int64_t j = 0; j < head_.vocab_size; ++j) {
    const double dz = coefficient * row.grad[j] * row.logits.derivatives[j];
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
  result_.topk_ids.resize(num_tokens * top_k_);
  result_.topk_logprobs.resize(num_tokens * top_k_);
  result_.grad_hidden_states.resize(num_tokens * head_.hidden_size);
  result_.grad_weight.resize(head_.vocab_size * head_.hidden_size);
  if (!head_.bias.empty()) result_.grad_bias.resize(head_.vocab_size);
  result_.sums.num_tokens = num_tokens;
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (!IsFinite(token)) {
      ++result_.sums.num_nonfinite_rows;
      continue;
    }
    Row row(LogitsOf(head_, &tokens_.hidden_states[token * head_.hidden_size]),
            TemperatureOf(token));
    Describe(token, row);
    if (tokens_.targets[token] == recipe_.ignore_index) continue;
    AddObjective(token, &row);
    AddToSums(token, row);
    AddGradients(token, row);
  }
  return std::move(result_);
}

std::optional<Distillation> InDouble(const std::optional<DistillationSpec>& spec) {
  if (!spec.has_value()) return std::nullopt;
  return Distillation{.divergence = spec->divergence,
                      .kl_temperature = spec->kl_temperature,
                      .scale_by_temperature_squared = spec->scale_by_temperature_squared,
                      .jsd_beta = spec->jsd_beta,
                      .top_k = spec->top_k,
                      .topk_mass = spec->topk_mass,
                      .cross_entropy_weight = spec->cross_entropy_weight,
                      .divergence_weight = spec->divergence_weight,
                      .vocabulary = spec->vocabulary};
}

std::optional<Policy> InDouble(const std::optional<PolicySpec>& spec) {
  if (!spec.has_value()) return std::nullopt;
  return Policy{.kind = spec->kind,
                .clip_low = spec->clip_low,
                .clip_high = spec->clip_high,
                .entropy_coefficient = spec->entropy_coefficient,
                .reference_kl_coefficient = spec->reference_kl_coefficient,
                .dual_clip = spec->dual_clip};
}

void CheckSize(size_t size, int64_t wanted, const char* what) {
  LMHEAD_CHECK(static_cast<int64_t>(size) == wanted,
               absl::StrCat(what, " has ", size, " elements, wanted ", wanted));
}

void CheckSizeOrEmpty(size_t size, int64_t wanted, const char* what) {
  if (size != 0) CheckSize(size, wanted, what);
}

void CheckHead(const Head& head) {
  CheckSize(head.weight.size(), head.vocab_size * head.hidden_size, "weight");
  CheckSizeOrEmpty(head.bias.size(), head.vocab_size, "bias");
}

void CheckObjective(const Head& head, const Recipe& recipe, const Tokens& tokens,
                    const Head* teacher) {
  const int64_t num_tokens = tokens.num_tokens();
  LMHEAD_CHECK(!(recipe.distillation.has_value() && recipe.policy.has_value()), "two objectives");
  LMHEAD_CHECK(recipe.has_teacher_head() == (teacher != nullptr), "teacher");
  if (teacher != nullptr) {
    CheckHead(*teacher);
    CheckSize(tokens.teacher_hidden_states.size(), num_tokens * teacher->hidden_size,
              "teacher_hidden_states");
  } else if (recipe.distillation.has_value()) {
    const int64_t entries = num_tokens * recipe.distillation->top_k;
    CheckSize(tokens.teacher_topk_ids.size(), entries, "teacher_topk_ids");
    CheckSize(tokens.teacher_topk_logprobs.size(), entries, "teacher_topk_logprobs");
  }
  for (const int32_t id : tokens.teacher_topk_ids) {
    LMHEAD_CHECK(0 <= id && id < head.vocab_size, absl::StrCat("teacher_topk_ids ", id));
  }
  if (!recipe.policy.has_value()) return;
  if (recipe.policy->kind == PolicyKind::kCoefficients) {
    CheckSize(tokens.logprob_grad.size(), num_tokens, "logprob_grad");
    CheckSize(tokens.entropy_grad.size(), num_tokens, "entropy_grad");
    return;
  }
  CheckSize(tokens.old_logprob.size(), num_tokens, "old_logprob");
  CheckSize(tokens.advantage.size(), num_tokens, "advantage");
  const bool has_reference = recipe.policy->reference_kl_coefficient != 0.0;
  CheckSize(tokens.reference_logprob.size(), has_reference ? num_tokens : 0, "reference_logprob");
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
      temperature(recipe.temperature),
      distillation(InDouble(recipe.distillation)),
      policy(InDouble(recipe.policy)) {}

void CheckInputs(const Head& head, const Recipe& recipe, const Tokens& tokens,
                 const Head* teacher) {
  const int64_t num_tokens = tokens.num_tokens();
  CheckHead(head);
  CheckSize(tokens.hidden_states.size(), num_tokens * head.hidden_size, "hidden_states");
  CheckSizeOrEmpty(tokens.token_weights.size(), num_tokens, "token_weights");
  CheckSizeOrEmpty(tokens.token_temperature.size(), num_tokens, "token_temperature");
  CheckSizeOrEmpty(recipe.class_weights.size(), head.vocab_size, "class_weights");
  for (const int32_t target : tokens.targets) {
    LMHEAD_CHECK(target == recipe.ignore_index || (0 <= target && target < head.vocab_size),
                 absl::StrCat("target ", target));
  }
  CheckObjective(head, recipe, tokens, teacher);
}

Result ComputeLoss(const Head& head, const Recipe& recipe, const Tokens& tokens,
                   const Head* teacher, int32_t top_k) {
  CheckInputs(head, recipe, tokens, teacher);
  LMHEAD_CHECK(0 <= top_k && top_k <= head.vocab_size, absl::StrCat("top_k ", top_k));
  return Oracle(head, recipe, tokens, teacher, top_k).Run();
}

std::vector<double> AllLogProbs(const Head& head, const Recipe& recipe, const Tokens& tokens) {
  std::vector<double> all(tokens.num_tokens() * head.vocab_size);
  for (int64_t token = 0; token < tokens.num_tokens(); ++token) {
    if (!AllFinite(tokens.hidden_states, token, head.hidden_size)) continue;
    const Logits logits = LogitsOf(head, &tokens.hidden_states[token * head.hidden_size]);
    const LogSoftmax<double> softmax(
        logits.Over(ValueOr(tokens.token_temperature, token, recipe.temperature)));
    for (int64_t j = 0; j < head.vocab_size; ++j) {
      all[token * head.vocab_size + j] = softmax.LogProb(j);
    }
  }
  return all;
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
