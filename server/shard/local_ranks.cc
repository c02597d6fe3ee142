#include "server/shard/local_ranks.h"

#include <omp.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/compute/cpu_backend.h"
#include "server/compute/cuda_backend.h"
#include "server/compute/gloo_collective.h"
#include "server/compute/nccl_collective.h"
#include "server/compute/timed_collective.h"
#include "server/memory/system_memory.h"

namespace lmhead {

absl::StatusOr<std::string> ChooseCollective(CollectiveChoice choice, const Hardware& hardware) {
  if (choice == CollectiveChoice::kGloo) return std::string("gloo");
  std::string why_not;
  if (hardware.kind == BackendKind::kCpu) {
    why_not = "NCCL is for GPUs, this server computes on the CPU";
  } else if (hardware.MostRanksOnADevice() > 1) {
    why_not = "NCCL takes no GPU twice, and --devices has one for several ranks";
  } else if (NcclAvailable(&why_not)) {
    return std::string("nccl");
  }
  if (choice == CollectiveChoice::kAuto) return std::string("gloo");
  return absl::UnavailableError(absl::StrCat("--collective=nccl: ", why_not));
}

absl::StatusOr<std::unique_ptr<ComputeBackend>> MakeBackend(const Hardware& hardware, int32_t index,
                                                            MemoryAccount* account,
                                                            const HeadSpec& spec,
                                                            const MemoryPlan& plan,
                                                            const RankContext& context) {
  if (hardware.kind == BackendKind::kCuda) {
    return CreateCudaBackend(spec, plan, account, hardware.devices[index].number, context);
  }
  // Of the loops that this thread starts: ranks of one process share its cores.
  static const int num_threads = omp_get_max_threads();
  const int num_ranks = static_cast<int>(hardware.devices.size());
  if (num_ranks > 1) omp_set_num_threads(std::max(1, num_threads / num_ranks));
  return CreateCpuBackend(spec, plan, account, context);
}

namespace {

// One end of the group of the ranks called `names`; null for a group of one.
absl::StatusOr<std::unique_ptr<Collective>> MakeCollective(const std::string& kind, int32_t place,
                                                           const std::vector<std::string>& names,
                                                           int device, const std::string& host,
                                                           absl::Duration timeout,
                                                           CollectiveTimes* times) {
  const auto size = static_cast<int32_t>(names.size());
  if (size == 1) return std::unique_ptr<Collective>();
  if (kind == "nccl") {
    return CreateNcclCollective(
        place, size, {.device = device, .timeout = timeout, .names = names, .times = times});
  }
  absl::StatusOr<std::unique_ptr<Collective>> collective =
      CreateGlooCollective(place, size, {.host = host, .timeout = timeout, .names = names});
  if (!collective.ok() || times == nullptr) return collective;
  return TimeCollective(*std::move(collective), times);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalRank>> MakeLocalRank(const Hardware& hardware, int32_t index,
                                                         int32_t rank, const GroupFacts& group,
                                                         const std::string& host,
                                                         MemoryAccount* account,
                                                         CollectiveTimes* times) {
  const int32_t per_replica = group.ranks_per_replica();
  const int32_t replica = rank / per_replica;
  const int32_t place = rank % per_replica;
  const auto name = [&](int32_t each) { return RankName(each, per_replica, group.num_replicas); };
  std::vector<std::string> of_replica;
  for (int32_t i = 0; i < per_replica; ++i) of_replica.push_back(name(replica * per_replica + i));
  std::vector<std::string> peers;
  for (int32_t i = 0; i < group.num_replicas; ++i) peers.push_back(name(i * per_replica + place));
  const auto make = [&](int32_t place_in_it, const std::vector<std::string>& names) {
    return MakeCollective(group.collective, place_in_it, names, hardware.devices[index].number,
                          host, group.timeout, times);
  };
  absl::StatusOr<std::unique_ptr<Collective>> shards = make(place, of_replica);
  if (!shards.ok()) return shards.status();
  absl::StatusOr<std::unique_ptr<Collective>> with_peers = make(replica, peers);
  if (!with_peers.ok()) return with_peers.status();
  return std::make_unique<LocalRank>(
      LocalRank::Collectives{.shards = *std::move(shards), .peers = *std::move(with_peers)},
      [hardware, index, account](const HeadSpec& spec, const MemoryPlan& plan,
                                 const RankContext& context) {
        return MakeBackend(hardware, index, account, spec, plan, context);
      });
}

RankMemory LocalMemory::Read(int32_t rank) {
  const MemoryAccount::Snapshot snapshot = account_.Read();
  RankMemory memory = {.rank = rank,
                       .live_bytes = snapshot.total.live_bytes,
                       .peak_process_bytes = snapshot.total.peak_process_bytes,
                       .peak_step_bytes = snapshot.total.peak_step_bytes};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const MemoryAccount::Use& use = snapshot.categories[i];
    memory.categories.push_back({.name = MemoryCategoryName(static_cast<MemoryCategory>(i)),
                                 .live_bytes = use.live_bytes,
                                 .peak_process_bytes = use.peak_process_bytes,
                                 .peak_step_bytes = use.peak_step_bytes});
  }
  ReadDevice(&memory);
  return memory;
}

void LocalMemory::ReadDevice(RankMemory* memory) {
  if (kind_ == BackendKind::kCpu) {
    const absl::StatusOr<ProcessMemory> process = ReadProcessMemory();
    if (!process.ok() || index_ != 0) return;
    memory->device_used_bytes = process->resident_bytes;
    memory->device_peak_bytes = process->peak_resident_bytes;
    return;
  }
  const absl::StatusOr<CudaDevice> device = DescribeCudaDevice(device_.number);
  if (!device.ok()) return;
  // The driver keeps no peak: it is the largest figure seen at a scrape or a GetServerInfo.
  absl::MutexLock lock(&mu_);
  device_peak_bytes_ = std::max(device_peak_bytes_, device->used_bytes);
  memory->device_used_bytes = device->used_bytes;
  memory->device_peak_bytes = device_peak_bytes_;
}

}  // namespace lmhead
