// The passes over rows of logits around the matrix products: transform, statistics, gradient.
//
// A row's logits arrive tile by tile. TransformRow turns the product into final logits in place,
// AccumulateRow folds them into the row's running statistics, FinishRow turns the statistics into
// the row's outputs, and GradRow turns final logits into the gradient of the product in place.
// Formulas: docs/NUMERICS.md. One row is one thread's work; nothing here allocates or blocks.
//
// The vector code is compiled for SSE2, AVX2 and AVX-512, and chosen once by what the processor
// has.

#ifndef LMHEAD_KERNELS_CPU_ROW_PASSES_H_
#define LMHEAD_KERNELS_CPU_ROW_PASSES_H_

#include <cstdint>
#include <span>
#include <string_view>

namespace lmhead::cpu {

// What all rows of a batch share.
struct RowConfig {
  int64_t vocab_size = 0;
  const float* bias = nullptr;           // [vocab_size], or null.
  const float* class_weights = nullptr;  // [vocab_size], or null.
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0 means none.
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  bool entropy = false;  // Whether the entropy is wanted.
};

// One row of a batch: its inputs, its statistics so far, and what the gradient needs of them.
struct RowState {
  // Inputs.
  int32_t target = 0;
  bool finite = true;  // False: a NaN or an infinity among the hidden states.
  bool valid = true;   // Finite, and the target is not ignore_index.
  float temperature = 1.0f;
  float coefficient = 0.0f;  // token_weight * grad_scale; 0 for a row that is not valid.

  // Statistics of the tiles seen. Sums are relative to logits_max and leave masked logits out.
  float logits_max = 0.0f;  // From -inf; BeginRow sets it.
  int32_t argmax = 0;       // Of the lowest index among equals.
  float target_logit = 0.0f;
  double sum_exp = 0.0;             // exp(z - logits_max)
  double sum_exp_logit = 0.0;       // exp(z - logits_max) (z - logits_max)
  double sum_class_weight = 0.0;    // w, when there is label smoothing.
  double sum_weighted_logit = 0.0;  // w (z - logits_max), likewise.

  // Set by FinishRow for GradRow.
  float target_mass = 0.0f;         // (1 - label_smoothing) w_t
  float probability_factor = 0.0f;  // (Sum of the target distribution + 2 z_loss lse) / sum_exp
};

// Outputs of one row, all before token weights; zeros where the row has none.
struct RowOutputs {
  double cross_entropy = 0.0;
  double z_loss = 0.0;
  double logprob = 0.0;
  double lse = 0.0;
  double entropy = 0.0;
};

// Columns [start, start + cols) of the vocabulary.
struct VocabTile {
  int64_t start = 0;
  int64_t cols = 0;
};

// Sets the statistics of `row` to those of no tile.
void BeginRow(RowState* row);

// Outputs of a row whose tiles have all been accumulated; also prepares `row` for GradRow.
RowOutputs FinishRow(const RowConfig& config, RowState* row);

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
};

// The best passes for this processor, and all that it can run (the last is the best).
const RowPasses& BestRowPasses();
std::span<const RowPasses> SupportedRowPasses();

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_ROW_PASSES_H_
