// A head, a recipe and chunks drawn at random: every combination that a stream may ask for.
//
// Equal seeds and dtypes give equal problems. Sizes are small, prime where that hurts, and reach
// over the tiles of the CPU backend; magnitudes go from tiny logits to confident rows and 1e4.

#ifndef LMHEAD_TESTS_CONFORMANCE_RANDOM_PROBLEM_H_
#define LMHEAD_TESTS_CONFORMANCE_RANDOM_PROBLEM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/types/dtype.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"
#include "tests/conformance/chunk_data.h"

namespace lmhead {

// A specification, without a schedule, and the values for it.
struct RandomHead {
  HeadSpec spec;
  std::vector<float> weight;  // Values of spec.weight_dtype.
  std::vector<float> bias;    // Empty without spec.has_bias.

  reference::Head ToReference() const;
};

struct RandomProblem {
  RandomHead head;
  std::optional<RandomHead> teacher;
  LossRecipe recipe;
  int32_t top_k = 0;  // Of the outputs.
  std::vector<ChunkData> chunks;

  // What a failure should say.
  std::string Describe() const;

  reference::Result Expected(const ChunkData& chunk) const;
  reference::Result PlainDense(const ChunkData& chunk, DType logits_dtype) const;

  // Bound of the final logits of all chunks, at every temperature that is taken.
  double LargestLogit() const;

  // About the size of an output where nothing is small by chance: rows that are certain have tiny
  // losses and gradients, whose errors are still roundings of numbers of this size.
  double SizeOf(const std::string& output) const;

 private:
  std::optional<reference::Head> TeacherHead() const;
  double LeastTemperature() const;
};

// `weight_dtype` is of both heads, `hidden_dtype` of both hidden states.
RandomProblem MakeRandomProblem(uint64_t seed, DType weight_dtype, DType hidden_dtype);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_RANDOM_PROBLEM_H_
