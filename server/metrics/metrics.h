// What the service tells Prometheus: one registry, every series created at start.
//
// Counters and histograms are updated inline by whoever does the work; memory and queue gauges are
// read from callbacks at scrape time. Names, units and labels are documented in docs/OPERATING.md.
// Never a step, worker or request id as a label. Knows nothing of the rest of the server.

#ifndef LMHEAD_SERVER_METRICS_METRICS_H_
#define LMHEAD_SERVER_METRICS_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

enum class ChunkOutcome : uint8_t { kAccepted, kDuplicate, kRejected, kFailed };
enum class ChunkStage : uint8_t { kReceive, kQueue, kUpload, kCompute, kDownload, kWrite };
enum class StepOutcome : uint8_t { kCommitted, kAborted };
enum class CheckpointOutcome : uint8_t { kSaved, kFailed };

// Read at scrape time.
struct RankMemory {
  struct Category {
    std::string_view name;
    int64_t live_bytes = 0;
    int64_t peak_process_bytes = 0;
    int64_t peak_step_bytes = 0;
  };
  int32_t rank = 0;
  std::vector<Category> categories;
  int64_t live_bytes = 0;
  int64_t peak_process_bytes = 0;
  int64_t peak_step_bytes = 0;
  int64_t limit_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t device_used_bytes = 0;
  int64_t device_peak_bytes = 0;
};
struct HeadGauges {
  std::string name;
  int64_t dense_logits_bytes = 0;  // Of the tokens of its last committed step, were they stored.
  // When its last checkpoint was complete, in seconds of the epoch; none by this process: absent.
  std::optional<double> last_checkpoint_seconds;
};
struct CollectiveGauges {
  std::string_view op;
  int64_t calls = 0;   // Total.
  double seconds = 0;  // Total.
};
struct ReplicaGauges {
  int64_t batches = 0;  // Total, like the next.
  int64_t tokens = 0;
};
struct Gauges {
  std::vector<RankMemory> memory;
  int64_t queue_depth = 0;         // Chunks waiting for the executor.
  int64_t staging_slots_lent = 0;  // Chunks between the wire and the answer.
  int64_t staging_slots_limit = 0;
  int64_t staging_bytes = 0;
  int64_t streams_waiting = 0;  // Streams that do not read for want of a slot.
  int64_t streams_open = 0;
  int64_t heads = 0;
  int64_t heads_poisoned = 0;
  std::vector<HeadGauges> by_head;
  std::vector<CollectiveGauges> collectives;
  std::vector<ReplicaGauges> replicas;  // By replica; none when there is one.
  int64_t replica_batch_bytes = 0;      // Of batches that replicas elsewhere have not answered.
  bool group_ready = false;             // Every rank is there and connected.
  double executor_busy_seconds = 0;     // Total, for utilisation by rate().
  // With TLS: when the first certificate of the server's chain expires, in seconds of the epoch.
  std::optional<double> tls_certificate_expiry_seconds;
  int64_t security_reload_failures = 0;  // Total.
};

// Thread-safe.
class Metrics {
 public:
  Metrics(std::string_view version, std::string_view backend);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Called at each scrape; must not block on the data path's locks for long. Set before Serve.
  void SetGauges(std::function<Gauges()> read);

  void CountChunk(ChunkOutcome outcome);
  void AddTokens(int64_t num_tokens, int64_t num_valid_tokens);
  void AddNonfiniteRows(int64_t num_rows);
  void AddBytes(int64_t received, int64_t sent);
  void ObserveStage(ChunkStage stage, double seconds);
  void ObserveBatch(int64_t num_chunks, int64_t num_tokens);
  void CountStep(StepOutcome outcome, double seconds);
  void CountCheckpoint(CheckpointOutcome outcome, double seconds);

  // Serves /metrics on `listen` ("host:port", port 0 for a free one) until destruction. Returns the
  // bound port; UNAVAILABLE when the port is in use, saying which.
  absl::StatusOr<int> Serve(const std::string& listen);

  // The exposition text, as a scrape would get it.
  std::string Render() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_METRICS_METRICS_H_
