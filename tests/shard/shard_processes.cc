#include "tests/shard/shard_processes.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/e2e/service_fixture.h"
#include "tests/util/paths.h"

extern char** environ;

namespace lmhead::shard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(90);
constexpr absl::Duration kPollInterval = absl::Milliseconds(20);

[[noreturn]] void EndProgram(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

}  // namespace

FollowerChild::FollowerChild(const std::vector<std::string>& command, const std::string& leader,
                             int rank, const std::vector<std::string>& extra_flags) {
  char path[] = "/tmp/lmhead-follower-XXXXXX";
  const int log = mkstemp(path);
  log_path_ = path;
  std::vector<std::string> arguments = command;
  arguments.push_back("follow");
  arguments.push_back(absl::StrCat("--leader=", leader));
  arguments.push_back(absl::StrCat("--rank=", rank));
  arguments.push_back(absl::StrCat("--backend=", TestBackend()));
  arguments.insert(arguments.end(), extra_flags.begin(), extra_flags.end());
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, log, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, log, STDERR_FILENO);
  const int error = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(log);
  if (error != 0) EndProgram(absl::StrCat("cannot run ", arguments[0]));
}

FollowerChild::~FollowerChild() {
  if (pid_ > 0) Kill();
  unlink(log_path_.c_str());
}

void FollowerChild::Signal(int signal) {
  if (pid_ > 0) kill(pid_, signal);
}

std::optional<int> FollowerChild::Wait(absl::Duration timeout) {
  for (const absl::Time deadline = absl::Now() + timeout; absl::Now() < deadline;) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    absl::SleepFor(kPollInterval);
  }
  return std::nullopt;
}

std::string FollowerChild::Log() const {
  std::ostringstream text;
  text << std::ifstream(log_path_).rdbuf();
  return text.str();
}

bool IsServing(const std::string& address, const std::string& name) {
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(name);
  grpc::health::v1::HealthCheckResponse response;
  return stub->Check(&context, request, &response).ok() &&
         response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

ShardProcesses::ShardProcesses(const GroupOptions& options) : options_(options) {
  const Layout& layout = options.layout;
  std::vector<std::string> flags = {
      absl::StrCat("--ranks=", layout.num_ranks), absl::StrCat("--local_ranks=", layout.num_local),
      absl::StrCat("--collective_timeout_seconds=", options.collective_timeout_seconds)};
  if (layout.num_local < layout.num_ranks) flags.push_back("--group_listen=127.0.0.1:0");
  flags.insert(flags.end(), options.server_flags.begin(), options.server_flags.end());
  server_ = e2e::StartServer(flags);
  const int remote = layout.num_ranks - layout.num_local;
  followers_.resize(remote / layout.ranks_per_follower);
  for (size_t index = 0; index < followers_.size(); ++index) StartFollower(index);
  AwaitReady(true);
  client_ = e2e::ConnectTo(server_->address());
}

int ShardProcesses::first_rank_of(size_t index) const {
  return options_.layout.num_local + static_cast<int>(index) * options_.layout.ranks_per_follower;
}

void ShardProcesses::StartFollower(size_t index) {
  std::vector<std::string> flags = {
      absl::StrCat("--local_ranks=", options_.layout.ranks_per_follower)};
  flags.insert(flags.end(), options_.follower_flags.begin(), options_.follower_flags.end());
  followers_[index] =
      std::make_unique<FollowerChild>(std::vector<std::string>{e2e::LmheadBinary()},
                                      server_->group_address(), first_rank_of(index), flags);
}

bool ShardProcesses::ready() const { return IsServing(server_->address(), "readiness"); }

void ShardProcesses::AwaitReady(bool wanted) const {
  for (const absl::Time deadline = absl::Now() + kPatience; absl::Now() < deadline;) {
    if (ready() == wanted) return;
    absl::SleepFor(kPollInterval);
  }
  std::string logs = absl::StrCat("readiness did not become ", wanted, "\n", server_->Log());
  for (const auto& follower : followers_) absl::StrAppend(&logs, "--\n", follower->Log());
  EndProgram(logs);
}

}  // namespace lmhead::shard
