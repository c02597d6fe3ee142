#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/limits.h"
#include "proto/wire/process.h"
#include "server/compute/cpu_backend.h"
#include "server/compute/cuda_backend.h"
#include "server/compute/executor.h"
#include "server/head/head_registry.h"
#include "server/memory/arena.h"
#include "server/memory/budget.h"
#include "server/memory/pinned_memory.h"
#include "server/memory/staging_pool.h"
#include "server/memory/system_memory.h"
#include "server/metrics/metrics.h"
#include "server/rpc/service.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr int kDevice = 0;

// Control calls may wait, each on a thread of gRPC's: one for every worker of a large step, and
// some.
constexpr int kThreadsMax = static_cast<int>(kWorkersMax) + 256;
constexpr int kConcurrentCallsMax = 1024;  // Of one connection.
constexpr int kMetadataBytesMax = 16 * kKiB;

// Between the end of calls by Stop and their cancellation by gRPC.
constexpr absl::Duration kEndGrace = absl::Seconds(1);
// For gRPC to let go of the last answers' memory.
constexpr absl::Duration kSlotGrace = absl::Seconds(10);

uint64_t RandomIncarnation() {
  std::random_device random;
  const uint64_t id = (uint64_t{random()} << 32) | random();
  return id == 0 ? 1 : id;
}

std::string ProcessorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "cpu";
}

// What computes, and what it says of itself.
struct Hardware {
  BackendKind kind = BackendKind::kCpu;
  std::string backend = "cpu";
  std::string device_name;
  int64_t device_bytes = 0;
};

absl::StatusOr<Hardware> DescribeCpu() {
  absl::StatusOr<int64_t> bytes = ReadSystemMemoryBytes();
  if (!bytes.ok()) return bytes.status();
  return Hardware{.device_name = ProcessorModel(), .device_bytes = *bytes};
}

absl::StatusOr<Hardware> ChooseHardware(BackendChoice choice) {
  if (choice == BackendChoice::kCpu) return DescribeCpu();
  std::string why_not;
  if (!CudaAvailable(&why_not)) {
    if (choice == BackendChoice::kCuda) {
      return absl::UnavailableError(absl::StrCat("--backend=cuda: ", why_not));
    }
    spdlog::info("no GPU: {}; computing on the CPU", why_not);
    return DescribeCpu();
  }
  absl::StatusOr<CudaDevice> device = DescribeCudaDevice(kDevice);
  if (!device.ok()) return device.status();
  return Hardware{.kind = BackendKind::kCuda,
                  .backend = "cuda",
                  .device_name = device->name,
                  .device_bytes = device->total_bytes};
}

int32_t NumPumpThreads() {
  const int32_t cores = static_cast<int32_t>(std::thread::hardware_concurrency());
  return std::clamp(cores / 4, 1, 8);
}

int64_t MaxMessageBytes(const ServerConfig& config) {
  return std::max(config.chunk_bytes_max + kMessageHeaderBytesMax, kControlMessageBytesMax);
}

// `listen` with the port that was taken.
std::string BoundAddress(const std::string& listen, int port) {
  const size_t colon = listen.rfind(':');
  if (listen.rfind("unix:", 0) == 0 || colon == std::string::npos) return listen;
  return absl::StrCat(listen.substr(0, colon), ":", port);
}

}  // namespace

class Server::Impl {
 public:
  Impl(const ServerConfig& config, Hardware hardware)
      : config_(config),
        hardware_(std::move(hardware)),
        incarnation_(RandomIncarnation()),
        metrics_(kVersion, hardware_.backend),
        budget_(config.memory_limit_bytes > 0 ? config.memory_limit_bytes
                                              : DefaultMemoryLimitBytes(hardware_.device_bytes)) {}
  ~Impl();

  absl::Status Start();
  void Stop(absl::Time deadline);

  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  uint64_t incarnation() const { return incarnation_; }

 private:
  absl::Status MakeSlots();
  void MakeCompute();
  absl::Status ServeMetrics();
  absl::Status ServeGrpc();
  void SetArguments(grpc::ServerBuilder* builder) const;
  ServerFacts Facts();
  std::vector<RankMemory> ReadMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(gauges_mu_);
  void ReadDeviceMemory(RankMemory* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(gauges_mu_);
  Gauges ReadGauges();
  void AwaitSlots();

  const ServerConfig config_;
  const Hardware hardware_;
  const uint64_t incarnation_;
  const absl::Time started_at_ = absl::Now();

  // Scrapes come on threads of the metrics server, which outlives most of what they read.
  absl::Mutex gauges_mu_;
  bool gauges_live_ ABSL_GUARDED_BY(gauges_mu_) = false;
  int64_t device_peak_bytes_ ABSL_GUARDED_BY(gauges_mu_) = 0;

  // In the order of use: each outlives those below it.
  Metrics metrics_;
  MemoryBudget budget_;
  MemoryAccount account_;
  std::unique_ptr<StagingPool> slots_;
  bool pinned_ = false;
  std::unique_ptr<StreamSet> streams_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<HeadRegistry> heads_;
  std::unique_ptr<LmHeadServiceImpl> service_;
  std::unique_ptr<grpc::Server> grpc_;
  std::string address_;
  std::string metrics_address_;

  absl::Mutex stop_mu_;
  bool stopping_ ABSL_GUARDED_BY(stop_mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(stop_mu_) = false;
  absl::Time stop_at_ ABSL_GUARDED_BY(stop_mu_) = absl::InfiniteFuture();
};

// --- Start ---

absl::Status Server::Impl::Start() {
  if (absl::Status status = MakeSlots(); !status.ok()) return status;
  MakeCompute();
  {
    absl::MutexLock lock(&gauges_mu_);
    gauges_live_ = true;
  }
  if (absl::Status status = ServeMetrics(); !status.ok()) return status;
  if (absl::Status status = ServeGrpc(); !status.ok()) return status;
  spdlog::info("lmhead {} serves at {}: backend {} ({}), {} bytes for heads, incarnation {}",
               kVersion, address_, hardware_.backend, hardware_.device_name, budget_.limit_bytes(),
               incarnation_);
  return absl::OkStatus();
}

absl::Status Server::Impl::MakeSlots() {
  absl::StatusOr<std::unique_ptr<StagingPool>> slots =
      StagingPool::Create(config_.staging_slots, StagingSlotBytes(config_.chunk_bytes_max));
  if (!slots.ok()) return slots.status();
  slots_ = *std::move(slots);
  if (hardware_.kind == BackendKind::kCuda) {
    absl::Status status = PinHostMemory(slots_->data(), slots_->size_bytes());
    if (!status.ok()) return status;
    pinned_ = true;
  }
  const int32_t max_streams =
      config_.max_streams == 0 ? config_.staging_slots : config_.max_streams;
  streams_ = std::make_unique<StreamSet>(max_streams, NumPumpThreads());
  return absl::OkStatus();
}

void Server::Impl::MakeCompute() {
  const bool cuda = hardware_.kind == BackendKind::kCuda;
  executor_ = std::make_unique<Executor>(Executor::Options{
      .join_chunks =
          config_.join_chunks == JoinChunks::kAuto ? cuda : config_.join_chunks == JoinChunks::kOn,
      .max_inflight_batches = cuda ? kCudaBatchesInFlight : 1,
      .on_batch = [this](int64_t chunks, int64_t tokens) {
        metrics_.ObserveBatch(chunks, tokens);
      }});
  BackendFactory make_backend = [this, cuda](const HeadSpec& spec, const MemoryPlan& plan) {
    return cuda ? CreateCudaBackend(spec, plan, &account_, kDevice)
                : CreateCpuBackend(spec, plan, &account_);
  };
  heads_ = std::make_unique<HeadRegistry>(
      &budget_, PlanOptions{.backend = hardware_.kind, .batch_tokens = config_.batch_tokens},
      std::move(make_backend),
      HeadEnvironment{.executor = executor_.get(),
                      .account = &account_,
                      .metrics = &metrics_,
                      .incarnation = incarnation_,
                      .chunk_bytes_max = config_.chunk_bytes_max});
  service_ = std::make_unique<LmHeadServiceImpl>(
      StreamEnvironment{.heads = heads_.get(),
                        .slots = slots_.get(),
                        .streams = streams_.get(),
                        .metrics = &metrics_,
                        .incarnation = incarnation_,
                        .max_inflight_chunks = config_.max_inflight_chunks,
                        .stall_timeout = config_.write_timeout},
      Facts());
}

absl::Status Server::Impl::ServeMetrics() {
  metrics_.SetGauges([this] { return ReadGauges(); });
  if (config_.metrics_listen.empty()) return absl::OkStatus();
  absl::StatusOr<int> port = metrics_.Serve(config_.metrics_listen);
  if (!port.ok()) return port.status();
  metrics_address_ = BoundAddress(config_.metrics_listen, *port);
  return absl::OkStatus();
}

void Server::Impl::SetArguments(grpc::ServerBuilder* builder) const {
  const int max_message_bytes = static_cast<int>(MaxMessageBytes(config_));
  builder->SetMaxReceiveMessageSize(max_message_bytes);
  builder->SetMaxSendMessageSize(max_message_bytes);
  // A small compressed message may be a large one; nothing here gains from compression.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Otherwise two servers could share a port, and each would get some of the connections.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kConcurrentCallsMax);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMetadataBytesMax);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMilliseconds);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMilliseconds);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kLeastPingIntervalMilliseconds);
  grpc::ResourceQuota quota("lmhead");
  quota.SetMaxThreads(kThreadsMax);
  builder->SetResourceQuota(quota);
}

absl::Status Server::Impl::ServeGrpc() {
  grpc::EnableDefaultHealthCheckService(true);
  if (config_.reflection) grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetArguments(&builder);
  int port = 0;
  builder.AddListeningPort(config_.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service_.get());
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", config_.listen,
                     ": the address is in use or is not this machine's; "
                     "choose another --listen (port 0 takes a free one)"));
  }
  address_ = BoundAddress(config_.listen, port);
  grpc::HealthCheckServiceInterface* health = grpc_->GetHealthCheckService();
  for (const char* name : {"", "readiness", "liveness"}) health->SetServingStatus(name, true);
  return absl::OkStatus();
}

// --- What it says of itself ---

ServerFacts Server::Impl::Facts() {
  return {
      .version = kVersion,
      .backend = hardware_.backend,
      .devices = {{.name = hardware_.device_name, .total_memory_bytes = hardware_.device_bytes}},
      .max_message_bytes = MaxMessageBytes(config_),
      .max_chunk_bytes = config_.chunk_bytes_max,
      .started_at = started_at_,
      .read_memory = [this] {
        absl::MutexLock lock(&gauges_mu_);
        return ReadMemory();
      }};
}

std::vector<RankMemory> Server::Impl::ReadMemory() {
  const MemoryAccount::Snapshot snapshot = account_.Read();
  RankMemory memory = {.live_bytes = snapshot.total.live_bytes,
                       .peak_process_bytes = snapshot.total.peak_process_bytes,
                       .peak_step_bytes = snapshot.total.peak_step_bytes,
                       .limit_bytes = budget_.limit_bytes(),
                       .reserved_bytes = budget_.reserved_bytes()};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const MemoryAccount::Use& use = snapshot.categories[i];
    memory.categories.push_back({.name = MemoryCategoryName(static_cast<MemoryCategory>(i)),
                                 .live_bytes = use.live_bytes,
                                 .peak_process_bytes = use.peak_process_bytes,
                                 .peak_step_bytes = use.peak_step_bytes});
  }
  ReadDeviceMemory(&memory);
  return {memory};
}

void Server::Impl::ReadDeviceMemory(RankMemory* memory) {
  if (hardware_.kind == BackendKind::kCpu) {
    const absl::StatusOr<ProcessMemory> process = ReadProcessMemory();
    if (!process.ok()) return;
    memory->device_used_bytes = process->resident_bytes;
    memory->device_peak_bytes = process->peak_resident_bytes;
    return;
  }
  const absl::StatusOr<CudaDevice> device = DescribeCudaDevice(kDevice);
  if (!device.ok()) return;
  // The driver keeps no peak: it is the largest figure seen at a scrape or a GetServerInfo.
  device_peak_bytes_ = std::max(device_peak_bytes_, device->used_bytes);
  memory->device_used_bytes = device->used_bytes;
  memory->device_peak_bytes = device_peak_bytes_;
}

Gauges Server::Impl::ReadGauges() {
  absl::MutexLock lock(&gauges_mu_);
  if (!gauges_live_) return {};
  Gauges gauges = {.memory = ReadMemory(),
                   .queue_depth = executor_->queue_depth(),
                   .staging_slots_lent = slots_->num_lent(),
                   .staging_slots_limit = slots_->num_slots(),
                   .staging_bytes = slots_->size_bytes(),
                   .streams_waiting = slots_->num_waiting(),
                   .streams_open = streams_->num_open(),
                   .executor_busy_seconds = executor_->busy_seconds()};
  for (const std::shared_ptr<Head>& head : heads_->List()) {
    ++gauges.heads;
    if (!head->Status().poisoned_by.empty()) ++gauges.heads_poisoned;
  }
  return gauges;
}

// --- Stop ---

void Server::Impl::Stop(absl::Time deadline) {
  {
    absl::MutexLock lock(&stop_mu_);
    stop_at_ = std::min(stop_at_, deadline);
    if (stopping_) {
      stop_mu_.Await(absl::Condition(&stopped_));
      return;
    }
    stopping_ = true;
  }
  spdlog::info("stopping: no new calls; {} streams are open", streams_->num_open());
  grpc_->GetHealthCheckService()->SetServingStatus("", false);
  grpc_->GetHealthCheckService()->SetServingStatus("readiness", false);
  bool shut_down = false;
  std::thread shutdown([&] {
    grpc_->Shutdown(absl::ToChronoTime(deadline + kEndGrace));
    absl::MutexLock lock(&stop_mu_);
    shut_down = true;
  });
  {
    absl::MutexLock lock(&stop_mu_);
    const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(stop_mu_) {
      return shut_down || absl::Now() >= stop_at_;
    };
    // Looks again now and then, because another Stop may bring the time forward.
    while (!stop_mu_.AwaitWithTimeout(absl::Condition(&over), absl::Milliseconds(20))) {
    }
  }
  streams_->EndAll(absl::UnavailableError("the server is stopping; connect again when it is back"));
  shutdown.join();
  absl::MutexLock lock(&stop_mu_);
  stopped_ = true;
}

void Server::Impl::AwaitSlots() {
  const absl::Time deadline = absl::Now() + kSlotGrace;
  while (slots_->num_lent() > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
}

Server::Impl::~Impl() {
  if (grpc_ != nullptr) {
    Stop(absl::Now());
    grpc_->Wait();
    grpc_.reset();
  }
  {
    absl::MutexLock lock(&gauges_mu_);
    gauges_live_ = false;
  }
  service_.reset();
  heads_.reset();
  executor_.reset();
  if (slots_ != nullptr) AwaitSlots();
  streams_.reset();
  if (pinned_) UnpinHostMemory(slots_->data());
}

// --- Server ---

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerConfig& config) {
  KeepGrpcInitialized();
  absl::StatusOr<Hardware> hardware = ChooseHardware(config.backend);
  if (!hardware.ok()) return hardware.status();
  auto impl = std::make_unique<Impl>(config, *std::move(hardware));
  if (absl::Status status = impl->Start(); !status.ok()) return status;
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

void Server::Stop(absl::Time deadline) { impl_->Stop(deadline); }
const std::string& Server::address() const { return impl_->address(); }
const std::string& Server::metrics_address() const { return impl_->metrics_address(); }
uint64_t Server::incarnation() const { return impl_->incarnation(); }

}  // namespace lmhead
