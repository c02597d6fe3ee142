// Random problems (random_problem.h) against the oracle: every schedule and number of ranks gives
// the same answer to the same seed.
//
//   INSTANTIATE_TEST_SUITE_P(Cpu, PropertyConformance,
//                            testing::ValuesIn(PropertyCasesOf({kCpu, kCpuOf2})), PropertyName);
//
// A failure names its seed. LMHEAD_TEST_SEED=n starts from seed n instead of 1, LMHEAD_TEST_RUNS=n
// makes n problems of each case.

#ifndef LMHEAD_TESTS_CONFORMANCE_PROPERTY_CONFORMANCE_H_
#define LMHEAD_TESTS_CONFORMANCE_PROPERTY_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "tests/conformance/rig.h"

namespace lmhead {

struct PropertyCase {
  std::vector<BackendUnderTest> backends;
  DType weight_dtype = DType::kFloat32;
  DType hidden_dtype = DType::kFloat32;
  DType logits_dtype = DType::kFloat32;  // See ConformanceCase.
};

// Each weight dtype with each hidden dtype; where a backend holds logits in bfloat16, with bfloat16
// alone, since it rounds hidden states to it, too.
std::vector<PropertyCase> PropertyCasesOf(const std::vector<BackendUnderTest>& backends,
                                          DType bfloat16_head_logits = DType::kFloat32);
std::string PropertyName(const testing::TestParamInfo<PropertyCase>& info);
void PrintTo(const PropertyCase& c, std::ostream* out);

class PropertyConformance : public testing::TestWithParam<PropertyCase> {};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_PROPERTY_CONFORMANCE_H_
