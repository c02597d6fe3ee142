#include "client/c/handles.h"

#include <new>

namespace lmhead {

lmhead_status Report(const absl::Status& status, lmhead_error** error) {
  const auto code = static_cast<lmhead_status>(status.code());
  if (status.ok() || error == nullptr) return code;
  try {
    *error = new lmhead_error{.code = code, .message = std::string(status.message())};
  } catch (const std::bad_alloc&) {
    *error = nullptr;  // The code alone: its text is "" then.
  }
  return code;
}

}  // namespace lmhead

void lmhead_api_version(int32_t* major, int32_t* minor) {
  if (major != nullptr) *major = LMHEAD_API_VERSION_MAJOR;
  if (minor != nullptr) *minor = LMHEAD_API_VERSION_MINOR;
}

const char* lmhead_version(void) { return LMHEAD_VERSION; }

lmhead_status lmhead_error_code(const lmhead_error* error) {
  return error == nullptr ? LMHEAD_OK : error->code;
}

const char* lmhead_error_message(const lmhead_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}

void lmhead_error_free(lmhead_error* error) { delete error; }

void lmhead_string_free(char* text) { delete[] text; }
