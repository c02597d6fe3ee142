// How far outputs are from the exact ones, and how far they may be.

#ifndef LMHEAD_BENCH_GOLDEN_COMPARE_H_
#define LMHEAD_BENCH_GOLDEN_COMPARE_H_

#include <map>
#include <string>
#include <vector>

#include "bench/golden_case.h"
#include "proto/types/dtype.h"

namespace lmhead::bench {

// Whether `error` is larger than `other`; one that is not a number is the largest.
bool IsWorse(double error, double other);

// Errors of one output against the exact result, and their bounds: twice the error of plain dense
// arithmetic in the same dtype (plain_dense.h) plus a floor for the cases that it happens to hit
// exactly. argmax counts mismatches; num_valid_tokens must be equal.
struct OutputError {
  double rel = 0.0;      // ||got - exact|| / ||exact||; ||got|| when the exact one is 0 everywhere.
  double max_abs = 0.0;  // Largest |got - exact|.
  double rel_limit = 0.0;
  double max_abs_limit = 0.0;

  // False, too, when an error is not a number.
  bool Passed() const { return rel <= rel_limit && max_abs <= max_abs_limit; }

  // Keeps the larger error of each kind, and the bound of it.
  void Worsen(const OutputError& other);
};

OutputError CompareOutput(const std::string& name, const std::vector<double>& got,
                          const std::vector<double>& exact, const std::vector<double>& plain,
                          DType dtype);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_GOLDEN_COMPARE_H_
