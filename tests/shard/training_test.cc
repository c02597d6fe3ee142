// Training over processes gives what one rank gives, whatever the layout.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
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

constexpr uint64_t kSteps = 3;

struct Trained {
  std::vector<float> weight;
  std::vector<float> bias;
  std::vector<float> grad_hidden_states;  // Of the last step's first worker.
  double loss_sum = 0.0;
};

// Trains a fresh head with one worker, whose chunks arrive in one order.
Trained Train(Client* client, const HeadShape& shape) {
  Trained trained;
  const absl::Status created = e2e::CreateHead(client, shape);
  EXPECT_TRUE(created.ok()) << created;
  for (uint64_t step = 1; step <= kSteps; ++step) {
    std::vector<Rows> rows = {e2e::MakeRows(shape, 150, step, 0)};
    Client* const workers[] = {client};
    const auto outcome = e2e::RunStep(client, workers, shape, step, {}, &rows);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    if (!outcome.ok()) return trained;
    trained.loss_sum = outcome->prepared.sums().loss_sum();
    trained.grad_hidden_states = rows[0].grad_hidden_states;
  }
  const auto weight = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_WEIGHT);
  EXPECT_TRUE(weight.ok()) << weight.status();
  if (weight.ok()) trained.weight = *weight;
  const auto bias = e2e::ReadTensor(client, shape, v1::TENSOR_KIND_BIAS);
  EXPECT_TRUE(bias.ok()) << bias.status();
  if (bias.ok()) trained.bias = *bias;
  return trained;
}

void ExpectClose(const Trained& got, const Trained& want) {
  const auto error = [](const std::vector<float>& a, const std::vector<float>& b) {
    return e2e::RelativeError(std::span(a), std::span<const float>(b));
  };
  ASSERT_EQ(got.weight.size(), want.weight.size());
  EXPECT_LE(error(got.weight, want.weight), 1e-5);
  EXPECT_LE(error(got.bias, want.bias), 1e-5);
  EXPECT_LE(error(got.grad_hidden_states, want.grad_hidden_states), 1e-5);
  EXPECT_NEAR(got.loss_sum, want.loss_sum, 1e-6 * want.loss_sum);
}

void ExpectSame(const Trained& got, const Trained& want) {
  EXPECT_EQ(got.weight, want.weight);
  EXPECT_EQ(got.bias, want.bias);
  EXPECT_EQ(got.grad_hidden_states, want.grad_hidden_states);
  EXPECT_EQ(got.loss_sum, want.loss_sum);
}

std::string NameOf(const Layout& layout) {
  return absl::StrCat(layout.num_ranks, " ranks, ", layout.num_local, " here, ",
                      layout.ranks_per_follower, " a follower");
}

// One thread a rank: sums in a rank then have one order whatever the layout, so that groups of as
// many ranks agree to the bit.
TEST(ShardTrainingTest, EveryLayoutGivesWhatOneRankGives) {
  setenv("OMP_NUM_THREADS", "1", 1);
  for (const v1::Schedule schedule : {v1::SCHEDULE_RETAIN, v1::SCHEDULE_RECOMPUTE}) {
    const HeadShape shape = {.schedule = schedule};
    const auto one_rank = e2e::StartServer();
    const Trained want = Train(e2e::ConnectTo(one_rank->address()).get(), shape);
    std::map<int, Trained> first_of_size;
    for (const Layout& layout : {Layout{2, 2, 1}, Layout{2, 1, 1}, Layout{4, 4, 1}, Layout{4, 2, 1},
                                 Layout{4, 1, 3}, Layout{4, 1, 1}}) {
      SCOPED_TRACE(NameOf(layout));
      ShardProcesses group({.layout = layout, .server_flags = {"--join_chunks=off"}});
      const Trained got = Train(group.client(), shape);
      ExpectClose(got, want);
      const auto [first, is_first] = first_of_size.emplace(layout.num_ranks, got);
      if (!is_first) ExpectSame(got, first->second);
    }
  }
  unsetenv("OMP_NUM_THREADS");
}

// More ranks than rows to go round: the last one owns none.
TEST(ShardTrainingTest, ARankWithoutRowsTakesPart) {
  const HeadShape shape = {.vocab_size = 9};
  const auto one_rank = e2e::StartServer();
  const Trained want = Train(e2e::ConnectTo(one_rank->address()).get(), shape);
  ShardProcesses group({.layout = {4, 2, 2}});
  ExpectClose(Train(group.client(), shape), want);
}

TEST(ShardTrainingTest, EveryRankReportsItsDeviceAndMemory) {
  const HeadShape shape;
  ShardProcesses group({.layout = {3, 2, 1}});
  LMHEAD_ASSERT_OK(e2e::CreateHead(group.client(), shape));
  const auto deadline = absl::Now() + absl::Seconds(60);
  // The follower's memory comes with its next answer to a ping.
  for (;;) {
    auto info = group.client()->GetServerInfo();
    LMHEAD_ASSERT_OK(info);
    ASSERT_EQ(info->devices_size(), 3);
    ASSERT_EQ(info->memory_size(), 3);
    EXPECT_EQ(info->devices(2).rank(), 2);
    EXPECT_EQ(info->devices(2).name(), info->devices(0).name());
    EXPECT_GT(info->memory(0).live_bytes(), 0);
    EXPECT_EQ(info->memory(1).live_bytes(), info->memory(0).live_bytes());
    EXPECT_GT(info->memory(2).limit_bytes(), 0);
    if (info->memory(2).live_bytes() == info->memory(0).live_bytes()) break;
    ASSERT_LT(absl::Now(), deadline) << info->DebugString();
    absl::SleepFor(absl::Milliseconds(100));
  }
}

}  // namespace
}  // namespace lmhead::shard
