#include "server/config/server_config.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/config/listen_address.h"

namespace lmhead {
namespace {

absl::Status CheckRange(const char* flag, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": got ", got, ", wanted ", low, " to ", high));
}

std::string HostOf(const std::string& listen) { return listen.substr(0, listen.rfind(':')); }

absl::Status CheckAddresses(const ServerConfig& config) {
  absl::Status status = CheckListenAddress("listen", config.listen);
  if (!config.health_listen.empty()) {
    status.Update(CheckListenAddress("health_listen", config.health_listen));
  }
  if (!config.metrics_listen.empty()) {
    status.Update(CheckHostPort("metrics_listen", config.metrics_listen));
  }
  if (!config.ranks.group_listen.empty()) {
    status.Update(CheckHostPort("group_listen", config.ranks.group_listen));
  }
  return status;
}

absl::Status ValidateRanks(RankConfig ranks) {
  absl::Status status = CheckRange("ranks", ranks.num_ranks, 0, kRanksMax);
  status.Update(CheckRange("replicas", ranks.num_replicas, 1, kRanksMax));
  if (!status.ok()) return status;
  if (ranks.collective_timeout < absl::Milliseconds(100) ||
      ranks.collective_timeout > absl::Hours(1)) {
    return absl::InvalidArgumentError(absl::StrCat("--collective_timeout_seconds: got ",
                                                   absl::ToDoubleSeconds(ranks.collective_timeout),
                                                   ", wanted 0.1 to 3600"));
  }
  const int32_t num_local = ranks.num_local;
  FillRankDefaults(&ranks);
  status = CheckRange("local_ranks", num_local, 0, ranks.num_ranks);
  if (!status.ok()) return status;
  if (ranks.num_ranks % ranks.num_replicas != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--replicas: got ", ranks.num_replicas, ", which does not divide the ",
                     ranks.num_ranks, " ranks of --ranks or --devices; every replica has as many"));
  }
  if (ranks.num_local == ranks.num_ranks) {
    if (ranks.group_listen.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--group_listen: got ", ranks.group_listen, ", but all ", ranks.num_ranks,
                     " ranks are in this process; leave some to followers with --local_ranks"));
  }
  if (ranks.group_listen.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--group_listen: got '", ranks.group_listen, "', wanted host:port, where the ",
        "followers of ranks ", ranks.num_local, " to ", ranks.num_ranks - 1, " call this server"));
  }
  const std::string& host = ranks.collective_host;
  if (host.empty() || host == "0.0.0.0" || host == "[::]" || host == "::") {
    return absl::InvalidArgumentError(
        "--collective_host: got none, and --group_listen names no address of this machine; wanted "
        "one that the followers can reach");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CollectiveChoice> ParseCollectiveChoice(const std::string& name) {
  if (name == "auto") return CollectiveChoice::kAuto;
  if (name == "gloo") return CollectiveChoice::kGloo;
  if (name == "nccl") return CollectiveChoice::kNccl;
  return absl::InvalidArgumentError(
      absl::StrCat("--collective: got '", name, "', wanted auto, gloo or nccl"));
}

absl::StatusOr<std::vector<int>> ParseDevices(const std::string& list) {
  std::vector<int> devices;
  for (const absl::string_view part : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    int device = -1;
    if (!absl::SimpleAtoi(part, &device) || device < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--devices: got '", list, "', wanted numbers of GPUs such as 0,1"));
    }
    devices.push_back(device);
  }
  return devices;
}

void FillRankDefaults(RankConfig* ranks) {
  if (ranks->num_ranks == 0) {
    ranks->num_ranks =
        ranks->devices.empty() ? ranks->num_replicas : static_cast<int32_t>(ranks->devices.size());
  }
  if (ranks->num_local == 0) ranks->num_local = ranks->num_ranks;
  if (!ranks->collective_host.empty()) return;
  ranks->collective_host =
      ranks->num_local == ranks->num_ranks ? "127.0.0.1" : HostOf(ranks->group_listen);
}

absl::StatusOr<BackendChoice> ParseBackendChoice(const std::string& name) {
  if (name == "auto") return BackendChoice::kAuto;
  if (name == "cpu") return BackendChoice::kCpu;
  if (name == "cuda") return BackendChoice::kCuda;
  return absl::InvalidArgumentError(
      absl::StrCat("--backend: got '", name, "', wanted auto, cpu or cuda"));
}

absl::Status ValidateDevices(BackendChoice backend, const std::vector<int>& devices) {
  if (backend != BackendChoice::kCpu || devices.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--devices: got ", absl::StrJoin(devices, ","),
                   ", but --backend=cpu computes on no GPU; leave one of them away"));
}

absl::Status ValidateServerConfig(const ServerConfig& config) {
  if (config.listen.empty()) {
    return absl::InvalidArgumentError("--listen: got nothing, wanted host:port or unix:/path");
  }
  if (absl::Status status = CheckAddresses(config); !status.ok()) return status;
  const absl::Status checks[] = {
      CheckRange("memory_limit_bytes", config.memory_limit_bytes, 0, int64_t{1} << 50),
      CheckRange("staging_slots", config.staging_slots, 1, kStagingSlotsMax),
      CheckRange("chunk_bytes_max", config.chunk_bytes_max, kChunkBytesMin, kChunkBytesMax),
      CheckRange("max_inflight_chunks", config.max_inflight_chunks, 1, kInflightChunksMax),
      CheckRange("batch_tokens", config.batch_tokens, 0, kBatchTokensMax),
      CheckRange("checkpoint_keep", config.checkpoint_keep, 0, kCheckpointKeepMax),
  };
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  if (config.max_streams < 0 || config.max_streams > config.staging_slots) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max_streams: got ", config.max_streams, ", wanted 0 to --staging_slots (",
        config.staging_slots, "): every open stream needs a staging slot to make progress"));
  }
  if (config.pair_timeout < absl::Seconds(1) || config.pair_timeout > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat("--pair_timeout_seconds: got ",
                                                   absl::ToDoubleSeconds(config.pair_timeout),
                                                   ", wanted 1 to 86400"));
  }
  if (config.write_timeout < absl::Seconds(1) || config.write_timeout > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat("--write_timeout_seconds: got ",
                                                   absl::ToDoubleSeconds(config.write_timeout),
                                                   ", wanted 1 to 86400"));
  }
  if (config.restore && config.checkpoint_dir.empty()) {
    return absl::InvalidArgumentError(
        "--restore: got no --checkpoint_dir, wanted the directory to restore from");
  }
  if (absl::Status status = ValidateRanks(config.ranks); !status.ok()) return status;
  if (absl::Status status = ValidateDevices(config.backend, config.ranks.devices); !status.ok()) {
    return status;
  }
  if (!config.ranks.group_listen.empty()) {
    absl::Status status =
        ValidateSecurityConfig(config.security, config.ranks.group_listen, "--group_listen");
    if (!status.ok()) return status;
  }
  return ValidateSecurityConfig(config.security, config.listen);
}

}  // namespace lmhead
