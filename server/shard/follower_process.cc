#include "server/shard/follower_process.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/shard/shard_messages.h"

namespace lmhead {

absl::StatusOr<std::unique_ptr<FollowerProcess>> FollowerProcess::Start(
    const FollowerConfig& config) {
  absl::StatusOr<Hardware> hardware =
      ChooseHardware(config.backend, config.devices, config.num_ranks);
  if (!hardware.ok()) return hardware.status();
  std::unique_ptr<FollowerProcess> process(new FollowerProcess(config, *hardware));
  for (int32_t index = 0; index < config.num_ranks; ++index) {
    process->followers_.push_back(std::make_unique<Follower>(process->OptionsOf(index)));
  }
  for (const std::unique_ptr<Follower>& follower : process->followers_) {
    process->threads_.emplace_back([process = process.get(), follower = follower.get()] {
      const absl::Status status = follower->Run();
      absl::MutexLock lock(&process->mu_);
      process->failure_.Update(status);
    });
  }
  return process;
}

FollowerProcess::FollowerProcess(const FollowerConfig& config, const Hardware& hardware)
    : config_(config), hardware_(hardware) {
  for (int32_t index = 0; index < config.num_ranks; ++index) {
    accounts_.push_back(std::make_unique<MemoryAccount>());
    memory_.push_back(std::make_unique<LocalMemory>(hardware.devices[index], hardware.kind, index,
                                                    accounts_.back().get()));
  }
}

FollowerProcess::~FollowerProcess() { Stop().IgnoreError(); }

Follower::Options FollowerProcess::OptionsOf(int32_t index) {
  const int32_t rank = config_.first_rank + index;
  v1::JoinGroup join;
  join.set_version(config_.version);
  join.set_rank(rank);
  join.set_backend(hardware_.backend);
  join.set_device_name(hardware_.devices[index].name);
  join.set_total_memory_bytes(hardware_.devices[index].total_bytes);
  MemoryAccount* const account = accounts_[index].get();
  const bool on_gpu = hardware_.kind == BackendKind::kCuda;
  return {.leader = config_.leader,
          .credentials = config_.credentials,
          .server_name = config_.server_name,
          .join = join,
          .backend = hardware_.kind,
          .device = on_gpu ? std::optional(hardware_.devices[index].number) : std::nullopt,
          .make_rank =
              [this, index, rank, account](const GroupFacts& group) {
                return MakeLocalRank(hardware_, index, rank, group, config_.collective_host,
                                     account, /*times=*/nullptr);
              },
          .read_memory = [this, index, rank] { return MemoryToProto(memory_[index]->Read(rank)); },
          .on_step_end = [account] { account->ResetStepPeaks(); },
          .on_welcome =
              [this, first = true]() mutable {
                if (std::exchange(first, false)) RankIsIn();
              }};
}

void FollowerProcess::RankIsIn() {
  if (++num_in_ == config_.num_ranks && config_.on_ready) config_.on_ready();
}

bool FollowerProcess::ended() const {
  absl::MutexLock lock(&mu_);
  return !failure_.ok();
}

absl::Status FollowerProcess::Stop() {
  for (const std::unique_ptr<Follower>& follower : followers_) follower->Stop();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  absl::MutexLock lock(&mu_);
  return failure_;
}

}  // namespace lmhead
