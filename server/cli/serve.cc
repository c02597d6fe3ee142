// lmhead serve: a server from flags, until it is told to stop.

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/cli/commands.h"
#include "server/cli/grpc_log.h"
#include "server/cli/serve_flags.h"
#include "server/config/server_config.h"
#include "server/logging/logging.h"
#include "server/server.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// After a second SIGTERM: for what does not end by itself.
constexpr absl::Duration kQuickStop = absl::Seconds(2);

// Whoever waits for the file sees all of it or nothing.
absl::Status WriteReadyFile(const std::string& path, const Server& server) {
  const nlohmann::json content = {{"address", server.address()},
                                  {"metrics_address", server.metrics_address()},
                                  {"health_address", server.health_address()},
                                  {"group_address", server.group_address()},
                                  {"pid", getpid()}};
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  std::ofstream file(temporary);
  file << content.dump() << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(
        absl::StrCat("--ready_file: cannot write ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// A stop signal has come and waits to be taken.
bool StopSignalled() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
}

// Waits for the first signal, drains, and cuts the drain short at a second one.
void ServeUntilStopped(Server* server, absl::Duration drain_timeout) {
  const sigset_t signals = StopSignals();
  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("got {}", strsignal(signal));
  std::atomic<bool> stopped{false};
  std::thread stop([&] {
    server->Stop(absl::Now() + drain_timeout);
    stopped = true;
  });
  const timespec poll = {.tv_sec = 0, .tv_nsec = 20'000'000};
  bool again = false;
  while (!stopped && !again) again = sigtimedwait(&signals, nullptr, &poll) > 0;
  if (again) {
    spdlog::info("got a second signal: ending steps and streams now");
    std::thread stop_now([server] { server->Stop(absl::Now()); });
    for (const absl::Time end = absl::Now() + kQuickStop; !stopped && absl::Now() < end;) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    if (!stopped) std::_Exit(0);  // A call that does not end; the process is going anyway.
    stop_now.join();
  }
  stop.join();
}

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "lmhead serve: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

}  // namespace

int RunServe(absl::Span<char* const> positional) {
  if (!positional.empty()) {
    return Fail(absl::InvalidArgumentError(
                    absl::StrCat("got '", positional[0], "'; serve takes flags only")),
                kExitUsage);
  }
  absl::StatusOr<ServerConfig> config = ServerConfigFromFlags();
  if (!config.ok()) return Fail(config.status(), kExitUsage);
  absl::StatusOr<absl::Duration> drain_timeout = DrainTimeoutFromFlags();
  if (!drain_timeout.ok()) return Fail(drain_timeout.status(), kExitUsage);
  if (absl::Status status =
          SetUpLogging(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
      !status.ok()) {
    return Fail(status, kExitUsage);
  }
  TakeGrpcLogIn();
  // Before any thread starts, so that all inherit it and sigwait alone gets them.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(*config, &StopSignalled);
  if (absl::IsCancelled(server.status())) {
    spdlog::info("{}", std::string(server.status().message()));
    return 0;
  }
  if (!server.ok()) return Fail(server.status(), kExitFailure);
  if (const std::string path = absl::GetFlag(FLAGS_ready_file); !path.empty()) {
    absl::Status status = WriteReadyFile(path, **server);
    if (!status.ok()) return Fail(status, kExitFailure);
  }
  ServeUntilStopped(server->get(), *drain_timeout);
  server->reset();
  spdlog::info("stopped");
  return 0;
}

}  // namespace lmhead
