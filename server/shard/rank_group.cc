#include "server/shard/rank_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/compute/shard_group.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr absl::Duration kAskInterval = absl::Seconds(1);

}  // namespace

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Start(const Hardware& hardware,
                                                            const Options& options) {
  std::unique_ptr<RankGroup> group(new RankGroup(hardware, options));
  if (options.config.num_ranks == 1) return group;
  if (absl::Status status = group->MakeRanks(); !status.ok()) return status;
  if (absl::Status status = group->StartLeader(); !status.ok()) return status;
  group->asking_ = std::thread([group = group.get()] { group->AskUntilConnected(); });
  return group;
}

RankGroup::RankGroup(const Hardware& hardware, const Options& options)
    : hardware_(hardware), options_(options) {
  for (int32_t index = 0; index < options_.config.num_local; ++index) {
    accounts_.push_back(std::make_unique<MemoryAccount>());
    account_views_.push_back(accounts_.back().get());
    local_memory_.push_back(std::make_unique<LocalMemory>(hardware_.devices[index], hardware_.kind,
                                                          index, account_views_.back()));
  }
}

absl::Status RankGroup::MakeRanks() {
  const RankConfig& config = options_.config;
  absl::StatusOr<std::string> collective = ChooseCollective(config.collective, hardware_);
  if (!collective.ok()) return collective.status();
  collective_ = *std::move(collective);
  const GroupFacts group = {.num_ranks = config.num_ranks,
                            .num_replicas = config.num_replicas,
                            .collective = collective_,
                            .timeout = config.collective_timeout};
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t rank = 0; rank < config.num_local; ++rank) {
    absl::StatusOr<std::unique_ptr<LocalRank>> local =
        MakeLocalRank(hardware_, rank, rank, group, config.collective_host, account_views_[rank],
                      rank == 0 ? &collective_times_ : nullptr);
    if (!local.ok()) {
      return absl::Status(local.status().code(),
                          absl::StrCat("rank ", rank, ": ", local.status().message()));
    }
    ranks.push_back(*std::move(local));
  }
  for (int32_t rank = config.num_local; rank < config.num_ranks; ++rank) {
    auto remote =
        std::make_unique<RemoteRank>(rank, rank % group.ranks_per_replica(),
                                     ShardLeader::SilenceLimit(config.collective_timeout));
    remote_.push_back(remote.get());
    ranks.push_back(std::move(remote));
  }
  RankPool::Options options = {.num_replicas = config.num_replicas,
                               .on_change = [this](bool connected) {
                                 options_.on_ready(connected);
                                 if (!connected) options_.request_connect();
                               }};
  // Of a replica that has ranks elsewhere, one of several.
  for (int32_t replica = 0; replica < config.num_replicas; ++replica) {
    const int32_t last_rank = (replica + 1) * group.ranks_per_replica() - 1;
    options.broadcast_hidden_states.push_back(last_rank >= config.num_local &&
                                              group.ranks_per_replica() > 1);
  }
  pool_ = std::make_unique<RankPool>(std::move(ranks), options);
  spdlog::info("{} ranks over {}, {} of them in this process, {} replicas", config.num_ranks,
               collective_, config.num_local, config.num_replicas);
  WarnOfSharedDevices();
  return absl::OkStatus();
}

void RankGroup::WarnOfSharedDevices() const {
  if (hardware_.kind != BackendKind::kCuda || options_.config.num_replicas == 1) return;
  if (hardware_.MostRanksOnADevice() == 1) return;
  spdlog::warn("--devices has a GPU for several ranks: replicas that share one compute by turns");
}

std::vector<RankPool::ReplicaWork> RankGroup::ReadReplicaWork() const {
  std::vector<RankPool::ReplicaWork> work;
  if (num_replicas() == 1) return work;
  for (int32_t replica = 0; replica < num_replicas(); ++replica) {
    work.push_back(pool_->work(replica));
  }
  return work;
}

absl::Status RankGroup::StartLeader() {
  if (remote_.empty()) return absl::OkStatus();
  const RankConfig& config = options_.config;
  absl::StatusOr<std::unique_ptr<ShardLeader>> leader =
      ShardLeader::Start({.listen = config.group_listen,
                          .credentials = options_.credentials,
                          .admit = options_.admit,
                          .version = options_.version,
                          .backend = hardware_.backend,
                          .collective = collective_,
                          .timeout = config.collective_timeout,
                          .request_connect = options_.request_connect},
                         pool_.get(), remote_);
  if (!leader.ok()) return leader.status();
  leader_ = *std::move(leader);
  const size_t colon = config.group_listen.rfind(':');
  group_address_ = absl::StrCat(config.group_listen.substr(0, colon), ":", leader_->port());
  spdlog::info("waiting for the followers of ranks {} to {} at {}", config.num_local,
               config.num_ranks - 1, group_address_);
  return absl::OkStatus();
}

int64_t RankGroup::ReadReplicaBatchBytes() const {
  int64_t bytes = 0;
  for (const RemoteRank* remote : remote_) bytes += remote->batch_bytes();
  return bytes;
}

RankGroup::~RankGroup() { Stop(); }

void RankGroup::Stop() {
  if (!stopped_.HasBeenNotified()) stopped_.Notify();
  if (asking_.joinable()) asking_.join();
  if (leader_ != nullptr) leader_->Stop();
}

// A try may fail for what passes: a network that is not up yet, a machine that is too busy.
void RankGroup::AskUntilConnected() const {
  while (!stopped_.WaitForNotificationWithTimeout(kAskInterval)) {
    if (!pool_->connected()) options_.request_connect();
  }
}

absl::StatusOr<std::unique_ptr<ComputeBackend>> RankGroup::MakeHead(const HeadSpec& spec,
                                                                    const MemoryPlan& plan) {
  if (pool_ != nullptr) return ShardGroup::Create(pool_.get(), spec, plan);
  return MakeBackend(hardware_, 0, account_views_[0], spec, plan, {});
}

absl::Status RankGroup::Connect() { return pool_ == nullptr ? absl::OkStatus() : pool_->Connect(); }

bool RankGroup::ready() const { return pool_ == nullptr || pool_->connected(); }

std::vector<RankMemory> RankGroup::ReadMemory() const {
  std::vector<RankMemory> memory;
  for (const std::unique_ptr<LocalMemory>& local : local_memory_) {
    memory.push_back(local->Read(static_cast<int32_t>(memory.size())));
  }
  for (const RemoteRank* remote : remote_) memory.push_back(remote->memory());
  return memory;
}

std::vector<Hardware::Device> RankGroup::ReadDevices() const {
  std::vector<Hardware::Device> devices = hardware_.devices;
  for (const RemoteRank* remote : remote_) {
    const std::optional<v1::JoinGroup> facts = remote->facts();
    devices.push_back({.name = facts.has_value() ? facts->device_name() : "",
                       .total_bytes = facts.has_value() ? facts->total_memory_bytes() : 0});
  }
  return devices;
}

}  // namespace lmhead
