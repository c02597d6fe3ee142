// JSON that people write: parsed with the line of a mistake, and no key that is not known.

#ifndef LMHEAD_SERVER_SECURITY_JSON_FILE_H_
#define LMHEAD_SERVER_SECURITY_JSON_FILE_H_

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

// The object that `text` is. INVALID_ARGUMENT with the line, for a syntax error and for a key that
// an object has twice.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text);

// OK when `value` is an object of these keys only; `where` is such as "identities[2]".
absl::Status CheckKeys(const nlohmann::json& value, const std::string& where,
                       std::initializer_list<std::string_view> known);

// The array `key` of `value`. INVALID_ARGUMENT when it is missing or no array.
absl::StatusOr<nlohmann::json> ArrayAt(const nlohmann::json& value, const std::string& where,
                                       const std::string& key);

// The string `key` of `value`, not empty. INVALID_ARGUMENT otherwise.
absl::StatusOr<std::string> StringAt(const nlohmann::json& value, const std::string& where,
                                     const std::string& key);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_JSON_FILE_H_
