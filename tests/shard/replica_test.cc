// Replicas of a head over processes: what they train, what is left when one of them dies.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <future>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/cli/demo/metrics_client.h"
#include "tests/e2e/service_fixture.h"
#include "tests/shard/shard_processes.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::shard {
namespace {

using e2e::HeadShape;
using e2e::Rows;
using ::testing::HasSubstr;

std::vector<Rows> StepRows(const HeadShape& shape, uint64_t step) {
  return {e2e::MakeRows(shape, 300, step, 0), e2e::MakeRows(shape, 200, step, 1)};
}

absl::StatusOr<std::vector<Rows>> RunStep(Client* client, const HeadShape& shape, uint64_t step) {
  std::vector<Rows> rows = StepRows(shape, step);
  Client* const workers[] = {client, client};
  const auto outcome = e2e::RunStep(client, workers, shape, step, {}, &rows);
  if (!outcome.ok()) return outcome.status();
  return rows;
}

// Trains the steps in a row, and holds every gradient of hidden states and the weight to what the
// oracle has.
void TrainWithOracle(Client* client, const HeadShape& shape, uint64_t last_step) {
  e2e::OracleTrainer oracle(shape);
  for (uint64_t step = 1; step <= last_step; ++step) {
    const auto rows = RunStep(client, shape, step);
    LMHEAD_ASSERT_OK(rows);
    const reference::Result want = oracle.Step(StepRows(shape, step), step);
    std::vector<float> grad_hidden_states;
    for (const Rows& each : *rows) {
      grad_hidden_states.insert(grad_hidden_states.end(), each.grad_hidden_states.begin(),
                                each.grad_hidden_states.end());
    }
    EXPECT_LE(e2e::RelativeError(grad_hidden_states, std::span(want.grad_hidden_states)), 1e-5);
  }
  const auto weight = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
  const auto bias = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_BIAS);
  LMHEAD_ASSERT_OK(bias);
  EXPECT_LE(e2e::RelativeError(*bias, std::span(oracle.bias())), 1e-5);
}

struct ReplicaLayout {
  Layout layout;
  int num_replicas = 2;
};

GroupOptions OptionsOf(const ReplicaLayout& replicas) {
  return {.layout = replicas.layout,
          .collective_timeout_seconds = kTimeoutSeconds,
          .server_flags = {absl::StrCat("--replicas=", replicas.num_replicas)}};
}

// A replica that is a follower's as a whole, in one process or in two, and one that is only in
// part.
TEST(ShardReplicaTest, EveryLayoutTrainsAsTheOracleDoes) {
  for (const ReplicaLayout& replicas :
       {ReplicaLayout{{2, 2, 1}, 2}, ReplicaLayout{{2, 1, 1}, 2}, ReplicaLayout{{4, 2, 2}, 2},
        ReplicaLayout{{4, 2, 1}, 2}, ReplicaLayout{{4, 1, 1}, 2}, ReplicaLayout{{3, 1, 2}, 3}}) {
    SCOPED_TRACE(absl::StrCat(replicas.layout.num_ranks, " ranks, ", replicas.layout.num_local,
                              " here, ", replicas.layout.ranks_per_follower, " a follower, ",
                              replicas.num_replicas, " replicas"));
    for (const v1::Schedule schedule : {v1::SCHEDULE_RETAIN, v1::SCHEDULE_RECOMPUTE}) {
      const HeadShape shape = {.schedule = schedule};
      ShardProcesses group(OptionsOf(replicas));
      LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
      TrainWithOracle(group.client(), shape, 3);
    }
  }
}

// The value of a replica's series, and of one of the whole server.
double ReplicaMetric(const std::string& exposition, const std::string& name, int replica) {
  const auto value =
      demo::MetricValue(exposition, name, {absl::StrCat("replica=\"", replica, "\"")});
  EXPECT_TRUE(value.ok()) << value.status();
  return value.value_or(0.0);
}
double ServerMetric(const std::string& exposition, const std::string& name) {
  const auto value = demo::MetricValue(exposition, name, {});
  EXPECT_TRUE(value.ok()) << value.status();
  return value.value_or(0.0);
}

// Chunks are batches here, each given to one replica and counted there, once.
TEST(ShardReplicaTest, WhatEachReplicaWasGivenAddsUpToWhatWasSent) {
  for (const ReplicaLayout& replicas :
       {ReplicaLayout{{2, 2, 1}, 2}, ReplicaLayout{{4, 2, 2}, 2}, ReplicaLayout{{3, 1, 1}, 3}}) {
    SCOPED_TRACE(absl::StrCat(replicas.layout.num_ranks, " ranks, ", replicas.layout.num_local,
                              " here, ", replicas.num_replicas, " replicas"));
    const HeadShape shape;
    GroupOptions options = OptionsOf(replicas);
    options.server_flags.push_back("--join_chunks=off");
    ShardProcesses group(options);
    LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
    int64_t tokens_sent = 0;
    int64_t chunks_sent = 0;
    for (uint64_t step = 1; step <= 3; ++step) {
      LMHEAD_ASSERT_OK(RunStep(group.client(), shape, step));
      for (const Rows& rows : StepRows(shape, step)) {
        tokens_sent += rows.num_tokens();
        chunks_sent += (rows.num_tokens() + e2e::FeedOptions().chunk_tokens - 1) /
                       e2e::FeedOptions().chunk_tokens;
      }
      const auto text = demo::ScrapeMetrics(group.server().metrics_address());
      LMHEAD_ASSERT_OK(text);
      double tokens = 0.0, batches = 0.0;
      for (int replica = 0; replica < replicas.num_replicas; ++replica) {
        const double of_replica = ReplicaMetric(*text, "lmhead_replica_tokens_total", replica);
        EXPECT_GT(of_replica, 0.0) << "replica " << replica;
        tokens += of_replica;
        batches += ReplicaMetric(*text, "lmhead_replica_batches_total", replica);
      }
      EXPECT_EQ(tokens, tokens_sent);
      EXPECT_EQ(batches, chunks_sent);
      EXPECT_EQ(ServerMetric(*text, "lmhead_tokens_total"), tokens_sent);
      EXPECT_EQ(ServerMetric(*text, "lmhead_replica_batch_bytes"), 0.0) << "none is on its way";
    }
  }
}

// Teachers, lists, policies and every output travel to a replica elsewhere and back.
TEST(ShardReplicaTest, EveryGoldenCasePasses) {
  for (const ReplicaLayout& replicas : {ReplicaLayout{{2, 1, 1}, 2}, ReplicaLayout{{4, 1, 1}, 2}}) {
    ShardProcesses group(OptionsOf(replicas));
    const CommandResult result =
        RunCommand(absl::StrCat("'", PathBesideTest("lmhead-bench"), "' golden ", GoldenFolder(),
                                " --address=", group.server().address()));
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("31 passed, 0 failed, 0 not yet"));
  }
}

class ShardReplicaFailureTest : public ::testing::Test {
 protected:
  const TemporaryFolder directory_;
};

// A follower that is killed in the middle of a step ends it for all replicas, with an error that
// names it; when it is there again, its head comes back from its checkpoint.
TEST_F(ShardReplicaFailureTest, AReplicaThatIsKilledEndsTheStepAndItsHeadIsRestored) {
  const HeadShape shape = {.vocab_size = 601};
  GroupOptions options = OptionsOf({{4, 2, 2}, 2});
  options.server_flags.push_back(absl::StrCat("--checkpoint_dir=", directory_.path()));
  ShardProcesses group(options);
  std::mt19937_64 random(7);
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  LMHEAD_ASSERT_OK(RunStep(group.client(), shape, 1));
  v1::SaveCheckpointRequest save;
  save.set_head(shape.name);
  LMHEAD_ASSERT_OK(group.client()->SaveCheckpoint(save));
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    auto running = std::async(std::launch::async, [&]() -> absl::Status {
      for (uint64_t step = 2;; ++step) {
        const auto rows = RunStep(group.client(), shape, step);
        if (!rows.ok()) return rows.status();
      }
    });
    absl::SleepFor(absl::Milliseconds(50 + random() % 300));
    const absl::Time killed = absl::Now();
    group.follower(0).Kill();
    const absl::Status failure = running.get();
    EXPECT_LT(absl::Now() - killed, kBound);
    // Of its two ranks the one that was found out first.
    EXPECT_THAT(std::string(failure.message()), HasSubstr("(replica 1)")) << failure;
    group.AwaitReady(false);
    group.StartFollower(0);
    group.AwaitReady(true);
    LMHEAD_ASSERT_OK(group.client()->DeleteHead(shape.name, /*force=*/true));
    v1::RestoreCheckpointRequest restore;
    restore.set_head(shape.name);
    const auto restored = group.client()->RestoreCheckpoint(restore);
    LMHEAD_ASSERT_OK(restored);
    EXPECT_EQ(restored->head().last_committed_step(), 1u);
  }
  for (uint64_t step = 2; step <= 3; ++step) {
    LMHEAD_ASSERT_OK(RunStep(group.client(), shape, step));
  }
  e2e::OracleTrainer oracle(shape);
  for (uint64_t step = 1; step <= 3; ++step) oracle.Step(StepRows(shape, step), step);
  const auto weight = e2e::ReadTensor(group.client(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
}

// A follower that hangs loses nothing: the head goes on from its last commit.
TEST_F(ShardReplicaFailureTest, AReplicaThatHangsAndGoesOnKeepsItsState) {
  const HeadShape shape;
  ShardProcesses group(OptionsOf({{2, 1, 1}, 2}));
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  LMHEAD_ASSERT_OK(RunStep(group.client(), shape, 1));
  const auto incarnation = e2e::BeginStep(group.client(), shape, 2, 1);
  LMHEAD_ASSERT_OK(incarnation);
  group.follower(0).Signal(SIGSTOP);
  const absl::Time stopped = absl::Now();
  Rows rows = e2e::MakeRows(shape, 400, 2, 0);
  const auto fed = e2e::Feed(group.client(), shape, 2, *incarnation, e2e::WorkerName(0), {}, &rows);
  EXPECT_LT(absl::Now() - stopped, kBound);
  ASSERT_FALSE(fed.ok());
  EXPECT_THAT(std::string(fed.status().message()), HasSubstr("rank 1 (replica 1)"));
  group.AwaitReady(false);
  LMHEAD_ASSERT_OK(e2e::AbortStep(group.client(), shape, 2, *incarnation));
  group.follower(0).Signal(SIGCONT);
  group.AwaitReady(true);
  LMHEAD_ASSERT_OK(RunStep(group.client(), shape, 2));
  e2e::OracleTrainer oracle(shape);
  for (uint64_t step = 1; step <= 2; ++step) oracle.Step(StepRows(shape, step), step);
  const auto weight = e2e::ReadTensor(group.client(), shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
}

// What replicas have saved, one rank goes on with, and the other way round.
TEST_F(ShardReplicaFailureTest, CheckpointsGoFromReplicasToOneRankAndBack) {
  const HeadShape shape = {.dtype = DType::kBFloat16};
  const std::string checkpoints = absl::StrCat("--checkpoint_dir=", directory_.path());
  std::vector<float> weight;
  uint64_t step = 0;
  for (const int num_replicas : {2, 1, 2}) {
    GroupOptions options;
    if (num_replicas > 1) options = OptionsOf({{4, 2, 1}, 2});
    options.server_flags.push_back(checkpoints);
    std::unique_ptr<ShardProcesses> group;
    std::unique_ptr<LocalServer> one_rank;
    std::unique_ptr<Client> connected;
    if (num_replicas > 1) {
      group = std::make_unique<ShardProcesses>(options);
    } else {
      one_rank = e2e::StartServer({checkpoints});
      connected = e2e::ConnectTo(one_rank->address());
    }
    Client* const client = group != nullptr ? group->client() : connected.get();
    if (step == 0) {
      LMHEAD_ASSERT_OK(e2e::CreateHead(client, shape));
    } else {
      v1::RestoreCheckpointRequest restore;
      restore.set_head(shape.name);
      const auto restored = client->RestoreCheckpoint(restore);
      LMHEAD_ASSERT_OK(restored);
      EXPECT_EQ(restored->head().last_committed_step(), step);
      const auto read = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_MASTER_WEIGHT);
      LMHEAD_ASSERT_OK(read);
      EXPECT_EQ(*read, weight);
    }
    LMHEAD_ASSERT_OK(RunStep(client, shape, ++step));
    const auto read = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_MASTER_WEIGHT);
    LMHEAD_ASSERT_OK(read);
    weight = *read;
    v1::SaveCheckpointRequest save;
    save.set_head(shape.name);
    LMHEAD_ASSERT_OK(client->SaveCheckpoint(save));
  }
  // Three servers, one training: as far from the oracle as bfloat16's rounding of the weight is.
  e2e::OracleTrainer oracle(shape);
  e2e::OracleTrainer plain(shape, DType::kBFloat16);
  for (uint64_t each = 1; each <= step; ++each) {
    oracle.Step(StepRows(shape, each), each);
    plain.Step(StepRows(shape, each), each);
  }
  const std::vector<float> plain_weight(plain.weight().begin(), plain.weight().end());
  const double plain_error = e2e::RelativeError(plain_weight, std::span(oracle.weight()));
  EXPECT_LE(e2e::RelativeError(weight, std::span(oracle.weight())),
            e2e::HoldsBFloat16Logits(shape) ? 1e-4 + 2.0 * plain_error : 1e-4);
}

TEST(ShardReplicaTest, NumbersThatDoNotFitAreRefused) {
  const auto serve = [](const std::string& flags) {
    return RunCommand(absl::StrCat("timeout 60 '", e2e::LmheadBinary(),
                                   "' serve --backend=cpu --listen=127.0.0.1:0 ", flags, " 2>&1"));
  };
  const CommandResult uneven = serve("--ranks=3 --replicas=2");
  EXPECT_EQ(uneven.exit_code, 2);
  EXPECT_THAT(uneven.output, HasSubstr("--replicas: got 2, which does not divide the 3 ranks"));
  const CommandResult none = serve("--replicas=0");
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.output, HasSubstr("--replicas: got 0, wanted 1 to"));
}

}  // namespace
}  // namespace lmhead::shard
