// Steps of several workers against a real service, and what they took.

#ifndef LMHEAD_BENCH_SERVICE_RUN_H_
#define LMHEAD_BENCH_SERVICE_RUN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/service_data.h"
#include "client/cpp/client.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"

namespace lmhead::bench {

// What is sent, and how.
struct Traffic {
  HeadSpec head;  // Its schedule and batch_tokens are set.
  DType hidden_dtype = DType::kBFloat16;
  int32_t workers = 0;
  int64_t tokens = 0;  // Of all workers, a step.
  int64_t chunk_bytes = 0;
  int32_t connections = 0;   // Of each worker.
  int32_t inflight = 0;      // Chunks without a result, on each connection.
  int64_t chunk_tokens = 0;  // Rows of a chunk, as chunk_bytes and the head have it.
  bool distil = false;       // Forward KL to a teacher head of the same shape, in each chunk.
};

// The service's own counters over the time in which rows were streamed.
struct ServiceCounters {
  double busy_seconds = 0.0;  // The executor had a batch under way.
  double bytes_received = 0.0;
  double bytes_sent = 0.0;
  double tokens = 0.0;
  double batches = 0.0;
};

// One step.
struct StepMeasurement {
  double step_seconds = 0.0;    // From BeginStep to the answer of AbortStep.
  double stream_seconds = 0.0;  // From the first row to the last worker's end of stream.
  int64_t num_tokens = 0;       // As the service summed them up, like the next one.
  int64_t num_chunks = 0;
  StageTimings chunk_timings;               // Means over the chunks.
  std::optional<ServiceCounters> counters;  // When the service's metrics can be read.
};

// A head in the service, its teacher when there is one, and workers that feed it; both heads are
// deleted at the end.
class ServiceRun {
 public:
  // `metrics_address` may be empty. `client` must outlive the run.
  static absl::StatusOr<std::unique_ptr<ServiceRun>> Create(Client* client,
                                                            const std::string& metrics_address,
                                                            const HeadSpec& head, bool distil);
  ~ServiceRun();
  ServiceRun(const ServiceRun&) = delete;
  ServiceRun& operator=(const ServiceRun&) = delete;

  // What the next steps send: makes the rows and the workers.
  // REQUIRES: traffic.head and traffic.distil are the run's.
  void SetTraffic(const Traffic& traffic);

  // One step: begin, stream, prepare, abort. INTERNAL when the service counted other rows or chunks
  // than were sent.
  // REQUIRES: SetTraffic() was called.
  absl::StatusOr<StepMeasurement> MeasureStep();

 private:
  struct Worker;

  ServiceRun(Client* client, const std::string& metrics_address, const std::string& head);

  absl::Status OpenWriters(uint64_t incarnation);
  absl::Status StreamAll();
  absl::Status Stream(Worker& worker);
  absl::Status CheckAndAbort(uint64_t incarnation, StepMeasurement* measurement);
  absl::StatusOr<std::optional<ServiceCounters>> ReadCounters() const;

  Client* const client_;
  const std::string metrics_address_;
  const std::string head_;
  std::string teacher_;  // Empty without one.
  Traffic traffic_;
  uint64_t step_ = 0;
  int64_t piece_tokens_ = 0;  // Rows of one Submit.
  std::unique_ptr<RandomRows> rows_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_SERVICE_RUN_H_
