// No process hangs at its exit: clients that leave with large messages in flight over TLS, and the
// server they leave behind.
//
// gRPC 1.51 may wait for ever in its own shutdown when the last channel of a process goes while
// messages of a MiB and more are under way, on machines with many cores; proto/wire/process.h has
// the way around it. This test is as good at showing that as the machine has cores.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/service_fixture.h"
#include "tests/util/certificates.h"
#include "tests/util/own_test.h"

namespace lmhead::e2e {
namespace {

// Told to the child: where the server is, its authority, and how to leave.
constexpr char kAddressVariable[] = "LMHEAD_TEST_EXIT_ADDRESS";
constexpr char kAuthorityVariable[] = "LMHEAD_TEST_EXIT_AUTHORITY";
constexpr char kMannerVariable[] = "LMHEAD_TEST_EXIT_MANNER";

constexpr int kConnections = 4;
constexpr int kTickets = 6;
const HeadShape kShape = {.vocab_size = 512, .hidden_size = 256};
constexpr int64_t kRowsOfTicket = 4096;  // 4 MiB of hidden states.

// Not a test of its own: what the processes do that the test below starts.
TEST(LeavingProcess, LeavesWithMessagesInFlight) {
  const char* const address = getenv(kAddressVariable);
  if (address == nullptr) GTEST_SKIP() << "only as a child of the other tests";
  const std::string manner = getenv(kMannerVariable);
  ClientOptions options;
  if (const char* authority = getenv(kAuthorityVariable))
    options.credentials.tls_ca_file = authority;
  // Not freed by the manners that leave everything as it is.
  auto* const client =
      new absl::StatusOr<std::unique_ptr<Client>>(Client::Connect(address, options));
  LMHEAD_ASSERT_OK(*client);
  auto* const writer = new absl::StatusOr<std::unique_ptr<StepWriter>>(
      (**client)->OpenWriter({.head = kShape.name,
                              .worker = WorkerName(0),
                              .num_connections = kConnections,
                              .max_inflight_chunks = 2 * kTickets}));
  LMHEAD_ASSERT_OK(*writer);
  auto* const rows = new Rows(MakeRows(kShape, kRowsOfTicket, 1, 0));
  LossRows loss;
  loss.hidden_states = {rows->hidden_states.data(), kRowsOfTicket, kShape.hidden_size,
                        DType::kFloat32};
  loss.targets = rows->targets;
  for (int i = 0; i < kTickets; ++i) LMHEAD_ASSERT_OK((**writer)->Submit(loss));
  if (manner == "as-it-is") std::exit(0);
  if (manner == "cancelled") (**writer)->Cancel();
  if (manner == "finished") LMHEAD_ASSERT_OK((**writer)->Finish());
  delete writer;
  delete client;
  delete rows;
}

// The exit code of a child, minus the signal that ended it; nothing when it hangs.
std::optional<int> RunChild(const std::map<std::string, std::string>& variables) {
  const pid_t pid = StartOwnTest("LeavingProcess.LeavesWithMessagesInFlight", variables);
  const absl::Time deadline = absl::Now() + absl::Minutes(2);
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (absl::Now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return std::nullopt;
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

class ExitTest : public ::testing::TestWithParam<bool> {};

TEST_P(ExitTest, ClientsAndTheServerEnd) {
  const bool tls = GetParam();
  const TestAuthority authority("authority");
  const Leaf leaf = authority.Issue({"DNS:localhost", "IP:127.0.0.1"});
  const SecretFolder files(
      {{"tls.crt", leaf.cert_pem}, {"tls.key", leaf.key_pem}, {"ca.crt", authority.cert_pem()}});
  std::vector<std::string> flags;
  ClientOptions options;
  std::map<std::string, std::string> variables;
  if (tls) {
    flags = {absl::StrCat("--tls_cert_file=", files.Path("tls.crt")),
             absl::StrCat("--tls_key_file=", files.Path("tls.key"))};
    options.credentials.tls_ca_file = files.Path("ca.crt");
    variables[kAuthorityVariable] = files.Path("ca.crt");
  }
  auto server = StartServer(flags);
  {
    auto client = Client::Connect(server->address(), options);
    LMHEAD_ASSERT_OK(client);
    LMHEAD_ASSERT_OK(CreateHead(client->get(), kShape));
  }
  variables[kAddressVariable] = server->address();
  for (int round = 0; round < 3; ++round) {
    for (const char* manner : {"as-it-is", "destroyed", "cancelled", "finished"}) {
      variables[kMannerVariable] = manner;
      const std::optional<int> code = RunChild(variables);
      ASSERT_TRUE(code.has_value()) << "a client that left " << manner << " hangs";
      EXPECT_EQ(*code, 0) << manner << " in round " << round;
    }
  }
  auto code = server->Stop();
  LMHEAD_ASSERT_OK(code);
  EXPECT_EQ(*code, 0);
}

INSTANTIATE_TEST_SUITE_P(Transport, ExitTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Tls" : "Plaintext"; });

}  // namespace
}  // namespace lmhead::e2e
