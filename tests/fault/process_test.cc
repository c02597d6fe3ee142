// Processes that die in the middle of a step: the service, and a worker.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "tests/e2e/service_fixture.h"
#include "tests/fault/chaos_proxy.h"
#include "tests/util/own_test.h"

namespace lmhead::fault {
namespace {

using e2e::HeadShape;
using e2e::Rows;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 200;

std::vector<Rows> StepRows(const HeadShape& shape, uint64_t step) {
  return {e2e::MakeRows(shape, kTokens, step, 0), e2e::MakeRows(shape, kTokens, step, 1)};
}

// Trains steps 1 to `last` of a fresh head and compares the weight with the oracle's.
void TrainAndCompare(Client* client, const HeadShape& shape, uint64_t last) {
  e2e::OracleTrainer oracle(shape);
  Client* const workers[] = {client, client};
  for (uint64_t step = 1; step <= last; ++step) {
    std::vector<Rows> rows = StepRows(shape, step);
    LMHEAD_ASSERT_OK(e2e::RunStep(client, workers, shape, step, {}, &rows));
    oracle.Step(rows, step);
  }
  auto weight = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
}

// A writer that has sent half of its worker's rows and has their results.
class HalfSent {
 public:
  HalfSent(Client* client, const HeadShape& shape, uint64_t step, uint64_t incarnation, int worker)
      : rows_(e2e::MakeRows(shape, kTokens, step, worker)), shape_(shape) {
    WriterSpec spec{.head = shape.name,
                    .step = step,
                    .worker = e2e::WorkerName(worker),
                    .incarnation = incarnation,
                    .chunk_bytes = 20 * shape.hidden_size * 4};
    auto writer = client->OpenWriter(spec);
    EXPECT_TRUE(writer.ok()) << writer.status();
    if (!writer.ok()) return;
    writer_ = *std::move(writer);
    auto result = SendHalf(0);
    EXPECT_TRUE(result.ok()) << result.status();
  }

  absl::StatusOr<LossResult> SendSecondHalf() { return SendHalf(kTokens / 2); }

 private:
  absl::StatusOr<LossResult> SendHalf(int64_t row) {
    LossRows rows;
    rows.hidden_states = {rows_.hidden_states.data() + row * shape_.hidden_size, kTokens / 2,
                          shape_.hidden_size, DType::kFloat32};
    rows.targets = std::span(rows_.targets).subspan(row, kTokens / 2);
    return writer_->Compute(rows);
  }

  const Rows rows_;
  const HeadShape shape_;
  std::unique_ptr<StepWriter> writer_;
};

TEST(ServerKilled, MidStepIsAClearErrorAndTheStepCanBeginAgain) {
  const HeadShape shape;
  auto server = e2e::StartServer();
  ChaosProxy proxy(server->address(), nullptr);  // Keeps its address over the restart.
  auto connected =
      Client::Connect(proxy.address(), {.connect_timeout = absl::Seconds(1), .max_attempts = 3});
  LMHEAD_ASSERT_OK(connected);
  Client* const client = connected->get();
  LMHEAD_ASSERT_OK(e2e::CreateHead(client, shape));
  auto incarnation = e2e::BeginStep(client, shape, 1, 2);
  LMHEAD_ASSERT_OK(incarnation);
  HalfSent half(client, shape, 1, *incarnation, 0);

  server->Kill();
  proxy.SetTarget("");
  const absl::Status lost = half.SendSecondHalf().status();
  EXPECT_THAT(lost.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted));
  EXPECT_THAT(std::string(lost.message()), HasSubstr(proxy.address()));

  server = e2e::StartServer();
  proxy.SetTarget(server->address());
  LMHEAD_ASSERT_OK(e2e::CreateHead(client, shape));
  // What belonged to the dead process is refused, not mixed into the new step.
  auto again = e2e::BeginStep(client, shape, 1, 2);
  LMHEAD_ASSERT_OK(again);
  EXPECT_NE(*again, *incarnation);
  auto stale = e2e::PrepareStep(client, shape, 1, *incarnation, 0.1);
  EXPECT_EQ(stale.status().code(), absl::StatusCode::kFailedPrecondition) << stale.status();
  EXPECT_THAT(std::string(stale.status().message()), HasSubstr("incarnation"));
  LMHEAD_ASSERT_OK(e2e::AbortStep(client, shape, 1, *again));
  TrainAndCompare(client, shape, 3);
}

TEST(ServerKilled, AWriterThatFindsAnotherIncarnationFailsWithAborted) {
  const HeadShape shape;
  auto server = e2e::StartServer();
  ChaosProxy proxy(server->address(), nullptr);
  auto connected = Client::Connect(proxy.address(), {.max_attempts = 20});
  LMHEAD_ASSERT_OK(connected);
  LMHEAD_ASSERT_OK(e2e::CreateHead(connected->get(), shape));
  auto incarnation = e2e::BeginStep(connected->get(), shape, 1, 2);
  LMHEAD_ASSERT_OK(incarnation);
  HalfSent half(connected->get(), shape, 1, *incarnation, 0);

  // The new server has the head and the step open before the writer comes back.
  auto restarted = e2e::StartServer();
  auto direct = e2e::ConnectTo(restarted->address());
  LMHEAD_ASSERT_OK(e2e::CreateHead(direct.get(), shape));
  LMHEAD_ASSERT_OK(e2e::BeginStep(direct.get(), shape, 1, 2));
  proxy.SetTarget(restarted->address());
  server->Kill();

  const absl::Status lost = half.SendSecondHalf().status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kAborted) << lost;
}

// Told to the child below: where the server is, and its incarnation.
constexpr char kAddressVariable[] = "LMHEAD_TEST_HALF_WORKER_ADDRESS";
constexpr char kIncarnationVariable[] = "LMHEAD_TEST_HALF_WORKER_INCARNATION";

// Not a test of its own: what the process does that the tests below start and kill.
TEST(HalfWorkerProcess, SendsHalfOfWorkerOneAndHangs) {
  const char* const address = getenv(kAddressVariable);
  if (address == nullptr) GTEST_SKIP() << "only as a child of the other tests";
  auto client = e2e::ConnectTo(address);
  HalfSent half(client.get(), HeadShape(), 1,
                std::strtoull(getenv(kIncarnationVariable), nullptr, 10), 1);
  if (::testing::Test::HasFailure()) return;
  ASSERT_EQ(write(kGivenFd, ".", 1), 1);
  for (;;) pause();
}

// The process above.
class HalfWorker {
 public:
  HalfWorker(const std::string& address, uint64_t incarnation) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = StartOwnTest(
        "HalfWorkerProcess.SendsHalfOfWorkerOneAndHangs",
        {{kAddressVariable, address}, {kIncarnationVariable, absl::StrCat(incarnation)}}, ends[1]);
    close(ends[1]);
    // A byte when its first chunks are counted; the end of the file when it failed.
    char ready = 0;
    EXPECT_EQ(read(ends[0], &ready, 1), 1) << "the worker ended early";
    close(ends[0]);
  }

  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
};

TEST(WorkerKilled, MidStreamIsNamedByPrepareAndTheStepCanBeDoneAgain) {
  const HeadShape shape;
  auto server = e2e::StartServer();
  auto client = e2e::ConnectTo(server->address());
  LMHEAD_ASSERT_OK(e2e::CreateHead(client.get(), shape));
  auto incarnation = e2e::BeginStep(client.get(), shape, 1, 2);
  LMHEAD_ASSERT_OK(incarnation);
  HalfWorker dying(server->address(), *incarnation);
  dying.Kill();

  Rows rows = e2e::MakeRows(shape, kTokens, 1, 0);
  LMHEAD_ASSERT_OK(e2e::Feed(client.get(), shape, 1, *incarnation, e2e::WorkerName(0), {}, &rows));
  auto prepared = e2e::PrepareStep(client.get(), shape, 1, *incarnation, 0.2);
  EXPECT_EQ(prepared.status().code(), absl::StatusCode::kFailedPrecondition) << prepared.status();
  EXPECT_THAT(std::string(prepared.status().message()), HasSubstr(e2e::WorkerName(1)));
  LMHEAD_ASSERT_OK(e2e::AbortStep(client.get(), shape, 1, *incarnation));
  TrainAndCompare(client.get(), shape, 2);
}

TEST(WorkerKilled, AnotherProcessMayTakeItsPlaceInTheSameStep) {
  const HeadShape shape;
  auto server = e2e::StartServer();
  auto client = e2e::ConnectTo(server->address());
  LMHEAD_ASSERT_OK(e2e::CreateHead(client.get(), shape));
  auto incarnation = e2e::BeginStep(client.get(), shape, 1, 2);
  LMHEAD_ASSERT_OK(incarnation);
  HalfWorker dying(server->address(), *incarnation);
  dying.Kill();

  // The same rows in the same chunks: what the dead one had sent counts once.
  std::vector<Rows> rows = StepRows(shape, 1);
  int64_t num_duplicates = 0;
  for (int worker : {0, 1}) {
    auto fed = e2e::Feed(client.get(), shape, 1, *incarnation, e2e::WorkerName(worker),
                         {.chunk_tokens = 20}, &rows[worker]);
    LMHEAD_ASSERT_OK(fed);
    num_duplicates += fed->num_duplicates;
  }
  EXPECT_EQ(num_duplicates, 5);
  auto prepared = e2e::PrepareStep(client.get(), shape, 1, *incarnation);
  LMHEAD_ASSERT_OK(prepared);
  EXPECT_EQ(prepared->num_chunks(), 20u);
  const reference::Result want = e2e::OracleTrainer(shape).Step(rows, 1);
  EXPECT_EQ(prepared->sums().num_valid_tokens(), want.sums.num_valid_tokens);
  auto grad = e2e::ReadTensor(client.get(), shape, v1::TENSOR_KIND_GRAD_WEIGHT);
  LMHEAD_ASSERT_OK(grad);
  EXPECT_LE(e2e::RelativeError(*grad, std::span(want.grad_weight)), 1e-5);
}

}  // namespace
}  // namespace lmhead::fault
