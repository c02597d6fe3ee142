#include "server/library/dynamic_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace lmhead {

absl::StatusOr<DynamicLibrary> DynamicLibrary::Open(const char* title,
                                                    absl::Span<const char* const> file_names) {
  std::string errors;
  for (const char* name : file_names) {
    void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return DynamicLibrary(title, handle);
    absl::StrAppend(&errors, errors.empty() ? "" : "; ", dlerror());
  }
  return absl::UnavailableError(absl::StrCat(
      title, " was not found, install it or add its folder to LD_LIBRARY_PATH (", errors, ")"));
}

void* DynamicLibrary::Find(const char* name) {
  void* const function = dlsym(handle_, name);
  if (function == nullptr) absl::StrAppend(&missing_, " ", name);
  return function;
}

absl::Status DynamicLibrary::Check() const {
  if (missing_.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(title_, " lacks", missing_));
}

}  // namespace lmhead
