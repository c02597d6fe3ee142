#include "kernels/reference/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/plain_dense.h"

namespace lmhead::reference {
namespace {

// A few roundings of float32, which every output is computed in.
constexpr double kFloorFloat32 = 2e-6;

// One rounding to bfloat16, as grad_hidden_states leaves: half of 2^-8 of the value.
constexpr double kFloorBFloat16 = 1.0 / 512;

// Entropy of rows that are certain: their p log p are 0 in double precision and the underflow of
// float32 here. Gradients and losses that are 0 are so by definition, and must be.
constexpr double kEntropyUnderflow = 1e-20;

struct Distance {
  double rel = 0.0;
  double max_abs = 0.0;
};

// |got - exact|, 0 for equal infinities and not a number where either is not one.
double Difference(double got, double exact) { return got == exact ? 0.0 : std::abs(got - exact); }

Distance DistanceOf(const std::vector<double>& got, const std::vector<double>& exact) {
  if (got.size() != exact.size()) {
    return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  }
  double squares = 0.0;
  double exact_squares = 0.0;
  Distance distance;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = Difference(got[i], exact[i]);
    squares += difference * difference;
    exact_squares += exact[i] * exact[i];
    if (IsWorse(difference, distance.max_abs)) distance.max_abs = difference;
  }
  distance.rel = exact_squares > 0.0 ? std::sqrt(squares / exact_squares) : std::sqrt(squares);
  return distance;
}

// Share and number of unequal entries.
Distance MismatchesOf(const std::vector<double>& got, const std::vector<double>& exact) {
  if (got.size() != exact.size()) return DistanceOf(got, exact);
  double mismatches = 0.0;
  for (size_t i = 0; i < got.size(); ++i) mismatches += got[i] == exact[i] ? 0.0 : 1.0;
  return {mismatches / static_cast<double>(got.size()), mismatches};
}

bool IsCount(const std::string& name) { return name == "argmax" || name == "num_valid_tokens"; }

double FloorOf(const std::string& name, DType dtype) {
  if (IsCount(name)) return 0.0;
  const bool rounded = name == "grad_hidden_states" && dtype == DType::kBFloat16;
  return rounded ? kFloorBFloat16 : kFloorFloat32;
}

double LargestMagnitude(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

}  // namespace

Outputs OutputsOf(const Result& result) {
  Outputs outputs = {{"token_loss", result.token_loss},
                     {"logprob", result.logprob},
                     {"lse", result.lse},
                     {"entropy", result.entropy},
                     {"argmax", {result.argmax.begin(), result.argmax.end()}},
                     {"loss_sum", {result.sums.loss_sum}},
                     {"num_valid_tokens", {static_cast<double>(result.sums.num_valid_tokens)}},
                     {"grad_hidden_states", result.grad_hidden_states},
                     {"grad_weight", result.grad_weight}};
  if (!result.grad_bias.empty()) outputs["grad_bias"] = result.grad_bias;
  return outputs;
}

Outputs PlainOutputs(const Head& head, const Recipe& recipe, const Tokens& tokens, DType dtype,
                     const Head* teacher) {
  Result plain = ComputePlainDense(head, recipe, tokens, dtype, teacher);
  plain.grad_hidden_states = RoundedTo(dtype, plain.grad_hidden_states);
  return OutputsOf(plain);
}

bool IsWorse(double error, double other) {
  return !std::isnan(other) && (std::isnan(error) || error > other);
}

void OutputError::Worsen(const OutputError& other) {
  if (IsWorse(other.rel, rel)) {
    rel = other.rel;
    plain_rel = other.plain_rel;
    rel_limit = other.rel_limit;
  }
  if (IsWorse(other.max_abs, max_abs)) {
    max_abs = other.max_abs;
    max_abs_limit = other.max_abs_limit;
  }
}

OutputError CompareOutput(const std::string& name, const std::vector<double>& got,
                          const std::vector<double>& exact, const std::vector<double>& plain,
                          DType dtype) {
  const bool counts = IsCount(name);
  const Distance distance = counts ? MismatchesOf(got, exact) : DistanceOf(got, exact);
  const Distance yardstick = counts ? MismatchesOf(plain, exact) : DistanceOf(plain, exact);
  const double underflow = name == "entropy" ? kEntropyUnderflow : 0.0;
  const double floor = FloorOf(name, dtype);
  const double magnitude = LargestMagnitude(exact);
  return {.rel = distance.rel,
          .max_abs = distance.max_abs,
          .plain_rel = yardstick.rel,
          .rel_limit = 2.0 * yardstick.rel + (magnitude > 0.0 ? floor : underflow),
          .max_abs_limit = 2.0 * yardstick.max_abs + floor * magnitude + underflow};
}

}  // namespace lmhead::reference
