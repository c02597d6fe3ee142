// A command line run to its end, as a user of the shell would.

#ifndef LMHEAD_TESTS_UTIL_COMMAND_H_
#define LMHEAD_TESTS_UTIL_COMMAND_H_

#include <string>

namespace lmhead {

struct CommandResult {
  int exit_code = -1;  // -1 when it was not started, or ended by a signal.
  std::string output;  // What it wrote to its standard output.
};

// Runs `command` in a shell; `2>&1` in it adds its standard error to the output.
CommandResult RunCommand(const std::string& command);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_COMMAND_H_
