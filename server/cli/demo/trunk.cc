#include "server/cli/demo/trunk.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "server/cli/demo/corpus.h"

namespace lmhead::demo {
namespace {

constexpr float kBeta1 = 0.9f;
constexpr float kBeta2 = 0.99f;
constexpr float kEpsilon = 1e-8f;

double SumOfSquares(const float* values, int64_t size) {
  double sum = 0.0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(values[i]) * values[i];
  return sum;
}

}  // namespace

TrunkGradient::TrunkGradient(int64_t vocab_size, int64_t hidden_size)
    : hidden_size_(hidden_size),
      embedding_(vocab_size * hidden_size),
      position_scale_(kContextWords * hidden_size),
      is_touched_(vocab_size, false) {}

float* TrunkGradient::Row(int32_t id) {
  if (!is_touched_[id]) {
    is_touched_[id] = true;
    touched_.push_back(id);
  }
  return embedding_.data() + id * hidden_size_;
}

void TrunkGradient::Add(const TrunkGradient& other) {
  for (int32_t id : other.touched_) {
    const float* from = other.embedding_.data() + id * hidden_size_;
    float* to = Row(id);
    for (int64_t j = 0; j < hidden_size_; ++j) to[j] += from[j];
  }
  for (size_t i = 0; i < position_scale_.size(); ++i) {
    position_scale_[i] += other.position_scale_[i];
  }
}

void TrunkGradient::Clear() {
  for (int32_t id : touched_) {
    is_touched_[id] = false;
    std::fill_n(embedding_.begin() + id * hidden_size_, hidden_size_, 0.0f);
  }
  touched_.clear();
  std::fill(position_scale_.begin(), position_scale_.end(), 0.0f);
}

double TrunkGradient::SquaredNorm() const {
  double sum = SumOfSquares(position_scale_.data(), static_cast<int64_t>(position_scale_.size()));
  for (int32_t id : touched_) {
    sum += SumOfSquares(embedding_.data() + id * hidden_size_, hidden_size_);
  }
  return sum;
}

Trunk::Trunk(int64_t vocab_size, int64_t hidden_size, uint64_t seed) : hidden_size_(hidden_size) {
  for (auto [parameter, size] : {std::pair{&embedding_, vocab_size * hidden_size},
                                 std::pair{&position_scale_, kContextWords * hidden_size}}) {
    parameter->values.resize(size);
    parameter->exp_avg.resize(size);
    parameter->exp_avg_sq.resize(size);
  }
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (float& value : embedding_.values) value = normal(generator);
  // Nearer words tell more, and each starts with a pattern of its own so that order matters.
  for (int k = 0; k < kContextWords; ++k) {
    for (int64_t j = 0; j < hidden_size; ++j) {
      position_scale_.values[k * hidden_size + j] =
          (1.0f + 0.5f * normal(generator)) / static_cast<float>(k + 1);
    }
  }
}

void Trunk::Forward(std::span<const int32_t> ids, std::span<const int32_t> positions,
                    float* hidden) const {
  for (size_t i = 0; i < positions.size(); ++i) {
    float* row = hidden + i * hidden_size_;
    std::fill_n(row, hidden_size_, 0.0f);
    for (int k = 0; k < kContextWords; ++k) {
      const int32_t id = ids[positions[i] - 1 - k];
      const float* embedding = embedding_.values.data() + id * hidden_size_;
      const float* scale = position_scale_.values.data() + k * hidden_size_;
      for (int64_t j = 0; j < hidden_size_; ++j) row[j] += scale[j] * embedding[j];
    }
  }
}

void Trunk::Backward(std::span<const int32_t> ids, std::span<const int32_t> positions,
                     const float* grad_hidden, TrunkGradient* gradient) const {
  for (size_t i = 0; i < positions.size(); ++i) {
    const float* grad = grad_hidden + i * hidden_size_;
    for (int k = 0; k < kContextWords; ++k) {
      const int32_t id = ids[positions[i] - 1 - k];
      const float* embedding = embedding_.values.data() + id * hidden_size_;
      const float* scale = position_scale_.values.data() + k * hidden_size_;
      float* grad_embedding = gradient->Row(id);
      float* grad_scale = gradient->position_scale().data() + k * hidden_size_;
      for (int64_t j = 0; j < hidden_size_; ++j) {
        grad_embedding[j] += grad[j] * scale[j];
        grad_scale[j] += grad[j] * embedding[j];
      }
    }
  }
}

void Trunk::ApplyUpdate(const TrunkGradient& gradient, double learning_rate,
                        double grad_multiplier) {
  ++num_updates_;
  const float multiplier = static_cast<float>(grad_multiplier);
  const float rate = static_cast<float>(learning_rate);
  for (int32_t id : gradient.touched()) {
    const int64_t begin = id * hidden_size_;
    UpdateRange(begin, hidden_size_, gradient.embedding().data() + begin, multiplier, rate,
                &embedding_);
  }
  UpdateRange(0, kContextWords * hidden_size_, gradient.position_scale().data(), multiplier, rate,
              &position_scale_);
}

void Trunk::UpdateRange(int64_t begin, int64_t size, const float* grad, float multiplier,
                        float learning_rate, Parameter* parameter) const {
  const float correction1 = 1.0f - std::pow(kBeta1, static_cast<float>(num_updates_));
  const float correction2 = 1.0f - std::pow(kBeta2, static_cast<float>(num_updates_));
  float* values = parameter->values.data() + begin;
  float* exp_avg = parameter->exp_avg.data() + begin;
  float* exp_avg_sq = parameter->exp_avg_sq.data() + begin;
  for (int64_t i = 0; i < size; ++i) {
    const float g = multiplier * grad[i];
    exp_avg[i] = kBeta1 * exp_avg[i] + (1.0f - kBeta1) * g;
    exp_avg_sq[i] = kBeta2 * exp_avg_sq[i] + (1.0f - kBeta2) * g * g;
    const float denominator = std::sqrt(exp_avg_sq[i] / correction2) + kEpsilon;
    values[i] -= learning_rate * (exp_avg[i] / correction1) / denominator;
  }
}

int64_t Trunk::num_parameters() const {
  return static_cast<int64_t>(embedding_.values.size() + position_scale_.values.size());
}

}  // namespace lmhead::demo
