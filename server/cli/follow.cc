// lmhead follow: ranks of a server elsewhere, until it is told to stop.

#include <arpa/inet.h>
#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/channel_credentials.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/cli/grpc_log.h"
#include "server/config/server_config.h"
#include "server/logging/logging.h"
#include "server/server.h"
#include "server/shard/follower_process.h"
#include "spdlog/spdlog.h"

ABSL_FLAG(std::string, leader, "", "The server's --group_listen: host:port.");
ABSL_FLAG(int32_t, rank, 0,
          "First rank of this process; with --local_ranks it holds those from it on.");
ABSL_DECLARE_FLAG(std::string, collective_host);
ABSL_DECLARE_FLAG(std::string, devices);
ABSL_DECLARE_FLAG(int32_t, local_ranks);
ABSL_DECLARE_FLAG(std::string, log_format);
ABSL_DECLARE_FLAG(std::string, log_level);
ABSL_DECLARE_FLAG(std::string, ready_file);

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "lmhead follow: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

// The address of this machine on the way to `leader`; nothing is sent.
absl::StatusOr<std::string> AddressTowards(const std::string& leader) {
  const size_t colon = leader.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--leader: got '", leader, "', wanted the server's --group_listen, host:port"));
  }
  std::string host = leader.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), leader.c_str() + colon + 1, &hints, &found)) {
    return absl::UnavailableError(absl::StrCat("--leader: ", leader, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  const int socket = ::socket(found->ai_family, SOCK_DGRAM, 0);
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  char text[INET6_ADDRSTRLEN] = "";
  const bool known = connect(socket, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
                     getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text),
                                 nullptr, 0, NI_NUMERICHOST) == 0;
  const int error = errno;
  close(socket);
  if (known) return std::string(text);
  return absl::UnavailableError(absl::StrCat("--leader: there is no way to ", leader, ": ",
                                             std::strerror(error), "; or say --collective_host"));
}

absl::StatusOr<FollowerConfig> ConfigFromFlags() {
  FollowerConfig config = {.leader = absl::GetFlag(FLAGS_leader),
                           .first_rank = absl::GetFlag(FLAGS_rank),
                           .num_ranks = std::max(1, absl::GetFlag(FLAGS_local_ranks)),
                           .version = kVersion};
  if (config.leader.empty() || config.first_rank < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("got --leader='", config.leader, "' and --rank=", config.first_rank,
                     ", wanted the server's --group_listen and a rank of at least 1"));
  }
  absl::StatusOr<BackendChoice> backend = ParseBackendChoice(absl::GetFlag(FLAGS_backend));
  if (!backend.ok()) return backend.status();
  config.backend = *backend;
  absl::StatusOr<std::vector<int>> devices = ParseDevices(absl::GetFlag(FLAGS_devices));
  if (!devices.ok()) return devices.status();
  config.devices = *std::move(devices);
  absl::Status fit = ValidateDevices(config.backend, config.devices);
  if (!fit.ok()) return fit;
  config.collective_host = absl::GetFlag(FLAGS_collective_host);
  if (config.collective_host.empty()) {
    absl::StatusOr<std::string> host = AddressTowards(config.leader);
    if (!host.ok()) return host.status();
    config.collective_host = *std::move(host);
  }
  absl::StatusOr<ChannelSecurity> security =
      MakeChannelSecurity(ClientOptionsFromFlags().credentials);
  if (!security.ok()) return security.status();
  config.credentials = security->credentials;
  config.server_name = security->server_name;
  return config;
}

// Written once every rank of this process has been taken in.
void WriteReadyFile(const std::string& path) {
  if (path.empty()) return;
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  std::ofstream file(temporary);
  file << nlohmann::json({{"pid", getpid()}}).dump() << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    spdlog::error("--ready_file: cannot write {}: {}", path, std::strerror(errno));
  }
}

}  // namespace

int RunFollow(absl::Span<char* const> positional) {
  if (!positional.empty()) {
    return Fail(absl::InvalidArgumentError(
                    absl::StrCat("got '", positional[0], "'; follow takes flags only")),
                kExitUsage);
  }
  absl::Status logging =
      SetUpLogging(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
  if (!logging.ok()) return Fail(logging, kExitUsage);
  TakeGrpcLogIn();
  absl::StatusOr<FollowerConfig> config = ConfigFromFlags();
  if (!config.ok()) return Fail(config.status(), kExitUsage);
  config->on_ready = [] { WriteReadyFile(absl::GetFlag(FLAGS_ready_file)); };

  // Before any thread starts, so that all inherit it and sigwait alone gets them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  absl::StatusOr<std::unique_ptr<FollowerProcess>> follower = FollowerProcess::Start(*config);
  if (!follower.ok()) return Fail(follower.status(), kExitFailure);
  // Until a signal, or until a rank cannot go on.
  const timespec poll = {.tv_sec = 0, .tv_nsec = 100'000'000};
  while (!(*follower)->ended() && sigtimedwait(&signals, nullptr, &poll) < 0) {
  }
  const absl::Status status = (*follower)->Stop();
  if (!status.ok()) return Fail(status, kExitFailure);
  spdlog::info("stopped");
  return 0;
}

}  // namespace lmhead
