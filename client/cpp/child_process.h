// A child process that does not outlive the one that started it.

#ifndef LMHEAD_CLIENT_CPP_CHILD_PROCESS_H_
#define LMHEAD_CLIENT_CPP_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lmhead {

// Runs arguments[0], looked up as a shell does, with its output appended to `log_path` and no
// input, in the process group of its parent: a Ctrl-C at the terminal ends both. The kernel kills
// the child (SIGKILL) when this process ends, however it does, or becomes another program; the
// thread that called this may end before. Returns the child's id, which the caller reaps;
// NOT_FOUND when the program cannot be run, naming it. Any thread may call this. A thread waits
// beside each child, until it ends.
absl::StatusOr<pid_t> SpawnChild(const std::vector<std::string>& arguments,
                                 const std::string& log_path);

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_CHILD_PROCESS_H_
