// A bad network between two workers and the service: every chunk is counted exactly once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "server/cli/demo/metrics_client.h"
#include "tests/e2e/service_fixture.h"
#include "tests/fault/chaos_proxy.h"

namespace lmhead::fault {
namespace {

using e2e::HeadShape;
using e2e::Rows;

constexpr int kNumWorkers = 2;
constexpr uint64_t kNumSteps = 4;
constexpr int64_t kTokensPerWorker = 1500;
constexpr e2e::FeedOptions kFeed{
    .num_connections = 2, .max_inflight_chunks = 3, .chunk_tokens = 64};
constexpr uint64_t kChunksPerWorker = (kTokensPerWorker + 63) / 64;

HeadShape Shape() { return {.vocab_size = 331, .hidden_size = 64}; }

struct TrainingRun {
  std::vector<v1::PrepareStepResponse> prepared;  // One a step.
  std::vector<std::vector<Rows>> rows;            // Likewise; with gradients.
  std::vector<float> weight;
};

// Where each party of a training run finds the server.
struct Routes {
  std::string control;
  std::vector<std::string> workers;
};

Routes StraightTo(const LocalServer& server) {
  return {server.address(), std::vector<std::string>(kNumWorkers, server.address())};
}

// A whole training run. The head is made, and read in the end, without detours.
absl::StatusOr<TrainingRun> Train(const LocalServer& server, const Routes& routes) {
  const HeadShape shape = Shape();
  auto direct = e2e::ConnectTo(server.address());
  if (absl::Status created = e2e::CreateHead(direct.get(), shape); !created.ok()) return created;
  const ClientOptions patient{.max_attempts = 30};
  auto control = Client::Connect(routes.control, patient);
  if (!control.ok()) return control.status();
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Client*> workers;
  for (const std::string& address : routes.workers) {
    auto client = Client::Connect(address, patient);
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
    workers.push_back(clients.back().get());
  }
  TrainingRun run;
  for (uint64_t step = 1; step <= kNumSteps; ++step) {
    std::vector<Rows> rows;
    for (int i = 0; i < kNumWorkers; ++i) {
      rows.push_back(e2e::MakeRows(shape, kTokensPerWorker, step, i));
    }
    auto outcome = e2e::RunStep(control->get(), workers, shape, step, kFeed, &rows);
    if (!outcome.ok()) return outcome.status();
    run.prepared.push_back(outcome->prepared);
    run.rows.push_back(std::move(rows));
  }
  auto weight = e2e::ReadTensor(direct.get(), shape, v1::TENSOR_KIND_WEIGHT);
  if (!weight.ok()) return weight.status();
  run.weight = *std::move(weight);
  return run;
}

double CountOfChunks(const LocalServer& server, const std::string& result) {
  auto text = demo::ScrapeMetrics(server.metrics_address());
  EXPECT_TRUE(text.ok()) << text.status();
  auto value =
      demo::MetricValue(text.value_or(""), "lmhead_chunks_total", {"result=\"" + result + "\""});
  EXPECT_TRUE(value.ok()) << value.status();
  return value.value_or(-1.0);
}

const TrainingRun& UndisturbedRun() {
  static const TrainingRun* const run = [] {
    auto server = e2e::StartServer();
    auto trained = Train(*server, StraightTo(*server));
    EXPECT_TRUE(trained.ok()) << trained.status();
    return new TrainingRun(trained.ok() ? *std::move(trained) : TrainingRun());
  }();
  return *run;
}

void ExpectSameTraining(const TrainingRun& got, const TrainingRun& want) {
  ASSERT_EQ(got.prepared.size(), kNumSteps);
  ASSERT_EQ(want.prepared.size(), kNumSteps);
  for (uint64_t i = 0; i < kNumSteps; ++i) {
    SCOPED_TRACE("step " + std::to_string(i + 1));
    EXPECT_EQ(got.prepared[i].num_chunks(), kNumWorkers * kChunksPerWorker);
    EXPECT_EQ(got.prepared[i].sums().num_tokens(), kNumWorkers * kTokensPerWorker);
    EXPECT_EQ(got.prepared[i].sums().num_valid_tokens(),
              want.prepared[i].sums().num_valid_tokens());
    // The first step has the same weight in both runs, so each chunk's sum is the same to the bit;
    // only the order of the additions differs. Later weights differ by float32's reordering.
    const double loss = want.prepared[i].sums().loss_sum();
    EXPECT_NEAR(got.prepared[i].sums().loss_sum(), loss, (i == 0 ? 1e-13 : 1e-6) * loss);
    for (int worker = 0; worker < kNumWorkers; ++worker) {
      EXPECT_LE(e2e::RelativeError(got.rows[i][worker].grad_hidden_states,
                                   std::span(want.rows[i][worker].grad_hidden_states)),
                1e-4);
    }
  }
  // A chunk lost or counted twice moves the weight by a hundred times this.
  EXPECT_LE(e2e::RelativeError(got.weight, std::span(want.weight)), 1e-5);
}

// Cuts within the first `bytes` bytes of the first `stormy` connections, calm afterwards.
ChaosProxy::Forecast Storm(uint64_t seed, int stormy, int64_t bytes) {
  auto generator = std::make_shared<std::mt19937_64>(seed);
  return [generator, stormy, bytes](int connection) {
    Weather weather;
    if (connection >= stormy) return weather;
    weather.cut_after_bytes = static_cast<int64_t>((*generator)() % bytes);
    weather.reset = (*generator)() % 2 == 0;
    weather.piece_bytes = 1 + static_cast<int64_t>((*generator)() % 30000);
    weather.delay_microseconds = static_cast<int>((*generator)() % 300);
    return weather;
  };
}

class StormTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(StormTest, EachChunkIsCountedOnce) {
  const uint64_t seed = GetParam();
  auto server = e2e::StartServer();
  ChaosProxy first(server->address(), Storm(seed, 12, 400000));
  ChaosProxy second(server->address(), Storm(seed + 1000, 12, 400000));
  auto run = Train(*server, {server->address(), {first.address(), second.address()}});
  LMHEAD_ASSERT_OK(run);
  std::printf("seed %llu: %d connections, %d cut, %.0f chunks sent again\n",
              static_cast<unsigned long long>(seed),
              first.num_connections() + second.num_connections(),
              first.num_cuts() + second.num_cuts(), CountOfChunks(*server, "duplicate"));
  EXPECT_GT(first.num_cuts() + second.num_cuts(), 0);
  EXPECT_EQ(CountOfChunks(*server, "accepted"), kNumSteps * kNumWorkers * kChunksPerWorker);
  EXPECT_EQ(CountOfChunks(*server, "failed"), 0);
  ExpectSameTraining(*run, UndisturbedRun());
}

TEST_P(StormTest, EachStepIsCommittedOnceThoughCallsAndAnswersAreLost) {
  auto server = e2e::StartServer();
  ChaosProxy proxy(server->address(), Storm(GetParam(), 12, 1500));
  auto run = Train(*server, {proxy.address(), {server->address(), server->address()}});
  LMHEAD_ASSERT_OK(run);
  std::printf("seed %llu: %d control connections, %d cut\n",
              static_cast<unsigned long long>(GetParam()), proxy.num_connections(),
              proxy.num_cuts());
  EXPECT_GT(proxy.num_cuts(), 0);
  ExpectSameTraining(*run, UndisturbedRun());
}

INSTANTIATE_TEST_SUITE_P(Seeds, StormTest, ::testing::Values(1, 2, 3));

TEST(Network, ASlowWorkerIsWaitedFor) {
  auto server = e2e::StartServer();
  ChaosProxy slow(server->address(),
                  [](int) { return Weather{.piece_bytes = 16384, .delay_microseconds = 2000}; });
  auto run = Train(*server, {server->address(), {slow.address(), server->address()}});
  LMHEAD_ASSERT_OK(run);
  ExpectSameTraining(*run, UndisturbedRun());
}

}  // namespace
}  // namespace lmhead::fault
