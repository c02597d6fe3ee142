#include "server/config/server_config.h"

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

absl::Status CheckRange(const char* flag, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": got ", got, ", wanted ", low, " to ", high));
}

}  // namespace

absl::StatusOr<BackendChoice> ParseBackendChoice(const std::string& name) {
  if (name == "auto") return BackendChoice::kAuto;
  if (name == "cpu") return BackendChoice::kCpu;
  if (name == "cuda") return BackendChoice::kCuda;
  return absl::InvalidArgumentError(
      absl::StrCat("--backend: got '", name, "', wanted auto, cpu or cuda"));
}

absl::Status ValidateServerConfig(const ServerConfig& config) {
  if (config.listen.empty()) {
    return absl::InvalidArgumentError("--listen: got nothing, wanted host:port or unix:/path");
  }
  const absl::Status checks[] = {
      CheckRange("memory_limit_bytes", config.memory_limit_bytes, 0, int64_t{1} << 50),
      CheckRange("staging_slots", config.staging_slots, 1, kStagingSlotsMax),
      CheckRange("chunk_bytes_max", config.chunk_bytes_max, kChunkBytesMin, kChunkBytesMax),
      CheckRange("max_inflight_chunks", config.max_inflight_chunks, 1, kInflightChunksMax),
      CheckRange("batch_tokens", config.batch_tokens, 0, kBatchTokensMax),
  };
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  if (config.max_streams < 0 || config.max_streams > config.staging_slots) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max_streams: got ", config.max_streams, ", wanted 0 to --staging_slots (",
        config.staging_slots, "): every open stream needs a staging slot to make progress"));
  }
  if (config.write_timeout < absl::Seconds(1) || config.write_timeout > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat("--write_timeout_seconds: got ",
                                                   absl::ToDoubleSeconds(config.write_timeout),
                                                   ", wanted 1 to 86400"));
  }
  return absl::OkStatus();
}

}  // namespace lmhead
