#include "client/cpp/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"

namespace lmhead {
namespace {

constexpr int kExitNotRun = 127;

// In the child, where no more may be done than in a signal handler: becomes the program, or returns
// with errno set.
void BecomeProgram(char* const* argv, const char* log_path, pid_t parent) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  // A parent that had ended before that will not be noticed any more.
  if (getppid() != parent) _exit(kExitNotRun);
  const int input = open("/dev/null", O_RDONLY);
  const int log = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (input < 0 || log < 0) return;
  if (dup2(input, STDIN_FILENO) < 0 || dup2(log, STDOUT_FILENO) < 0 ||
      dup2(log, STDERR_FILENO) < 0) {
    return;
  }
  for (const int fd : {input, log}) {
    if (fd > STDERR_FILENO) close(fd);
  }
  execvp(argv[0], argv);
}

absl::Status CannotRun(const std::string& program, int error) {
  return absl::NotFoundError(absl::StrFormat("cannot run %s: %s", program, strerror(error)));
}

}  // namespace

// Not posix_spawn, which sets no signal for the parent's end.
absl::StatusOr<pid_t> SpawnChild(const std::vector<std::string>& arguments,
                                 const std::string& log_path) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  int ends[2];  // Carries the child's errno; closed by a program that runs.
  if (pipe2(ends, O_CLOEXEC) != 0) return CannotRun(arguments[0], errno);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    BecomeProgram(argv.data(), log_path.c_str(), parent);
    const int error = errno;
    // What cannot be told is seen from the exit code.
    [[maybe_unused]] const ssize_t told = write(ends[1], &error, sizeof(error));
    _exit(kExitNotRun);
  }
  int error = child < 0 ? errno : 0;
  close(ends[1]);
  if (child > 0) {
    int failure = 0;
    ssize_t got = 0;
    do {
      got = read(ends[0], &failure, sizeof(failure));
    } while (got < 0 && errno == EINTR);
    if (got == sizeof(failure)) error = failure;
  }
  close(ends[0]);
  if (error == 0) return child;
  if (child > 0) waitpid(child, nullptr, 0);
  return CannotRun(arguments[0], error);
}

}  // namespace lmhead
