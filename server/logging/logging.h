// How the process logs: one line an event on standard error, as text or as JSON, with what the
// event belongs to (a request, a head, a step).
//
// Code logs by spdlog as ever. Who serves a call puts a LogScope around it, and every line that the
// thread logs meanwhile carries its fields.

#ifndef LMHEAD_SERVER_LOGGING_LOGGING_H_
#define LMHEAD_SERVER_LOGGING_LOGGING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "spdlog/formatter.h"

namespace lmhead {

// What a line belongs to; empty and 0 are left out.
struct LogFields {
  std::string request_id;
  std::string head;
  uint64_t step = 0;
  std::string worker;
  std::optional<uint64_t> chunk;
};

// Adds fields to what this thread logs, until it is destroyed. Scopes nest: the inner one's fields
// win, its empty ones leave the outer one's. Lives on one thread; `fields` outlives it.
class LogScope {
 public:
  explicit LogScope(const LogFields& fields);
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;

  // Of this thread now.
  static LogFields Current();

 private:
  const LogFields* const fields_;
  const LogScope* const outer_;
};

enum class LogFormat : uint8_t { kText, kJson };

// One line an event:
//   text  2026-01-31T12:00:00.123 info message [request 5f3a…]
//   json  {"time":"2026-01-31T12:00:00.123Z","level":"info","message":"…","request_id":"5f3a…",
//          "head":"lm","step":12,"worker":"w0","chunk":7}; text that is not UTF-8 is mended
std::unique_ptr<spdlog::formatter> MakeLogFormatter(LogFormat format);

// Makes the process log to standard error. INVALID_ARGUMENT, naming the flag, for a level that is
// not debug, info, warn, error or off, or a format that is not text or json.
absl::Status SetUpLogging(const std::string& level, const std::string& format);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_LOGGING_LOGGING_H_
