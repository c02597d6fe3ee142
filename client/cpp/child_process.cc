#include "client/cpp/child_process.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"

namespace lmhead {
namespace {

constexpr int kExitNotRun = 127;

// What SpawnChild() asks of a keeper. It is the caller's, who waits for `done`.
struct Start {
  char* const* argv;
  const char* log_path;
  sigset_t signal_mask;  // The caller's, and so the child's.
  pid_t child = -1;
  int error = 0;  // 0: the child runs.
  absl::Notification done;
};

// In the child, where no more may be done than in a signal handler: becomes the program, or returns
// with errno set.
void BecomeProgram(const Start& start, pid_t parent) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  // A parent that had ended before that will not be noticed any more.
  if (getppid() != parent) _exit(kExitNotRun);
  const int input = open("/dev/null", O_RDONLY);
  const int log = open(start.log_path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (input < 0 || log < 0) return;
  if (dup2(input, STDIN_FILENO) < 0 || dup2(log, STDOUT_FILENO) < 0 ||
      dup2(log, STDERR_FILENO) < 0) {
    return;
  }
  for (const int fd : {input, log}) {
    if (fd > STDERR_FILENO) close(fd);
  }
  if (sigprocmask(SIG_SETMASK, &start.signal_mask, nullptr) != 0) return;
  execvp(start.argv[0], start.argv);
}

// Forks and waits until the child runs the program; 0, or why it does not (and it is reaped). Not
// posix_spawn, which sets no signal for the parent's end.
int Fork(Start* start) {
  int ends[2];  // Carries the child's errno; closed by a program that runs.
  if (pipe2(ends, O_CLOEXEC) != 0) return errno;
  const pid_t parent = getpid();
  start->child = fork();
  if (start->child == 0) {
    BecomeProgram(*start, parent);
    const int error = errno;
    // What cannot be told is seen from the exit code.
    [[maybe_unused]] const ssize_t told = write(ends[1], &error, sizeof(error));
    _exit(kExitNotRun);
  }
  int error = start->child < 0 ? errno : 0;
  close(ends[1]);
  if (start->child > 0) {
    int failure = 0;
    ssize_t got = 0;
    do {
      got = read(ends[0], &failure, sizeof(failure));
    } while (got < 0 && errno == EINTR);
    if (got == sizeof(failure)) error = failure;
  }
  close(ends[0]);
  if (error != 0 && start->child > 0) waitpid(start->child, nullptr, 0);
  return error;
}

// The thread that a child is forked from, for which the kernel takes the whole parent
// (PR_SET_PDEATHSIG): it has to be there as long as the child is. Ends when the child has ended,
// and leaves the reaping to who called SpawnChild().
void* Keep(void* argument) {
  Start* const start = static_cast<Start*>(argument);
  start->error = Fork(start);
  const bool runs = start->error == 0;
  const pid_t child = start->child;
  start->done.Notify();  // The caller goes on: `start` is no more.
  siginfo_t ended;
  while (runs && waitid(P_PID, child, &ended, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
  return nullptr;
}

// Nobody joins it, since nobody would know when. A thread a child rather than one for all: it has
// what else a child inherits of a thread (processors, niceness, memory policy) from the caller, and
// there is nothing that a fork of this process could leave without its thread, or locked.
int StartKeeper(Start* start) {
  pthread_attr_t attributes;
  if (const int error = pthread_attr_init(&attributes); error != 0) return error;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // This process's signals are for its other threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &start->signal_mask);
  pthread_t keeper;
  const int error = pthread_create(&keeper, &attributes, Keep, start);
  pthread_sigmask(SIG_SETMASK, &start->signal_mask, nullptr);
  pthread_attr_destroy(&attributes);
  return error;
}

absl::Status CannotRun(const std::string& program, int error) {
  return absl::NotFoundError(absl::StrFormat("cannot run %s: %s", program, strerror(error)));
}

}  // namespace

absl::StatusOr<pid_t> SpawnChild(const std::vector<std::string>& arguments,
                                 const std::string& log_path) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  Start start = {.argv = argv.data(), .log_path = log_path.c_str()};
  if (const int error = StartKeeper(&start); error != 0) return CannotRun(arguments[0], error);
  start.done.WaitForNotification();
  if (start.error != 0) return CannotRun(arguments[0], start.error);
  return start.child;
}

}  // namespace lmhead
