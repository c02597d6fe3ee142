#include "server/metrics/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

using prometheus::ClientMetric;
using prometheus::Counter;
using prometheus::Histogram;
using prometheus::MetricFamily;
using prometheus::MetricType;
using prometheus::Registry;

using Boundaries = Histogram::BucketBoundaries;

// The values of the labels, in the order of the enums.
constexpr std::array<const char*, 4> kChunkResults = {"accepted", "duplicate", "rejected",
                                                      "failed"};
constexpr std::array<const char*, 6> kStages = {"receive", "queue",    "upload",
                                                "compute", "download", "write"};
constexpr std::array<const char*, 2> kStepOutcomes = {"committed", "aborted"};
constexpr std::array<const char*, 2> kCheckpointOutcomes = {"saved", "failed"};

// Two buckets a decade, from the shortest stage that can be told from nothing to a stuck one.
const Boundaries kStageSeconds = {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01,
                                  0.03, 0.1,  0.3,  1,    3,    10,   30};
const Boundaries kStepSeconds = {0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000};
const Boundaries kCheckpointSeconds = {0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000};
const Boundaries kBatchTokens = {16,   32,   64,   128,   256,   512,  1024,
                                 2048, 4096, 8192, 16384, 32768, 65536};
const Boundaries kBatchChunks = {1, 2, 4, 8, 16, 32, 64};

// One family of the gauges that are read at scrape time.
class GaugeFamily {
 public:
  GaugeFamily(std::string name, std::string help, MetricType type = MetricType::Gauge) {
    family_.name = std::move(name);
    family_.help = std::move(help);
    family_.type = type;
  }

  // int64 bytes are exact: a double holds every integer below 2^53, and the text has 16 digits.
  GaugeFamily& Add(double value, const std::vector<ClientMetric::Label>& labels = {}) {
    ClientMetric metric;
    metric.label = labels;
    (family_.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
    family_.metric.push_back(std::move(metric));
    return *this;
  }
  GaugeFamily& Add(int64_t value, const std::vector<ClientMetric::Label>& labels = {}) {
    return Add(static_cast<double>(value), labels);
  }

  // A family without a series is left out: a bare HELP line means nothing to a scraper.
  void AppendTo(std::vector<MetricFamily>* families) && {
    if (!family_.metric.empty()) families->push_back(std::move(family_));
  }

 private:
  MetricFamily family_;
};

void CollectMemory(const std::vector<RankMemory>& ranks, std::vector<MetricFamily>* families) {
  GaugeFamily live("lmhead_memory_live_bytes", "Accounted memory allocated now, by category.");
  GaugeFamily peak("lmhead_memory_peak_bytes",
                   "Most accounted memory by category, since the start of the process or since the "
                   "last BeginStep.");
  GaugeFamily limit("lmhead_memory_limit_bytes", "Budget that heads are admitted against.");
  GaugeFamily reserved("lmhead_memory_reserved_bytes", "Sum of the plans of the heads.");
  GaugeFamily total_live("lmhead_memory_total_live_bytes",
                         "Accounted memory allocated now, over all categories.");
  GaugeFamily total_peak("lmhead_memory_total_peak_bytes",
                         "Most of the sum over all categories at one time, since the start of the "
                         "process or since the last BeginStep.");
  GaugeFamily used("lmhead_device_memory_used_bytes",
                   "The device's own figure; for the CPU backend the resident set.");
  GaugeFamily used_peak("lmhead_device_memory_peak_bytes",
                        "The device's own peak; for the CPU backend the largest resident set.");
  for (const RankMemory& memory : ranks) {
    const ClientMetric::Label rank{"rank", absl::StrCat(memory.rank)};
    const ClientMetric::Label process{"scope", "process"};
    const ClientMetric::Label step{"scope", "step"};
    for (const RankMemory::Category& category : memory.categories) {
      const ClientMetric::Label name{"category", std::string(category.name)};
      live.Add(category.live_bytes, {rank, name});
      peak.Add(category.peak_process_bytes, {rank, name, process});
      peak.Add(category.peak_step_bytes, {rank, name, step});
    }
    limit.Add(memory.limit_bytes, {rank});
    reserved.Add(memory.reserved_bytes, {rank});
    total_live.Add(memory.live_bytes, {rank});
    total_peak.Add(memory.peak_process_bytes, {rank, process});
    total_peak.Add(memory.peak_step_bytes, {rank, step});
    used.Add(memory.device_used_bytes, {rank});
    used_peak.Add(memory.device_peak_bytes, {rank});
  }
  for (GaugeFamily* family :
       {&live, &peak, &limit, &reserved, &total_live, &total_peak, &used, &used_peak}) {
    std::move(*family).AppendTo(families);
  }
}

void CollectServer(const Gauges& gauges, std::vector<MetricFamily>* families) {
  const auto add = [&](const char* name, const char* help, int64_t value) {
    GaugeFamily family(name, help);
    family.Add(value);
    std::move(family).AppendTo(families);
  };
  add("lmhead_queue_depth", "Chunks waiting for the executor.", gauges.queue_depth);
  add("lmhead_staging_slots_lent", "Chunks between the wire and the answer.",
      gauges.staging_slots_lent);
  add("lmhead_staging_slots_limit", "Staging slots: most chunks in the server at once.",
      gauges.staging_slots_limit);
  add("lmhead_staging_bytes", "Memory of all staging slots.", gauges.staging_bytes);
  add("lmhead_streams_open", "ComputeLoss streams.", gauges.streams_open);
  add("lmhead_streams_waiting", "Streams that do not read for want of a staging slot.",
      gauges.streams_waiting);
  add("lmhead_heads", "Heads that exist.", gauges.heads);
  add("lmhead_heads_poisoned", "Heads that a fatal error has ended.", gauges.heads_poisoned);
  add("lmhead_group_ready", "1 while every rank is there and connected, 0 while one is away.",
      gauges.group_ready ? 1 : 0);
  GaugeFamily busy("lmhead_executor_busy_seconds_total", "Time the executors have been computing.",
                   MetricType::Counter);
  busy.Add(gauges.executor_busy_seconds);
  std::move(busy).AppendTo(families);
  GaugeFamily reloads("lmhead_security_reload_failures_total",
                      "Changes of certificate, policy or token files that were refused.",
                      MetricType::Counter);
  reloads.Add(gauges.security_reload_failures);
  std::move(reloads).AppendTo(families);
  if (!gauges.tls_certificate_expiry_seconds.has_value()) return;
  GaugeFamily expiry("lmhead_tls_certificate_expiry_timestamp_seconds",
                     "When the first certificate of the chain that the server presents expires.");
  expiry.Add(*gauges.tls_certificate_expiry_seconds);
  std::move(expiry).AppendTo(families);
}

void CollectHeads(const std::vector<HeadGauges>& heads, std::vector<MetricFamily>* families) {
  GaugeFamily dense("lmhead_dense_logits_bytes",
                    "What the logits of the last committed step would take if they were stored.");
  GaugeFamily checkpoint("lmhead_last_checkpoint_timestamp_seconds",
                         "When the head's last checkpoint of this process was complete.");
  for (const HeadGauges& head : heads) {
    const ClientMetric::Label name{"head", head.name};
    dense.Add(head.dense_logits_bytes, {name});
    if (head.last_checkpoint_seconds.has_value()) {
      checkpoint.Add(*head.last_checkpoint_seconds, {name});
    }
  }
  std::move(dense).AppendTo(families);
  std::move(checkpoint).AppendTo(families);
}

void CollectCollectives(const std::vector<CollectiveGauges>& collectives,
                        std::vector<MetricFamily>* families) {
  if (collectives.empty()) return;
  MetricFamily family;
  family.name = "lmhead_collective_seconds";
  family.help =
      "Time of rank 0 in collectives, its waiting for the others included; over NCCL on its GPU.";
  family.type = MetricType::Summary;  // Of no quantiles: a count and a sum.
  for (const CollectiveGauges& collective : collectives) {
    ClientMetric metric;
    metric.label = {{"op", std::string(collective.op)}};
    metric.summary.sample_count = static_cast<uint64_t>(collective.calls);
    metric.summary.sample_sum = collective.seconds;
    family.metric.push_back(std::move(metric));
  }
  families->push_back(std::move(family));
}

void CollectReplicas(const std::vector<ReplicaGauges>& replicas, int64_t batch_bytes,
                     std::vector<MetricFamily>* families) {
  if (replicas.empty()) return;
  GaugeFamily batches("lmhead_replica_batches_total", "Batches given to a replica.",
                      MetricType::Counter);
  GaugeFamily tokens("lmhead_replica_tokens_total", "Rows of the batches given to a replica.",
                     MetricType::Counter);
  for (size_t replica = 0; replica < replicas.size(); ++replica) {
    const ClientMetric::Label label{"replica", absl::StrCat(replica)};
    batches.Add(replicas[replica].batches, {label});
    tokens.Add(replicas[replica].tokens, {label});
  }
  GaugeFamily bytes(
      "lmhead_replica_batch_bytes",
      "Bytes of the batches that replicas in followers were given and have not answered.");
  bytes.Add(batch_bytes);
  for (GaugeFamily* family : {&batches, &tokens, &bytes}) std::move(*family).AppendTo(families);
}

// The figures of this process under the names that every Prometheus client library gives them.
void CollectProcess(std::vector<MetricFamily>* families) {
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  if (std::ifstream("/proc/self/statm") >> total_pages >> resident_pages) {
    GaugeFamily resident("process_resident_memory_bytes", "Resident memory of the process.");
    resident.Add(resident_pages * sysconf(_SC_PAGESIZE));
    std::move(resident).AppendTo(families);
  }
  std::error_code error;
  const std::filesystem::directory_iterator descriptors("/proc/self/fd", error);
  if (error) return;
  GaugeFamily open_fds("process_open_fds", "Open file descriptors of the process.");
  open_fds.Add(static_cast<int64_t>(std::distance(begin(descriptors), end(descriptors))));
  std::move(open_fds).AppendTo(families);
}

// Reads the gauges at each scrape. Runs on the web server's threads.
class GaugeCollector : public prometheus::Collectable {
 public:
  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> families;
    if (read != nullptr) {
      const Gauges gauges = read();
      CollectMemory(gauges.memory, &families);
      CollectHeads(gauges.by_head, &families);
      CollectCollectives(gauges.collectives, &families);
      CollectReplicas(gauges.replicas, gauges.replica_batch_bytes, &families);
      CollectServer(gauges, &families);
    }
    CollectProcess(&families);
    return families;
  }

  std::function<Gauges()> read;
};

Counter& AddCounter(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

Histogram& AddHistogram(Registry& registry, const char* name, const char* help,
                        const Boundaries& boundaries) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, boundaries);
}

// One counter for each value of a label.
template <size_t N>
std::array<Counter*, N> AddCounters(Registry& registry, const char* name, const char* help,
                                    const char* label, const std::array<const char*, N>& values) {
  auto& family = prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  std::array<Counter*, N> counters;
  for (size_t i = 0; i < N; ++i) counters[i] = &family.Add({{label, values[i]}});
  return counters;
}

// Whether `listen` is "host:port" with a port that exists.
bool IsHostAndPort(const std::string& listen) {
  const size_t colon = listen.rfind(':');
  int port = -1;
  return colon != std::string::npos && colon > 0 &&
         absl::SimpleAtoi(listen.substr(colon + 1), &port) && port >= 0 && port <= 65535;
}

}  // namespace

// Every series is created here, so that a scrape right after the start shows all of them, and is
// kept by reference, so that counting takes no look-up.
struct Metrics::Impl {
  Impl(std::string_view version, std::string_view backend) {
    prometheus::BuildGauge()
        .Name("lmhead_build_info")
        .Help("Always 1; the labels say what is running.")
        .Register(*registry)
        .Add({{"version", std::string(version)}, {"backend", std::string(backend)}})
        .Set(1);
    prometheus::BuildGauge()
        .Name("lmhead_start_time_seconds")
        .Help("When the service started, in seconds since 1970.")
        .Register(*registry)
        .Add({})
        .SetToCurrentTime();
    auto& stage_family = prometheus::BuildHistogram()
                             .Name("lmhead_chunk_stage_seconds")
                             .Help(
                                 "Time of a chunk in each stage; a batch's time counts for each of "
                                 "its chunks.")
                             .Register(*registry);
    for (size_t i = 0; i < kStages.size(); ++i) {
      stages[i] = &stage_family.Add({{"stage", kStages[i]}}, kStageSeconds);
    }
  }

  const std::shared_ptr<Registry> registry = std::make_shared<Registry>();
  const std::shared_ptr<GaugeCollector> gauges = std::make_shared<GaugeCollector>();

  const std::array<Counter*, 4> chunks = AddCounters(
      *registry, "lmhead_chunks_total", "Chunks by what became of them.", "result", kChunkResults);
  Counter& tokens = AddCounter(*registry, "lmhead_tokens_total", "Rows computed.");
  Counter& valid_tokens = AddCounter(*registry, "lmhead_valid_tokens_total",
                                     "Rows computed whose target is not ignore_index.");
  Counter& nonfinite_rows =
      AddCounter(*registry, "lmhead_nonfinite_rows_total",
                 "Rows left out for a NaN or an infinity in their hidden states.");
  const std::array<Counter*, 2> rpc_bytes =
      AddCounters<2>(*registry, "lmhead_rpc_bytes_total", "Bytes of ComputeLoss messages.",
                     "direction", {"received", "sent"});
  const std::array<Counter*, 2> steps =
      AddCounters(*registry, "lmhead_steps_total", "Steps by outcome.", "outcome", kStepOutcomes);
  Histogram& step_seconds =
      AddHistogram(*registry, "lmhead_step_duration_seconds",
                   "Time from BeginStep to the step's commit or abort.", kStepSeconds);
  const std::array<Counter*, 2> checkpoints =
      AddCounters(*registry, "lmhead_checkpoints_total", "Checkpoints asked for, by outcome.",
                  "outcome", kCheckpointOutcomes);
  Histogram& checkpoint_seconds =
      AddHistogram(*registry, "lmhead_checkpoint_seconds",
                   "Time that saving a head took, also in vain.", kCheckpointSeconds);
  Histogram& batch_tokens = AddHistogram(*registry, "lmhead_batch_tokens",
                                         "Rows that one launch computes.", kBatchTokens);
  Histogram& batch_chunks = AddHistogram(*registry, "lmhead_batch_chunks",
                                         "Chunks that one launch computes.", kBatchChunks);
  std::array<Histogram*, 6> stages{};

  // Last: its threads use all of the above, so they must end first.
  std::unique_ptr<prometheus::Exposer> exposer;
};

Metrics::Metrics(std::string_view version, std::string_view backend)
    : impl_(std::make_unique<Impl>(version, backend)) {}

Metrics::~Metrics() = default;

void Metrics::SetGauges(std::function<Gauges()> read) { impl_->gauges->read = std::move(read); }

void Metrics::CountChunk(ChunkOutcome outcome) {
  impl_->chunks[static_cast<size_t>(outcome)]->Increment();
}

void Metrics::AddTokens(int64_t num_tokens, int64_t num_valid_tokens) {
  impl_->tokens.Increment(static_cast<double>(num_tokens));
  impl_->valid_tokens.Increment(static_cast<double>(num_valid_tokens));
}

void Metrics::AddNonfiniteRows(int64_t num_rows) {
  impl_->nonfinite_rows.Increment(static_cast<double>(num_rows));
}

void Metrics::AddBytes(int64_t received, int64_t sent) {
  impl_->rpc_bytes[0]->Increment(static_cast<double>(received));
  impl_->rpc_bytes[1]->Increment(static_cast<double>(sent));
}

void Metrics::ObserveStage(ChunkStage stage, double seconds) {
  impl_->stages[static_cast<size_t>(stage)]->Observe(seconds);
}

void Metrics::ObserveBatch(int64_t num_chunks, int64_t num_tokens) {
  impl_->batch_chunks.Observe(static_cast<double>(num_chunks));
  impl_->batch_tokens.Observe(static_cast<double>(num_tokens));
}

void Metrics::CountStep(StepOutcome outcome, double seconds) {
  impl_->steps[static_cast<size_t>(outcome)]->Increment();
  impl_->step_seconds.Observe(seconds);
}

void Metrics::CountCheckpoint(CheckpointOutcome outcome, double seconds) {
  impl_->checkpoints[static_cast<size_t>(outcome)]->Increment();
  impl_->checkpoint_seconds.Observe(seconds);
}

absl::StatusOr<int> Metrics::Serve(const std::string& listen) {
  if (!IsHostAndPort(listen)) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics: cannot listen on '", listen,
                     "': wanted host:port with a port of 0 to 65535, such as 127.0.0.1:9464"));
  }
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(listen);
    exposer->RegisterCollectable(impl_->registry);
    exposer->RegisterCollectable(impl_->gauges);
    const std::vector<int> ports = exposer->GetListeningPorts();
    impl_->exposer = std::move(exposer);
    return ports.front();
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("metrics: cannot listen on ", listen,
                     ": the port is in use or the address is not this machine's (", error.what(),
                     "); choose another, or port 0 for a free one"));
  }
}

std::string Metrics::Render() const {
  std::vector<MetricFamily> families = impl_->registry->Collect();
  for (MetricFamily& family : impl_->gauges->Collect()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace lmhead
