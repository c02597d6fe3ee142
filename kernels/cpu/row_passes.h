// The passes over rows of logits around the matrix products: transform, statistics, gradient.
//
// A row's logits arrive tile by tile. RowPasses::transform turns the product into final logits in
// place, accumulate folds them into the row's running statistics, FinishRow turns the statistics
// into the row's outputs, and grad turns final logits into the gradient of the product in place.
// Divergences from a teacher and top-k outputs have passes of their own beside these: divergence.h
// and top_k.h. Formulas: docs/NUMERICS.md. One row is one thread's work; nothing here allocates or
// blocks.
//
// The vector code is compiled for SSE2, AVX2 and AVX-512, and chosen once by what the processor
// has.

#ifndef LMHEAD_KERNELS_CPU_ROW_PASSES_H_
#define LMHEAD_KERNELS_CPU_ROW_PASSES_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "proto/types/loss_recipe.h"

namespace lmhead::cpu {

struct DivergenceConfig;
struct DivergenceStatistics;
struct DivergenceState;
struct JointTile;
struct MixtureSums;

// What all rows of a batch share.
struct RowConfig {
  int64_t vocab_size = 0;
  const float* bias = nullptr;           // Null, or of the ids from bias_start.
  int64_t bias_start = 0;                // First id of the shard.
  const float* class_weights = nullptr;  // [vocab_size], or null.
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0 means none.
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  float cross_entropy_weight = 1.0f;   // Of cross entropy and z-loss in the objective.
  const PolicySpec* policy = nullptr;  // Set: the objective is the policy's, not cross entropy.
  bool entropy = false;                // Whether the entropy is wanted, or needed by the policy.
};

// Statistics of the tiles seen. Sums are relative to logits_max and leave masked logits out.
struct RowStatistics {
  float logits_max = 0.0f;  // From -inf; BeginRow sets it.
  int32_t argmax = 0;       // Of the lowest index among equals.
  float target_logit = 0.0f;
  double sum_exp = 0.0;             // exp(z - logits_max)
  double sum_exp_logit = 0.0;       // exp(z - logits_max) (z - logits_max)
  double sum_class_weight = 0.0;    // w, when there is label smoothing.
  double sum_weighted_logit = 0.0;  // w (z - logits_max), likewise.
};

// One row of a batch: its inputs, its statistics so far, and what the gradient needs of them.
struct RowState {
  // Inputs.
  int32_t target = 0;
  bool finite = true;  // False: a NaN or an infinity among the hidden states.
  bool valid = true;   // Finite, and the target is not ignore_index.
  float temperature = 1.0f;
  float coefficient = 0.0f;  // token_weight * grad_scale; 0 for a row that is not valid.

  RowStatistics stats;

  // Set by FinishRow for grad.
  float target_mass = 0.0f;         // Cross entropy: weight (1 - label_smoothing) w_t.
  float probability_factor = 0.0f;  // What a probability is multiplied by, over sum_exp.
  float entropy_factor = 0.0f;      // Policy: minus d objective / d entropy, over sum_exp.
  float entropy_offset = 0.0f;      // Entropy minus log sum_exp.
};

// The policy's inputs of one row; those that its kind does not have stay 0.
struct PolicyInputs {
  float logprob_grad = 0.0f;
  float entropy_grad = 0.0f;
  float old_logprob = 0.0f;
  float advantage = 0.0f;
  float reference_logprob = 0.0f;
};

// Outputs of one row, all before token weights; zeros where the row has none.
struct RowOutputs {
  double cross_entropy = 0.0;  // Times its weight in the objective, like z_loss.
  double z_loss = 0.0;
  double policy = 0.0;
  double logprob = 0.0;
  double lse = 0.0;
  double entropy = 0.0;
  double log_sum = 0.0;  // lse - logits_max
  bool clipped = false;  // The policy's ratio has no gradient because of a clip.
  double old_policy_kl = 0.0;
};

// Columns [start, start + cols) of the vocabulary.
struct VocabTile {
  int64_t start = 0;
  int64_t cols = 0;
};

// Sets the statistics of `row` to those of no tile.
void BeginRow(RowState* row);

// Adds the statistics of further ids, which follow those of `into`. target_logit is not touched:
// it is of one part alone.
void MergeStatistics(const RowStatistics& part, RowStatistics* into);

// log sum_exp of a row whose tiles have all been accumulated; 0 when every logit is masked.
double LogSumOf(const RowStatistics& stats);

// Log-probability of one of its logits, at most 0. `log_sum` is LogSumOf(stats).
double LogProbOf(const RowStatistics& stats, double log_sum, float logit);

// Outputs of a row whose tiles have all been accumulated; also prepares `row` for grad.
RowOutputs FinishRow(const RowConfig& config, const PolicyInputs& policy, RowState* row);

// The vector passes, compiled for one instruction set. `logits` are the row's `tile.cols` floats.
struct RowPasses {
  std::string_view name;  // "sse2", "avx2" or "avx512".

  // logits <- softcap tanh(logit_scale (logits + bias) / softcap) / temperature. A logit masked by
  // an infinite bias is -inf afterwards, whatever the transform.
  void (*transform)(const RowConfig& config, VocabTile tile, const RowState& row, float* logits);

  // Folds final logits into the statistics.
  void (*accumulate)(const RowConfig& config, VocabTile tile, const float* logits, RowState* row);

  // Final logits -> derivative of the objective with respect to hidden W^T + bias; zeros for a row
  // whose coefficient is 0.
  void (*grad)(const RowConfig& config, VocabTile tile, const RowState& row, float* logits);

  // The first column in [from, cols) whose logit is above `threshold`, or cols.
  int64_t (*next_above)(const float* logits, int64_t from, int64_t cols, float threshold);

  // Folds `scale` times the logits into a maximum and the sum of exponentials relative to it.
  void (*accumulate_exp)(const float* logits, int64_t cols, float scale, float* max,
                         double* sum_exp);

  // Folds a tile of both sides into the statistics of their divergence.
  void (*accumulate_divergence)(const DivergenceConfig& config, const JointTile& tile, float scale,
                                const float* logits, DivergenceStatistics* stats);

  // Adds a tile to the sums of a JSD, whose normalisers are known.
  void (*accumulate_mixture)(const DivergenceConfig& config, const JointTile& tile, float scale,
                             const float* logits, const DivergenceState& state, MixtureSums* sums);

  // As grad, of an objective with a divergence. Against a top-k teacher the columns of its ids get
  // their derivative from SetListedGrad afterwards, all others here.
  void (*grad_divergence)(const RowConfig& config, const DivergenceConfig& divergence,
                          VocabTile tile, const JointTile& joint, const RowState& row,
                          const DivergenceState& state, float* logits);
};

// The best passes for this processor, and all that it can run (the last is the best).
const RowPasses& BestRowPasses();
std::span<const RowPasses> SupportedRowPasses();

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_ROW_PASSES_H_
