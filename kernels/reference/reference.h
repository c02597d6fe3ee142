// The oracle: the language-model head in double precision, by its definition.
//
// Full logits, single-threaded plain loops, no cleverness: what every backend, schedule and shard
// count is compared with. Formulas and their sources (docs/NUMERICS.md tells more):
//
//   z0 = hidden W^T + bias, z1 = logit_scale z0, z2 = softcap tanh(z1 / softcap),
//   z  = z2 / temperature                             Gemma 2 (2024) for softcap; request or token
//   lse = m + log sum exp(z - m), m = max z           the shifted sum (Blanchard et al., 2021)
//   logprob = (z_t - m) - log sum exp(z - m)          <= 0
//   q_j = (1 - e) w_t [j = t] + (e / V) w_j           torch.nn.CrossEntropyLoss: label smoothing e,
//   token_loss = -sum_j q_j logprob_j + z_loss lse^2  class weights w (1 when none); PaLM's z-loss
//   dz_j = c (p_j (sum q + 2 z_loss lse) - q_j)       c = token_weight grad_scale
//   entropy = lse - sum_j p_j z_j
//
// A logit whose bias is -inf is masked out, also behind softcap: p = 0, and its share e / V of the
// target distribution is dropped (0 * -inf = 0), as is its part of sum q. A masked target has
// logprob -inf and loss +inf, as in torch. A row whose every logit is masked has no gradient. A row
// whose target is ignore_index has token_loss and logprob 0 and no gradient, but lse, entropy and
// argmax. A row with a NaN or an infinity in its hidden states has zero outputs and no gradient,
// and is counted. The class weight does not multiply the z-loss; the token weight does.
//
// With a teacher (rows with a NaN or an infinity in its hidden states are counted and left out
// likewise), D a divergence of softmax(z2 / Tk) from the teacher's, s = Tk^2 or 1:
//
//   token_loss = cross_entropy_weight (cross entropy + z_loss lse^2) + divergence_weight s D
//
// and with a policy, token_loss is its objective instead. Both are in objectives.h.

#ifndef LMHEAD_KERNELS_REFERENCE_REFERENCE_H_
#define LMHEAD_KERNELS_REFERENCE_REFERENCE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"
#include "proto/types/tensor_view.h"

namespace lmhead::reference {

// The elements of `matrix`, exactly.
std::vector<double> Upcast(ConstMatrixView matrix);

// Rounded once to `dtype`, to nearest.
float RoundedTo(DType dtype, float value);
std::vector<double> RoundedTo(DType dtype, const std::vector<double>& values);

// DistillationSpec and PolicySpec with their numbers in double. A JSD may have beta 0 or 1 here and
// is then the forward or the reverse KL.
struct Distillation {
  Divergence divergence = Divergence::kForwardKl;
  double kl_temperature = 1.0;
  bool scale_by_temperature_squared = false;
  double jsd_beta = 0.0;
  int32_t top_k = 0;
  TopkMass topk_mass = TopkMass::kNone;
  double cross_entropy_weight = 0.0;
  double divergence_weight = 1.0;
  TeacherVocabulary vocabulary = TeacherVocabulary::kEqual;

  // What the divergence is multiplied by.
  double Weight() const {
    return divergence_weight *
           (scale_by_temperature_squared ? kl_temperature * kl_temperature : 1.0);
  }
};

struct Policy {
  PolicyKind kind = PolicyKind::kCoefficients;
  double clip_low = 0.0;
  double clip_high = 0.0;
  double entropy_coefficient = 0.0;
  double reference_kl_coefficient = 0.0;
  double dual_clip = 0.0;  // 0 means none.
};

// LossRecipe with its numbers in double, so that constants such as 0.1 can be given exactly.
struct Recipe {
  int32_t ignore_index = kDefaultIgnoreIndex;
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  std::vector<double> class_weights;         // Empty, or [vocab_size].
  double temperature = 1.0;                  // Of rows without a token_temperature.
  std::optional<Distillation> distillation;  // Not both.
  std::optional<Policy> policy;

  bool has_teacher_head() const {
    return distillation.has_value() && distillation->divergence != Divergence::kTopkForwardKl;
  }

  Recipe() = default;
  explicit Recipe(const LossRecipe& recipe);
};

struct Head {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  std::vector<double> weight;  // [vocab_size, hidden_size]
  std::vector<double> bias;    // Empty, or [vocab_size].
  double logit_scale = 1.0;
  double softcap = 0.0;  // 0 means none.
};

struct Tokens {
  std::vector<double> hidden_states;  // [num_tokens, hidden_size]
  std::vector<int32_t> targets;       // [num_tokens]
  std::vector<double> token_weights;  // Empty, or [num_tokens], like the next.
  std::vector<double> token_temperature;
  double grad_scale = 1.0;

  // As the recipe asks, [num_tokens] each, or empty.
  std::vector<double> logprob_grad;
  std::vector<double> entropy_grad;
  std::vector<double> old_logprob;
  std::vector<double> advantage;
  std::vector<double> reference_logprob;
  std::vector<int32_t> teacher_topk_ids;      // [num_tokens, top_k], or empty, like the next.
  std::vector<double> teacher_topk_logprobs;  // At kl_temperature.
  std::vector<double> teacher_hidden_states;  // [num_tokens, teacher's hidden_size], or empty.

  int64_t num_tokens() const { return static_cast<int64_t>(targets.size()); }
};

struct Result {
  // [num_tokens] each. token_loss is before token_weights and grad_scale.
  std::vector<double> token_loss;
  std::vector<double> logprob;
  std::vector<double> lse;
  std::vector<double> entropy;
  std::vector<int32_t> argmax;  // The lowest index among equals.
  // [num_tokens, top_k] of the largest logits, falling; among equals the lowest index first.
  std::vector<int32_t> topk_ids;
  std::vector<double> topk_logprobs;
  LossSums sums;
  std::vector<double> grad_hidden_states;  // [num_tokens, hidden_size]
  std::vector<double> grad_weight;         // [vocab_size, hidden_size]
  std::vector<double> grad_bias;           // [vocab_size] when the head has a bias, else empty.
};

// Ends the process unless vectors have the sizes stated, ids are in their vocabulary (targets may
// be ignore_index), and `teacher` is there exactly when the recipe has a teacher head.
void CheckInputs(const Head& head, const Recipe& recipe, const Tokens& tokens, const Head* teacher);

// Loss, outputs and all gradients of `tokens`; the `top_k` largest log-probabilities of each.
// REQUIRES: as CheckInputs() says; top_k <= vocab_size.
Result ComputeLoss(const Head& head, const Recipe& recipe, const Tokens& tokens,
                   const Head* teacher = nullptr, int32_t top_k = 0);

// Log-probabilities of every vocabulary id at the row's temperature, [num_tokens, vocab_size]; 0 in
// rows that are not finite.
std::vector<double> AllLogProbs(const Head& head, const Recipe& recipe, const Tokens& tokens);

// State of one parameter tensor; vectors start empty and are made at the first update.
struct OptimizerState {
  std::vector<double> exp_avg;     // AdamW; SGD's momentum buffer.
  std::vector<double> exp_avg_sq;  // AdamW.
  int64_t num_updates = 0;
};

// One update of `parameter` with grad_multiplier * grad: torch.optim.AdamW (Loshchilov and Hutter,
// 2019) or torch.optim.SGD without dampening and Nesterov. `weight_decay` stands for spec's.
void ApplyUpdate(const OptimizerSpec& spec, double weight_decay, double learning_rate,
                 double grad_multiplier, std::span<const double> grad, std::span<double> parameter,
                 OptimizerState* state);

}  // namespace lmhead::reference

#endif  // LMHEAD_KERNELS_REFERENCE_REFERENCE_H_
