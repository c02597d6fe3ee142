#include "client/cpp/local_server.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/child_process.h"

namespace lmhead {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(10);
constexpr size_t kLogTailBytes = 4096;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

std::string Tail(const std::string& text) {
  return text.size() <= kLogTailBytes ? text : "..." + text.substr(text.size() - kLogTailBytes);
}

absl::StatusOr<std::string> MakeTemporaryDirectory() {
  std::error_code error;
  std::string path = (std::filesystem::temp_directory_path(error) / "lmhead-XXXXXX").string();
  if (error || mkdtemp(path.data()) == nullptr) {
    return absl::InternalError(
        absl::StrFormat("cannot make a temporary directory %s: %s", path, strerror(errno)));
  }
  return path;
}

// The exit code when the child has ended (128 + signal when one killed it).
std::optional<int> Reap(pid_t pid, int options) {
  int status = 0;
  pid_t reaped = -1;
  do {
    reaped = waitpid(pid, &status, options);
  } while (reaped < 0 && errno == EINTR);
  if (reaped == 0) return std::nullopt;
  if (reaped < 0) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Start(
    const std::string& binary, const std::vector<std::string>& extra_flags,
    absl::Duration timeout) {
  absl::StatusOr<std::string> directory = MakeTemporaryDirectory();
  if (!directory.ok()) return directory.status();
  std::unique_ptr<LocalServer> server(new LocalServer());
  server->directory_ = *directory;
  const std::string ready_file = absl::StrCat(*directory, "/ready.json");
  std::vector<std::string> arguments = {binary, "serve", "--listen=127.0.0.1:0",
                                        "--metrics_listen=127.0.0.1:0",
                                        absl::StrCat("--ready_file=", ready_file)};
  arguments.insert(arguments.end(), extra_flags.begin(), extra_flags.end());
  const absl::StatusOr<pid_t> pid = SpawnChild(arguments, server->LogPath());
  if (!pid.ok()) return pid.status();
  server->pid_ = *pid;
  if (absl::Status status = server->AwaitReady(ready_file, timeout); !status.ok()) return status;
  return server;
}

LocalServer::~LocalServer() {
  Kill();
  std::error_code ignored;
  if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
}

absl::Status LocalServer::AwaitReady(const std::string& ready_file, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (access(ready_file.c_str(), R_OK) != 0) {
    if (const std::optional<int> code = Reap(pid_, WNOHANG); code.has_value()) {
      pid_ = -1;
      return absl::UnavailableError(
          absl::StrFormat("the server ended with exit code %d before it was ready; its log:\n%s",
                          *code, Tail(Log())));
    }
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrFormat("the server was not ready within %s; its log:\n%s",
                          absl::FormatDuration(timeout), Tail(Log())));
    }
    absl::SleepFor(kPollInterval);
  }
  const auto ready = nlohmann::json::parse(ReadFile(ready_file), nullptr, false);
  if (!ready.is_object() || !ready.contains("address") || !ready["address"].is_string()) {
    return absl::InternalError(
        absl::StrCat("the server's ready file has no address: ", ReadFile(ready_file)));
  }
  address_ = ready["address"].get<std::string>();
  metrics_address_ = ready.value("metrics_address", "");
  health_address_ = ready.value("health_address", "");
  group_address_ = ready.value("group_address", "");
  return absl::OkStatus();
}

absl::StatusOr<int> LocalServer::Stop(absl::Duration timeout) {
  if (pid_ < 0) return absl::FailedPreconditionError("the server has been stopped already");
  kill(pid_, SIGTERM);
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    if (const std::optional<int> code = Reap(pid_, WNOHANG); code.has_value()) {
      pid_ = -1;
      return *code;
    }
    if (absl::Now() > deadline) break;
    absl::SleepFor(kPollInterval);
  }
  const std::string log = Tail(Log());
  Kill();
  return absl::DeadlineExceededError(
      absl::StrFormat("the server did not end within %s of SIGTERM and was killed; its log:\n%s",
                      absl::FormatDuration(timeout), log));
}

void LocalServer::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  Reap(pid_, 0);
  pid_ = -1;
}

std::string LocalServer::Log() const { return ReadFile(LogPath()); }

std::string LocalServer::LogPath() const { return absl::StrCat(directory_, "/server.log"); }

}  // namespace lmhead
