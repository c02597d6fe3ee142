// The demo's trunk: a log-bilinear context model (Mnih and Hinton, 2007) that lives in the client.
//
//   hidden[t] = sum over k of position_scale[k] * embedding[word[t - k]],  k = 1 ... kContextWords
//
// with an elementwise product. It stands for a transformer: the service sees only its hidden states
// and answers with their gradient, which is all this model needs to learn.

#ifndef LMHEAD_SERVER_CLI_DEMO_TRUNK_H_
#define LMHEAD_SERVER_CLI_DEMO_TRUNK_H_

#include <cstdint>
#include <span>
#include <vector>

namespace lmhead::demo {

// Sum of the trunk's gradients over rows. Rows of the embedding that no row used are zero and not
// listed in `touched`.
class TrunkGradient {
 public:
  TrunkGradient(int64_t vocab_size, int64_t hidden_size);

  // Adds `other`.
  void Add(const TrunkGradient& other);
  void Clear();
  double SquaredNorm() const;

  // The embedding's gradient of `id`, which is touched from now on.
  float* Row(int32_t id);

  std::vector<float>& position_scale() { return position_scale_; }
  const std::vector<float>& embedding() const { return embedding_; }
  const std::vector<float>& position_scale() const { return position_scale_; }
  const std::vector<int32_t>& touched() const { return touched_; }

 private:
  const int64_t hidden_size_;
  std::vector<float> embedding_;       // [vocab_size, hidden_size]
  std::vector<float> position_scale_;  // [kContextWords, hidden_size]
  std::vector<bool> is_touched_;
  std::vector<int32_t> touched_;
};

// Thread-compatible: Forward and Backward may run concurrently.
class Trunk {
 public:
  Trunk(int64_t vocab_size, int64_t hidden_size, uint64_t seed);

  // hidden[i] for the word at ids[positions[i]]. `hidden` has room for [positions, hidden_size].
  // REQUIRES: each position has kContextWords ids before it.
  void Forward(std::span<const int32_t> ids, std::span<const int32_t> positions,
               float* hidden) const;

  // Adds the gradients of the same rows to `gradient`, given grad_hidden_states.
  void Backward(std::span<const int32_t> ids, std::span<const int32_t> positions,
                const float* grad_hidden, TrunkGradient* gradient) const;

  // One Adam update with grad_multiplier * gradient. Embeddings of untouched words, and their
  // moments, stay as they are.
  void ApplyUpdate(const TrunkGradient& gradient, double learning_rate, double grad_multiplier);

  int64_t hidden_size() const { return hidden_size_; }
  int64_t num_parameters() const;

  // For tests: the parameters themselves.
  std::vector<float>& embedding() { return embedding_.values; }
  std::vector<float>& position_scale() { return position_scale_.values; }

 private:
  struct Parameter {
    std::vector<float> values, exp_avg, exp_avg_sq;
  };
  void UpdateRange(int64_t begin, int64_t size, const float* grad, float multiplier,
                   float learning_rate, Parameter* parameter) const;

  const int64_t hidden_size_;
  Parameter embedding_;       // [vocab_size, hidden_size]
  Parameter position_scale_;  // [kContextWords, hidden_size]
  int64_t num_updates_ = 0;
};

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_TRUNK_H_
