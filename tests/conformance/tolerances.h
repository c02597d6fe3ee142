// The one table of tolerances: what a backend may differ from the oracle, by dtype and output.
//
// Every bound is on ||got - want|| / ||want|| (compare.h) against the float64 oracle on the same,
// upcast inputs. On top of them stands a bound that needs no table: the largest absolute error is
// at most twice that of the same computation in plain dense arithmetic
// (kernels/reference/plain_dense.h). A bound is never loosened to make a test pass.

#ifndef LMHEAD_TESTS_CONFORMANCE_TOLERANCES_H_
#define LMHEAD_TESTS_CONFORMANCE_TOLERANCES_H_

#include "proto/types/dtype.h"

namespace lmhead {

struct Tolerances {
  double token_outputs = 0.0;       // token_loss, logprob, lse, entropy and their sums.
  double grad_weight = 0.0;         // grad_bias too.
  double grad_hidden_states = 0.0;  // Before its rounding to the dtype of the hidden states.
};

// Of logits and their gradient held in float32, which the CPU backend does for every head, and of
// logits held in bfloat16 between the passes, which a backend may do for a bfloat16 head: one
// rounding to 8 significant bits is a relative error of up to 2^-8.
inline constexpr Tolerances kFloat32Logits{
    .token_outputs = 1e-6, .grad_weight = 2e-6, .grad_hidden_states = 2e-6};
inline constexpr Tolerances kBFloat16Logits{
    .token_outputs = 4e-3, .grad_weight = 8e-3, .grad_hidden_states = 8e-3};

// The one rounding of grad_hidden_states to nearest: 24, 8 or 11 significant bits. float16 also has
// a smallest step, which the tests stay above.
constexpr double RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
  }
  return 0.0;
}

// A logit of magnitude m is a float32 of rounding 2^-24 m, whatever the arithmetic behind it, and
// the products that it is a sum of are rounded alike; exp turns that into a relative error.
constexpr double RoundingOfLogits(double largest_logit) { return 4 * 0x1p-24 * largest_logit; }

// Of parameters after a number of optimizer updates, against the oracle fed with the same
// gradients.
inline constexpr double kParameterTolerance = 1e-6;

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_TOLERANCES_H_
