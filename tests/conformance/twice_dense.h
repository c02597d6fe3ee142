// The bound of a golden case for a backend that holds logits in bfloat16.

#ifndef LMHEAD_TESTS_CONFORMANCE_TWICE_DENSE_H_
#define LMHEAD_TESTS_CONFORMANCE_TWICE_DENSE_H_

#include <string>
#include <vector>

#include "tests/conformance/rig.h"

namespace lmhead {

// What a backend gave for a golden case; empty vectors for what its schedule does not give.
struct GoldenAnswer {
  ChunkAnswer chunk;
  std::vector<float> grad_weight;
  std::vector<float> grad_bias;
};

// Every output is at most twice as far from torch's float64 as plain dense arithmetic with logits
// rounded to bfloat16 is (bench/plain_dense.h), by norm and by the largest error.
void ExpectWithinTwiceDense(const std::string& golden_path, const GoldenAnswer& answer);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_TWICE_DENSE_H_
