// Followers that die, hang and come back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/service_fixture.h"
#include "tests/shard/shard_processes.h"

namespace lmhead::shard {
namespace {

using e2e::HeadShape;
using e2e::Rows;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Large enough that a step takes a while, small enough for the oracle.
HeadShape Shape() { return {.vocab_size = 601}; }

std::vector<Rows> StepRows(const HeadShape& shape, uint64_t step) {
  return {e2e::MakeRows(shape, 400, step, 0), e2e::MakeRows(shape, 400, step, 1)};
}

absl::Status RunStep(Client* client, const HeadShape& shape, uint64_t step) {
  std::vector<Rows> rows = StepRows(shape, step);
  Client* const workers[] = {client, client};
  return e2e::RunStep(client, workers, shape, step, {}, &rows).status();
}

// Trains `shape` from `first` to `last`.
void Train(Client* client, const HeadShape& shape, uint64_t first, uint64_t last) {
  for (uint64_t step = first; step <= last; ++step) {
    LMHEAD_ASSERT_OK(RunStep(client, shape, step));
  }
}

// The head is what `last` steps from the start make of it.
void ExpectTrained(Client* client, const HeadShape& shape, uint64_t last) {
  e2e::OracleTrainer oracle(shape);
  for (uint64_t step = 1; step <= last; ++step) {
    const std::vector<Rows> rows = StepRows(shape, step);
    oracle.Step(rows, step);
  }
  const auto weight = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_WEIGHT);
  LMHEAD_ASSERT_OK(weight);
  EXPECT_LE(e2e::RelativeError(*weight, std::span(oracle.weight())), 1e-5);
}

// Runs a step, does something in the middle of it, and answers what became of the step and when.
struct Interrupted {
  absl::Status status;
  absl::Duration took;
};
Interrupted InterruptStep(Client* client, const HeadShape& shape, uint64_t step,
                          absl::Duration after, const std::function<void()>& interrupt) {
  std::future<absl::Status> running =
      std::async(std::launch::async, [&] { return RunStep(client, shape, step); });
  absl::SleepFor(after);
  const absl::Time start = absl::Now();
  interrupt();
  const absl::Status status = running.get();
  return {status, absl::Now() - start};
}

absl::Status AbortOpenStep(Client* client, const HeadShape& shape) {
  const auto info = client->GetHead(shape.name);
  if (!info.ok()) return info.status();
  if (info->open_step() == 0) return absl::OkStatus();
  const auto server = client->GetServerInfo();
  if (!server.ok()) return server.status();
  return e2e::AbortStep(client, shape, info->open_step(), server->incarnation());
}

TEST(ShardFailureTest, AServerIsNotReadyBeforeItsFollowersAreThere) {
  auto server = e2e::StartServer(FlagsOf({2, 1, 1}));
  EXPECT_TRUE(IsServing(server->address(), "liveness"));
  EXPECT_FALSE(IsServing(server->address(), "readiness"));
  auto client = Client::Connect(server->address(), {.max_attempts = 1});
  LMHEAD_ASSERT_OK(client);
  const absl::Status refused = e2e::CreateHead(client->get(), Shape());
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1 is away"));
  const auto code = server->Stop();
  LMHEAD_ASSERT_OK(code);
  EXPECT_EQ(*code, 0);
}

// A follower that is killed takes its shards with it: the step ends, the head says why until it is
// deleted, and a new follower makes the group stand again.
TEST(ShardFailureTest, FollowersKilledAtRandomPoints) {
  std::mt19937_64 random(Seed());
  const HeadShape shape = Shape();
  ShardProcesses group({.layout = {4, 1, 1}, .collective_timeout_seconds = kTimeoutSeconds});
  for (int round = 0; round < 4; ++round) {
    LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
    Train(group.client(), shape, 1, 1);
    const size_t victim = random() % group.num_followers();
    const int rank = group.first_rank_of(victim);
    SCOPED_TRACE(absl::StrCat("round ", round, ", rank ", rank));
    const Interrupted step =
        InterruptStep(group.client(), shape, 2, absl::Milliseconds(random() % 60),
                      [&] { group.follower(victim).Kill(); });
    if (!step.status.ok()) {
      EXPECT_LT(step.took, kBound);
      EXPECT_THAT(std::string(step.status.message()), HasSubstr(absl::StrCat("rank ", rank)));
    }
    group.AwaitReady(false);
    group.StartFollower(victim);
    group.AwaitReady(true);
    // The step that was under way may have ended before the kill; the head is lost all the same.
    AbortOpenStep(group.client(), shape).IgnoreError();
    const absl::Status lost = RunStep(group.client(), shape, 3);
    EXPECT_EQ(lost.code(), absl::StatusCode::kAborted) << lost;
    // Killed within the update, the other ranks have done it and this one has not.
    EXPECT_THAT(
        std::string(lost.message()),
        AnyOf(HasSubstr(absl::StrCat("rank ", rank, " lost its shard")),
              AllOf(HasSubstr("not all of them did"), HasSubstr(absl::StrCat("rank ", rank)))));
    LMHEAD_ASSERT_OK(group.client()->DeleteHead(shape.name, /*force=*/true));
  }
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  Train(group.client(), shape, 1, 3);
  ExpectTrained(group.client(), shape, 3);
}

// A follower that hangs loses nothing: the step ends within the bound, and when the follower goes
// on, so does the head, from its last commit.
TEST(ShardFailureTest, AFollowerThatHangsAndGoesOnKeepsItsShards) {
  std::mt19937_64 random(Seed());
  const HeadShape shape = Shape();
  ShardProcesses group({.layout = {3, 1, 1}, .collective_timeout_seconds = kTimeoutSeconds});
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  uint64_t committed = 0;
  for (int round = 0; round < 3; ++round) {
    Train(group.client(), shape, committed + 1, committed + 1);
    ++committed;
    const size_t victim = random() % group.num_followers();
    const int rank = group.first_rank_of(victim);
    SCOPED_TRACE(absl::StrCat("round ", round, ", rank ", rank));
    auto incarnation = e2e::BeginStep(group.client(), shape, committed + 1, 1);
    LMHEAD_ASSERT_OK(incarnation);
    Rows rows = e2e::MakeRows(shape, 400, committed + 1, 0);
    group.follower(victim).Signal(SIGSTOP);
    const absl::Time stopped = absl::Now();
    const auto fed = e2e::Feed(group.client(), shape, committed + 1, *incarnation,
                               e2e::WorkerName(0), {}, &rows);
    EXPECT_LT(absl::Now() - stopped, kBound);
    ASSERT_FALSE(fed.ok());
    EXPECT_THAT(std::string(fed.status().message()), HasSubstr(absl::StrCat("rank ", rank)));
    group.AwaitReady(false);
    LMHEAD_ASSERT_OK(e2e::AbortStep(group.client(), shape, committed + 1, *incarnation));
    group.follower(victim).Signal(SIGCONT);
    group.AwaitReady(true);
  }
  Train(group.client(), shape, committed + 1, committed + 1);
  ExpectTrained(group.client(), shape, committed + 1);
}

TEST(ShardFailureTest, AServerEndsWhileAFollowerHangs) {
  const HeadShape shape = Shape();
  ShardProcesses group({.layout = {2, 1, 1},
                        .collective_timeout_seconds = 60.0,
                        .server_flags = {"--drain_timeout_seconds=1"}});
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  group.follower(0).Signal(SIGSTOP);
  const auto code = group.server().Stop(absl::Seconds(30));
  LMHEAD_ASSERT_OK(code);
  EXPECT_EQ(*code, 0);
}

TEST(ShardFailureTest, AFollowerEndsOnSigtermAndOutlivesItsServer) {
  ShardProcesses group({.layout = {2, 1, 1}});
  group.server().Kill();
  EXPECT_EQ(group.follower(0).Wait(absl::Seconds(1)), std::nullopt) << group.follower(0).Log();
  group.follower(0).Signal(SIGTERM);
  EXPECT_EQ(group.follower(0).Wait(absl::Seconds(30)), 0) << group.follower(0).Log();
}

TEST(ShardFailureTest, AFollowerThatDoesNotFitEndsAndSaysWhy) {
  ShardProcesses group({.layout = {2, 1, 1}});
  const std::vector<std::string> lmhead = {e2e::LmheadBinary()};
  FollowerChild unknown(lmhead, group.server().group_address(), 7);
  EXPECT_EQ(unknown.Wait(absl::Seconds(30)), 1);
  EXPECT_THAT(unknown.Log(), HasSubstr("rank 7 is not a follower's"));
  FollowerChild taken(lmhead, group.server().group_address(), 1);
  EXPECT_EQ(taken.Wait(absl::Seconds(3)), std::nullopt) << "it waits for its turn";
  EXPECT_THAT(taken.Log(), HasSubstr("rank 1 is taken by the follower at"));
  FollowerChild leaderless(lmhead, "nowhere", 1);
  EXPECT_EQ(leaderless.Wait(absl::Seconds(30)), 2);
  EXPECT_THAT(leaderless.Log(), HasSubstr("--leader: got 'nowhere'"));
}

}  // namespace
}  // namespace lmhead::shard
