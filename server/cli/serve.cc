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
#include "proto/types/limits.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/config/server_config.h"
#include "server/server.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:50051",
          "Where to serve gRPC: host:port or unix:/path. Port 0 takes a free one.");
ABSL_FLAG(std::string, metrics_listen, "",
          "Where to serve Prometheus metrics over HTTP at /metrics: host:port, port 0 takes a free "
          "one. Empty: nowhere.");
ABSL_FLAG(std::string, ready_file, "",
          "File written once the server serves: JSON with address, metrics_address and pid.");
ABSL_FLAG(int32_t, staging_slots, lmhead::kDefaultStagingSlots,
          "Chunks in the server at once, over all streams. Each takes a slot of host memory of a "
          "little more than --chunk_bytes_max.");
ABSL_FLAG(int64_t, chunk_bytes_max, lmhead::kDefaultChunkBytesMax,
          "Largest hidden_states of a chunk, in bytes.");
ABSL_FLAG(int32_t, max_streams, 0,
          "ComputeLoss streams at once, at most --staging_slots. 0: as many as staging slots.");
ABSL_FLAG(int32_t, max_inflight_chunks, lmhead::kDefaultInflightChunksMax,
          "Chunks of one stream without an answer; beyond it the stream is not read.");
ABSL_FLAG(
    std::string, join_chunks, "auto",
    "Compute waiting chunks together, up to batch_tokens rows: on, off or auto. Off, a step of "
    "one worker with one stream is bitwise reproducible. auto: on for the GPU, off for the "
    "CPU.");
ABSL_FLAG(double, write_timeout_seconds, 60.0,
          "How long a client may take to accept an answer, in seconds, before its stream ends.");
ABSL_FLAG(double, shutdown_timeout_seconds, 30.0,
          "How long open streams may go on after SIGTERM, in seconds. A second SIGTERM ends them.");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn, error or off. Logs go to stderr.");
ABSL_FLAG(bool, reflection, false, "Serve gRPC reflection, for grpcurl and the like.");

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// After a second SIGTERM: for what does not end by itself.
constexpr absl::Duration kQuickStop = absl::Seconds(2);

absl::Status SetUpLogging(const std::string& level_name) {
  const spdlog::level::level_enum level = spdlog::level::from_str(level_name);
  if (level == spdlog::level::off && level_name != "off") {
    return absl::InvalidArgumentError(absl::StrCat("--log_level: got '", level_name,
                                                   "', wanted debug, info, warn, error or off"));
  }
  spdlog::set_default_logger(spdlog::stderr_color_mt("lmhead"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v");
  spdlog::set_level(level);
  spdlog::flush_on(spdlog::level::info);
  return absl::OkStatus();
}

absl::StatusOr<JoinChunks> ParseJoinChunks(const std::string& text) {
  if (text == "auto") return JoinChunks::kAuto;
  if (text == "on" || text == "true") return JoinChunks::kOn;
  if (text == "off" || text == "false") return JoinChunks::kOff;
  return absl::InvalidArgumentError(
      absl::StrCat("--join_chunks: got '", text, "', wanted on, off or auto"));
}

absl::StatusOr<absl::Duration> SecondsFromFlag(const char* flag, double seconds) {
  if (seconds >= 0.0 && seconds <= 86400.0) return absl::Seconds(seconds);
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": got ", seconds, ", wanted 0 to 86400 seconds"));
}

absl::StatusOr<ServerConfig> ConfigFromFlags() {
  ServerConfig config;
  config.listen = absl::GetFlag(FLAGS_listen);
  config.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  absl::StatusOr<BackendChoice> backend = ParseBackendChoice(absl::GetFlag(FLAGS_backend));
  if (!backend.ok()) return backend.status();
  config.backend = *backend;
  absl::StatusOr<JoinChunks> join_chunks = ParseJoinChunks(absl::GetFlag(FLAGS_join_chunks));
  if (!join_chunks.ok()) return join_chunks.status();
  config.join_chunks = *join_chunks;
  config.memory_limit_bytes = absl::GetFlag(FLAGS_memory_limit_bytes);
  config.staging_slots = absl::GetFlag(FLAGS_staging_slots);
  config.chunk_bytes_max = absl::GetFlag(FLAGS_chunk_bytes_max);
  config.max_streams = absl::GetFlag(FLAGS_max_streams);
  config.max_inflight_chunks = absl::GetFlag(FLAGS_max_inflight_chunks);
  config.batch_tokens = absl::GetFlag(FLAGS_batch_tokens);
  absl::StatusOr<absl::Duration> timeout =
      SecondsFromFlag("write_timeout_seconds", absl::GetFlag(FLAGS_write_timeout_seconds));
  if (!timeout.ok()) return timeout.status();
  config.write_timeout = *timeout;
  config.reflection = absl::GetFlag(FLAGS_reflection);
  if (absl::Status status = ValidateServerConfig(config); !status.ok()) return status;
  return config;
}

// Whoever waits for the file sees all of it or nothing.
absl::Status WriteReadyFile(const std::string& path, const Server& server) {
  const nlohmann::json content = {{"address", server.address()},
                                  {"metrics_address", server.metrics_address()},
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

// Waits for the first signal, drains, and cuts the drain short at a second one.
void ServeUntilStopped(Server* server, absl::Duration shutdown_timeout) {
  const sigset_t signals = StopSignals();
  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("got {}", strsignal(signal));
  std::atomic<bool> stopped{false};
  std::thread stop([&] {
    server->Stop(absl::Now() + shutdown_timeout);
    stopped = true;
  });
  const timespec poll = {.tv_sec = 0, .tv_nsec = 20'000'000};
  bool again = false;
  while (!stopped && !again) again = sigtimedwait(&signals, nullptr, &poll) > 0;
  if (again) {
    spdlog::info("got a second signal: ending streams now");
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
  absl::StatusOr<ServerConfig> config = ConfigFromFlags();
  if (!config.ok()) return Fail(config.status(), kExitUsage);
  absl::StatusOr<absl::Duration> shutdown_timeout =
      SecondsFromFlag("shutdown_timeout_seconds", absl::GetFlag(FLAGS_shutdown_timeout_seconds));
  if (!shutdown_timeout.ok()) return Fail(shutdown_timeout.status(), kExitUsage);
  if (absl::Status status = SetUpLogging(absl::GetFlag(FLAGS_log_level)); !status.ok()) {
    return Fail(status, kExitUsage);
  }
  // Before any thread starts, so that all inherit it and sigwait alone gets them.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(*config);
  if (!server.ok()) return Fail(server.status(), kExitFailure);
  if (const std::string path = absl::GetFlag(FLAGS_ready_file); !path.empty()) {
    absl::Status status = WriteReadyFile(path, **server);
    if (!status.ok()) return Fail(status, kExitFailure);
  }
  ServeUntilStopped(server->get(), *shutdown_timeout);
  server->reset();
  spdlog::info("stopped");
  return 0;
}

}  // namespace lmhead
