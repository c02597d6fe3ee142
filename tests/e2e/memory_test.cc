// The promise the service is there for: its peak memory does not depend on the number of tokens.

#include <gtest/gtest.h>

#include <cstdio>

#include "server/cli/demo/metrics_client.h"
#include "tests/e2e/service_fixture.h"

namespace lmhead::e2e {
namespace {

struct Peak {
  int64_t process_bytes = 0, step_bytes = 0, reserved_bytes = 0;
};

Peak ScrapePeak(const LocalServer& server) {
  auto text = demo::ScrapeMetrics(server.metrics_address());
  EXPECT_TRUE(text.ok()) << text.status();
  if (!text.ok()) return {};
  const auto value = [&](const char* name, const std::vector<std::string>& labels) {
    auto found = demo::MetricValue(*text, name, labels);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? static_cast<int64_t>(*found) : -1;
  };
  return {value("lmhead_memory_total_peak_bytes", {"scope=\"process\""}),
          value("lmhead_memory_total_peak_bytes", {"scope=\"step\""}),
          value("lmhead_memory_reserved_bytes", {})};
}

// The peaks of a fresh server after one step of `num_tokens` tokens.
Peak PeakOfStep(const HeadShape& shape, int64_t num_tokens) {
  auto server = StartServer();
  auto client = ConnectTo(server->address());
  EXPECT_TRUE(CreateHead(client.get(), shape).ok());
  std::vector<Rows> rows = {MakeRows(shape, num_tokens, 1, 0)};
  Client* const workers[] = {client.get()};
  auto outcome = RunStep(client.get(), workers, shape, 1, {.chunk_tokens = 1024}, &rows);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  if (outcome.ok()) {
    EXPECT_EQ(outcome->prepared.sums().num_tokens(), num_tokens);
  }
  return ScrapePeak(*server);
}

class PeakMemoryTest : public ::testing::TestWithParam<v1::Schedule> {};

TEST_P(PeakMemoryTest, EightThousandAndSixtyFourThousandTokensPeakAlike) {
  const HeadShape shape{
      .vocab_size = 4096, .hidden_size = 32, .dtype = DType::kFloat32, .schedule = GetParam()};
  const Peak small = PeakOfStep(shape, 8 * 1024);
  const Peak large = PeakOfStep(shape, 64 * 1024);
  std::printf("accounted peak: %lld bytes at 8K tokens, %lld bytes at 64K tokens\n",
              static_cast<long long>(small.process_bytes),
              static_cast<long long>(large.process_bytes));
  EXPECT_GT(small.process_bytes, shape.vocab_size * shape.hidden_size * 4 * 4);
  EXPECT_EQ(small.process_bytes, large.process_bytes);
  EXPECT_EQ(small.step_bytes, large.step_bytes);
  // What was promised to the head is what it took.
  EXPECT_EQ(small.process_bytes, small.reserved_bytes);
}

INSTANTIATE_TEST_SUITE_P(Schedules, PeakMemoryTest,
                         ::testing::Values(v1::SCHEDULE_RETAIN, v1::SCHEDULE_RECOMPUTE));

}  // namespace
}  // namespace lmhead::e2e
