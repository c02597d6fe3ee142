#include "server/config/server_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

namespace lmhead {
namespace {

using ::testing::HasSubstr;

TEST(ServerConfig, DefaultsAreValid) { EXPECT_TRUE(ValidateServerConfig({}).ok()); }

struct BadConfig {
  const char* name;
  std::function<void(ServerConfig*)> spoil;
  std::string words;
};

class BadConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, NamesTheFlagGotAndWanted) {
  ServerConfig config;
  GetParam().spoil(&config);
  const absl::Status status = ValidateServerConfig(config);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().words));
}

INSTANTIATE_TEST_SUITE_P(
    All, BadConfigTest,
    ::testing::Values(
        BadConfig{"NoAddress", [](ServerConfig* c) { c->listen = ""; }, "--listen"},
        BadConfig{"NoPort", [](ServerConfig* c) { c->listen = "127.0.0.1"; },
                  "--listen: got '127.0.0.1', which has no port"},
        BadConfig{"LargePort", [](ServerConfig* c) { c->listen = "127.0.0.1:99999"; },
                  "--listen: got '127.0.0.1:99999', wanted host:port with a port of 0 to 65535"},
        BadConfig{"NamedPort", [](ServerConfig* c) { c->health_listen = "127.0.0.1:http"; },
                  "--health_listen: got '127.0.0.1:http'"},
        BadConfig{"NegativePort", [](ServerConfig* c) { c->listen = "127.0.0.1:-1"; },
                  "--listen: got '127.0.0.1:-1'"},
        BadConfig{"SocketWithoutAPath", [](ServerConfig* c) { c->listen = "unix:"; },
                  "--listen: got 'unix:', wanted unix:/path"},
        BadConfig{"SocketWithALongPath",
                  [](ServerConfig* c) { c->listen = "unix:/" + std::string(107, 'a'); },
                  "wanted unix:/path with 1 to 107 characters"},
        BadConfig{"MetricsAtASocket", [](ServerConfig* c) { c->metrics_listen = "unix:/run/m"; },
                  "--metrics_listen: got 'unix:/run/m', wanted host:port"},
        BadConfig{"FollowersAtASocket",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 2;
                    c->ranks.num_local = 1;
                    c->ranks.group_listen = "unix:/run/g";
                  },
                  "--group_listen: got 'unix:/run/g', wanted host:port"},
        BadConfig{"GpusForTheCpu",
                  [](ServerConfig* c) {
                    c->backend = BackendChoice::kCpu;
                    c->ranks.devices = {0, 1};
                  },
                  "--devices: got 0,1, but --backend=cpu"},
        BadConfig{"NegativeMemory", [](ServerConfig* c) { c->memory_limit_bytes = -1; },
                  "--memory_limit_bytes: got -1, wanted 0"},
        BadConfig{"NoSlots", [](ServerConfig* c) { c->staging_slots = 0; },
                  "--staging_slots: got 0, wanted 1 to"},
        BadConfig{"TooManySlots", [](ServerConfig* c) { c->staging_slots = kStagingSlotsMax + 1; },
                  "--staging_slots"},
        BadConfig{"SmallChunks", [](ServerConfig* c) { c->chunk_bytes_max = 1; },
                  "--chunk_bytes_max"},
        BadConfig{"LargeChunks", [](ServerConfig* c) { c->chunk_bytes_max = int64_t{1} << 40; },
                  "--chunk_bytes_max"},
        BadConfig{"MoreStreamsThanSlots",
                  [](ServerConfig* c) {
                    c->staging_slots = 4;
                    c->max_streams = 5;
                  },
                  "--max_streams: got 5, wanted 0 to --staging_slots (4)"},
        BadConfig{"NoInflight", [](ServerConfig* c) { c->max_inflight_chunks = 0; },
                  "--max_inflight_chunks"},
        BadConfig{"NegativeBatch", [](ServerConfig* c) { c->batch_tokens = -5; }, "--batch_tokens"},
        BadConfig{"NegativeRanks", [](ServerConfig* c) { c->ranks.num_ranks = -1; },
                  "--ranks: got -1, wanted 0 to"},
        BadConfig{"NoReplica", [](ServerConfig* c) { c->ranks.num_replicas = 0; },
                  "--replicas: got 0, wanted 1 to 1024"},
        BadConfig{"TooManyReplicas", [](ServerConfig* c) { c->ranks.num_replicas = kRanksMax + 1; },
                  "--replicas: got 1025, wanted 1 to 1024"},
        BadConfig{"ReplicasThatDoNotDivideTheRanks",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 4;
                    c->ranks.num_replicas = 3;
                  },
                  "--replicas: got 3, which does not divide the 4 ranks of --ranks or --devices"},
        BadConfig{"MoreReplicasThanRanks",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 2;
                    c->ranks.num_replicas = 4;
                  },
                  "--replicas: got 4, which does not divide the 2 ranks"},
        BadConfig{"ReplicasThatDoNotDivideTheDevices",
                  [](ServerConfig* c) {
                    c->ranks.devices = {0, 1, 2};
                    c->ranks.num_replicas = 2;
                  },
                  "--replicas: got 2, which does not divide the 3 ranks"},
        BadConfig{"MoreLocalRanks",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 2;
                    c->ranks.num_local = 3;
                  },
                  "--local_ranks: got 3, wanted 0 to 2"},
        BadConfig{"FollowersWithoutAPort",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 4;
                    c->ranks.num_local = 1;
                  },
                  "--group_listen: got '', wanted host:port, where the followers of ranks 1 to 3"},
        BadConfig{"PortWithoutFollowers",
                  [](ServerConfig* c) { c->ranks.group_listen = "127.0.0.1:0"; },
                  "--group_listen: got 127.0.0.1:0, but all 1 ranks are in this process"},
        BadConfig{"FollowersOfAnyAddress",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 2;
                    c->ranks.num_local = 1;
                    c->ranks.group_listen = "0.0.0.0:50060";
                    c->security.insecure = true;
                  },
                  "--collective_host"},
        BadConfig{"FollowersInPlaintext",
                  [](ServerConfig* c) {
                    c->ranks.num_ranks = 2;
                    c->ranks.num_local = 1;
                    c->ranks.group_listen = "10.0.0.1:50060";
                  },
                  "--group_listen=10.0.0.1:50060 is plaintext"},
        BadConfig{"NoCollectiveTimeout",
                  [](ServerConfig* c) { c->ranks.collective_timeout = absl::ZeroDuration(); },
                  "--collective_timeout_seconds: got 0"},
        BadConfig{"NoTimeout", [](ServerConfig* c) { c->write_timeout = absl::ZeroDuration(); },
                  "--write_timeout_seconds: got 0"}),
    [](const auto& info) { return info.param.name; });

TEST(ServerConfig, RanksByDevices) {
  EXPECT_EQ(*ParseDevices("0,1,0"), (std::vector<int>{0, 1, 0}));
  EXPECT_EQ(*ParseDevices(""), std::vector<int>{});
  EXPECT_TRUE(absl::IsInvalidArgument(ParseDevices("0,x").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ParseDevices("-1").status()));
  EXPECT_EQ(*ParseCollectiveChoice("nccl"), CollectiveChoice::kNccl);
  EXPECT_TRUE(absl::IsInvalidArgument(ParseCollectiveChoice("mpi").status()));
  RankConfig ranks = {.devices = {0, 1, 2}};
  FillRankDefaults(&ranks);
  EXPECT_EQ(ranks.num_ranks, 3);
  EXPECT_EQ(ranks.num_local, 3);
  EXPECT_EQ(ranks.collective_host, "127.0.0.1");
  ranks = {.num_ranks = 4, .num_local = 2, .group_listen = "10.0.0.1:50060"};
  FillRankDefaults(&ranks);
  EXPECT_EQ(ranks.collective_host, "10.0.0.1");
}

TEST(ServerConfig, ReplicasThatDivideTheRanksAreTaken) {
  for (const auto& [num_ranks, num_replicas] :
       {std::pair(1, 1), {2, 2}, {4, 2}, {6, 3}, {kRanksMax, kRanksMax}}) {
    ServerConfig config;
    config.ranks = {.num_ranks = num_ranks, .num_replicas = num_replicas};
    EXPECT_TRUE(ValidateServerConfig(config).ok()) << ValidateServerConfig(config);
  }
}

// A rank each, unless devices or followers say otherwise.
TEST(ServerConfig, ReplicasAloneHaveARankEach) {
  RankConfig ranks = {.num_replicas = 3};
  FillRankDefaults(&ranks);
  EXPECT_EQ(ranks.num_ranks, 3);
  EXPECT_EQ(ranks.num_local, 3);
  ranks = {.num_replicas = 2, .devices = {0, 1, 2, 3}};
  FillRankDefaults(&ranks);
  EXPECT_EQ(ranks.num_ranks, 4);
  ServerConfig config;
  config.ranks = {.num_replicas = 3};
  EXPECT_TRUE(ValidateServerConfig(config).ok());
}

TEST(ServerConfig, BackendByName) {
  EXPECT_EQ(*ParseBackendChoice("cpu"), BackendChoice::kCpu);
  EXPECT_EQ(*ParseBackendChoice("auto"), BackendChoice::kAuto);
  EXPECT_EQ(*ParseBackendChoice("cuda"), BackendChoice::kCuda);
  EXPECT_TRUE(absl::IsInvalidArgument(ParseBackendChoice("tpu").status()));
}

}  // namespace
}  // namespace lmhead
