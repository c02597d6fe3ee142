#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/limits.h"
#include "proto/wire/process.h"
#include "proto/wire/reflection.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/compute/executor.h"
#include "server/config/listen_address.h"
#include "server/head/head_registry.h"
#include "server/head/step_watchdog.h"
#include "server/memory/budget.h"
#include "server/memory/cuda_layout.h"
#include "server/memory/staging_pool.h"
#include "server/memory/system_memory.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_guard.h"
#include "server/rpc/guarded_service.h"
#include "server/rpc/health_server.h"
#include "server/rpc/health_service.h"
#include "server/rpc/restore.h"
#include "server/rpc/service.h"
#include "server/security/security.h"
#include "server/security/server_credentials.h"
#include "server/shard/hardware.h"
#include "server/shard/rank_group.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

// Control calls may wait, each on a thread of gRPC's: one for every worker of a large step, and
// some.
constexpr int kThreadsMax = static_cast<int>(kWorkersMax) + 256;
constexpr int kConcurrentCallsMax = 1024;  // Of one connection.
constexpr int kMetadataBytesMax = 16 * kKiB;

// Between the end of calls by Stop and their cancellation by gRPC.
constexpr absl::Duration kEndGrace = absl::Seconds(1);
// For the followers of a server that restores its heads at start.
constexpr absl::Duration kRestorePatience = absl::Minutes(5);
// For gRPC to let go of the last answers' memory.
constexpr absl::Duration kSlotGrace = absl::Seconds(10);

uint64_t RandomIncarnation() {
  std::random_device random;
  const uint64_t id = (uint64_t{random()} << 32) | random();
  return id == 0 ? 1 : id;
}

int32_t NumPumpThreads() {
  const int32_t cores = static_cast<int32_t>(std::thread::hardware_concurrency());
  return std::clamp(cores / 4, 1, 8);
}

int64_t MaxMessageBytes(const ServerConfig& config) {
  return std::max(config.chunk_bytes_max + kMessageHeaderBytesMax, kControlMessageBytesMax);
}

// Of each rank, when ranks share a device. The ranks' devices are alike; where they are not, the
// smallest one bounds all.
int64_t DefaultRankLimitBytes(const Hardware& hardware) {
  int64_t bytes = hardware.devices.front().total_bytes;
  for (const Hardware::Device& device : hardware.devices) {
    bytes = std::min(bytes, device.total_bytes);
  }
  return DefaultMemoryLimitBytes(bytes) / hardware.MostRanksOnADevice();
}

// At once, over all replicas. One on the CPU computes one at a time, and has the next there while
// it does: a replica elsewhere would otherwise wait for it.
int32_t BatchesInFlight(bool cuda, int32_t num_replicas) {
  if (cuda) return kCudaBatchesInFlight * num_replicas;
  return num_replicas == 1 ? 1 : 2 * num_replicas;
}

// Of those, the ones that do not wait for more chunks: enough that every GPU has one to compute and
// the next uploaded.
int32_t EagerBatches(bool cuda, int32_t num_replicas) {
  return BatchesInFlight(cuda, num_replicas) - (cuda ? num_replicas : 0);
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
                                              : DefaultRankLimitBytes(hardware_)) {}
  ~Impl();

  absl::Status Start(const std::function<bool()>& cancelled);
  void Stop(absl::Time deadline);

  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  const std::string& health_address() const { return health_address_; }
  const std::string& group_address() const { return ranks_->group_address(); }
  uint64_t incarnation() const { return incarnation_; }

 private:
  absl::Status OpenCheckpoints();
  absl::Status RestoreHeads();
  void SaveHeads();
  absl::Status MakeSlots();
  absl::Status MakeRanks();
  void ConnectRanks();
  void TellWhyNotReady(const std::string& problem);
  void CheckHeads();
  absl::Status AwaitRanks(const std::function<bool()>& cancelled);
  void MakeCompute();
  absl::Status ServeMetrics();
  absl::Status ServeHealth();
  absl::Status ServeGrpc();
  void UpdateReadiness() ABSL_LOCKS_EXCLUDED(ready_mu_);
  void SetServing(bool serving) ABSL_LOCKS_EXCLUDED(ready_mu_);
  bool AnyStepOpen() const;
  void AwaitSteps(absl::Time deadline);
  void SetArguments(grpc::ServerBuilder* builder) const;
  ServerFacts Facts();
  std::vector<RankMemory> ReadMemory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(gauges_mu_);
  Gauges ReadGauges();
  void OnCheckpoint(const std::string& head, const absl::Status& status, absl::Duration duration);
  void AwaitSlots();

  const ServerConfig config_;
  const Hardware hardware_;
  const uint64_t incarnation_;
  const absl::Time started_at_ = absl::Now();

  // Scrapes come on threads of the metrics server, which outlives most of what they read.
  absl::Mutex gauges_mu_;
  bool gauges_live_ ABSL_GUARDED_BY(gauges_mu_) = false;
  std::map<std::string, absl::Time> checkpointed_at_ ABSL_GUARDED_BY(gauges_mu_);  // By head.

  // In the order of use: each outlives those below it.
  HealthService health_service_;          // At --listen.
  std::unique_ptr<HealthServer> health_;  // Answers until the end.
  std::unique_ptr<Security> security_;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::unique_ptr<CallGuard> guard_;
  Metrics metrics_;
  MemoryBudget budget_;
  std::unique_ptr<StagingPool> slots_;
  std::unique_ptr<StreamSet> streams_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<RankGroup> ranks_;
  std::unique_ptr<CheckpointStore> checkpoints_;  // Null when none are kept.
  std::unique_ptr<HeadRegistry> heads_;
  std::unique_ptr<StepWatchdog> watchdog_;
  std::unique_ptr<LmHeadServiceImpl> service_;
  std::unique_ptr<GuardedService> guarded_;
  std::unique_ptr<grpc::Server> grpc_;
  std::string address_;
  std::string metrics_address_;
  std::string health_address_;

  std::atomic<bool> connect_requested_{false};
  std::set<std::string> reasons_told_;     // Why the ranks are not connected; the executor's.
  std::atomic<bool> ranks_usable_{false};  // ranks_ and the executor are there.
  std::atomic<bool> heads_usable_{false};  // heads_ is there, too.
  absl::Mutex ready_mu_;
  bool serving_ ABSL_GUARDED_BY(ready_mu_) = false;  // Calls are taken; the server is not stopping.

  absl::Mutex stop_mu_;
  bool stopping_ ABSL_GUARDED_BY(stop_mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(stop_mu_) = false;
  bool hurried_ ABSL_GUARDED_BY(stop_mu_) = false;  // Stop was called again: no time to save.
  absl::Time stop_at_ ABSL_GUARDED_BY(stop_mu_) = absl::InfiniteFuture();
};

// --- Start ---

absl::Status Server::Impl::Start(const std::function<bool()>& cancelled) {
  absl::StatusOr<std::unique_ptr<Security>> security = Security::Load(config_.security);
  if (!security.ok()) return security.status();
  security_ = *std::move(security);
  guard_ = std::make_unique<CallGuard>(security_.get());
  if (absl::Status status = ServeHealth(); !status.ok()) return status;
  if (absl::Status status = OpenCheckpoints(); !status.ok()) return status;
  if (absl::Status status = MakeSlots(); !status.ok()) return status;
  if (absl::Status status = MakeRanks(); !status.ok()) return status;
  MakeCompute();
  if (absl::Status status = AwaitRanks(cancelled); !status.ok()) return status;
  if (absl::Status status = RestoreHeads(); !status.ok()) return status;
  {
    absl::MutexLock lock(&gauges_mu_);
    gauges_live_ = true;
  }
  if (absl::Status status = ServeMetrics(); !status.ok()) return status;
  if (absl::Status status = ServeGrpc(); !status.ok()) return status;
  spdlog::info("lmhead {} serves at {}: backend {} ({}), {} bytes for heads, incarnation {}",
               kVersion, address_, hardware_.backend, hardware_.devices.front().name,
               budget_.limit_bytes(), incarnation_);
  return absl::OkStatus();
}

absl::Status Server::Impl::OpenCheckpoints() {
  if (config_.checkpoint_dir.empty()) return absl::OkStatus();
  checkpoints_ = std::make_unique<CheckpointStore>(
      config_.checkpoint_dir, config_.checkpoint_keep, kVersion,
      [this](const std::string& head, const absl::Status& status, absl::Duration duration) {
        OnCheckpoint(head, status, duration);
      });
  absl::Status status = checkpoints_->Check();
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--checkpoint_dir: ", status.message()));
}

absl::Status Server::Impl::RestoreHeads() {
  if (!config_.restore) return absl::OkStatus();
  for (const std::string& name : checkpoints_->Heads()) {
    absl::StatusOr<std::shared_ptr<Head>> head =
        RestoreHead(heads_.get(), checkpoints_.get(), name, /*checkpoint=*/"");
    if (head.ok()) continue;
    return absl::Status(head.status().code(),
                        absl::StrCat("--restore: head ", name, ": ", head.status().message()));
  }
  return absl::OkStatus();
}

// What has been committed since the last checkpoint survives an orderly end. A failure is logged:
// the server ends all the same.
void Server::Impl::SaveHeads() {
  if (checkpoints_ == nullptr) return;
  for (const std::shared_ptr<Head>& head : heads_->List()) {
    if (!head->spec().trainable || head->Status().last_committed_step == 0) continue;
    const absl::StatusOr<SavedCheckpoint> saved = checkpoints_->Save(*head, /*name=*/"");
    if (saved.ok()) {
      spdlog::info("head {}: checkpoint {}", head->spec().name, saved->name);
    } else {
      spdlog::error("head {}: no checkpoint was written: {}", head->spec().name,
                    std::string(saved.status().message()));
    }
  }
}

absl::Status Server::Impl::MakeSlots() {
  std::optional<int> pinned_for;
  if (hardware_.kind == BackendKind::kCuda) pinned_for = hardware_.devices.front().number;
  absl::StatusOr<std::unique_ptr<StagingPool>> slots = StagingPool::Create(
      config_.staging_slots, StagingSlotBytes(config_.chunk_bytes_max), pinned_for);
  if (!slots.ok()) return slots.status();
  slots_ = *std::move(slots);
  const int32_t max_streams =
      config_.max_streams == 0 ? config_.staging_slots : config_.max_streams;
  streams_ = std::make_unique<StreamSet>(max_streams, config_.staging_slots, NumPumpThreads());
  return absl::OkStatus();
}

absl::Status Server::Impl::MakeRanks() {
  const bool cuda = hardware_.kind == BackendKind::kCuda;
  executor_ = std::make_unique<Executor>(Executor::Options{
      .join_chunks =
          config_.join_chunks == JoinChunks::kAuto ? cuda : config_.join_chunks == JoinChunks::kOn,
      .max_inflight_batches = BatchesInFlight(cuda, config_.ranks.num_replicas),
      .eager_batches = EagerBatches(cuda, config_.ranks.num_replicas),
      .on_batch = [this](int64_t chunks, int64_t tokens) {
        metrics_.ObserveBatch(chunks, tokens);
      }});
  credentials_ = MakeServerCredentials(security_.get());
  absl::StatusOr<std::unique_ptr<RankGroup>> ranks = RankGroup::Start(
      hardware_,
      {.config = config_.ranks,
       .version = kVersion,
       .credentials = credentials_,
       .admit = [this](const grpc::ServerContextBase& context,
                       std::string_view method) { return guard_->Admit(context, method).status(); },
       .request_connect = [this] { ConnectRanks(); },
       .on_ready = [this](bool) { UpdateReadiness(); }});
  if (!ranks.ok()) return ranks.status();
  ranks_ = *std::move(ranks);
  ranks_usable_ = true;
  ConnectRanks();
  return absl::OkStatus();
}

// Asks for it, on the executor; once at a time.
void Server::Impl::ConnectRanks() {
  if (!ranks_usable_ || connect_requested_.exchange(true)) return;
  executor_->Post([this] {
    connect_requested_ = false;
    const std::string problem(ranks_->Connect().message());
    TellWhyNotReady(problem);
    if (problem.empty() && heads_usable_) CheckHeads();
  });
}

// Each reason once until the ranks are connected: two may take turns from try to try.
void Server::Impl::TellWhyNotReady(const std::string& problem) {
  constexpr size_t kReasonsMax = 100;
  if (problem.empty() || reasons_told_.size() == kReasonsMax) reasons_told_.clear();
  if (!problem.empty() && reasons_told_.insert(problem).second) {
    spdlog::info("not ready: {}", problem);
  }
}

// Tells of the heads whose shards went with a rank's process, rather than let a trainer find out.
// On the executor's thread.
void Server::Impl::CheckHeads() {
  for (const std::shared_ptr<Head>& head : heads_->List()) {
    if (!head->Status().poisoned_by.empty()) continue;
    const absl::Status status = head->CheckStateOnExecutor();
    if (absl::IsAborted(status)) spdlog::error("{}", std::string(status.message()));
  }
}

// Heads can be restored only onto ranks that are there.
absl::Status Server::Impl::AwaitRanks(const std::function<bool()>& cancelled) {
  if (!config_.restore) return absl::OkStatus();
  const absl::Time deadline = absl::Now() + kRestorePatience;
  while (!ranks_->ready()) {
    if (cancelled && cancelled()) {
      return absl::CancelledError("--restore: told to stop before all ranks were there");
    }
    if (absl::Now() > deadline) {
      return absl::UnavailableError(absl::StrCat("--restore: not all ranks came within ",
                                                 absl::FormatDuration(kRestorePatience),
                                                 "; start their followers"));
    }
    absl::SleepFor(absl::Milliseconds(200));
  }
  return absl::OkStatus();
}

void Server::Impl::MakeCompute() {
  BackendFactory make_backend = [this](const HeadSpec& spec, const MemoryPlan& plan) {
    return ranks_->MakeHead(spec, plan);
  };
  heads_ = std::make_unique<HeadRegistry>(
      &budget_,
      PlanOptions{.backend = hardware_.kind,
                  .num_ranks = ranks_->ranks_per_replica(),
                  .num_replicas = ranks_->num_replicas(),
                  .batch_tokens = config_.batch_tokens},
      std::move(make_backend),
      HeadEnvironment{.executor = executor_.get(),
                      .account = ranks_->accounts().front(),
                      .other_accounts = {ranks_->accounts().begin() + 1, ranks_->accounts().end()},
                      .metrics = &metrics_,
                      .incarnation = incarnation_,
                      .chunk_bytes_max = config_.chunk_bytes_max,
                      .pair_timeout = config_.pair_timeout,
                      .num_ranks = ranks_->ranks_per_replica()});
  heads_usable_ = true;
  service_ = std::make_unique<LmHeadServiceImpl>(
      StreamEnvironment{.heads = heads_.get(),
                        .slots = slots_.get(),
                        .streams = streams_.get(),
                        .metrics = &metrics_,
                        .guard = guard_.get(),
                        .checkpoints = checkpoints_.get(),
                        .incarnation = incarnation_,
                        .max_inflight_chunks = config_.max_inflight_chunks,
                        .stall_timeout = config_.write_timeout},
      Facts());
}

absl::Status Server::Impl::ServeHealth() {
  if (config_.health_listen.empty()) return absl::OkStatus();
  absl::Status free = CheckSocketIsFree("health_listen", config_.health_listen);
  if (!free.ok()) return free;
  absl::StatusOr<std::unique_ptr<HealthServer>> health = HealthServer::Start(config_.health_listen);
  if (!health.ok()) return health.status();
  health_ = *std::move(health);
  health_address_ = BoundAddress(config_.health_listen, health_->port());
  return absl::OkStatus();
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
  absl::Status free = CheckSocketIsFree("listen", config_.listen);
  if (!free.ok()) return free;
  if (config_.reflection) grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  if (!config_.reflection) LeaveReflectionAway(&builder);
  SetArguments(&builder);
  int port = 0;
  builder.AddListeningPort(config_.listen, credentials_, &port);
  guarded_ = std::make_unique<GuardedService>(service_.get(), guard_.get(), heads_.get());
  builder.RegisterService(guarded_.get());
  builder.RegisterService(&health_service_);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", config_.listen,
                     ": the address is in use or is not this machine's; "
                     "choose another --listen (port 0 takes a free one)"));
  }
  address_ = BoundAddress(config_.listen, port);
  {
    absl::MutexLock lock(&ready_mu_);
    grpc_ = std::move(server);
  }
  SetServing(true);
  watchdog_ = std::make_unique<StepWatchdog>(
      heads_.get(),
      StepLimits{.worker_lease = config_.worker_lease, .step_timeout = config_.step_timeout});
  return absl::OkStatus();
}

void Server::Impl::SetServing(bool serving) {
  {
    absl::MutexLock lock(&ready_mu_);
    serving_ = serving;
  }
  UpdateReadiness();
}

// Also called by ranks that come and go, before and after the server serves.
void Server::Impl::UpdateReadiness() {
  absl::MutexLock lock(&ready_mu_);
  if (grpc_ == nullptr) return;
  const bool ready = serving_ && ranks_->ready();
  health_service_.SetReady(ready);
  if (health_ != nullptr) health_->SetReady(ready);
}

// --- What it says of itself ---

ServerFacts Server::Impl::Facts() {
  return {.version = kVersion,
          .backend = hardware_.backend,
          .max_message_bytes = MaxMessageBytes(config_),
          .max_chunk_bytes = config_.chunk_bytes_max,
          .started_at = started_at_,
          .read_devices =
              [this] {
                std::vector<ServerFacts::Device> devices;
                for (const Hardware::Device& device : ranks_->ReadDevices()) {
                  const auto rank = static_cast<int32_t>(devices.size());
                  devices.push_back({.rank = rank,
                                     .replica = rank / ranks_->ranks_per_replica(),
                                     .name = device.name,
                                     .total_memory_bytes = device.total_bytes});
                }
                return devices;
              },
          .read_memory =
              [this] {
                absl::MutexLock lock(&gauges_mu_);
                return ReadMemory();
              }};
}

std::vector<RankMemory> Server::Impl::ReadMemory() {
  std::vector<RankMemory> memory = ranks_->ReadMemory();
  for (RankMemory& rank : memory) {
    rank.limit_bytes = budget_.limit_bytes();
    rank.reserved_bytes = budget_.reserved_bytes();
  }
  return memory;
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
                   .group_ready = ranks_->ready(),
                   .executor_busy_seconds = executor_->busy_seconds(),
                   .security_reload_failures = security_->num_reload_failures()};
  if (const auto identity = security_->tls_identity(); identity != nullptr) {
    gauges.tls_certificate_expiry_seconds =
        absl::ToDoubleSeconds(identity->expiry - absl::UnixEpoch());
  }
  const CollectiveTimes& times = ranks_->collective_times();
  for (size_t op = 0; op < CollectiveTimes::kNames.size(); ++op) {
    gauges.collectives.push_back({.op = CollectiveTimes::kNames[op],
                                  .calls = times.calls[op],
                                  .seconds = static_cast<double>(times.nanoseconds[op]) * 1e-9});
  }
  for (const RankPool::ReplicaWork& work : ranks_->ReadReplicaWork()) {
    gauges.replicas.push_back({.batches = work.num_batches, .tokens = work.num_tokens});
  }
  gauges.replica_batch_bytes = ranks_->ReadReplicaBatchBytes();
  for (const std::shared_ptr<Head>& head : heads_->List()) {
    const HeadStatus status = head->Status();
    ++gauges.heads;
    if (!status.poisoned_by.empty()) ++gauges.heads_poisoned;
    HeadGauges figures = {.name = status.spec.name,
                          .dense_logits_bytes = status.last_step_tokens * status.spec.vocab_size *
                                                BytesPerElement(status.spec.weight_dtype)};
    if (const auto found = checkpointed_at_.find(figures.name); found != checkpointed_at_.end()) {
      figures.last_checkpoint_seconds = absl::ToDoubleSeconds(found->second - absl::UnixEpoch());
    }
    gauges.by_head.push_back(std::move(figures));
  }
  return gauges;
}

void Server::Impl::OnCheckpoint(const std::string& head, const absl::Status& status,
                                absl::Duration duration) {
  metrics_.CountCheckpoint(status.ok() ? CheckpointOutcome::kSaved : CheckpointOutcome::kFailed,
                           absl::ToDoubleSeconds(duration));
  if (!status.ok()) return;
  absl::MutexLock lock(&gauges_mu_);
  checkpointed_at_[head] = absl::Now();
}

// --- Stop ---

void Server::Impl::Stop(absl::Time deadline) {
  {
    absl::MutexLock lock(&stop_mu_);
    stop_at_ = std::min(stop_at_, deadline);
    if (stopping_) {
      hurried_ = true;
      stop_mu_.Await(absl::Condition(&stopped_));
      return;
    }
    stopping_ = true;
  }
  SetServing(false);
  guard_->StartDraining();
  spdlog::info("stopping: no new steps; {} streams are open", streams_->num_open());
  AwaitSteps(deadline);
  {
    absl::MutexLock lock(&stop_mu_);
    deadline = stop_at_;
  }
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
  bool hurried = false;
  {
    absl::MutexLock lock(&stop_mu_);
    hurried = hurried_;
  }
  if (!hurried) SaveHeads();
  absl::MutexLock lock(&stop_mu_);
  stopped_ = true;
}

bool Server::Impl::AnyStepOpen() const {
  const std::vector<std::shared_ptr<Head>> heads = heads_->List();
  return std::any_of(heads.begin(), heads.end(),
                     [](const auto& head) { return head->Status().open_step != 0; });
}

// Lets open steps come to their end, which takes new calls; aborts those that have not at the
// deadline.
void Server::Impl::AwaitSteps(absl::Time deadline) {
  for (;;) {
    if (!AnyStepOpen()) return;
    absl::MutexLock lock(&stop_mu_);
    const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(stop_mu_) {
      return absl::Now() >= stop_at_;
    };
    if (stop_mu_.AwaitWithTimeout(absl::Condition(&over), absl::Milliseconds(20))) break;
  }
  const char* reason = absl::Now() < deadline
                           ? "the server was told to stop at once"
                           : "the server is stopping, and the step did not end in the time that "
                             "--drain_timeout_seconds gives";
  for (const std::shared_ptr<Head>& head : heads_->List()) {
    const uint64_t step = head->AbandonStep(reason);
    if (step != 0) spdlog::warn("head {}: aborted step {}: {}", head->spec().name, step, reason);
  }
}

void Server::Impl::AwaitSlots() {
  const absl::Time deadline = absl::Now() + kSlotGrace;
  while (slots_->num_lent() > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
}

Server::Impl::~Impl() {
  if (grpc_ != nullptr) {
    Stop(absl::Now());
    grpc_->Wait();
    absl::MutexLock lock(&ready_mu_);
    grpc_.reset();
  }
  {
    absl::MutexLock lock(&gauges_mu_);
    gauges_live_ = false;
  }
  guarded_.reset();
  service_.reset();
  watchdog_.reset();
  // A follower that hangs does not hold up the end of the heads.
  if (ranks_ != nullptr) ranks_->Stop();
  heads_usable_ = false;
  if (executor_ != nullptr) executor_->Run([] {});  // Nothing on its thread looks at them any more.
  heads_.reset();
  ranks_usable_ = false;
  executor_.reset();
  ranks_.reset();
  if (slots_ != nullptr) AwaitSlots();
  streams_.reset();
}

// --- Server ---

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerConfig& config,
                                                      const std::function<bool()>& cancelled) {
  KeepGrpcInitialized();
  ServerConfig filled = config;
  FillRankDefaults(&filled.ranks);
  absl::StatusOr<Hardware> hardware =
      ChooseHardware(config.backend, filled.ranks.devices, filled.ranks.num_local);
  if (!hardware.ok()) return hardware.status();
  auto impl = std::make_unique<Impl>(filled, *std::move(hardware));
  if (absl::Status status = impl->Start(cancelled); !status.ok()) return status;
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

void Server::Stop(absl::Time deadline) { impl_->Stop(deadline); }
const std::string& Server::address() const { return impl_->address(); }
const std::string& Server::metrics_address() const { return impl_->metrics_address(); }
const std::string& Server::health_address() const { return impl_->health_address(); }
const std::string& Server::group_address() const { return impl_->group_address(); }
uint64_t Server::incarnation() const { return impl_->incarnation(); }

}  // namespace lmhead
