// Ends the process on a programming error: a broken contract is never limped past.

#ifndef LMHEAD_PROTO_TYPES_CHECK_H_
#define LMHEAD_PROTO_TYPES_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <string>

namespace lmhead {

[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition,
                                     const std::string& message) {
  std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", file, line, condition, message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace lmhead

// LMHEAD_CHECK(rows > 0, absl::StrCat("got ", rows)): the message is built only on failure.
#define LMHEAD_CHECK(condition, message)                                \
  do {                                                                  \
    if (!(condition)) [[unlikely]]                                      \
      ::lmhead::CheckFailed(__FILE__, __LINE__, #condition, (message)); \
  } while (false)

#endif  // LMHEAD_PROTO_TYPES_CHECK_H_
