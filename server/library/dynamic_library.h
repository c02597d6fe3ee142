// A shared library that is opened when it is first needed: the binary starts without it.

#ifndef LMHEAD_SERVER_LIBRARY_DYNAMIC_LIBRARY_H_
#define LMHEAD_SERVER_LIBRARY_DYNAMIC_LIBRARY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace lmhead {

// Stays open until the process ends.
class DynamicLibrary {
 public:
  // The first of the files that the loader finds. `title` is what errors call the library.
  // UNAVAILABLE with what the loader said of each.
  static absl::StatusOr<DynamicLibrary> Open(const char* title,
                                             absl::Span<const char* const> file_names);

  // Sets a function's pointer; to null when the library lacks it.
  template <typename Function>
  void Resolve(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(Find(name));
  }

  // UNAVAILABLE naming every function that Resolve() did not find.
  absl::Status Check() const;

 private:
  DynamicLibrary(const char* title, void* handle) : title_(title), handle_(handle) {}
  void* Find(const char* name);

  std::string title_;
  void* handle_;
  std::string missing_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_LIBRARY_DYNAMIC_LIBRARY_H_
