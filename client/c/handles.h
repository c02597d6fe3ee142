// What stands behind the C interface: its opaque objects, and the passage from absl::Status, and
// from exceptions, to codes and error objects.

#ifndef LMHEAD_CLIENT_C_HANDLES_H_
#define LMHEAD_CLIENT_C_HANDLES_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/c/lmhead.h"
#include "client/cpp/client.h"

struct lmhead_error {
  lmhead_status code = LMHEAD_UNKNOWN;
  std::string message;
};

struct lmhead_client {
  std::unique_ptr<lmhead::Client> client;
};

struct lmhead_writer {
  std::unique_ptr<lmhead::StepWriter> writer;
};

namespace lmhead {

// The code of `status`; *error, where wanted, is set accordingly.
lmhead_status Report(const absl::Status& status, lmhead_error** error);

// Runs `body`, which returns absl::Status, and lets nothing but a code out.
template <typename Body>
lmhead_status Guarded(lmhead_error** error, Body body) {
  absl::Status status;
  try {
    if (error != nullptr) *error = nullptr;
    status = body();
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("the process has no memory left");
  } catch (const std::exception& exception) {
    status = absl::InternalError(exception.what());
  } catch (...) {
    status = absl::InternalError("an exception of an unknown type");
  }
  return Report(status, error);
}

inline absl::Status CheckGiven(const void* pointer, const char* name) {
  if (pointer != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is NULL", name));
}

// A caller's struct as this library knows it. `first_size` is its size in version 1.0; what the
// caller does not have stays as in `defaults`, what only the caller has must be zero.
template <typename T>
absl::StatusOr<T> TakeStruct(const T* given, const T& defaults, size_t first_size,
                             const char* name) {
  if (absl::Status status = CheckGiven(given, name); !status.ok()) return status;
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (size < first_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s.struct_size is %d, want at least %d: set it to sizeof", name, size, first_size));
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(given);
  if (size > sizeof(T) &&
      std::any_of(bytes + sizeof(T), bytes + size, [](std::byte b) { return b != std::byte{0}; })) {
    return absl::UnimplementedError(absl::StrFormat(
        "%s has %d bytes, this library knows %d of them, and a later one is set: use a newer one",
        name, size, sizeof(T)));
  }
  T taken = defaults;
  std::memcpy(&taken, given, std::min(size, sizeof(T)));
  return taken;
}

// As much of `value` as the caller's struct has room for; its struct_size stays.
template <typename T>
absl::Status GiveStruct(T value, size_t first_size, const char* name, T* given) {
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (size < first_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s.struct_size is %d, want at least %d: set it to sizeof", name, size, first_size));
  }
  value.struct_size = size;
  std::memcpy(given, &value, std::min(size, sizeof(T)));
  return absl::OkStatus();
}

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_C_HANDLES_H_
