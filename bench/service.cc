// lmhead-bench service: how near does a head behind the service come to the same head without it?

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/commands.h"
#include "bench/common.h"
#include "bench/service_inprocess.h"
#include "bench/service_report.h"
#include "bench/service_run.h"
#include "proto/types/limits.h"
#include "server/cli/common_flags.h"
#include "server/compute/cuda_backend.h"
#include "server/config/server_config.h"
#include "spdlog/spdlog.h"

ABSL_FLAG(int32_t, workers, 2, "service: workers of the step, a thread each.");
ABSL_FLAG(int64_t, tokens, 0,
          "service: tokens a step, of all workers together. 0: what takes a few seconds.");
ABSL_FLAG(
    int64_t, chunk_bytes, lmhead::kClientChunkBytes,
    "service: hidden states of a chunk, a teacher's too, in bytes; at most batch_tokens rows.");
ABSL_FLAG(
    std::string, connections, "1",
    "service: connections of each worker; several numbers, a comma between each, are measured "
    "in turn.");
ABSL_FLAG(int32_t, inflight, 0,
          "service: chunks without a result on each connection. 0: so many that six batches are on "
          "their way.");
ABSL_FLAG(int32_t, repeats, 5, "service: steps measured, of which the median counts.");
ABSL_FLAG(
    bool, distil, false,
    "service: forward KL to a frozen teacher head of the same shape instead of cross entropy. "
    "Each chunk then carries the teacher's hidden states, too.");
ABSL_FLAG(bool, compare_inprocess, false,
          "service: also train the same head on the same rows in this process, in turn with the "
          "steps. It needs its own room on the device.");
ABSL_FLAG(std::string, metrics_address, "",
          "service: metrics of the service at --address, host:port. Without it the executor's time "
          "is not known.");

namespace lmhead::bench {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitNotRun = 2;

// Two batches more than a GPU has under way, one that fills up, and results on their way back.
constexpr int64_t kBatchesOnTheirWay = 6;
constexpr int64_t kInflightMin = 2;
constexpr int32_t kWorkersOfBenchMax = 256;
constexpr int32_t kRepeatsMax = 1000;
constexpr int64_t kTokensMax = int64_t{1} << 32;

// What a step should take when the tokens are not given, and a guess of what a backend does.
constexpr double kStepSeconds = 3.0;
constexpr double kCudaFlops = 7e14;
constexpr double kCpuFlops = 4e10;

struct ServiceOptions {
  std::vector<Schedule> schedules;
  std::vector<int32_t> connections;
  Traffic traffic;  // Without schedule and connections.
  int32_t repeats = 0;
};

absl::Status CheckRange(const char* flag, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", got, "; wanted ", low, " to ", high));
}

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

absl::Status CheckFlags(absl::Span<char* const> positional) {
  if (!positional.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("wanted flags alone, got '", std::string(positional[0]), "'"));
  }
  const absl::Status checks[] = {
      CheckRange("vocab", absl::GetFlag(FLAGS_vocab), 0, kVocabSizeMax),
      CheckRange("hidden", absl::GetFlag(FLAGS_hidden), 0, kHiddenSizeMax),
      CheckRange("batch_tokens", absl::GetFlag(FLAGS_batch_tokens), 0, kBatchTokensMax),
      CheckRange("workers", absl::GetFlag(FLAGS_workers), 1, kWorkersOfBenchMax),
      CheckRange("tokens", absl::GetFlag(FLAGS_tokens), 0, kTokensMax),
      CheckRange("chunk_bytes", absl::GetFlag(FLAGS_chunk_bytes), 1, kChunkBytesMax),
      CheckRange("inflight", absl::GetFlag(FLAGS_inflight), 0, kInflightChunksMax),
      CheckRange("repeats", absl::GetFlag(FLAGS_repeats), 1, kRepeatsMax)};
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  if (!absl::GetFlag(FLAGS_metrics_address).empty() && absl::GetFlag(FLAGS_address).empty()) {
    return absl::InvalidArgumentError(
        "--metrics_address belongs to the service at --address, which is not given");
  }
  if (absl::GetFlag(FLAGS_distil) && absl::GetFlag(FLAGS_compare_inprocess)) {
    return absl::InvalidArgumentError(
        "--compare_inprocess has no teacher: it does not go with --distil");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ConnectionsFromFlag() {
  std::vector<int32_t> all;
  for (const absl::string_view text : absl::StrSplit(absl::GetFlag(FLAGS_connections), ',')) {
    int32_t connections = 0;
    if (!absl::SimpleAtoi(text, &connections) || connections < 1 ||
        connections > kStreamsPerWorkerMax) {
      return absl::InvalidArgumentError(absl::StrCat("--connections: '", text, "' is not 1 to ",
                                                     kStreamsPerWorkerMax, " connections"));
    }
    all.push_back(connections);
  }
  return all;
}

// The backend of a service that will be started.
absl::StatusOr<BackendKind> BackendToStart() {
  const absl::StatusOr<BackendChoice> choice = ParseBackendChoice(absl::GetFlag(FLAGS_backend));
  if (!choice.ok()) return choice.status();
  std::string why_not;
  if (*choice == BackendChoice::kCpu) return BackendKind::kCpu;
  if (*choice == BackendChoice::kCuda || CudaAvailable(&why_not)) return BackendKind::kCuda;
  return BackendKind::kCpu;
}

// Hidden states of a row in a chunk, a teacher's too.
int64_t RowBytes(const Traffic& traffic) {
  const int64_t row_bytes = traffic.head.hidden_size * BytesPerElement(traffic.hidden_dtype);
  return traffic.distil ? 2 * row_bytes : row_bytes;
}

int64_t OrDefault(int64_t value, int64_t fallback) { return value == 0 ? fallback : value; }

HeadSpec HeadFromFlags(BackendKind backend, DType dtype) {
  const bool cuda = backend == BackendKind::kCuda;
  HeadSpec head;
  head.name = absl::StrCat("service-bench-", getpid());
  head.vocab_size = OrDefault(absl::GetFlag(FLAGS_vocab), cuda ? 131072 : 8192);
  head.hidden_size = OrDefault(absl::GetFlag(FLAGS_hidden), cuda ? 4096 : 256);
  head.weight_dtype = dtype;
  head.trainable = true;
  head.optimizer.kind = OptimizerKind::kSgd;
  head.batch_tokens = OrDefault(absl::GetFlag(FLAGS_batch_tokens),
                                cuda ? kDefaultBatchTokensCuda : kDefaultBatchTokensCpu);
  head.weight_init = {.kind = WeightInitKind::kNormal, .std = 0.02, .seed = 1};
  return head;
}

// What kStepSeconds are expected to be enough for, in whole batches.
int64_t DefaultTokens(BackendKind backend, const HeadSpec& head) {
  const double flops = backend == BackendKind::kCuda ? kCudaFlops : kCpuFlops;
  const double flop_a_token = 6.0 * static_cast<double>(head.vocab_size * head.hidden_size);
  const double batches =
      kStepSeconds * flops / flop_a_token / static_cast<double>(head.batch_tokens);
  const int64_t most = kTokensMax / head.batch_tokens;
  return head.batch_tokens * std::clamp(static_cast<int64_t>(batches), int64_t{1}, most);
}

absl::StatusOr<ServiceOptions> OptionsFromFlags(BackendKind backend) {
  ServiceOptions options{.repeats = absl::GetFlag(FLAGS_repeats)};
  auto schedules = SchedulesFromFlag({Schedule::kRetain, Schedule::kRecompute});
  if (!schedules.ok()) return schedules.status();
  options.schedules = *std::move(schedules);
  auto connections = ConnectionsFromFlag();
  if (!connections.ok()) return connections.status();
  options.connections = *std::move(connections);
  const absl::StatusOr<DType> dtype = DTypeFromFlag(DType::kBFloat16);
  if (!dtype.ok()) return dtype.status();

  Traffic& traffic = options.traffic;
  traffic.head = HeadFromFlags(backend, *dtype);
  traffic.hidden_dtype = *dtype;
  traffic.workers = absl::GetFlag(FLAGS_workers);
  traffic.tokens = OrDefault(absl::GetFlag(FLAGS_tokens), DefaultTokens(backend, traffic.head));
  traffic.chunk_bytes = absl::GetFlag(FLAGS_chunk_bytes);
  traffic.distil = absl::GetFlag(FLAGS_distil);
  traffic.chunk_tokens = std::clamp<int64_t>(traffic.chunk_bytes / RowBytes(traffic), 1,
                                             std::min(traffic.head.batch_tokens, kChunkTokensMax));
  if (traffic.tokens < traffic.workers) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens is ", traffic.tokens,
                                                   "; wanted at least one for each of the ",
                                                   traffic.workers, " workers"));
  }
  return options;
}

int32_t InflightOf(const Traffic& traffic, int32_t connections) {
  const int64_t given = absl::GetFlag(FLAGS_inflight);
  if (given > 0) return static_cast<int32_t>(given);
  const int64_t streams = int64_t{traffic.workers} * connections;
  const int64_t wanted =
      CeilDivide(kBatchesOnTheirWay * traffic.head.batch_tokens, traffic.chunk_tokens * streams);
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, kInflightMin, kInflightChunksMax));
}

// What a service needs for all of the traffic at once: a slot for each chunk without a result, and
// one that each stream reads the next into.
absl::StatusOr<std::vector<std::string>> ServerFlags(const ServiceOptions& options) {
  const Traffic& traffic = options.traffic;
  int64_t slots = kDefaultStagingSlots;
  int32_t inflight_max = kDefaultInflightChunksMax;
  for (const int32_t connections : options.connections) {
    const int32_t inflight = InflightOf(traffic, connections);
    slots = std::max(slots, int64_t{traffic.workers} * connections * (inflight + 1));
    inflight_max = std::max(inflight_max, inflight);
  }
  if (slots > kStagingSlotsMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--workers, --connections and --inflight put ", slots, " chunks in flight; a service has ",
        kStagingSlotsMax, " at most: lower one of them, or raise --chunk_bytes"));
  }
  return std::vector<std::string>{
      absl::StrCat("--staging_slots=", slots), absl::StrCat("--max_inflight_chunks=", inflight_max),
      absl::StrCat("--chunk_bytes_max=", std::max(kDefaultChunkBytesMax, traffic.chunk_bytes)),
      "--join_chunks=on"};
}

// The service's own bounds win: what is reported is what is done.
void FitToLimits(const v1::ServerLimits& limits, Traffic* traffic) {
  traffic->chunk_tokens = std::min(
      traffic->chunk_tokens, std::max<int64_t>(1, limits.max_chunk_bytes() / RowBytes(*traffic)));
  traffic->inflight = std::min(traffic->inflight, limits.max_inflight_chunks());
}

// A service that runs, what it says of itself, and what will be sent to it.
struct Session {
  Service service;
  v1::GetServerInfoResponse info;
  std::string metrics_address;
  BackendKind backend = BackendKind::kCpu;
  ServiceOptions options;
};

absl::Status AskService(Session* session) {
  auto info = session->service.client->GetServerInfo();
  if (!info.ok()) return info.status();
  session->info = *std::move(info);
  session->backend = session->info.backend() == "cuda" ? BackendKind::kCuda : BackendKind::kCpu;
  return absl::OkStatus();
}

absl::StatusOr<Session> StartSession() {
  Session session;
  const bool starts_one = absl::GetFlag(FLAGS_address).empty();
  std::vector<std::string> flags;
  if (starts_one) {
    const absl::StatusOr<BackendKind> backend = BackendToStart();
    if (!backend.ok()) return backend.status();
    auto options = OptionsFromFlags(*backend);
    if (!options.ok()) return options.status();
    auto wanted = ServerFlags(*options);
    if (!wanted.ok()) return wanted.status();
    flags = *std::move(wanted);
  }
  auto service = ReachService(flags);
  if (!service.ok()) return service.status();
  session.service = *std::move(service);
  if (absl::Status status = AskService(&session); !status.ok()) return status;
  auto options = OptionsFromFlags(session.backend);
  if (!options.ok()) return options.status();
  session.options = *std::move(options);
  session.metrics_address =
      starts_one ? session.service.child->metrics_address() : absl::GetFlag(FLAGS_metrics_address);
  return session;
}

ServiceFacts FactsOf(const Session& session) {
  return {.address = session.service.client->address(),
          .backend = session.info.backend(),
          .device = session.info.devices().empty() ? "" : session.info.devices(0).name()};
}

// One line of the table: a warm-up, then steps and, when asked for, runs in this process in turn.
absl::StatusOr<ServiceCase> MeasureCase(const Traffic& traffic, int repeats, ServiceRun* run,
                                        InProcessHead* inprocess) {
  ServiceCase measured{.traffic = traffic};
  run->SetTraffic(traffic);
  for (int i = 0; i <= repeats; ++i) {
    const absl::StatusOr<StepMeasurement> step = run->MeasureStep();
    if (!step.ok()) return step.status();
    ServiceRepeat repeat{.step = *step};
    if (inprocess != nullptr) {
      const absl::StatusOr<double> seconds = inprocess->Time(traffic.tokens);
      if (!seconds.ok()) return seconds.status();
      repeat.inprocess_seconds = *seconds;
    }
    if (i > 0) measured.repeats.push_back(repeat);  // The first one warms up.
  }
  return measured;
}

absl::Status MeasureSchedule(Session& session, Schedule schedule, bool print,
                             std::vector<ServiceCase>* cases) {
  Traffic traffic = session.options.traffic;
  traffic.head.schedule = schedule;
  auto run = ServiceRun::Create(session.service.client.get(), session.metrics_address, traffic.head,
                                traffic.distil);
  if (!run.ok()) return run.status();
  std::unique_ptr<InProcessHead> inprocess;
  if (absl::GetFlag(FLAGS_compare_inprocess)) {
    auto created = InProcessHead::Create(traffic.head, traffic.hidden_dtype, session.backend);
    if (!created.ok()) return created.status();
    inprocess = *std::move(created);
  }
  for (const int32_t connections : session.options.connections) {
    traffic.connections = connections;
    traffic.inflight = InflightOf(traffic, connections);
    FitToLimits(session.info.limits(), &traffic);
    if (print && cases->empty()) {
      std::fputs(RenderServiceHeader(FactsOf(session), traffic, session.options.repeats).c_str(),
                 stdout);
    }
    auto measured = MeasureCase(traffic, session.options.repeats, run->get(), inprocess.get());
    if (!measured.ok()) return measured.status();
    cases->push_back(*std::move(measured));
    if (print) std::fputs(RenderServiceCase(cases->back()).c_str(), stdout);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status MeasureAll(Session& session) {
  const bool json = absl::GetFlag(FLAGS_json);
  std::vector<ServiceCase> cases;
  for (const Schedule schedule : session.options.schedules) {
    absl::Status status = MeasureSchedule(session, schedule, /*print=*/!json, &cases);
    if (!status.ok()) return status;
  }
  const std::string text =
      json ? RenderServiceJson(FactsOf(session), cases) : RenderServiceLegend();
  std::fputs(text.c_str(), stdout);
  return StopService(session.service);
}

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "lmhead-bench service: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

}  // namespace

int RunService(absl::Span<char* const> positional) {
  spdlog::set_level(spdlog::level::warn);  // Standard output is the table's.
  if (absl::Status status = CheckFlags(positional); !status.ok()) return Fail(status, kExitNotRun);
  absl::StatusOr<Session> session = StartSession();
  if (!session.ok()) return Fail(session.status(), kExitNotRun);
  const absl::Status status = MeasureAll(*session);
  return status.ok() ? 0 : Fail(status, kExitFailed);
}

}  // namespace lmhead::bench
