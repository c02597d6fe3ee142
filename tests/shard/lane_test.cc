// The lanes of a replica elsewhere, through a proxy that counts and cuts its connections.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/limits.h"
#include "tests/e2e/service_fixture.h"
#include "tests/fault/chaos_proxy.h"
#include "tests/shard/shard_processes.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::shard {
namespace {

using e2e::HeadShape;
using e2e::Rows;
using fault::ChaosProxy;
using fault::Weather;
using ::testing::HasSubstr;

// Batches of several parts.
HeadShape WideShape() { return {.vocab_size = 211, .hidden_size = 512}; }
// Batches that are more than the kernel's buffers of all connections hold.
HeadShape VeryWideShape() { return {.vocab_size = 61, .hidden_size = 8192}; }

// A server whose second replica is a follower that calls through the proxy.
class ShardLaneTest : public ::testing::Test {
 protected:
  void Start(const ChaosProxy::Forecast& forecast) {
    std::vector<std::string> flags = FlagsOf({2, 1, 1});
    flags.insert(flags.end(),
                 {absl::StrCat("--backend=", TestBackend()), "--replicas=2",
                  absl::StrCat("--chunk_bytes_max=", 40 * kMiB), "--join_chunks=off",
                  absl::StrCat("--checkpoint_dir=", directory_.path()), "--checkpoint_keep=1",
                  absl::StrCat("--collective_timeout_seconds=", timeout_seconds_)});
    auto server = LocalServer::Start(e2e::LmheadBinary(), flags);
    LMHEAD_ASSERT_OK(server);
    server_ = *std::move(server);
    proxy_ = std::make_unique<ChaosProxy>(server_->group_address(), forecast);
    follower_ = std::make_unique<FollowerChild>(std::vector<std::string>{e2e::LmheadBinary()},
                                                proxy_->address(), 1);
    client_ = e2e::ConnectTo(server_->address());
    ASSERT_NO_FATAL_FAILURE(AwaitReady());
    LMHEAD_ASSERT_OK(e2e::CreateHead(client_.get(), shape_));
  }

  void AwaitReady() {
    const absl::Time deadline = absl::Now() + absl::Seconds(120);
    while (!IsServing(server_->address(), "readiness")) {
      ASSERT_LT(absl::Now(), deadline) << server_->Log() << "--\n" << follower_->Log();
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  Rows StepRows(uint64_t step) const { return e2e::MakeRows(shape_, num_rows_, step, 0); }

  // One step, aborted when it fails. A commit that fails may have broken the head.
  absl::Status TryStep(uint64_t step) {
    const auto incarnation = e2e::BeginStep(client_.get(), shape_, step, 1);
    if (!incarnation.ok()) return incarnation.status();
    absl::Status status = RunOpenStep(step, *incarnation);
    if (!status.ok()) e2e::AbortStep(client_.get(), shape_, step, *incarnation).IgnoreError();
    return status;
  }

  absl::Status RunOpenStep(uint64_t step, uint64_t incarnation) {
    Rows rows = StepRows(step);
    const auto fed = e2e::Feed(client_.get(), shape_, step, incarnation, e2e::WorkerName(0),
                               {.num_connections = 2, .chunk_tokens = 1000}, &rows);
    if (!fed.ok()) return fed.status();
    const auto prepared = e2e::PrepareStep(client_.get(), shape_, step, incarnation);
    if (!prepared.ok()) return prepared.status();
    const double multiplier = 1.0 / static_cast<double>(prepared->sums().num_valid_tokens());
    return e2e::CommitStep(client_.get(), shape_, step, incarnation, e2e::LearningRate(step),
                           multiplier)
        .status();
  }

  void ExpectTrainedAsTheOracle(uint64_t last_step) {
    e2e::OracleTrainer oracle(shape_);
    for (uint64_t step = 1; step <= last_step; ++step) {
      const std::vector<Rows> rows = {StepRows(step)};
      oracle.Step(rows, step);
    }
    const auto weight = e2e::ReadTensor(client_.get(), shape_, v1::TENSOR_KIND_WEIGHT);
    LMHEAD_ASSERT_OK(weight);
    EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
  }

  HeadShape shape_ = WideShape();
  int64_t num_rows_ = 4000;
  double timeout_seconds_ = kTimeoutSeconds;
  const TemporaryFolder directory_;
  std::unique_ptr<LocalServer> server_;
  std::unique_ptr<ChaosProxy> proxy_;
  std::unique_ptr<FollowerChild> follower_;
  std::unique_ptr<Client> client_;
};

// Hidden states go over every lane, one connection each, and none over the follower's call. What
// travels up is the follower's to send: gradients.
TEST_F(ShardLaneTest, BatchesGoOverEveryLane) {
  timeout_seconds_ = 60.0;  // So that nobody calls twice.
  ASSERT_NO_FATAL_FAILURE(Start(nullptr));
  for (uint64_t step = 1; step <= 4; ++step) LMHEAD_ASSERT_OK(TryStep(step));
  ASSERT_NO_FATAL_FAILURE(ExpectTrainedAsTheOracle(4));
  const std::vector<std::string> sent = proxy_->SentByClients();
  ASSERT_EQ(sent.size(), size_t{1 + kLanesOfARank}) << "the follower's call and its lanes";
  size_t largest = 0;
  for (size_t lane = 1; lane < sent.size(); ++lane) {
    EXPECT_GT(sent[lane].size(), size_t{200'000}) << "lane " << lane;
    largest = std::max(largest, sent[lane].size());
  }
  EXPECT_LT(sent[0].size(), largest / 4) << "the follower's call carries no tensors";
}

// Wherever a lane is cut, the step it was in fails and nothing else does: the follower calls again,
// its shard is still there, and in the end every step was done once.
TEST_F(ShardLaneTest, LanesThatAreCutCostAStepAndNothingElse) {
  constexpr int kStormy = 16;  // Connections: some four calls of the follower.
  constexpr uint64_t kSteps = 6;
  const uint64_t seed = Seed();
  const auto forecast = [seed](int connection) -> Weather {
    std::mt19937_64 random(seed + static_cast<uint64_t>(connection));
    // The first is that of the call itself; a lane lives through some batches, or not one message.
    if (connection == 0 || connection > kStormy) return {};
    const bool may_be_calm = connection % kLanesOfARank != 0;  // One of each call is not.
    if (may_be_calm && random() % 3 == 0) return {};
    return {.cut_after_bytes = static_cast<int64_t>(random() >> (44 + random() % 16)),
            .reset = random() % 2 == 0};
  };
  ASSERT_NO_FATAL_FAILURE(Start(forecast));
  int num_failures = 0;
  for (uint64_t step = 1; step <= kSteps;) {
    const absl::Status status = TryStep(step);
    if (status.ok()) {
      v1::SaveCheckpointRequest save;
      save.set_head(shape_.name);
      client_->SaveCheckpoint(save).IgnoreError();
      ++step;
      continue;
    }
    ASSERT_LT(++num_failures, 100) << status;
    ASSERT_NO_FATAL_FAILURE(AwaitReady());
    v1::RestoreCheckpointRequest restore;
    restore.set_head(shape_.name);
    if (!absl::IsAborted(status) || step == 1) continue;  // The head goes on where it was.
    const auto restored = client_->RestoreCheckpoint(restore);
    if (restored.ok()) step = restored->head().last_committed_step() + 1;
  }
  EXPECT_GT(proxy_->num_cuts(), 0);
  ExpectTrainedAsTheOracle(kSteps);
}

// What gRPC still holds of a batch that a hanging follower does not take costs the step's error no
// time.
TEST_F(ShardLaneTest, AFollowerThatHangsWithFullLanesEndsTheStepInTime) {
  shape_ = VeryWideShape();
  ASSERT_NO_FATAL_FAILURE(Start(nullptr));
  const auto incarnation = e2e::BeginStep(client_.get(), shape_, 1, 1);
  LMHEAD_ASSERT_OK(incarnation);
  Rows rows = StepRows(1);
  follower_->Signal(SIGSTOP);
  const absl::Time stopped = absl::Now();
  const auto fed = e2e::Feed(client_.get(), shape_, 1, *incarnation, e2e::WorkerName(0),
                             {.chunk_tokens = 1000}, &rows);
  EXPECT_LT(absl::Now() - stopped, kBound);
  ASSERT_FALSE(fed.ok());
  EXPECT_THAT(std::string(fed.status().message()), HasSubstr("rank 1 (replica 1)"));
  LMHEAD_ASSERT_OK(e2e::AbortStep(client_.get(), shape_, 1, *incarnation));
  follower_->Signal(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(AwaitReady());
  num_rows_ = 100;
  LMHEAD_ASSERT_OK(TryStep(1));
}

}  // namespace
}  // namespace lmhead::shard
