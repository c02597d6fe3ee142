#include "server/shard/leader.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "lmhead/v1/shard.grpc.pb.h"
#include "proto/types/limits.h"
#include "proto/wire/reflection.h"
#include "proto/wire/status.h"
#include "server/shard/leader_lane.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

using FollowStream = grpc::ServerReaderWriter<v1::FollowResponse, v1::FollowRequest>;

// Pings within a silence limit.
constexpr int kPingsPerLimit = 4;

// Longest wait of one GetRendezvous; the follower's timeout is below.
constexpr absl::Duration kRendezvousMax = absl::Hours(1);

}  // namespace

// Control on gRPC's synchronous threads, which may block; lanes on its callback threads.
using LeaderService = v1::ShardService::WithRawCallbackMethod_Lane<v1::ShardService::Service>;

class ShardLeader::Impl final : public LeaderService {
 public:
  Impl(const Options& options, RankPool* pool, const std::vector<RemoteRank*>& remote);
  ~Impl() override { Stop(); }

  absl::Status Start();
  void Stop();
  int port() const { return port_; }

  grpc::Status Follow(grpc::ServerContext* context, FollowStream* stream) override;
  LaneServerReactor* Lane(grpc::CallbackServerContext* context) override;
  grpc::Status SetRendezvous(grpc::ServerContext* context, const v1::SetRendezvousRequest* request,
                             v1::SetRendezvousResponse* response) override;
  grpc::Status GetRendezvous(grpc::ServerContext* context, const v1::GetRendezvousRequest* request,
                             v1::GetRendezvousResponse* response) override;

 private:
  absl::Status Admit(const grpc::ServerContextBase& context, const char* method) const;
  absl::StatusOr<std::shared_ptr<Lanes>> FindLanes(const v1::JoinLane& join) const;
  void ServeFollower(grpc::ServerContext* context, FollowStream* stream, int32_t number,
                     const std::shared_ptr<LeaderOutbox>& outbox, Lanes* lanes);
  absl::StatusOr<RemoteRank*> CheckJoin(const v1::FollowRequest& first) const;
  absl::Status NotAFollower(int32_t rank) const;
  v1::Welcome Welcome() const;
  absl::StatusOr<std::shared_ptr<InProcessStore>> FindStore(uint64_t generation) const;
  void Watch();

  const Options options_;
  RankPool* const pool_;
  std::map<int32_t, RemoteRank*> remote_;
  std::unique_ptr<grpc::Server> grpc_;
  int port_ = 0;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread watch_;
};

ShardLeader::Impl::Impl(const Options& options, RankPool* pool,
                        const std::vector<RemoteRank*>& remote)
    : options_(options), pool_(pool) {
  for (int32_t rank = 0; rank < pool->num_ranks(); ++rank) {
    for (RemoteRank* each : remote) {
      if (&pool->rank(rank) != each) continue;
      remote_[rank] = each;
      each->SetOnLost([this, rank](const absl::Status& reason) {
        spdlog::warn("{} is away: {}", pool_->NameOf(rank), std::string(reason.message()));
        pool_->Fail(pool_->generation(), rank, reason);
      });
    }
  }
}

absl::Status ShardLeader::Impl::Start() {
  grpc::ServerBuilder builder;
  LeaveReflectionAway(&builder);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // The followers ping as often as the collective's timeout asks for.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // What a connection that hangs was sent is held until it is given up: after one to two of these.
  const auto silence = static_cast<int>(absl::ToInt64Milliseconds(SilenceLimit(options_.timeout)));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, silence);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, silence);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddListeningPort(options_.listen, options_.credentials, &port_);
  builder.RegisterService(this);
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for followers on ", options_.listen,
                     ": the address is in use or is not this machine's; choose another "
                     "--group_listen (port 0 takes a free one)"));
  }
  watch_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

void ShardLeader::Impl::Stop() {
  {
    absl::MutexLock lock(&mu_);
    if (std::exchange(stopping_, true)) return;
  }
  if (watch_.joinable()) watch_.join();
  if (grpc_ != nullptr) {
    grpc_->Shutdown(absl::ToChronoTime(absl::Now()));
    grpc_->Wait();
  }
}

void ShardLeader::Impl::Watch() {
  const absl::Duration interval = SilenceLimit(options_.timeout) / kPingsPerLimit;
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), interval)) return;
    }
    for (const auto& [rank, remote] : remote_) remote->Tick();
  }
}

// --- The calls ---------------------------------------------------------------------------------

absl::Status ShardLeader::Impl::Admit(const grpc::ServerContextBase& context,
                                      const char* method) const {
  absl::Status status = options_.admit(context, method);
  if (!status.ok()) {
    spdlog::warn("{} from {} refused: {}", method, context.peer(), status.ToString());
  }
  return status;
}

absl::StatusOr<RemoteRank*> ShardLeader::Impl::CheckJoin(const v1::FollowRequest& first) const {
  if (!first.has_join()) {
    return absl::InvalidArgumentError("the first message of a follower is not `join`");
  }
  const v1::JoinGroup& join = first.join();
  if (join.version() != options_.version) {
    return absl::FailedPreconditionError(absl::StrCat("the follower has release ", join.version(),
                                                      ", the leader ", options_.version,
                                                      "; all ranks run the same release"));
  }
  if (join.backend() != options_.backend) {
    return absl::FailedPreconditionError(
        absl::StrCat("the follower computes on ", join.backend(), ", the leader on ",
                     options_.backend, "; start it with --backend=", options_.backend));
  }
  const auto found = remote_.find(join.rank());
  if (found == remote_.end() || join.session() == 0) {
    return NotAFollower(join.rank());
  }
  return found->second;
}

absl::Status ShardLeader::Impl::NotAFollower(int32_t rank) const {
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " is not a follower's; those are the ranks from ",
                   remote_.begin()->first, " to ", remote_.rbegin()->first));
}

v1::Welcome ShardLeader::Impl::Welcome() const {
  v1::Welcome welcome;
  welcome.set_num_ranks(pool_->num_ranks());
  welcome.set_num_replicas(pool_->num_replicas());
  welcome.set_collective(options_.collective);
  welcome.set_timeout_seconds(absl::ToDoubleSeconds(options_.timeout));
  for (const HeadId head : pool_->heads()) welcome.add_heads(head);
  return welcome;
}

grpc::Status ShardLeader::Impl::Follow(grpc::ServerContext* context, FollowStream* stream) {
  if (absl::Status status = Admit(*context, "Follow"); !status.ok()) return ToGrpcStatus(status);
  v1::FollowRequest message;
  if (!stream->Read(&message)) return grpc::Status::OK;
  absl::StatusOr<RemoteRank*> found = CheckJoin(message);
  if (!found.ok()) return ToGrpcStatus(found.status());
  RemoteRank& rank = **found;
  const int32_t number = message.join().rank();
  auto outbox = std::make_shared<LeaderOutbox>([context] { context->TryCancel(); });
  std::shared_ptr<Lanes> lanes;
  if (rank.TakesBatches()) {
    lanes = std::make_shared<Lanes>(kLanesOfARank, [outbox] { outbox->Cancel(); });
  }
  const absl::Status status =
      rank.Attach(message.join(), context->peer(), Welcome(), outbox, lanes);
  if (status.ok()) ServeFollower(context, stream, number, outbox, lanes.get());
  outbox->Close();
  if (lanes != nullptr) {
    lanes->Close(status.ok() ? FollowerIsGone() : status);
    lanes->AwaitEnd();
  }
  return ToGrpcStatus(status);
}

void ShardLeader::Impl::ServeFollower(grpc::ServerContext* context, FollowStream* stream,
                                      int32_t number, const std::shared_ptr<LeaderOutbox>& outbox,
                                      Lanes* lanes) {
  RemoteRank& rank = *remote_.at(number);
  spdlog::info("{} is there: the follower at {}", pool_->NameOf(number), context->peer());
  std::thread writer([&outbox, stream] {
    while (std::optional<v1::FollowResponse> next = outbox->Pop()) {
      if (!stream->Write(*next)) return;
    }
  });
  if (rank.session() != 0) options_.request_connect();  // Otherwise its last lane asks.
  v1::FollowRequest message;
  while (stream->Read(&message)) rank.Receive(outbox.get(), &message);
  const absl::Status loss = lanes == nullptr ? absl::OkStatus() : lanes->loss();
  rank.Detach(outbox.get(), loss.ok() ? FollowerIsGone() : loss);
  outbox->Close();
  writer.join();
}

LaneServerReactor* ShardLeader::Impl::Lane(grpc::CallbackServerContext* context) {
  return LeaderLane::Start(
      context,
      {.find_lanes = [this](const v1::JoinLane& join) { return FindLanes(join); },
       .on_complete = options_.request_connect},
      Admit(*context, "Lane"));
}

absl::StatusOr<std::shared_ptr<Lanes>> ShardLeader::Impl::FindLanes(
    const v1::JoinLane& join) const {
  const auto found = remote_.find(join.rank());
  if (found != remote_.end()) return found->second->FindLanes(join);
  return NotAFollower(join.rank());
}

absl::StatusOr<std::shared_ptr<InProcessStore>> ShardLeader::Impl::FindStore(
    uint64_t generation) const {
  std::shared_ptr<InProcessStore> store = pool_->store(generation);
  if (store != nullptr) return store;
  return absl::NotFoundError(absl::StrCat("generation ", generation, " is not connecting"));
}

grpc::Status ShardLeader::Impl::SetRendezvous(grpc::ServerContext* context,
                                              const v1::SetRendezvousRequest* request,
                                              v1::SetRendezvousResponse* response) {
  if (absl::Status status = Admit(*context, "SetRendezvous"); !status.ok()) {
    return ToGrpcStatus(status);
  }
  absl::StatusOr<std::shared_ptr<InProcessStore>> store = FindStore(request->generation());
  if (!store.ok()) return ToGrpcStatus(store.status());
  return ToGrpcStatus((*store)->Set(request->key(), request->value()));
}

grpc::Status ShardLeader::Impl::GetRendezvous(grpc::ServerContext* context,
                                              const v1::GetRendezvousRequest* request,
                                              v1::GetRendezvousResponse* response) {
  if (absl::Status status = Admit(*context, "GetRendezvous"); !status.ok()) {
    return ToGrpcStatus(status);
  }
  absl::StatusOr<std::shared_ptr<InProcessStore>> store = FindStore(request->generation());
  if (!store.ok()) return ToGrpcStatus(store.status());
  const absl::Duration timeout =
      std::min(absl::Seconds(request->timeout_seconds()), kRendezvousMax);
  absl::StatusOr<std::string> value = (*store)->Get(request->key(), absl::Now() + timeout);
  if (!value.ok()) return ToGrpcStatus(value.status());
  response->set_value(*std::move(value));
  return grpc::Status::OK;
}

// --- ShardLeader -------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<ShardLeader>> ShardLeader::Start(
    const Options& options, RankPool* pool, const std::vector<RemoteRank*>& remote) {
  auto impl = std::make_unique<Impl>(options, pool, remote);
  if (absl::Status status = impl->Start(); !status.ok()) return status;
  return std::unique_ptr<ShardLeader>(new ShardLeader(std::move(impl)));
}

ShardLeader::ShardLeader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ShardLeader::~ShardLeader() = default;

void ShardLeader::Stop() { impl_->Stop(); }
int ShardLeader::port() const { return impl_->port(); }

}  // namespace lmhead
