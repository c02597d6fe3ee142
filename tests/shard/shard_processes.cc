#include "tests/shard/shard_processes.h"

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cpp/child_process.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/e2e/service_fixture.h"
#include "tests/util/paths.h"

namespace lmhead::shard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(90);
constexpr absl::Duration kPollInterval = absl::Milliseconds(20);

// The GPUs of a process's ranks, in turn over those of the test.
void AddDevices(int first_rank, int num_ranks, std::vector<std::string>* flags) {
  if (TestBackend() != "cuda") return;
  std::vector<int> devices;
  for (int rank = first_rank; rank < first_rank + num_ranks; ++rank) {
    devices.push_back(rank % TestGpus());
  }
  flags->push_back(absl::StrCat("--devices=", absl::StrJoin(devices, ",")));
}

std::vector<std::string> FollowCommand(const std::vector<std::string>& command,
                                       const std::string& leader, int rank,
                                       const std::vector<std::string>& extra_flags) {
  std::vector<std::string> arguments = command;
  arguments.insert(arguments.end(),
                   {"follow", absl::StrCat("--leader=", leader), absl::StrCat("--rank=", rank),
                    absl::StrCat("--backend=", TestBackend())});
  AddDevices(rank, 1, &arguments);
  arguments.insert(arguments.end(), extra_flags.begin(), extra_flags.end());
  return arguments;
}

[[noreturn]] void EndProgram(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

}  // namespace

uint64_t Seed() {
  const char* const given = std::getenv("LMHEAD_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("LMHEAD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

Child::Child(const std::vector<std::string>& command) {
  const absl::StatusOr<pid_t> child = SpawnChild(command, log_path_);
  if (!child.ok()) EndProgram(std::string(child.status().message()));
  pid_ = *child;
}

Child::~Child() {
  if (pid_ > 0) Kill();
}

void Child::Signal(int signal) {
  if (pid_ > 0) kill(pid_, signal);
}

std::optional<int> Child::Wait(absl::Duration timeout) {
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

std::string Child::Log() const {
  std::ostringstream text;
  text << std::ifstream(log_path_).rdbuf();
  return text.str();
}

FollowerChild::FollowerChild(const std::vector<std::string>& command, const std::string& leader,
                             int rank, const std::vector<std::string>& extra_flags)
    : Child(FollowCommand(command, leader, rank, extra_flags)) {}

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

std::vector<std::string> FlagsOf(const Layout& layout, const std::string& host) {
  std::vector<std::string> flags = {absl::StrCat("--ranks=", layout.num_ranks),
                                    absl::StrCat("--local_ranks=", layout.num_local)};
  if (layout.num_local < layout.num_ranks) {
    flags.push_back(absl::StrCat("--group_listen=", host, ":0"));
  }
  // NCCL does not take a GPU twice.
  if (TestBackend() == "cuda") {
    flags.push_back(layout.num_ranks <= TestGpus() ? "--collective=nccl" : "--collective=gloo");
  }
  AddDevices(0, layout.num_local, &flags);
  return flags;
}

ShardProcesses::ShardProcesses(const GroupOptions& options) : options_(options) {
  StartServer({});
  const int remote = options.layout.num_ranks - options.layout.num_local;
  followers_.resize(remote / options.layout.ranks_per_follower);
  for (size_t index = 0; index < followers_.size(); ++index) StartFollower(index);
  AwaitReady(true);
  client_ = e2e::ConnectTo(server_->address());
}

void ShardProcesses::StartServer(std::vector<std::string> extra_flags) {
  std::vector<std::string> flags = FlagsOf(options_.layout);
  flags.push_back(absl::StrCat("--backend=", TestBackend()));
  flags.push_back(
      absl::StrCat("--collective_timeout_seconds=", options_.collective_timeout_seconds));
  flags.insert(flags.end(), options_.server_flags.begin(), options_.server_flags.end());
  flags.insert(flags.end(), extra_flags.begin(), extra_flags.end());
  auto server = LocalServer::Start(e2e::LmheadBinary(), flags, kPatience);
  if (!server.ok()) EndProgram(std::string(server.status().message()));
  server_ = *std::move(server);
}

void ShardProcesses::StartServerAgain(const std::vector<std::string>& extra_flags) {
  std::vector<std::string> flags = {absl::StrCat("--group_listen=", server_->group_address())};
  flags.insert(flags.end(), extra_flags.begin(), extra_flags.end());
  client_.reset();
  StartServer(flags);
  AwaitReady(true);
  client_ = e2e::ConnectTo(server_->address());
}

int ShardProcesses::first_rank_of(size_t index) const {
  return options_.layout.num_local + static_cast<int>(index) * options_.layout.ranks_per_follower;
}

void ShardProcesses::StartFollower(size_t index) {
  std::vector<std::string> flags = {
      absl::StrCat("--local_ranks=", options_.layout.ranks_per_follower)};
  AddDevices(first_rank_of(index), options_.layout.ranks_per_follower, &flags);
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
