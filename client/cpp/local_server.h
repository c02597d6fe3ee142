// Starts `lmhead serve` as a child process on free loopback ports, and stops it.
//
// For the demo, the benchmarks and the tests: a real server process behind a real socket. It does
// not outlive the process that started it, also one that is killed.

#ifndef LMHEAD_CLIENT_CPP_LOCAL_SERVER_H_
#define LMHEAD_CLIENT_CPP_LOCAL_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lmhead {

class LocalServer {
 public:
  // Runs `binary serve --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 --ready_file=…
  // extra_flags…` and waits until the ready file is written. On failure the error carries the end
  // of the server's log.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(
      const std::string& binary, const std::vector<std::string>& extra_flags,
      absl::Duration timeout = absl::Seconds(30));
  ~LocalServer();  // SIGKILL when still running.
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  const std::string& address() const { return address_; }                  // host:port of gRPC.
  const std::string& metrics_address() const { return metrics_address_; }  // host:port of HTTP.
  // host:port of the health port; empty without --health_listen.
  const std::string& health_address() const { return health_address_; }
  // host:port where followers call; empty without --group_listen.
  const std::string& group_address() const { return group_address_; }
  pid_t pid() const { return pid_; }  // -1 once it has ended.

  // SIGTERM, then waits. Returns the exit code; DEADLINE_EXCEEDED (and SIGKILL) when it does not
  // end. The default is longer than the 30 s that the server gives its open steps.
  absl::StatusOr<int> Stop(absl::Duration timeout = absl::Seconds(45));

  // SIGKILL and reap.
  void Kill();

  // What the server has written to its standard output and error so far.
  std::string Log() const;

 private:
  LocalServer() = default;

  absl::Status AwaitReady(const std::string& ready_file, absl::Duration timeout);
  std::string LogPath() const;

  pid_t pid_ = -1;
  std::string directory_;  // Ready file and log; removed with the server.
  std::string address_;
  std::string metrics_address_;
  std::string health_address_;
  std::string group_address_;
};

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_LOCAL_SERVER_H_
