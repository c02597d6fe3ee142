// What a server is told at start: the flags of `lmhead serve` as one value.

#ifndef LMHEAD_SERVER_CONFIG_SERVER_CONFIG_H_
#define LMHEAD_SERVER_CONFIG_SERVER_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/limits.h"

namespace lmhead {

// Bounds of the numbers.
inline constexpr int32_t kStagingSlotsMax = 4096;
inline constexpr int64_t kChunkBytesMin = 4 * kKiB;
inline constexpr int64_t kChunkBytesMax = 256 * kMiB;
inline constexpr int32_t kInflightChunksMax = 4096;

// Which backend computes. kAuto takes the GPU when the build and the machine have one.
enum class BackendChoice : uint8_t { kAuto, kCpu, kCuda };

// Whether waiting chunks share batches. kAuto: on for the GPU, off for the CPU, where it would cost
// bitwise reproducibility for little.
enum class JoinChunks : uint8_t { kAuto, kOn, kOff };

// Defaults are those of the flags of the same names.
struct ServerConfig {
  std::string listen = "127.0.0.1:50051";  // host:port or unix:/path; port 0 takes a free one.
  std::string metrics_listen;              // host:port; empty serves no metrics.
  BackendChoice backend = BackendChoice::kAuto;
  int64_t memory_limit_bytes = 0;  // Budget of all heads; 0: 80 % of the machine's or container's.
  int32_t staging_slots = kDefaultStagingSlots;
  int64_t chunk_bytes_max = kDefaultChunkBytesMax;
  int32_t max_streams = 0;  // 0: as many as staging slots.
  int32_t max_inflight_chunks = kDefaultInflightChunksMax;
  int64_t batch_tokens = 0;  // Of heads that do not say; 0: the backend's default.
  JoinChunks join_chunks = JoinChunks::kAuto;
  absl::Duration write_timeout = absl::Seconds(60);  // See --write_timeout_seconds.
  bool reflection = false;
};

// INVALID_ARGUMENT unless `name` is auto, cpu or cuda.
absl::StatusOr<BackendChoice> ParseBackendChoice(const std::string& name);

// OK when every number is in range and the numbers fit each other. INVALID_ARGUMENT naming the
// flag, what was got and what is wanted.
absl::Status ValidateServerConfig(const ServerConfig& config);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CONFIG_SERVER_CONFIG_H_
