// The loss of a stream and what it answers: the domain types behind lmhead.v1.LossRecipe,
// OutputSpec, LossSums and StageTimings. The comments there are the reference, the formulas are in
// docs/NUMERICS.md.

#ifndef LMHEAD_PROTO_TYPES_LOSS_RECIPE_H_
#define LMHEAD_PROTO_TYPES_LOSS_RECIPE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/types/dtype.h"

namespace lmhead {

inline constexpr int32_t kDefaultIgnoreIndex = -100;

// Temperatures of the logits and of a divergence. Beyond them a logit, or the difference of two, is
// no float32 any more that an exponential could be taken of.
inline constexpr float kTemperatureMin = 1e-6f;
inline constexpr float kTemperatureMax = 1e6f;

constexpr bool IsTemperature(float value) {
  return value >= kTemperatureMin && value <= kTemperatureMax;
}

// Wire values (lmhead.v1.DistillationSpec.Divergence).
enum class Divergence : uint8_t { kForwardKl = 1, kReverseKl = 2, kJsd = 3, kTopkForwardKl = 4 };

// Wire values (lmhead.v1.DistillationSpec.TopkMass); kNone for a teacher head.
enum class TopkMass : uint8_t { kNone = 0, kRenormalise = 1, kKeep = 2, kTail = 3 };

// Wire values (lmhead.v1.DistillationSpec.Vocabulary).
enum class TeacherVocabulary : uint8_t { kEqual = 0, kCommon = 1, kPad = 2 };

// Defaults are filled in. Divergences are of softmax(z2 / kl_temperature); JSD with beta 0 or 1 has
// become the KL that it is.
struct DistillationSpec {
  Divergence divergence = Divergence::kForwardKl;
  std::string teacher_head;  // Empty exactly for kTopkForwardKl.
  float kl_temperature = 1.0f;
  bool scale_by_temperature_squared = false;
  float jsd_beta = 0.0f;
  int32_t top_k = 0;
  TopkMass topk_mass = TopkMass::kNone;
  float cross_entropy_weight = 0.0f;
  float divergence_weight = 1.0f;
  DType teacher_hidden_dtype = DType::kFloat32;
  bool paired_stream = false;
  TeacherVocabulary vocabulary = TeacherVocabulary::kEqual;

  friend bool operator==(const DistillationSpec&, const DistillationSpec&) = default;
};

// Wire values (lmhead.v1.PolicySpec.Kind).
enum class PolicyKind : uint8_t { kCoefficients = 1, kClipped = 2 };

struct PolicySpec {
  PolicyKind kind = PolicyKind::kCoefficients;
  float clip_low = 0.0f;
  float clip_high = 0.0f;
  float entropy_coefficient = 0.0f;
  float reference_kl_coefficient = 0.0f;
  float dual_clip = 0.0f;  // 0 means none.

  friend bool operator==(const PolicySpec&, const PolicySpec&) = default;
};

// Two chunks may share a batch only when their recipes are equal.
struct LossRecipe {
  int32_t ignore_index = kDefaultIgnoreIndex;
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  std::vector<float> class_weights;  // Empty, or [vocab_size].
  float temperature = 1.0f;
  bool per_token_temperature = false;
  bool token_weights = false;
  std::optional<DistillationSpec> distillation;  // Not both: a recipe has one objective.
  std::optional<PolicySpec> policy;

  // Whether there is a resident teacher, whose hidden states come with the chunks.
  bool has_teacher_head() const {
    return distillation.has_value() && distillation->divergence != Divergence::kTopkForwardKl;
  }
  // Entries a token of a top-k teacher; 0 when there is none.
  int32_t teacher_top_k() const { return distillation.has_value() ? distillation->top_k : 0; }

  friend bool operator==(const LossRecipe&, const LossRecipe&) = default;
};

struct OutputSpec {
  bool grad_hidden_states = false;
  bool token_loss = false;
  bool logprob = false;
  bool lse = false;
  bool entropy = false;
  bool argmax = false;
  int32_t top_k = 0;  // Ids and log-probabilities of the k largest logits.

  friend bool operator==(const OutputSpec&, const OutputSpec&) = default;
};

// Sums over the rows of a chunk, or of a whole step.
struct LossSums {
  double loss_sum = 0.0;
  int64_t num_tokens = 0;
  int64_t num_valid_tokens = 0;
  int64_t num_nonfinite_rows = 0;
  int64_t num_correct = 0;
  double weight_sum = 0.0;
  double cross_entropy_sum = 0.0;
  double z_loss_sum = 0.0;
  double entropy_sum = 0.0;
  double divergence_sum = 0.0;
  double policy_sum = 0.0;
  double dropped_teacher_mass_sum = 0.0;
  int64_t num_clipped = 0;
  double old_policy_kl_sum = 0.0;

  LossSums& operator+=(const LossSums& other) {
    loss_sum += other.loss_sum;
    num_tokens += other.num_tokens;
    num_valid_tokens += other.num_valid_tokens;
    num_nonfinite_rows += other.num_nonfinite_rows;
    num_correct += other.num_correct;
    weight_sum += other.weight_sum;
    cross_entropy_sum += other.cross_entropy_sum;
    z_loss_sum += other.z_loss_sum;
    entropy_sum += other.entropy_sum;
    divergence_sum += other.divergence_sum;
    policy_sum += other.policy_sum;
    dropped_teacher_mass_sum += other.dropped_teacher_mass_sum;
    num_clipped += other.num_clipped;
    old_policy_kl_sum += other.old_policy_kl_sum;
    return *this;
  }
  friend bool operator==(const LossSums&, const LossSums&) = default;
};

struct StageTimings {
  double queue_seconds = 0.0;
  double upload_seconds = 0.0;
  double compute_seconds = 0.0;
  double download_seconds = 0.0;
};

}  // namespace lmhead

#endif  // LMHEAD_PROTO_TYPES_LOSS_RECIPE_H_
