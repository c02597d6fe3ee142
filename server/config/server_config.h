// What a server is told at start: the flags of `lmhead serve` as one value.

#ifndef LMHEAD_SERVER_CONFIG_SERVER_CONFIG_H_
#define LMHEAD_SERVER_CONFIG_SERVER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/limits.h"
#include "server/security/security_config.h"

namespace lmhead {

// Bounds of the numbers.
inline constexpr int32_t kStagingSlotsMax = 4096;
inline constexpr int64_t kChunkBytesMin = 4 * kKiB;
inline constexpr int64_t kChunkBytesMax = 256 * kMiB;
inline constexpr int32_t kInflightChunksMax = 4096;
inline constexpr int32_t kCheckpointKeepMax = 1'000'000;

// Which backend computes. kAuto takes the GPU when the build and the machine have one.
enum class BackendChoice : uint8_t { kAuto, kCpu, kCuda };

// Whether waiting chunks share batches. kAuto: on for the GPU, off for the CPU, where it would cost
// bitwise reproducibility for little.
enum class JoinChunks : uint8_t { kAuto, kOn, kOff };

// How ranks talk. kAuto takes NCCL between GPUs that have a rank each, Gloo otherwise.
enum class CollectiveChoice : uint8_t { kAuto, kGloo, kNccl };

// The ranks that heads are split over, and replicas of them. FillRankDefaults() has filled in the
// defaults.
struct RankConfig {
  int32_t num_ranks = 0;     // 0: one a device of `devices`, without one a replica.
  int32_t num_replicas = 1;  // That the ranks form; divides num_ranks.
  int32_t num_local = 0;     // In this process; the others are followers'. 0: all.
  std::vector<int> devices;  // GPUs of the ranks of this process, in turn; empty: GPU 0.
  CollectiveChoice collective = CollectiveChoice::kAuto;
  absl::Duration collective_timeout = absl::Seconds(30);
  std::string collective_host;  // Address of this machine for the other ranks.
  std::string group_listen;     // host:port, for followers; port 0 takes a free one.
};

// Defaults are those of the flags of the same names.
struct ServerConfig {
  std::string listen = "127.0.0.1:50051";  // host:port or unix:/path; port 0 takes a free one.
  std::string metrics_listen;              // host:port; empty serves no metrics.
  std::string health_listen;               // Likewise of grpc.health.v1 alone, in plaintext.
  BackendChoice backend = BackendChoice::kAuto;
  int64_t memory_limit_bytes = 0;  // Budget of all heads; 0: 80 % of the machine's or container's.
  int32_t staging_slots = kDefaultStagingSlots;
  int64_t chunk_bytes_max = kDefaultChunkBytesMax;
  int32_t max_streams = 0;  // 0: as many as staging slots.
  int32_t max_inflight_chunks = kDefaultInflightChunksMax;
  int64_t batch_tokens = 0;  // Of heads that do not say; 0: the backend's default.
  JoinChunks join_chunks = JoinChunks::kAuto;
  absl::Duration write_timeout = absl::Seconds(60);  // See --write_timeout_seconds.
  absl::Duration pair_timeout = absl::Seconds(60);   // See --pair_timeout_seconds.
  bool reflection = false;
  std::string checkpoint_dir;   // Empty keeps none.
  int32_t checkpoint_keep = 3;  // Checkpoints of a head that are kept; 0: all.
  bool restore = false;         // Bring back every head of checkpoint_dir at start.
  absl::Duration worker_lease;  // See --worker_lease_seconds; zero is off, as in the next.
  absl::Duration step_timeout;
  RankConfig ranks;
  SecurityConfig security;
};

// INVALID_ARGUMENT unless `name` is auto, cpu or cuda.
absl::StatusOr<BackendChoice> ParseBackendChoice(const std::string& name);

// INVALID_ARGUMENT unless `name` is auto, gloo or nccl.
absl::StatusOr<CollectiveChoice> ParseCollectiveChoice(const std::string& name);

// "0,1" as numbers. INVALID_ARGUMENT for anything else; empty gives none.
absl::StatusOr<std::vector<int>> ParseDevices(const std::string& list);

// INVALID_ARGUMENT when GPUs are named for ranks that compute on the CPU.
absl::Status ValidateDevices(BackendChoice backend, const std::vector<int>& devices);

// Numbers of ranks that were left to the defaults, and the host: that of --group_listen, or the
// loopback when every rank is here.
void FillRankDefaults(RankConfig* ranks);

// OK when every number is in range and the numbers fit each other. INVALID_ARGUMENT naming the
// flag, what was got and what is wanted.
absl::Status ValidateServerConfig(const ServerConfig& config);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CONFIG_SERVER_CONFIG_H_
