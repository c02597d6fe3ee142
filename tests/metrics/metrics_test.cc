#include "server/metrics/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace lmhead {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Gauges SomeGauges() {
  RankMemory memory;
  memory.rank = 0;
  memory.categories = {{"weight", 34359738368, 34359738369, 34359738370}, {"collective", 0, 0, 0}};
  memory.live_bytes = 1;
  memory.peak_process_bytes = 9007199254740991;  // 2^53 - 1
  memory.peak_step_bytes = 3;
  memory.limit_bytes = 4;
  memory.reserved_bytes = 5;
  memory.device_used_bytes = 6;
  memory.device_peak_bytes = 7;
  return {.memory = {memory},
          .queue_depth = 11,
          .staging_slots_lent = 12,
          .staging_slots_limit = 13,
          .staging_bytes = 14,
          .streams_waiting = 15,
          .streams_open = 16,
          .heads = 17,
          .heads_poisoned = 18,
          .by_head = {{.name = "lm", .dense_logits_bytes = 68719476736},
                      {.name = "kept", .last_checkpoint_seconds = 1800000000.25}},
          .collectives = {{.op = "reduce", .calls = 3, .seconds = 1.5}},
          .group_ready = true,
          .executor_busy_seconds = 19.5};
}

std::unique_ptr<Metrics> MakeMetrics() {
  auto metrics = std::make_unique<Metrics>("0.1.0", "cpu");
  metrics->SetGauges(SomeGauges);
  return metrics;
}

// GET /metrics of a loopback port, as a scraper does it.
std::string Scrape(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t got; (got = read(fd, buffer, sizeof buffer)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return answer;
}

TEST(MetricsTest, EverySeriesExistsBeforeAnythingHappens) {
  const std::string text = MakeMetrics()->Render();
  for (const char* series : {
           "lmhead_chunks_total{result=\"accepted\"} 0",
           "lmhead_chunks_total{result=\"duplicate\"} 0",
           "lmhead_chunks_total{result=\"rejected\"} 0",
           "lmhead_chunks_total{result=\"failed\"} 0",
           "lmhead_tokens_total 0",
           "lmhead_valid_tokens_total 0",
           "lmhead_nonfinite_rows_total 0",
           "lmhead_chunk_stage_seconds_count{stage=\"receive\"} 0",
           "lmhead_chunk_stage_seconds_count{stage=\"queue\"} 0",
           "lmhead_chunk_stage_seconds_count{stage=\"upload\"} 0",
           "lmhead_chunk_stage_seconds_count{stage=\"compute\"} 0",
           "lmhead_chunk_stage_seconds_count{stage=\"download\"} 0",
           "lmhead_chunk_stage_seconds_count{stage=\"write\"} 0",
           "lmhead_batch_tokens_count 0",
           "lmhead_batch_chunks_count 0",
           "lmhead_steps_total{outcome=\"committed\"} 0",
           "lmhead_steps_total{outcome=\"aborted\"} 0",
           "lmhead_step_duration_seconds_count 0",
           "lmhead_checkpoints_total{outcome=\"saved\"} 0",
           "lmhead_checkpoints_total{outcome=\"failed\"} 0",
           "lmhead_checkpoint_seconds_count 0",
           "lmhead_rpc_bytes_total{direction=\"received\"} 0",
           "lmhead_rpc_bytes_total{direction=\"sent\"} 0",
           "lmhead_build_info{backend=\"cpu\",version=\"0.1.0\"} 1",
       }) {
    EXPECT_THAT(text, HasSubstr(std::string(series) + "\n"));
  }
}

TEST(MetricsTest, GaugesAreReadAtScrapeAndBytesAreExact) {
  const std::string text = MakeMetrics()->Render();
  for (const char* series : {
           "lmhead_memory_live_bytes{rank=\"0\",category=\"weight\"} 34359738368",
           "lmhead_memory_peak_bytes{rank=\"0\",category=\"weight\",scope=\"process\"} 34359738369",
           "lmhead_memory_peak_bytes{rank=\"0\",category=\"weight\",scope=\"step\"} 34359738370",
           "lmhead_memory_live_bytes{rank=\"0\",category=\"collective\"} 0",
           "lmhead_memory_total_live_bytes{rank=\"0\"} 1",
           "lmhead_memory_total_peak_bytes{rank=\"0\",scope=\"process\"} 9007199254740991",
           "lmhead_memory_total_peak_bytes{rank=\"0\",scope=\"step\"} 3",
           "lmhead_memory_limit_bytes{rank=\"0\"} 4",
           "lmhead_memory_reserved_bytes{rank=\"0\"} 5",
           "lmhead_device_memory_used_bytes{rank=\"0\"} 6",
           "lmhead_device_memory_peak_bytes{rank=\"0\"} 7",
           "lmhead_queue_depth 11",
           "lmhead_staging_slots_lent 12",
           "lmhead_staging_slots_limit 13",
           "lmhead_staging_bytes 14",
           "lmhead_streams_waiting 15",
           "lmhead_streams_open 16",
           "lmhead_heads 17",
           "lmhead_heads_poisoned 18",
           "lmhead_dense_logits_bytes{head=\"lm\"} 68719476736",
           "lmhead_dense_logits_bytes{head=\"kept\"} 0",
           "lmhead_last_checkpoint_timestamp_seconds{head=\"kept\"} 1800000000.25",
           "lmhead_group_ready 1",
           "lmhead_collective_seconds_count{op=\"reduce\"} 3",
           "lmhead_collective_seconds_sum{op=\"reduce\"} 1.5",
           "lmhead_executor_busy_seconds_total 19.5",
       }) {
    EXPECT_THAT(text, HasSubstr(std::string(series) + "\n"));
  }
  // A head that was never saved says nothing of when.
  EXPECT_THAT(text, Not(HasSubstr("lmhead_last_checkpoint_timestamp_seconds{head=\"lm\"}")));
  EXPECT_THAT(text, HasSubstr("# TYPE lmhead_executor_busy_seconds_total counter\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE lmhead_memory_live_bytes gauge\n"));
  EXPECT_THAT(text, HasSubstr("process_resident_memory_bytes "));
  EXPECT_THAT(text, HasSubstr("process_open_fds "));
  EXPECT_THAT(text, HasSubstr("lmhead_start_time_seconds "));
}

TEST(MetricsTest, CountsWhatHappens) {
  const auto metrics = MakeMetrics();
  metrics->CountChunk(ChunkOutcome::kAccepted);
  metrics->CountChunk(ChunkOutcome::kAccepted);
  metrics->CountChunk(ChunkOutcome::kFailed);
  metrics->AddTokens(100, 90);
  metrics->AddNonfiniteRows(3);
  metrics->AddBytes(1'000'000'000'001, 7);
  metrics->ObserveStage(ChunkStage::kCompute, 0.02);
  metrics->ObserveBatch(2, 100);
  metrics->CountStep(StepOutcome::kCommitted, 0.5);
  metrics->CountCheckpoint(CheckpointOutcome::kSaved, 2);
  metrics->CountCheckpoint(CheckpointOutcome::kFailed, 0.5);
  const std::string text = metrics->Render();
  for (const char* series : {
           "lmhead_chunks_total{result=\"accepted\"} 2",
           "lmhead_chunks_total{result=\"failed\"} 1",
           "lmhead_chunks_total{result=\"rejected\"} 0",
           "lmhead_tokens_total 100",
           "lmhead_valid_tokens_total 90",
           "lmhead_nonfinite_rows_total 3",
           "lmhead_rpc_bytes_total{direction=\"received\"} 1000000000001",
           "lmhead_rpc_bytes_total{direction=\"sent\"} 7",
           "lmhead_chunk_stage_seconds_bucket{stage=\"compute\",le=\"0.01\"} 0",
           "lmhead_chunk_stage_seconds_bucket{stage=\"compute\",le=\"0.03\"} 1",
           "lmhead_chunk_stage_seconds_sum{stage=\"compute\"} 0.02",
           "lmhead_chunk_stage_seconds_count{stage=\"queue\"} 0",
           "lmhead_batch_tokens_bucket{le=\"64\"} 0",
           "lmhead_batch_tokens_bucket{le=\"128\"} 1",
           "lmhead_batch_chunks_bucket{le=\"1\"} 0",
           "lmhead_batch_chunks_bucket{le=\"2\"} 1",
           "lmhead_steps_total{outcome=\"committed\"} 1",
           "lmhead_step_duration_seconds_sum 0.5",
           "lmhead_checkpoints_total{outcome=\"saved\"} 1",
           "lmhead_checkpoints_total{outcome=\"failed\"} 1",
           "lmhead_checkpoint_seconds_sum 2.5",
           "lmhead_checkpoint_seconds_bucket{le=\"1\"} 1",
       }) {
    EXPECT_THAT(text, HasSubstr(std::string(series) + "\n"));
  }
}

TEST(MetricsTest, WithoutGaugesTheirFamiliesAreAbsent) {
  const std::string text = Metrics("0.1.0", "cpu").Render();
  EXPECT_THAT(text, Not(HasSubstr("lmhead_memory_live_bytes")));
  EXPECT_THAT(text, HasSubstr("lmhead_tokens_total 0\n"));
}

TEST(MetricsTest, ServesWhatItRendersOnAFreePort) {
  const auto metrics = MakeMetrics();
  const absl::StatusOr<int> port = metrics->Serve("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  EXPECT_GT(*port, 0);
  metrics->AddTokens(5, 5);
  const std::string answer = Scrape(*port);
  EXPECT_THAT(answer, HasSubstr("200 OK"));
  EXPECT_THAT(answer, HasSubstr("lmhead_tokens_total 5\n"));
  EXPECT_THAT(answer, HasSubstr("lmhead_heads 17\n"));
}

TEST(MetricsTest, ATakenPortIsNamed) {
  const auto first = MakeMetrics();
  const std::string address = "127.0.0.1:" + std::to_string(first->Serve("127.0.0.1:0").value());
  const auto second = MakeMetrics();
  const absl::Status status = second->Serve(address).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(address));
  // Nothing is left behind: another port still works.
  EXPECT_TRUE(second->Serve("127.0.0.1:0").ok());
}

TEST(MetricsTest, BadAddressesAreRefused) {
  for (const char* listen : {"", "9090", ":9090", "localhost", "127.0.0.1:", "127.0.0.1:65536",
                             "127.0.0.1:x", "127.0.0.1:-1"}) {
    EXPECT_EQ(MakeMetrics()->Serve(listen).status().code(), absl::StatusCode::kInvalidArgument)
        << listen;
  }
  EXPECT_EQ(MakeMetrics()->Serve("192.0.2.1:0").status().code(), absl::StatusCode::kUnavailable);
}

TEST(MetricsTest, CountsFromSeveralThreadsWhileScraped) {
  const auto metrics = MakeMetrics();
  const int port = metrics->Serve("127.0.0.1:0").value();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 1000; ++n) {
        metrics->CountChunk(ChunkOutcome::kAccepted);
        metrics->ObserveStage(ChunkStage::kWrite, 1e-3);
      }
    });
  }
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Scrape(port), HasSubstr("lmhead_chunks_total"));
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(Scrape(port), HasSubstr("lmhead_chunks_total{result=\"accepted\"} 4000\n"));
  EXPECT_THAT(Scrape(port), HasSubstr("lmhead_chunk_stage_seconds_count{stage=\"write\"} 4000\n"));
}

// Prometheus's own checker accepts names, units, types and help texts.
TEST(MetricsTest, PromtoolAcceptsTheExposition) {
  if (std::system("promtool --version >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool is not installed (Debian package prometheus)";
  }
  const std::string path = ::testing::TempDir() + "/metrics_" + std::to_string(getpid());
  std::ofstream(path) << MakeMetrics()->Render();
  const std::string command = "promtool check metrics <" + path + " >" + path + ".out 2>&1";
  const int exit_code = std::system(command.c_str());
  std::ostringstream output;
  output << std::ifstream(path + ".out").rdbuf();
  EXPECT_EQ(exit_code, 0) << output.str();
  EXPECT_EQ(output.str(), "");
  std::filesystem::remove(path);
  std::filesystem::remove(path + ".out");
}

}  // namespace
}  // namespace lmhead
