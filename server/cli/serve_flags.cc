#include "server/cli/serve_flags.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/types/limits.h"
#include "server/cli/common_flags.h"
#include "server/cli/security_flags.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:50051",
          "Where to serve gRPC: host:port or unix:/path. Port 0 takes a free one.");
ABSL_FLAG(std::string, metrics_listen, "",
          "Where to serve Prometheus metrics over HTTP at /metrics: host:port, port 0 takes a free "
          "one. Empty: nowhere.");
ABSL_FLAG(
    std::string, health_listen, "",
    "Where to serve grpc.health.v1 alone, in plaintext, for probes: host:port, port 0 takes a "
    "free one. Names: liveness, readiness. Empty: only at --listen.");
ABSL_FLAG(
    std::string, ready_file, "",
    "File written once the server serves: JSON with address, metrics_address, health_address, "
    "group_address and pid.");
ABSL_FLAG(int32_t, staging_slots, lmhead::kDefaultStagingSlots,
          "Chunks in the server at once, over all streams. Each takes a slot of host memory of a "
          "little more than --chunk_bytes_max.");
ABSL_FLAG(int64_t, chunk_bytes_max, lmhead::kDefaultChunkBytesMax,
          "Largest hidden_states of a chunk, in bytes.");
ABSL_FLAG(int32_t, max_streams, 0,
          "ComputeLoss streams at once, at most --staging_slots. 0: as many as staging slots.");
ABSL_FLAG(int32_t, max_inflight_chunks, lmhead::kDefaultInflightChunksMax,
          "Chunks of one stream without an answer; beyond it the stream is not read.");
ABSL_FLAG(
    std::string, join_chunks, "auto",
    "Compute waiting chunks together, up to batch_tokens rows: on, off or auto. Off, a step of "
    "one worker with one stream is bitwise reproducible. auto: on for the GPU, off for the "
    "CPU.");
ABSL_FLAG(int32_t, local_ranks, 0,
          "Ranks in this process, one thread each; the others are held by followers (lmhead "
          "follow). 0: all; of a follower: one.");
ABSL_FLAG(std::string, devices, "",
          "GPUs of this process's ranks, in turn: 0,1. Several ranks may share one, over Gloo. "
          "Empty: GPU 0.");
ABSL_FLAG(std::string, collective, "auto",
          "How ranks exchange tensors: nccl, gloo or auto. auto: NCCL when every rank of this "
          "process has a GPU of its own, Gloo otherwise.");
ABSL_FLAG(double, collective_timeout_seconds, 30.0,
          "Longest wait of a rank for another, in seconds: a rank that hangs or is gone ends the "
          "open step within it.");
ABSL_FLAG(std::string, collective_host, "",
          "Address of this machine that the other ranks reach for Gloo. Empty: serve takes the "
          "host of --group_listen, a follower the address that it calls the leader from.");
ABSL_FLAG(std::string, group_listen, "",
          "Where followers call: host:port, port 0 takes a free one. A network of its own, or TLS "
          "with client certificates: whoever reaches it can be a rank.");
ABSL_FLAG(double, pair_timeout_seconds, 60.0,
          "How long a chunk of a paired stream waits for its other side, the teacher's or the "
          "student's, in seconds, before its stream ends.");
ABSL_FLAG(double, write_timeout_seconds, 60.0,
          "How long a client may take to accept an answer, in seconds, before its stream ends.");
ABSL_FLAG(
    double, drain_timeout_seconds, 30.0,
    "After SIGTERM: how long open steps and streams may go on, in seconds; new ones are refused "
    "at once. What is left then is aborted. A second SIGTERM aborts it at once.");
ABSL_FLAG(double, worker_lease_seconds, 0.0,
          "A worker of an open step that has had no stream and sent nothing for this long ends the "
          "step: it is aborted, and the others are told which worker is missing. 0: never.");
ABSL_FLAG(double, step_timeout_seconds, 0.0,
          "A step that is open for longer is aborted, in seconds. 0: never.");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warn, error or off. Logs go to stderr.");
ABSL_FLAG(std::string, log_format, "text", "text, or json: one object a line.");
ABSL_FLAG(std::string, checkpoint_dir, "",
          "Directory for SaveCheckpoint, one below it for each head; on a disk that outlives the "
          "machine. A server that ends in order saves every head that has trained. Empty: none.");
ABSL_FLAG(int32_t, checkpoint_keep, 3, "Newest checkpoints of each head to keep; 0: all.");
ABSL_FLAG(bool, restore, false,
          "At start, bring back every head that has a checkpoint in --checkpoint_dir.");
ABSL_FLAG(bool, reflection, false, "Serve gRPC reflection, for grpcurl and the like.");

namespace lmhead {
namespace {

absl::StatusOr<JoinChunks> ParseJoinChunks(const std::string& text) {
  if (text == "auto") return JoinChunks::kAuto;
  if (text == "on" || text == "true") return JoinChunks::kOn;
  if (text == "off" || text == "false") return JoinChunks::kOff;
  return absl::InvalidArgumentError(
      absl::StrCat("--join_chunks: got '", text, "', wanted on, off or auto"));
}

absl::StatusOr<absl::Duration> SecondsFromFlag(const char* flag, double seconds) {
  if (seconds >= 0.0 && seconds <= 86400.0) return absl::Seconds(seconds);
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": got ", seconds, ", wanted 0 to 86400 seconds"));
}

absl::Status ReadRankFlags(RankConfig* ranks) {
  ranks->num_ranks = absl::GetFlag(FLAGS_ranks);
  ranks->num_replicas = absl::GetFlag(FLAGS_replicas).value_or(1);
  ranks->num_local = absl::GetFlag(FLAGS_local_ranks);
  absl::StatusOr<std::vector<int>> devices = ParseDevices(absl::GetFlag(FLAGS_devices));
  if (!devices.ok()) return devices.status();
  ranks->devices = *std::move(devices);
  absl::StatusOr<CollectiveChoice> collective =
      ParseCollectiveChoice(absl::GetFlag(FLAGS_collective));
  if (!collective.ok()) return collective.status();
  ranks->collective = *collective;
  absl::StatusOr<absl::Duration> timeout = SecondsFromFlag(
      "collective_timeout_seconds", absl::GetFlag(FLAGS_collective_timeout_seconds));
  if (!timeout.ok()) return timeout.status();
  ranks->collective_timeout = *timeout;
  ranks->collective_host = absl::GetFlag(FLAGS_collective_host);
  ranks->group_listen = absl::GetFlag(FLAGS_group_listen);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ServerConfig> ServerConfigFromFlags() {
  ServerConfig config;
  config.listen = absl::GetFlag(FLAGS_listen);
  config.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  config.health_listen = absl::GetFlag(FLAGS_health_listen);
  config.security = SecurityConfigFromFlags();
  absl::StatusOr<BackendChoice> backend = ParseBackendChoice(absl::GetFlag(FLAGS_backend));
  if (!backend.ok()) return backend.status();
  config.backend = *backend;
  absl::StatusOr<JoinChunks> join_chunks = ParseJoinChunks(absl::GetFlag(FLAGS_join_chunks));
  if (!join_chunks.ok()) return join_chunks.status();
  config.join_chunks = *join_chunks;
  config.memory_limit_bytes = absl::GetFlag(FLAGS_memory_limit_bytes);
  config.staging_slots = absl::GetFlag(FLAGS_staging_slots);
  config.chunk_bytes_max = absl::GetFlag(FLAGS_chunk_bytes_max);
  config.max_streams = absl::GetFlag(FLAGS_max_streams);
  config.max_inflight_chunks = absl::GetFlag(FLAGS_max_inflight_chunks);
  config.batch_tokens = absl::GetFlag(FLAGS_batch_tokens);
  absl::StatusOr<absl::Duration> timeout =
      SecondsFromFlag("write_timeout_seconds", absl::GetFlag(FLAGS_write_timeout_seconds));
  if (!timeout.ok()) return timeout.status();
  config.write_timeout = *timeout;
  absl::StatusOr<absl::Duration> pair_timeout =
      SecondsFromFlag("pair_timeout_seconds", absl::GetFlag(FLAGS_pair_timeout_seconds));
  if (!pair_timeout.ok()) return pair_timeout.status();
  config.pair_timeout = *pair_timeout;
  absl::StatusOr<absl::Duration> lease =
      SecondsFromFlag("worker_lease_seconds", absl::GetFlag(FLAGS_worker_lease_seconds));
  if (!lease.ok()) return lease.status();
  config.worker_lease = *lease;
  absl::StatusOr<absl::Duration> step_timeout =
      SecondsFromFlag("step_timeout_seconds", absl::GetFlag(FLAGS_step_timeout_seconds));
  if (!step_timeout.ok()) return step_timeout.status();
  config.step_timeout = *step_timeout;
  if (absl::Status status = ReadRankFlags(&config.ranks); !status.ok()) return status;
  config.reflection = absl::GetFlag(FLAGS_reflection);
  config.checkpoint_dir = absl::GetFlag(FLAGS_checkpoint_dir);
  config.checkpoint_keep = absl::GetFlag(FLAGS_checkpoint_keep);
  config.restore = absl::GetFlag(FLAGS_restore);
  if (absl::Status status = ValidateServerConfig(config); !status.ok()) return status;
  return config;
}

absl::StatusOr<absl::Duration> DrainTimeoutFromFlags() {
  return SecondsFromFlag("drain_timeout_seconds", absl::GetFlag(FLAGS_drain_timeout_seconds));
}

}  // namespace lmhead
