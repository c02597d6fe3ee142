// The yardstick: cross entropy the plain way, on dense logits, in a given arithmetic.
//
// In float32, and in bfloat16 with the logits and their gradient rounded as its matrix products
// would store them, it is what a straightforward trainer computes: an implementation may be at most
// twice as far from the exact results. In double it checks that a case's results are those of its
// inputs, and so the yardstick itself: against wrong results it would allow anything.

#ifndef LMHEAD_BENCH_PLAIN_DENSE_H_
#define LMHEAD_BENCH_PLAIN_DENSE_H_

#include "bench/golden_case.h"
#include "proto/types/dtype.h"

namespace lmhead::bench {

enum class Arithmetic { kDouble, kFloat32, kBFloat16 };

// All outputs of a case, under the names of golden.expected.
// REQUIRES: golden has no unknown fields.
Outputs ComputePlainDense(const GoldenCase& golden, Arithmetic arithmetic);

// What a service that is sent `dtype` is measured by.
constexpr Arithmetic ArithmeticOf(DType dtype) {
  return dtype == DType::kBFloat16 ? Arithmetic::kBFloat16 : Arithmetic::kFloat32;
}

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_PLAIN_DENSE_H_
