#include "tests/conformance/random_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/reference/compare.h"
#include "tests/conformance/tolerances.h"

namespace lmhead {
namespace {

constexpr uint64_t kSeeds = 400;

double Norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

TEST(RandomProblem, EqualSeedsGiveEqualProblems) {
  for (const uint64_t seed : {1, 7}) {
    const RandomProblem first = MakeRandomProblem(seed, DType::kBFloat16, DType::kFloat16);
    const RandomProblem second = MakeRandomProblem(seed, DType::kBFloat16, DType::kFloat16);
    EXPECT_EQ(first.Describe(), second.Describe());
    EXPECT_EQ(first.head.weight, second.head.weight);
    EXPECT_EQ(first.chunks[0].hidden_states.size(), second.chunks[0].hidden_states.size());
  }
}

// What the seeds are meant to reach is reached.
TEST(RandomProblem, EveryObjectiveAndOptionComesUp) {
  std::set<std::string> seen;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const RandomProblem problem = MakeRandomProblem(seed, DType::kFloat32, DType::kFloat32);
    const LossRecipe& recipe = problem.recipe;
    if (problem.top_k > 0) seen.insert("top-k outputs");
    if (problem.LargestLogit() > 1e4) seen.insert("logits of 1e4");
    if (problem.head.spec.vocab_size > 1024) seen.insert("more than one tile");
    if (recipe.policy.has_value()) {
      seen.insert(absl::StrCat("policy ", static_cast<int>(recipe.policy->kind)));
      if (recipe.policy->dual_clip > 0.0f) seen.insert("dual clip");
    }
    if (recipe.distillation.has_value()) {
      const DistillationSpec& spec = *recipe.distillation;
      seen.insert(absl::StrCat("divergence ", static_cast<int>(spec.divergence), " mass ",
                               static_cast<int>(spec.topk_mass)));
      seen.insert(absl::StrCat("vocabulary ", static_cast<int>(spec.vocabulary)));
      if (spec.cross_entropy_weight > 0.0f) seen.insert("mix");
    }
    for (const ChunkData& chunk : problem.chunks) {
      const reference::Result result = problem.Expected(chunk);
      if (result.sums.num_nonfinite_rows > 0) seen.insert("rows that are not finite");
      if (result.sums.num_valid_tokens == 0) seen.insert("chunks without targets");
      if (result.sums.num_clipped > 0) seen.insert("clipped rows");
      if (chunk.num_tokens() == 1) seen.insert("one row");
      // Infinite losses have tests of their own; here they would hide the rest.
      EXPECT_TRUE(std::isfinite(result.sums.loss_sum)) << seed << ": " << problem.Describe();
    }
  }
  EXPECT_EQ(seen.size(), 20u) << testing::PrintToString(seen);
}

TEST(RandomProblem, PlainDenseArithmeticIsNearTheOracle) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const RandomProblem problem = MakeRandomProblem(seed, DType::kFloat32, DType::kFloat32);
    SCOPED_TRACE(absl::StrCat(seed, ": ", problem.Describe()));
    const double tolerance = 2e-5 + RoundingOfLogits(problem.LargestLogit());
    for (const ChunkData& chunk : problem.chunks) {
      const reference::Outputs exact = OutputsOf(problem.Expected(chunk));
      const reference::Outputs plain = OutputsOf(problem.PlainDense(chunk, DType::kFloat32));
      for (const std::string name : {"grad_weight", "grad_hidden_states", "lse", "logprob"}) {
        const reference::OutputError error = reference::CompareOutput(
            name, plain.at(name), exact.at(name), exact.at(name), DType::kFloat32);
        const double size = Norm(exact.at(name));
        EXPECT_LE(error.rel * size, tolerance * std::max(size, problem.SizeOf(name))) << name;
      }
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace lmhead
