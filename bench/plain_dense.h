// The yardstick: cross entropy the plain way, on dense logits, in the arithmetic of a dtype.
//
// What a straightforward trainer would compute: float32 throughout, and for bfloat16 the logits and
// their gradient rounded to bfloat16 as its matrix products would store them. An implementation may
// be at most twice as far from the exact results as this.

#ifndef LMHEAD_BENCH_PLAIN_DENSE_H_
#define LMHEAD_BENCH_PLAIN_DENSE_H_

#include "bench/golden_case.h"
#include "proto/types/dtype.h"

namespace lmhead::bench {

// All outputs of a case, under the names of golden.expected.
// REQUIRES: dtype is kFloat32 or kBFloat16; golden has no unknown fields; targets are in range.
Outputs ComputePlainDense(const GoldenCase& golden, DType dtype);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_PLAIN_DENSE_H_
