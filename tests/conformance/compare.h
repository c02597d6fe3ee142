// How tests compare vectors of numbers.

#ifndef LMHEAD_TESTS_CONFORMANCE_COMPARE_H_
#define LMHEAD_TESTS_CONFORMANCE_COMPARE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace lmhead {

// ||got - want|| / ||want||, where elements that are equal (infinities too) differ by 0. Infinite
// for a NaN or vectors of different lengths. A norm of `want` below floor * sqrt(length) counts as
// that much, so that a vector of exact zeros can be compared with small numbers.
template <typename Got, typename Want>
double RelativeError(const std::vector<Got>& got, const std::vector<Want>& want,
                     double floor = 1e-6) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = static_cast<double>(got[i]);
    const double w = static_cast<double>(want[i]);
    if (g == w) {
      norm += std::isfinite(w) ? w * w : 0.0;
      continue;
    }
    difference += (g - w) * (g - w);
    norm += w * w;
  }
  if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
  const double least = floor * std::sqrt(static_cast<double>(got.size()));
  return got.empty() ? 0.0 : std::sqrt(difference) / std::max(std::sqrt(norm), least);
}

// The largest absolute difference; infinite as above.
template <typename Got, typename Want>
double MaxError(const std::vector<Got>& got, const std::vector<Want>& want) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  double largest = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = static_cast<double>(got[i]);
    const double w = static_cast<double>(want[i]);
    if (g == w) continue;
    if (!std::isfinite(g - w)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, std::fabs(g - w));
  }
  return largest;
}

template <typename T>
double LargestMagnitude(const std::vector<T>& values) {
  double largest = 0.0;
  for (const T value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(static_cast<double>(value)));
  }
  return largest;
}

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_COMPARE_H_
