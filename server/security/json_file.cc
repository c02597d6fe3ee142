#include "server/security/json_file.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lmhead {
namespace {

using nlohmann::json;

std::string Prefix(const std::string& where) { return where.empty() ? "" : where + ": "; }

size_t LineOf(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  return 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
}

}  // namespace

absl::StatusOr<json> ParseJsonObject(std::string_view text) {
  std::string doubled;
  std::vector<std::set<std::string>> keys;  // Of each object that is open.
  const json::parser_callback_t watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key &&
        !keys.back().insert(parsed.get<std::string>()).second && doubled.empty()) {
      doubled = parsed.get<std::string>();
    }
    return true;
  };
  json value;
  try {
    value = json::parse(text, watch);
  } catch (const json::parse_error& error) {
    std::string what = error.what();  // "[json.exception.…] parse error at line 3, column 7: …".
    if (const size_t end = what.find("] "); end != std::string::npos) what.erase(0, end + 2);
    return absl::InvalidArgumentError(
        absl::StrCat("line ", LineOf(text, error.byte), ": not JSON: ", what));
  }
  if (!doubled.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("key '", doubled, "' is there twice"));
  }
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("line 1: got ", value.type_name(), ", wanted a JSON object"));
  }
  return value;
}

absl::Status CheckKeys(const json& value, const std::string& where,
                       std::initializer_list<std::string_view> known) {
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Prefix(where), "got ", value.type_name(), ", wanted an object"));
  }
  for (const auto& [key, unused] : value.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(Prefix(where), "unknown key '", key, "', wanted ",
                     absl::StrJoin(std::vector<std::string>(known.begin(), known.end()), ", ")));
  }
  return absl::OkStatus();
}

absl::StatusOr<json> ArrayAt(const json& value, const std::string& where, const std::string& key) {
  const auto found = value.find(key);
  if (found != value.end() && found->is_array()) return *found;
  return absl::InvalidArgumentError(
      absl::StrCat(Prefix(where), key, found == value.end() ? " is missing" : " is no array",
                   ", wanted an array"));
}

absl::StatusOr<std::string> StringAt(const json& value, const std::string& where,
                                     const std::string& key) {
  const auto found = value.find(key);
  if (found != value.end() && found->is_string() && !found->get_ref<const std::string&>().empty()) {
    return found->get<std::string>();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      Prefix(where), key, found == value.end() ? " is missing" : " is not a string with text in it",
      ", wanted a string"));
}

}  // namespace lmhead
