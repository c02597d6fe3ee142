// A server and its followers as real processes, and what the tests do to them.

#ifndef LMHEAD_TESTS_SHARD_SHARD_PROCESSES_H_
#define LMHEAD_TESTS_SHARD_SHARD_PROCESSES_H_

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/local_server.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::shard {

// --collective_timeout_seconds of groups whose ranks are made to fail. NCCL's connecting and its
// first collectives take seconds on a busy machine.
inline const double kTimeoutSeconds = TestGpus() > 1 ? 12.0 : 4.0;
// By when an open step has ended after a rank has failed: the bound that OPERATING.md states,
// with room for a busy machine.
inline const absl::Duration kBound = absl::Seconds(4 * kTimeoutSeconds);

// Of a test with random points: LMHEAD_TEST_SEED, else a new one; printed.
uint64_t Seed();

// A child process and what it writes.
class Child {
 public:
  // Ends the test program when the command cannot be started.
  explicit Child(const std::vector<std::string>& command);
  ~Child();  // SIGKILL when still running.
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void Signal(int signal);
  void Kill() { Signal(SIGKILL), Wait(absl::Seconds(10)); }

  // The exit code, or 128 + the signal that ended it; none when it has not ended in time.
  std::optional<int> Wait(absl::Duration timeout);

  std::string Log() const;

 private:
  pid_t pid_ = -1;
  const TemporaryFolder folder_;
  const std::string log_path_ = folder_.Path("log");
};

// `lmhead follow`.
class FollowerChild : public Child {
 public:
  // Runs `command… follow --leader=… --rank=… extra_flags…`.
  FollowerChild(const std::vector<std::string>& command, const std::string& leader, int rank,
                const std::vector<std::string>& extra_flags = {});
};

// How a group is spread over processes.
struct Layout {
  int num_ranks = 2;
  int num_local = 1;           // In the server.
  int ranks_per_follower = 1;  // Of the others.
};

// The server's flags for that. Followers call it at a free port of `host`. On CUDA the ranks are
// over NCCL where each has a GPU of its own (TestGpus), over Gloo where they share.
std::vector<std::string> FlagsOf(const Layout& layout, const std::string& host = "127.0.0.1");

struct GroupOptions {
  Layout layout;
  double collective_timeout_seconds = 20.0;
  std::vector<std::string> server_flags;
  std::vector<std::string> follower_flags;
};

// A server, its followers, and a client.
class ShardProcesses {
 public:
  // Starts all of them and waits until the group stands.
  explicit ShardProcesses(const GroupOptions& options);

  LocalServer& server() { return *server_; }
  Client* client() { return client_.get(); }
  size_t num_followers() const { return followers_.size(); }
  FollowerChild& follower(size_t index) { return *followers_[index]; }
  int first_rank_of(size_t index) const;

  void StartFollower(size_t index);  // In the place of one that has ended.
  // Another server in the place of one that has ended, where the followers call the same port;
  // waits until the group stands, and connects the client to it.
  void StartServerAgain(const std::vector<std::string>& extra_flags);

  // The server's readiness, as a probe sees it.
  bool ready() const;
  // Waits for that; ends the test program when it does not come, with everybody's logs.
  void AwaitReady(bool ready) const;

 private:
  void StartServer(std::vector<std::string> extra_flags);

  const GroupOptions options_;
  std::unique_ptr<LocalServer> server_;
  std::vector<std::unique_ptr<FollowerChild>> followers_;
  std::unique_ptr<Client> client_;
};

// Whether a service at this address says that it is ready (or live).
bool IsServing(const std::string& address, const std::string& name);

}  // namespace lmhead::shard

#endif  // LMHEAD_TESTS_SHARD_SHARD_PROCESSES_H_
