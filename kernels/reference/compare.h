// How far outputs are from the exact ones, and how far they may be: the one rule, for tests,
// benchmarks and the demo.
//
// No output may be more than twice as far from the oracle as plain dense arithmetic in the same
// dtype is on the same inputs (plain_dense.h), by norm and by the largest error, plus a floor of a
// few roundings for the cases that plain arithmetic happens to hit exactly.

#ifndef LMHEAD_KERNELS_REFERENCE_COMPARE_H_
#define LMHEAD_KERNELS_REFERENCE_COMPARE_H_

#include <map>
#include <string>
#include <vector>

#include "kernels/reference/reference.h"
#include "proto/types/dtype.h"

namespace lmhead::reference {

// Outputs by name (token_loss, loss_sum, lse, grad_weight, ...), row-major; counts and indices as
// numbers, too.
using Outputs = std::map<std::string, std::vector<double>>;

// All outputs of `result`; grad_bias when there is one.
Outputs OutputsOf(const Result& result);

// Those of plain dense arithmetic with logits, their gradient and grad_hidden_states in `dtype`.
Outputs PlainOutputs(const Head& head, const Recipe& recipe, const Tokens& tokens, DType dtype,
                     const Head* teacher = nullptr);

// Whether `error` is larger than `other`; one that is not a number is the largest.
bool IsWorse(double error, double other);

// Errors of one output against the exact result, and their limits by the rule above. argmax counts
// mismatches; num_valid_tokens must be equal.
struct OutputError {
  double rel = 0.0;      // ||got - exact|| / ||exact||; ||got|| when the exact one is 0 everywhere.
  double max_abs = 0.0;  // Largest |got - exact|.
  double plain_rel = 0.0;  // Of plain dense arithmetic.
  double rel_limit = 0.0;
  double max_abs_limit = 0.0;

  // False, too, when an error is not a number.
  bool Passed() const { return rel <= rel_limit && max_abs <= max_abs_limit; }

  // Keeps the larger error of each kind, and what belongs to it.
  void Worsen(const OutputError& other);
};

// `plain` is what PlainOutputs gives for the same inputs and dtype. In a narrow one the floor of
// grad_hidden_states is one rounding to it.
OutputError CompareOutput(const std::string& name, const std::vector<double>& got,
                          const std::vector<double>& exact, const std::vector<double>& plain,
                          DType dtype);

}  // namespace lmhead::reference

#endif  // LMHEAD_KERNELS_REFERENCE_COMPARE_H_
