#include "server/cli/demo/trunk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "server/cli/demo/corpus.h"

namespace lmhead::demo {
namespace {

constexpr int64_t kVocabSize = 12;
constexpr int64_t kHiddenSize = 6;
constexpr int kNumRows = 5;

// A trunk, rows for it, and a linear objective sum(weights * hidden), whose derivative with respect
// to hidden is `weights`.
class TrunkTest : public ::testing::Test {
 protected:
  TrunkTest() : trunk_(kVocabSize, kHiddenSize, 7) {
    std::mt19937 generator(3);
    std::uniform_int_distribution<int32_t> word(0, kVocabSize - 3);  // Two words are never used.
    std::normal_distribution<float> normal;
    for (int i = 0; i < kContextWords + kNumRows; ++i) ids_.push_back(word(generator));
    for (int i = 0; i < kNumRows; ++i) positions_.push_back(kContextWords + i);
    for (int i = 0; i < kNumRows * kHiddenSize; ++i) weights_.push_back(normal(generator));
  }

  double Objective() const {
    std::vector<float> hidden(kNumRows * kHiddenSize);
    trunk_.Forward(ids_, positions_, hidden.data());
    double sum = 0.0;
    for (size_t i = 0; i < hidden.size(); ++i) sum += static_cast<double>(weights_[i]) * hidden[i];
    return sum;
  }

  TrunkGradient Gradient() const {
    TrunkGradient gradient(kVocabSize, kHiddenSize);
    trunk_.Backward(ids_, positions_, weights_.data(), &gradient);
    return gradient;
  }

  void ExpectMatchesDifferences(std::vector<float>& parameters, const std::vector<float>& grad) {
    ASSERT_EQ(parameters.size(), grad.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const float saved = parameters[i];
      constexpr float kStep = 1.0f / 64;
      parameters[i] = saved + kStep;
      const double above = Objective();
      parameters[i] = saved - kStep;
      const double below = Objective();
      parameters[i] = saved;
      EXPECT_NEAR((above - below) / (2 * kStep), grad[i], 1e-3) << "parameter " << i;
    }
  }

  Trunk trunk_;
  std::vector<int32_t> ids_, positions_;
  std::vector<float> weights_;
};

TEST_F(TrunkTest, GradientMatchesFiniteDifferences) {
  TrunkGradient gradient = Gradient();
  ExpectMatchesDifferences(trunk_.embedding(), gradient.embedding());
  ExpectMatchesDifferences(trunk_.position_scale(), gradient.position_scale());
}

TEST_F(TrunkTest, OrderOfTheWordsMatters) {
  std::vector<float> hidden(kHiddenSize), swapped(kHiddenSize);
  ids_[kContextWords - 1] = 0;
  ids_[kContextWords - 2] = 1;
  trunk_.Forward(ids_, std::span(positions_).first(1), hidden.data());
  std::swap(ids_[kContextWords - 1], ids_[kContextWords - 2]);
  trunk_.Forward(ids_, std::span(positions_).first(1), swapped.data());
  EXPECT_NE(hidden, swapped);
}

TEST_F(TrunkTest, GradientsOfTwoWorkersAddUp) {
  TrunkGradient sum(kVocabSize, kHiddenSize), part(kVocabSize, kHiddenSize);
  trunk_.Backward(ids_, std::span(positions_).first(2), weights_.data(), &sum);
  trunk_.Backward(ids_, std::span(positions_).subspan(2), weights_.data() + 2 * kHiddenSize, &part);
  sum.Add(part);
  const TrunkGradient whole = Gradient();
  for (size_t i = 0; i < whole.embedding().size(); ++i) {
    EXPECT_NEAR(sum.embedding()[i], whole.embedding()[i], 1e-5);
  }
  for (size_t i = 0; i < whole.position_scale().size(); ++i) {
    EXPECT_NEAR(sum.position_scale()[i], whole.position_scale()[i], 1e-5);
  }
  EXPECT_NEAR(sum.SquaredNorm(), whole.SquaredNorm(), 1e-3);
}

TEST_F(TrunkTest, ClearForgetsEverything) {
  TrunkGradient gradient = Gradient();
  EXPECT_GT(gradient.SquaredNorm(), 0.0);
  gradient.Clear();
  EXPECT_EQ(gradient.SquaredNorm(), 0.0);
  EXPECT_TRUE(gradient.touched().empty());
  trunk_.Backward(ids_, positions_, weights_.data(), &gradient);
  EXPECT_EQ(gradient.embedding(), Gradient().embedding());
}

TEST_F(TrunkTest, UpdateMovesDownhillAndLeavesUnusedWordsAlone) {
  const std::vector<float> before = trunk_.embedding();
  const double objective = Objective();
  trunk_.ApplyUpdate(Gradient(), 0.01, 1.0);
  EXPECT_LT(Objective(), objective);
  for (int64_t i = (kVocabSize - 2) * kHiddenSize; i < kVocabSize * kHiddenSize; ++i) {
    EXPECT_EQ(trunk_.embedding()[i], before[i]);
  }
}

TEST_F(TrunkTest, FirstUpdateIsTheLearningRateWhateverTheMultiplier) {
  // Adam's first step is learning_rate * sign(gradient).
  const std::vector<float> before = trunk_.position_scale();
  const TrunkGradient gradient = Gradient();
  trunk_.ApplyUpdate(gradient, 0.01, 1e-3);
  for (size_t i = 0; i < before.size(); ++i) {
    const float want = before[i] - std::copysign(0.01f, gradient.position_scale()[i]);
    EXPECT_NEAR(trunk_.position_scale()[i], want, 1e-4);
  }
}

TEST_F(TrunkTest, SameSeedSameParameters) {
  Trunk again(kVocabSize, kHiddenSize, 7), other(kVocabSize, kHiddenSize, 8);
  EXPECT_EQ(again.embedding(), trunk_.embedding());
  EXPECT_NE(other.embedding(), trunk_.embedding());
}

}  // namespace
}  // namespace lmhead::demo
