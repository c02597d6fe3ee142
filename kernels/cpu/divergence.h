// The divergence of a row from its teacher: statistics, value, and what the gradient needs of them.
//
// Both sides are taken at kl_temperature: u = scale z of the student (its final logits are at
// another temperature), v of the teacher; p = softmax(u), q = softmax(v). A teacher head's logits
// are walked beside the student's, tile by tile, by RowPasses; a JSD needs a second sweep once the
// normalisers are known. Of a top-k teacher there are only ids and log-probabilities: the student's
// logits at those ids are set aside while a tile is accumulated, so that the mass outside of them
// is a sum and never 1 minus a sum. Formulas: docs/NUMERICS.md.

#ifndef LMHEAD_KERNELS_CPU_DIVERGENCE_H_
#define LMHEAD_KERNELS_CPU_DIVERGENCE_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/row_passes.h"
#include "proto/types/loss_recipe.h"

namespace lmhead::cpu {

// What all rows of a batch share.
struct DivergenceConfig {
  Divergence divergence = Divergence::kForwardKl;
  TopkMass topk_mass = TopkMass::kNone;
  TeacherVocabulary vocabulary = TeacherVocabulary::kEqual;
  bool whole_vocabulary = false;  // The top-k teacher's ids are all that there are.
  float kl_temperature = 1.0f;
  float jsd_beta = 0.0f;
  double weight = 1.0;  // divergence_weight, and kl_temperature squared when it scales.
};

// A tile of both sides, side by side.
struct JointTile {
  const float* teacher_logits = nullptr;  // v; null for a top-k teacher.
  int64_t teacher_cols = 0;               // In the columns from there the teacher has no id: q = 0.
  int64_t cols = 0;                       // Columns that the divergence is taken over.
};

// Statistics of the tiles seen, sums relative to their maxima.
struct DivergenceStatistics {
  float student_max = 0.0f;  // Of u; of a top-k teacher, of the ids outside its list.
  float teacher_max = 0.0f;  // Of v where the student has an id, too.
  float beyond_max = 0.0f;   // Of v where it has none.
  float listed_max = 0.0f;   // Of u at the ids of a top-k teacher, those of this rank.
  double student_sum_exp = 0.0;
  double teacher_sum_exp = 0.0;
  double beyond_sum_exp = 0.0;
  double joint_sum = 0.0;         // Forward: exp(x) (x - y), reverse: exp(y) (y - x), with
                                  // x = v - teacher_max and y = u - student_max.
  double listed_sum_exp = 0.0;    // Like the next two, of the listed ids of this rank.
  double listed_mass = 0.0;       // q
  double listed_sum_logit = 0.0;  // q (u - listed_max)
};

// Sums of a JSD's second sweep, over both normalisers: with m = beta q + (1 - beta) p,
// p (log p - log m) times sum exp(y), and q (log q - log m) times sum exp(x).
struct MixtureSums {
  double student = 0.0;
  double teacher = 0.0;
};

struct DivergenceState {
  DivergenceStatistics stats;
  MixtureSums mixture;
  double teacher_mass = 0.0;         // Of a top-k teacher: sum of its probabilities.
  double teacher_sum_logprob = 0.0;  // Likewise: q log q.
  double beyond_mass = 0.0;          // Of a teacher head: its probability where p is 0 (kPad).

  // Set by PrepareMixture (JSD) and FinishDivergence for the later sweeps.
  bool has_gradient = false;     // Not of infinite values and rows without logits.
  float log_norm_ratio = 0.0f;   // log sum exp(y) - log sum exp(x)
  float p_factor = 0.0f;         // What exp(y) is multiplied by in the gradient.
  float q_factor = 0.0f;         // Forward: what exp(x) is.
  float offset = 0.0f;           // Reverse: the divergence; JSD: KL(p || m).
  double listed_p_factor = 0.0;  // Top-k: what exp(u - listed_max) is at the listed ids,
  double listed_q_factor = 0.0;  // and what q is.
};

// One entry of a top-k teacher's list, and the student's final logit there.
struct TeacherEntry {
  int32_t id = 0;
  float logprob = 0.0f;
  float logit = 0.0f;  // -inf until its tile has been seen.
};

struct DivergenceOutputs {
  double divergence = 0.0;  // Times its weight in the objective.
  double dropped_teacher_mass = 0.0;
};

void BeginDivergence(DivergenceState* state);

// Takes a row's list in, by rising ids. REQUIRES: entries has room for all.
void BeginEntries(std::span<const int32_t> ids, std::span<const float> logprobs,
                  TeacherEntry* entries, DivergenceState* state);

// Folds a tile into the statistics of a top-k divergence; entries in the tile get their logits.
// The logits are changed on the way and are as before afterwards.
void AccumulateOutside(const RowPasses& passes, VocabTile tile, float scale,
                       std::span<TeacherEntry> entries, float* logits, DivergenceState* state);

// After the last tile: folds the entries with ids in `range` into the statistics.
void AccumulateListed(VocabTile range, float scale, std::span<const TeacherEntry> entries,
                      DivergenceStatistics* stats);

// Adds the statistics of further ids.
void MergeDivergence(Divergence divergence, const DivergenceStatistics& part,
                     DivergenceStatistics* into);

// Of a JSD, when every tile has been accumulated and merged: readies its second sweep.
void PrepareMixture(const DivergenceConfig& config, DivergenceState* state);

// The value of a valid row whose sweeps are done; also prepares `state` for the gradient.
DivergenceOutputs FinishDivergence(const DivergenceConfig& config, float temperature,
                                   DivergenceState* state);

// Sets the gradient in the columns of a top-k teacher's ids, after grad_divergence.
void SetListedGrad(const RowConfig& config, const DivergenceConfig& divergence, VocabTile tile,
                   const RowState& row, const DivergenceState& state,
                   std::span<const TeacherEntry> entries, float* grad);

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_DIVERGENCE_H_
