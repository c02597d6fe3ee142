#include "kernels/reference/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace lmhead::reference {
namespace {

OutputError Compare(const std::string& name, const std::vector<double>& got,
                    const std::vector<double>& exact, const std::vector<double>& plain) {
  return CompareOutput(name, got, exact, plain, DType::kFloat32);
}

TEST(CompareOutput, MeasuresRelativeAndAbsoluteError) {
  const OutputError error = Compare("lse", {3, 4.5}, {3, 4}, {3, 4});
  EXPECT_DOUBLE_EQ(error.rel, 0.1);
  EXPECT_DOUBLE_EQ(error.max_abs, 0.5);
  EXPECT_FALSE(error.Passed());
}

TEST(CompareOutput, TwiceThePlainErrorIsTheBound) {
  EXPECT_TRUE(Compare("lse", {3, 4.019}, {3, 4}, {3, 4.01}).Passed());
  EXPECT_FALSE(Compare("lse", {3, 4.021}, {3, 4}, {3, 4.01}).Passed());
  // Where the plain error happens to be nothing, a few roundings are allowed.
  EXPECT_TRUE(Compare("lse", {3, 4.000004}, {3, 4}, {3, 4}).Passed());
}

TEST(CompareOutput, ExactZerosMustBeZero) {
  EXPECT_TRUE(Compare("grad_weight", {0, 0}, {0, 0}, {0, 0}).Passed());
  EXPECT_FALSE(Compare("grad_weight", {0, 1e-30}, {0, 0}, {0, 0}).Passed());
}

// A certain row's entropy may underflow to something near 0, but no gradient or loss may.
TEST(CompareOutput, OnlyEntropyMayUnderflow) {
  EXPECT_TRUE(Compare("entropy", {0, 1e-30}, {0, 0}, {0, 0}).Passed());
  EXPECT_FALSE(Compare("entropy", {0, 1e-15}, {0, 0}, {0, 0}).Passed());
  EXPECT_FALSE(Compare("token_loss", {0, 1e-30}, {0, 0}, {0, 0}).Passed());
}

TEST(CompareOutput, NotANumberWrongSizesAndWrongCountsFail) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(Compare("lse", {nan}, {1}, {1}).Passed());
  EXPECT_FALSE(Compare("lse", {nan, 1}, {1, 1}, {1, 1}).Passed());
  EXPECT_FALSE(Compare("lse", {infinity}, {1}, {1}).Passed());
  EXPECT_FALSE(Compare("lse", {}, {1}, {1}).Passed());
  EXPECT_FALSE(Compare("argmax", {1, 2}, {1, 3}, {1, 3}).Passed());
  EXPECT_TRUE(Compare("argmax", {1, 3}, {1, 3}, {1, 3}).Passed());
  EXPECT_FALSE(Compare("num_valid_tokens", {6}, {7}, {7}).Passed());
}

TEST(CompareOutput, WorseningKeepsTheLargestAndNeverHidesWhatIsNotANumber) {
  OutputError error = Compare("lse", {1.5}, {1}, {1});
  error.Worsen(Compare("lse", {1.25}, {1}, {1}));
  EXPECT_DOUBLE_EQ(error.rel, 0.5);
  error.Worsen(Compare("lse", {std::numeric_limits<double>::quiet_NaN()}, {1}, {1}));
  error.Worsen(Compare("lse", {1}, {1}, {1}));
  EXPECT_FALSE(error.Passed());
  EXPECT_TRUE(std::isnan(error.rel));
}

TEST(CompareOutput, OnlyRoundedGradientsHaveTheFloorOfTheirRounding) {
  const auto passes = [](const std::string& name, DType dtype) {
    return CompareOutput(name, {1.0 + 0x1p-10}, {1}, {1}, dtype).Passed();
  };
  EXPECT_TRUE(passes("grad_hidden_states", DType::kBFloat16));
  EXPECT_FALSE(passes("grad_hidden_states", DType::kFloat32));
  EXPECT_FALSE(passes("grad_weight", DType::kBFloat16));
}

TEST(OutputsOf, HoldsGradBiasOfAHeadWithBias) {
  Head head{.vocab_size = 2, .hidden_size = 1, .weight = {1, -1}};
  const Tokens tokens{.hidden_states = {2}, .targets = {1}};
  EXPECT_FALSE(OutputsOf(ComputeLoss(head, {}, tokens)).contains("grad_bias"));
  head.bias = {0, 0};
  const Outputs outputs = OutputsOf(ComputeLoss(head, {}, tokens));
  EXPECT_EQ(outputs.at("grad_bias").size(), 2u);
  EXPECT_EQ(outputs.at("argmax"), std::vector<double>{0});
  EXPECT_EQ(outputs.at("num_valid_tokens"), std::vector<double>{1});
}

}  // namespace
}  // namespace lmhead::reference
