// Checks of numbers in messages, with errors that say the field, what was got and what is wanted.

#ifndef LMHEAD_PROTO_WIRE_FIELD_CHECKS_H_
#define LMHEAD_PROTO_WIRE_FIELD_CHECKS_H_

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace lmhead {

inline absl::Status CheckRange(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %d, want %d to %d", field, value, least, most));
}

// `wanted` finishes the sentence: "in [0, 1)".
inline absl::Status CheckNumber(std::string_view field, double value, bool good,
                                std::string_view wanted) {
  if (std::isfinite(value) && good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %g, want a finite number %s", field, value, wanted));
}

inline absl::Status CheckFraction(std::string_view field, double value) {
  return CheckNumber(field, value, value >= 0.0 && value < 1.0, "in [0, 1)");
}

inline absl::Status CheckNotNegative(std::string_view field, double value) {
  return CheckNumber(field, value, value >= 0.0, ">= 0");
}

inline absl::Status CheckPositive(std::string_view field, double value) {
  return CheckNumber(field, value, value > 0.0, "> 0");
}

inline absl::Status FirstError(std::initializer_list<absl::Status> checks) {
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  return absl::OkStatus();
}

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_FIELD_CHECKS_H_
