// lmhead-bench service as a process, with a real service as its child, on sizes that take no time.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/local_server.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"

namespace lmhead::bench {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTiny[] =
    "--backend=cpu --vocab=96 --hidden=32 --batch_tokens=64 --chunk_bytes=1024 --inflight=3 ";

CommandResult RunService(const std::string& arguments, bool with_errors = false) {
  return RunCommand(absl::StrCat("'", PathBesideTest("lmhead-bench"), "' service ", arguments,
                                 with_errors ? " 2>&1" : ""));
}

// The object below "service", or one without anything.
nlohmann::json RunJson(const std::string& arguments) {
  const CommandResult outcome = RunService(absl::StrCat(arguments, " --json"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const auto json = nlohmann::json::parse(outcome.output, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(json.is_object() && json.contains("service")) << outcome.output;
  return json.is_object() ? json.value("service", nlohmann::json::object())
                          : nlohmann::json::object();
}

TEST(ServiceBenchTest, DistilsFromATeacher) {
  // Chunks hold half the rows: the teacher's hidden states come with them.
  const auto service = RunJson(
      absl::StrCat(kTiny, "--workers=2 --tokens=100 --repeats=1 --schedule=retain --distil"));
  EXPECT_EQ(service["loss"], "forward KL to a teacher");
  ASSERT_EQ(service["cases"].size(), 1);
  EXPECT_EQ(service["cases"][0]["chunk_tokens"], 8);
  EXPECT_EQ(service["cases"][0]["repeats"][0]["num_tokens"], 100);
  EXPECT_EQ(service["cases"][0]["repeats"][0]["num_chunks"], 14);  // Seven of each worker.
  const CommandResult both = RunService("--distil --compare_inprocess", /*with_errors=*/true);
  EXPECT_NE(both.exit_code, 0);
  EXPECT_THAT(both.output, HasSubstr("--compare_inprocess has no teacher"));
}

TEST(ServiceBenchTest, CountsEveryTokenAndChunkOnce) {
  // Three workers with 67, 67 and 66 rows, in chunks of 16: five each.
  const auto service = RunJson(absl::StrCat(
      kTiny, "--workers=3 --tokens=200 --connections=1,2 --repeats=2 --compare_inprocess"));
  EXPECT_EQ(service["backend"], "cpu");
  EXPECT_EQ(service["vocab_size"], 96);
  EXPECT_EQ(service["hidden_size"], 32);
  EXPECT_EQ(service["dtype"], "bfloat16");
  EXPECT_EQ(service["loss"], "cross entropy");
  EXPECT_EQ(service["batch_tokens"], 64);
  ASSERT_EQ(service["cases"].size(), 4);  // Two schedules, two numbers of connections.
  for (const auto& measured : service["cases"]) {
    EXPECT_EQ(measured["chunk_tokens"], 16);
    EXPECT_EQ(measured["inflight"], 3);
    EXPECT_GT(measured["tokens_per_second"], 0.0);
    EXPECT_GT(measured["inprocess_tokens_per_second"], 0.0);
    EXPECT_GT(measured["rows_per_batch"], 0.0);
    EXPECT_LE(measured["rows_per_batch"], 64.0);
    ASSERT_EQ(measured["repeats"].size(), 2);
    for (const auto& repeat : measured["repeats"]) {
      EXPECT_EQ(repeat["num_tokens"], 200);
      EXPECT_EQ(repeat["num_chunks"], 15);
      EXPECT_GE(repeat["num_batches"], 4);  // 200 rows in batches of at most 64.
      EXPECT_LE(repeat["num_batches"], 15);
      EXPECT_GT(repeat["busy_seconds"], 0.0);
      EXPECT_LE(repeat["stream_seconds"], repeat["step_seconds"]);
      // Hidden states alone are 64 bytes a row, each way; nothing is sent twice.
      EXPECT_GT(repeat["message_bytes_received"], 200 * 64);
      EXPECT_LT(repeat["message_bytes_received"], 2 * 200 * 64);
      EXPECT_GT(repeat["message_bytes_sent"], 200 * 64);
      EXPECT_LT(repeat["message_bytes_sent"], 2 * 200 * 64);
    }
  }
  EXPECT_EQ(service["cases"][0]["schedule"], "retain");
  EXPECT_EQ(service["cases"][0]["connections"], 1);
  EXPECT_EQ(service["cases"][3]["schedule"], "recompute");
  EXPECT_EQ(service["cases"][3]["connections"], 2);
}

TEST(ServiceBenchTest, ManyPiecesOfFloat32) {
  // More rows than a worker has buffers for: they are sent over and over.
  const auto service = RunJson(
      absl::StrCat(kTiny, "--dtype=fp32 --schedule=retain --workers=1 --tokens=1001 --repeats=1"));
  ASSERT_EQ(service["cases"].size(), 1);
  const auto& measured = service["cases"][0];
  EXPECT_EQ(measured["chunk_tokens"], 8);
  EXPECT_EQ(measured["repeats"][0]["num_tokens"], 1001);
  EXPECT_EQ(measured["repeats"][0]["num_chunks"], 126);
  EXPECT_TRUE(measured["inprocess_ratio"].is_null());
}

TEST(ServiceBenchTest, LeavesAServiceThatWasThereAsItWas) {
  auto server = LocalServer::Start(PathBesideTest("lmhead"), {"--backend=cpu"});
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string arguments = absl::StrCat(
      kTiny, "--tokens=100 --repeats=1 --schedule=recompute --address=", (*server)->address());
  const auto blind = RunJson(arguments);
  ASSERT_EQ(blind["cases"].size(), 1);
  EXPECT_EQ(blind["address"], (*server)->address());
  EXPECT_EQ(blind["cases"][0]["repeats"][0]["num_tokens"], 100);
  EXPECT_TRUE(blind["cases"][0]["busy_ratio"].is_null());
  const auto seeing =
      RunJson(absl::StrCat(arguments, " --metrics_address=", (*server)->metrics_address()));
  ASSERT_EQ(seeing["cases"].size(), 1);
  EXPECT_GT(seeing["cases"][0]["busy_ratio"], 0.0);

  auto client = Client::Connect((*server)->address(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto info = (*client)->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->heads_size(), 0);
}

TEST(ServiceBenchTest, TheTableHasALineACase) {
  const CommandResult outcome = RunService(
      absl::StrCat(kTiny, "--tokens=100 --repeats=1 --connections=1,2 --schedule=retain"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("head 96 x 32 bfloat16"));
  EXPECT_THAT(outcome.output, HasSubstr("busy tok/s"));
  EXPECT_THAT(outcome.output, HasSubstr("\nretain        1        3 "));
  EXPECT_THAT(outcome.output, HasSubstr("\nretain        2        3 "));
  EXPECT_THAT(outcome.output, Not(HasSubstr("\nrecompute")));
}

TEST(ServiceBenchTest, FlagsThatMakeNoSenseAreNamed) {
  const auto refused = [](const std::string& arguments, const std::string& reason) {
    const CommandResult outcome = RunService(arguments, /*with_errors=*/true);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(reason)) << arguments;
  };
  refused("--workers=0", "--workers is 0; wanted 1 to");
  refused("--tokens=-1", "--tokens is -1");
  refused("--backend=cpu --workers=4 --tokens=3", "at least one for each of the 4 workers");
  refused("--repeats=0", "--repeats is 0");
  refused("--chunk_bytes=0", "--chunk_bytes is 0");
  refused("--inflight=-1", "--inflight is -1");
  refused("--hidden=-1", "--hidden is -1");
  refused("--vocab=-1", "--vocab is -1");
  refused("--batch_tokens=-1", "--batch_tokens is -1");
  refused("--backend=cpu --connections=1,x", "--connections: 'x' is not 1 to");
  refused("--backend=cpu --connections=0", "--connections: '0' is not 1 to");
  refused("--backend=cpu --schedule=eval", "--schedule is 'eval'; wanted retain, recompute or all");
  refused("--backend=cpu --dtype=fp8", "--dtype is 'fp8'");
  refused("--backend=tpu", "tpu");
  refused("--backend=cpu --workers=256 --inflight=4096", "chunks in flight; a service has");
  refused("--metrics_address=localhost:1", "--metrics_address belongs to the service at --address");
  refused("folder", "wanted flags alone, got 'folder'");
  refused("--backend=cpu --server_binary=/nothing/there", "/nothing/there");
}

}  // namespace
}  // namespace lmhead::bench
