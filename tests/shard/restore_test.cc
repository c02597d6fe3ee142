// Heads come back from their checkpoints after processes of a group have been killed: by
// RestoreCheckpoint when a follower was started anew, by --restore when the server was.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/service_fixture.h"
#include "tests/shard/shard_processes.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::shard {
namespace {

namespace fs = std::filesystem;
using e2e::HeadShape;
using e2e::Rows;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kSteps = 10;

HeadShape Shape() { return {.vocab_size = 601}; }

// A folder for checkpoints, and rank threads whose sums have one order.
class ShardRestoreTest : public ::testing::Test {
 protected:
  ShardRestoreTest() { setenv("OMP_NUM_THREADS", "1", 1); }
  ~ShardRestoreTest() override { unsetenv("OMP_NUM_THREADS"); }

  GroupOptions Options(const Layout& layout) const {
    return {.layout = layout,
            .collective_timeout_seconds = kTimeoutSeconds,
            .server_flags = {absl::StrCat("--checkpoint_dir=", directory_.path()),
                             "--checkpoint_keep=2", "--join_chunks=off"}};
  }

  const TemporaryFolder directory_;
};

// A client that tells of a lost server at once.
std::unique_ptr<Client> Impatient(const std::string& address) {
  auto client = Client::Connect(address, {.max_attempts = 1});
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

absl::Status RunStep(Client* client, const HeadShape& shape, uint64_t step) {
  std::vector<Rows> rows = {e2e::MakeRows(shape, 300, step, 0)};
  Client* const workers[] = {client};
  return e2e::RunStep(client, workers, shape, step, {}, &rows).status();
}

absl::Status Save(Client* client, const HeadShape& shape) {
  v1::SaveCheckpointRequest request;
  request.set_head(shape.name);
  return client->SaveCheckpoint(request).status();
}

// From the newest checkpoint; the step it holds.
absl::StatusOr<uint64_t> Restore(Client* client, const HeadShape& shape) {
  v1::RestoreCheckpointRequest request;
  request.set_head(shape.name);
  const auto response = client->RestoreCheckpoint(request);
  if (!response.ok()) return response.status();
  return response->head().last_committed_step();
}

// Steps `first` to kSteps with a checkpoint after every second one, up to the first failure.
absl::Status Train(Client* client, const HeadShape& shape, uint64_t first) {
  for (uint64_t step = first; step <= kSteps; ++step) {
    if (absl::Status status = RunStep(client, shape, step); !status.ok()) return status;
    if (step % 2 != 0) continue;
    if (absl::Status status = Save(client, shape); !status.ok()) return status;
  }
  return absl::OkStatus();
}

struct State {
  std::vector<float> weight;
  std::vector<float> bias;
};
State Read(Client* client, const HeadShape& shape) {
  const auto weight = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_WEIGHT);
  const auto bias = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_BIAS);
  EXPECT_TRUE(weight.ok()) << weight.status();
  EXPECT_TRUE(bias.ok()) << bias.status();
  return weight.ok() && bias.ok() ? State{*weight, *bias} : State{};
}

// What the steps come to when nothing happens.
State TrainUndisturbed(const Layout& layout) {
  const HeadShape shape = Shape();
  ShardProcesses group({.layout = layout, .server_flags = {"--join_chunks=off"}});
  EXPECT_TRUE(e2e::CreateHead(group.client(), shape).ok());
  for (uint64_t step = 1; step <= kSteps; ++step) {
    const absl::Status status = RunStep(group.client(), shape, step);
    EXPECT_TRUE(status.ok()) << status;
  }
  return Read(group.client(), shape);
}

// Kills the processes of a group while they train, and brings them back the documented way.
class Saboteur {
 public:
  Saboteur(ShardProcesses* group, const HeadShape& shape, uint64_t seed)
      : group_(*group), shape_(shape), random_(seed) {}

  // Trains until something was killed, and brings it back. Returns the step that the head is at.
  uint64_t Round(uint64_t first) {
    const auto client = Impatient(group_.server().address());
    std::future<absl::Status> training =
        std::async(std::launch::async, [&] { return Train(client.get(), shape_, first); });
    absl::SleepFor(absl::Milliseconds(random_() % 400));
    const bool server = KillSome();
    training.get().IgnoreError();  // Of a kill after the last step there is nothing to see.
    return server ? ComeBackWithServer() : ComeBackWithFollowers();
  }

 private:
  // At least one of the processes; whether the server was among them.
  bool KillSome() {
    const uint64_t all = (uint64_t{2} << group_.num_followers()) - 1;
    const uint64_t victims = 1 + random_() % all;
    dead_.clear();
    for (size_t index = 0; index < group_.num_followers(); ++index) {
      if ((victims >> index & 1) == 0) continue;
      group_.follower(index).Kill();
      dead_.push_back(index);
    }
    const bool server = (victims >> group_.num_followers() & 1) != 0;
    if (server) group_.server().Kill();
    return server;
  }

  void StartDeadFollowers() {
    for (const size_t index : dead_) group_.StartFollower(index);
    dead_.clear();
  }

  uint64_t ComeBackWithServer() {
    StartDeadFollowers();
    group_.StartServerAgain({"--restore"});
    const auto head = group_.client()->GetHead(shape_.name);
    EXPECT_TRUE(head.ok()) << head.status();
    return head.ok() ? head->last_committed_step() : 0;
  }

  uint64_t ComeBackWithFollowers() {
    group_.AwaitReady(false);
    StartDeadFollowers();
    group_.AwaitReady(true);
    if (random_() % 3 == 0) {
      // Once more while the head is being restored.
      const auto client = Impatient(group_.server().address());
      std::future<absl::Status> restoring =
          std::async(std::launch::async, [&] { return Restore(client.get(), shape_).status(); });
      absl::SleepFor(absl::Milliseconds(random_() % 20));
      dead_ = {random_() % group_.num_followers()};
      group_.follower(dead_.front()).Kill();
      restoring.get().IgnoreError();
      group_.AwaitReady(false);
      StartDeadFollowers();
      group_.AwaitReady(true);
    }
    const auto step = Restore(group_.client(), shape_);
    EXPECT_TRUE(step.ok()) << step.status() << "\n" << group_.server().Log();
    return step.value_or(0);
  }

  ShardProcesses& group_;
  const HeadShape shape_;
  std::mt19937_64 random_;
  std::vector<size_t> dead_;
};

class KillsTest : public ShardRestoreTest, public ::testing::WithParamInterface<Layout> {};

TEST_P(KillsTest, ProcessesKilledAtRandomPointsLeaveNothingBehind) {
  const HeadShape shape = Shape();
  const State want = TrainUndisturbed(GetParam());
  ShardProcesses group(Options(GetParam()));
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  LMHEAD_ASSERT_OK(Save(group.client(), shape));
  Saboteur saboteur(&group, shape, Seed());
  uint64_t step = 0;
  for (int round = 0; round < 5 && !HasFailure(); ++round) step = saboteur.Round(step + 1);
  LMHEAD_ASSERT_OK(Train(group.client(), shape, step + 1));

  const State got = Read(group.client(), shape);
  EXPECT_EQ(got.weight, want.weight);
  EXPECT_EQ(got.bias, want.bias);
  e2e::OracleTrainer oracle(shape);
  for (step = 1; step <= kSteps; ++step) {
    const std::vector<Rows> rows = {e2e::MakeRows(shape, 300, step, 0)};
    oracle.Step(rows, step);
  }
  EXPECT_LE(e2e::RelativeError(got.weight, std::span(oracle.weight())), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Layouts, KillsTest,
                         ::testing::Values(Layout{2, 1, 1}, Layout{4, 1, 1}, Layout{4, 2, 2}),
                         [](const auto& test) {
                           return absl::StrCat(test.param.num_ranks, "Ranks", test.param.num_local,
                                               "Here");
                         });

// The server stays; a follower is another process than before. Its heads say so at once, whatever
// they were doing, and one call brings each of them back.
TEST_F(ShardRestoreTest, OneCallBringsAHeadBackWhoseFollowerWasStartedAnew) {
  const HeadShape shape = Shape();
  const HeadShape idle = {.name = "idle", .vocab_size = 9};  // The last rank has no rows.
  ShardProcesses group(Options({4, 2, 1}));
  Client* const client = group.client();
  for (const HeadShape& each : {shape, idle}) {
    LMHEAD_ASSERT_OK(e2e::CreateHead(client, each));
    LMHEAD_ASSERT_OK(RunStep(client, each, 1));
    LMHEAD_ASSERT_OK(Save(client, each));
  }
  LMHEAD_ASSERT_OK(RunStep(client, shape, 2));  // After the checkpoint: gone with the follower.
  LMHEAD_ASSERT_OK(e2e::BeginStep(client, shape, 3, 1));
  group.follower(1).Kill();
  group.AwaitReady(false);
  group.StartFollower(1);
  group.AwaitReady(true);
  for (const HeadShape& each : {shape, idle}) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    for (;;) {
      const auto head = client->GetHead(each.name);
      LMHEAD_ASSERT_OK(head);
      if (!head->poisoned_by().empty()) break;
      ASSERT_LT(absl::Now(), deadline) << group.server().Log();
      absl::SleepFor(absl::Milliseconds(10));
    }
    const absl::Status lost = RunStep(client, each, 3);
    EXPECT_EQ(lost.code(), absl::StatusCode::kAborted) << lost;
    EXPECT_THAT(std::string(lost.message()),
                AllOf(HasSubstr("rank 3 lost its shard"), HasSubstr("RestoreCheckpoint")));
    const auto step = Restore(client, each);
    LMHEAD_ASSERT_OK(step);
    EXPECT_EQ(*step, 1u);
    LMHEAD_ASSERT_OK(RunStep(client, each, 2));
  }
  e2e::OracleTrainer oracle(shape);
  for (uint64_t step = 1; step <= 2; ++step) {
    const std::vector<Rows> rows = {e2e::MakeRows(shape, 300, step, 0)};
    oracle.Step(rows, step);
  }
  const State trained = Read(client, shape);
  EXPECT_LE(e2e::RelativeError(trained.weight, std::span(oracle.weight())), 1e-5);

  // A file for each rank, which any other number of ranks restores.
  LMHEAD_ASSERT_OK(Save(client, shape));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(fs::exists(fs::path(directory_.path()) / shape.name / "step-000000000002" /
                           absl::StrCat("shard-0000", rank, "-of-00004.safetensors")));
  }
  const auto one_rank =
      e2e::StartServer({absl::StrCat("--checkpoint_dir=", directory_.path()), "--restore"});
  const State there = Read(e2e::ConnectTo(one_rank->address()).get(), shape);
  EXPECT_EQ(there.weight, trained.weight);
  EXPECT_EQ(there.bias, trained.bias);
}

// A follower that is away may come back with its shards: nothing is restored over them.
TEST_F(ShardRestoreTest, NothingIsRestoredWhileAFollowerIsAway) {
  const HeadShape shape = Shape();
  ShardProcesses group(Options({2, 1, 1}));
  const auto client = Impatient(group.server().address());
  LMHEAD_ASSERT_OK(e2e::CreateHead(client.get(), shape));
  LMHEAD_ASSERT_OK(Save(client.get(), shape));
  LMHEAD_ASSERT_OK(RunStep(client.get(), shape, 1));
  group.follower(0).Signal(SIGSTOP);
  group.AwaitReady(false);
  const absl::Status refused = Restore(client.get(), shape).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1 is away"));
  group.follower(0).Signal(SIGCONT);
  group.AwaitReady(true);
  LMHEAD_ASSERT_OK(RunStep(client.get(), shape, 2));
  // Now that it is there, it goes back when it is told to.
  const auto step = Restore(client.get(), shape);
  LMHEAD_ASSERT_OK(step);
  EXPECT_EQ(*step, 0u);
}

// Before its followers are there, a server with --restore has nothing to lose.
TEST_F(ShardRestoreTest, AServerThatWaitsForItsFollowersEndsOnSigterm) {
  std::vector<std::string> command = {e2e::LmheadBinary(), "serve", "--listen=127.0.0.1:0",
                                      "--restore"};
  for (const std::string& flag : Options({2, 1, 1}).server_flags) command.push_back(flag);
  for (const std::string& flag : FlagsOf({2, 1, 1})) command.push_back(flag);
  Child server(command);
  for (const absl::Time deadline = absl::Now() + absl::Seconds(60);
       server.Log().find("rank 1 is away") == std::string::npos;) {
    ASSERT_LT(absl::Now(), deadline) << server.Log();
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(server.Wait(absl::Milliseconds(300)), std::nullopt) << server.Log();
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(30)), 0) << server.Log();
}

}  // namespace
}  // namespace lmhead::shard
