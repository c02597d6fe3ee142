// The loss of a stream and what it answers: the domain types behind lmhead.v1.LossRecipe,
// OutputSpec, LossSums and StageTimings. The comments there are the reference, the formulas are in
// docs/NUMERICS.md.

#ifndef LMHEAD_PROTO_TYPES_LOSS_RECIPE_H_
#define LMHEAD_PROTO_TYPES_LOSS_RECIPE_H_

#include <cstdint>
#include <vector>

namespace lmhead {

inline constexpr int32_t kDefaultIgnoreIndex = -100;

// Two chunks may share a batch only when their recipes are equal.
struct LossRecipe {
  int32_t ignore_index = kDefaultIgnoreIndex;
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  std::vector<float> class_weights;  // Empty, or [vocab_size].
  float temperature = 1.0f;
  bool per_token_temperature = false;
  bool token_weights = false;

  friend bool operator==(const LossRecipe&, const LossRecipe&) = default;
};

struct OutputSpec {
  bool grad_hidden_states = false;
  bool token_loss = false;
  bool logprob = false;
  bool lse = false;
  bool entropy = false;
  bool argmax = false;

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
