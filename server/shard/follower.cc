#include "server/shard/follower.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "lmhead/v1/shard.grpc.pb.h"
#include "proto/wire/convert.h"
#include "proto/wire/status.h"
#include "server/shard/batch_buffers.h"
#include "server/shard/follower_lane.h"
#include "server/shard/outbox.h"
#include "server/shard/shard_messages.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

using FollowStream = grpc::ClientReaderWriter<v1::FollowRequest, v1::FollowResponse>;
using FollowerOutbox = Outbox<v1::FollowRequest>;

// Between calls: soon after a call that worked, later while the leader cannot be reached.
constexpr absl::Duration kFirstPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestPause = absl::Seconds(5);

// A leader that is stopped, or behind a network that is down, is noticed by these.
constexpr int kLeaderPingMilliseconds = 10'000;
constexpr int kLeaderPingTimeoutMilliseconds = 10'000;

uint64_t RandomSession() {
  std::random_device random;
  const uint64_t id = (uint64_t{random()} << 32) | random();
  return id == 0 ? 1 : id;
}

// On a connection of its own.
std::shared_ptr<grpc::Channel> OpenChannel(const Follower::Options& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kLeaderPingMilliseconds);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kLeaderPingTimeoutMilliseconds);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(kLongestPause)));
  if (!options.server_name.empty()) arguments.SetSslTargetNameOverride(options.server_name);
  return grpc::CreateCustomChannel(options.leader, options.credentials, arguments);
}

// The leader's rendezvous.
class LeaderStore final : public RendezvousStore {
 public:
  LeaderStore(v1::ShardService::StubInterface* stub, uint64_t generation, absl::Duration timeout)
      : stub_(*stub), generation_(generation), timeout_(timeout) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
    v1::SetRendezvousRequest request;
    request.set_generation(generation_);
    request.set_key(key);
    request.set_value(value);
    v1::SetRendezvousResponse response;
    return FromGrpcStatus(stub_.SetRendezvous(&context, request, &response));
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::GetRendezvousRequest request;
    request.set_generation(generation_);
    request.set_key(key);
    request.set_timeout_seconds(absl::ToDoubleSeconds(deadline - absl::Now()));
    v1::GetRendezvousResponse response;
    absl::Status status = FromGrpcStatus(stub_.GetRendezvous(&context, request, &response));
    if (!status.ok()) return status;
    return std::move(*response.mutable_value());
  }

 private:
  v1::ShardService::StubInterface& stub_;
  const uint64_t generation_;
  const absl::Duration timeout_;
};

// What calling again does not mend.
bool IsFatal(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status) ||
         absl::IsUnimplemented(status);
}

// Of a call that the leader never answered: what TLS does not say of a connection that it ended.
absl::Status WithTlsHint(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  const char* hint = "";
  if (absl::StrContains(status.message(), "handshake failed")) {
    hint =
        "; the leader's certificate has to be of the authorities of --tls_ca_file, for the host of "
        "--leader or for --tls_server_name";
  } else if (absl::StrContains(status.message(), "Socket closed") ||
             absl::StrContains(status.message(), "Connection reset")) {
    hint =
        "; so ends a leader with TLS the call of a follower without (--tls_ca_file), without a "
        "certificate that it demands, or with one that it does not trust (--tls_cert_file)";
  }
  return absl::UnavailableError(absl::StrCat(status.message(), hint));
}

// What a batch points to until it is done and its gradients are sent.
struct FollowerBatch {
  std::shared_ptr<v1::Command> command;
  std::shared_ptr<const LossRecipe> recipe;
  BackwardMode mode = BackwardMode::kNone;
  OutputSpec outputs;
  std::vector<ChunkRows> chunks;
  v1::ShardBatchResult result;  // Outputs are written here; none of a rank that writes none.
  // Of the hidden states, and of their gradients in their place.
  std::shared_ptr<std::byte> memory;
  Lanes::Places places;  // There, by the numbers of LanePart.

  void GiveMemory();
};

// As it lies in the memory: each on a cache line of its own.
int64_t BytesInMemory(const ConstMatrixView& rows) {
  constexpr int64_t kAlignment = 64;
  return (rows.size_bytes() + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t BytesOnLanes(std::span<const ChunkRows> chunks) {
  int64_t bytes = 0;
  for (const ChunkRows& chunk : chunks) {
    bytes += BytesInMemory(chunk.hidden_states) + BytesInMemory(chunk.teacher_hidden_states);
  }
  return bytes;
}

void FollowerBatch::GiveMemory() {
  std::byte* next = memory.get();
  const auto give = [this, &next](ConstMatrixView* rows) {
    rows->data = next;
    places.emplace_back(next, static_cast<size_t>(rows->size_bytes()));
    next += BytesInMemory(*rows);
  };
  for (ChunkRows& chunk : chunks) {
    const ConstMatrixView& hidden = chunk.hidden_states;
    if (WantsGradients(outputs, mode)) {
      chunk.grad_hidden_states = {next, hidden.rows, hidden.cols, hidden.dtype};
    }
    give(&chunk.hidden_states);
    if (chunk.teacher_hidden_states.rows > 0) {
      give(&chunk.teacher_hidden_states);
    } else {
      places.emplace_back();
    }
  }
}

void AnswerBatch(FollowerBatch* batch, const BatchOutput& output, v1::CommandReply* reply) {
  for (int i = 0; i < batch->result.chunks_size(); ++i) {
    *batch->result.mutable_chunks(i)->mutable_sums() = LossSumsToProto(output.sums[i]);
  }
  *batch->result.mutable_timings() = StageTimingsToProto(output.timings);
  *reply->mutable_batch() = std::move(batch->result);
}

// Of what lanes carry.
struct Arrival {
  absl::Notification notified;
  absl::Status status;  // Written before.
};

}  // namespace

class Follower::Impl {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)),
        stub_(v1::ShardService::NewStub(OpenChannel(options_))),
        buffers_(options_.device) {
    options_.join.set_session(RandomSession());
  }

  absl::Status Run();
  void Stop();

 private:
  // What a command's answer needs: the call it came on, its lanes (null: it has none), its number.
  struct Answer {
    std::shared_ptr<FollowerOutbox> outbox;
    std::shared_ptr<Lanes> lanes;
    uint64_t id = 0;

    void Send(const absl::Status& status, v1::CommandReply reply = {}) const;
    Rank::Done Done() const;
  };

  absl::Status FollowOnce();
  absl::Status TakeIn(const v1::Welcome& welcome);
  std::shared_ptr<Lanes> OpenLanes(const v1::Welcome& welcome,
                                   const std::shared_ptr<FollowerOutbox>& outbox) const;
  void Serve(FollowStream* stream, const std::shared_ptr<FollowerOutbox>& outbox,
             const std::shared_ptr<Lanes>& lanes);
  absl::Status Start(const std::shared_ptr<v1::Command>& command, const Answer& answer);
  absl::Status StartConnect(const v1::ConnectRank& connect, const Answer& answer);
  absl::Status StartCreate(HeadId head, const v1::CreateShard& create, const Answer& answer);
  absl::Status StartBatch(const std::shared_ptr<v1::Command>& command, const Answer& answer);
  absl::Status TakeRecipe(HeadId head, const v1::ComputeShardBatch& compute);
  absl::StatusOr<std::shared_ptr<FollowerBatch>> ReadBatch(
      const std::shared_ptr<v1::Command>& command);
  absl::Status StartRows(const std::shared_ptr<v1::Command>& command, const Answer& answer);
  absl::Status StartRead(HeadId head, const v1::ReadShardRows& read, const Answer& answer);
  bool stopping();

  Options options_;
  const std::unique_ptr<v1::ShardService::Stub> stub_;
  BatchBuffers buffers_;
  GroupFacts group_;
  std::unique_ptr<LocalRank> rank_;  // There from the first welcome on.

  // Of the call under way.
  std::map<HeadId, int64_t> vocab_sizes_;
  std::shared_ptr<const LossRecipe> recipe_;

  absl::Mutex mu_;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mu_) = nullptr;  // Of the call under way.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

// --- Calling the leader ------------------------------------------------------------------------

bool Follower::Impl::stopping() {
  absl::MutexLock lock(&mu_);
  return stopping_;
}

void Follower::Impl::Stop() {
  absl::MutexLock lock(&mu_);
  stopping_ = true;
  if (context_ != nullptr) context_->TryCancel();
}

absl::Status Follower::Impl::Run() {
  absl::Duration pause = kFirstPause;
  std::string last;
  while (!stopping()) {
    const absl::Time started = absl::Now();
    absl::Status status = FollowOnce();
    if (stopping()) break;
    if (IsFatal(status)) return status;
    if (absl::Now() - started > kLongestPause) pause = kFirstPause;
    if (const std::string message(status.message()); message != last) {
      spdlog::warn("rank {}: no leader at {}: {}; calling again", options_.join.rank(),
                   options_.leader, message.empty() ? "it ended the call" : message);
      last = message;
    }
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(&stopping_), pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return absl::OkStatus();
}

absl::Status Follower::Impl::FollowOnce() {
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mu_);
    if (stopping_) return absl::OkStatus();
    context_ = &context;
  }
  const std::unique_ptr<FollowStream> stream = stub_->Follow(&context);
  v1::FollowRequest first;
  *first.mutable_join() = options_.join;
  v1::FollowResponse answer;
  absl::Status failure;
  std::shared_ptr<Lanes> lanes;
  if (stream->Write(first) && stream->Read(&answer)) {
    failure = answer.has_welcome()
                  ? TakeIn(answer.welcome())
                  : absl::InternalError("the leader's first message is no welcome");
    if (failure.ok()) {
      const auto outbox = std::make_shared<FollowerOutbox>([&context] { context.TryCancel(); });
      lanes = OpenLanes(answer.welcome(), outbox);
      Serve(stream.get(), outbox, lanes);
    }
  }
  if (!failure.ok()) context.TryCancel();
  const absl::Status finished = FromGrpcStatus(stream->Finish());
  {
    absl::MutexLock lock(&mu_);
    context_ = nullptr;
  }
  absl::Status loss;  // Of a lane, which has ended the call.
  if (lanes != nullptr) {
    loss = lanes->loss();
    lanes->AwaitEnd();
  }
  if (!failure.ok()) return failure;
  if (absl::IsCancelled(finished) && !loss.ok()) return loss;
  return answer.has_welcome() ? finished : WithTlsHint(finished);
}

absl::Status Follower::Impl::TakeIn(const v1::Welcome& welcome) {
  const GroupFacts group = {.num_ranks = welcome.num_ranks(),
                            .num_replicas = welcome.num_replicas(),
                            .collective = welcome.collective(),
                            .timeout = absl::Seconds(welcome.timeout_seconds())};
  if (rank_ == nullptr) {
    absl::StatusOr<std::unique_ptr<LocalRank>> rank = options_.make_rank(group);
    if (!rank.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("this rank cannot be: ", rank.status().message()));
    }
    rank_ = *std::move(rank);
    group_ = group;
  } else if (!(group == group_)) {
    return absl::FailedPreconditionError(
        "the leader was started with other ranks or replicas, another collective or another "
        "timeout; start this follower anew");
  }
  // Ends what the last call has left on the rank's thread, too.
  rank_->Abort(absl::UnavailableError("the leader has taken the rank in anew"));
  const std::vector<HeadId> heads(welcome.heads().begin(), welcome.heads().end());
  rank_->KeepHeads(heads);
  recipe_ = nullptr;
  spdlog::info("rank {}: follows the leader at {}, {} ranks, {} replicas, over {}",
               options_.join.rank(), options_.leader, group.num_ranks, group.num_replicas,
               group.collective);
  options_.on_welcome();
  return absl::OkStatus();
}

// None when the rank gets no batches.
std::shared_ptr<Lanes> Follower::Impl::OpenLanes(
    const v1::Welcome& welcome, const std::shared_ptr<FollowerOutbox>& outbox) const {
  if (welcome.num_lanes() <= 0) return nullptr;
  auto lanes = std::make_shared<Lanes>(welcome.num_lanes(), [outbox] { outbox->Cancel(); });
  v1::JoinLane join;
  join.set_rank(options_.join.rank());
  join.set_session(options_.join.session());
  join.set_call(welcome.call());
  for (int32_t lane = 0; lane < welcome.num_lanes(); ++lane) {
    FollowerLane::Open(OpenChannel(options_), join, lanes);
  }
  return lanes;
}

void Follower::Impl::Serve(FollowStream* stream, const std::shared_ptr<FollowerOutbox>& outbox,
                           const std::shared_ptr<Lanes>& lanes) {
  std::thread writer([&outbox, stream] {
    while (std::optional<v1::FollowRequest> next = outbox->Pop()) {
      if (!stream->Write(*next)) return;
    }
  });
  v1::FollowResponse message;
  while (stream->Read(&message)) {
    if (message.has_ping()) {
      v1::FollowRequest pong;
      *pong.mutable_state()->mutable_memory() = options_.read_memory();
      outbox->Push(std::move(pong));
    } else if (message.has_abort()) {
      rank_->Abort(
          {static_cast<absl::StatusCode>(message.abort().code()), message.abort().message()});
    } else if (message.has_command()) {
      auto command = std::make_shared<v1::Command>(std::move(*message.mutable_command()));
      const Answer answer = {outbox, lanes, command->id()};
      if (absl::Status status = Start(command, answer); !status.ok()) answer.Send(status);
    }
  }
  const absl::Status gone = absl::UnavailableError("the leader is gone");
  rank_->Abort(gone);
  if (lanes != nullptr) lanes->Close(gone);
  outbox->Close();
  writer.join();
}

// --- Commands ----------------------------------------------------------------------------------

void Follower::Impl::Answer::Send(const absl::Status& status, v1::CommandReply reply) const {
  StatusToReply(status, &reply);
  reply.set_id(id);
  v1::FollowRequest message;
  *message.mutable_reply() = std::move(reply);
  outbox->Push(std::move(message));
}

Rank::Done Follower::Impl::Answer::Done() const {
  return [answer = *this](const absl::Status& status) { answer.Send(status); };
}

// Hands the command to the rank, which answers. A status is an answer as well.
absl::Status Follower::Impl::Start(const std::shared_ptr<v1::Command>& command,
                                   const Answer& answer) {
  const HeadId head = command->head();
  switch (command->command_case()) {
    case v1::Command::kConnect:
      return StartConnect(command->connect(), answer);
    case v1::Command::kCreate:
      return StartCreate(head, command->create(), answer);
    case v1::Command::kDestroy:
      rank_->DestroyHead(head, answer.Done());
      return absl::OkStatus();
    case v1::Command::kCompute:
      return StartBatch(command, answer);
    case v1::Command::kSquaredNorm:
      rank_->GradSquaredNorm(head, [answer](absl::StatusOr<double> sum) {
        v1::CommandReply reply;
        if (sum.ok()) reply.set_sum(*sum);
        answer.Send(sum.status(), std::move(reply));
      });
      return absl::OkStatus();
    case v1::Command::kReduce:
      rank_->ReduceGradients(head, answer.Done());
      return absl::OkStatus();
    case v1::Command::kUpdate:
      rank_->ApplyUpdate(head,
                         {.learning_rate = command->update().learning_rate(),
                          .grad_multiplier = command->update().grad_multiplier()},
                         [this, answer](const absl::Status& status) {
                           options_.on_step_end();
                           answer.Send(status);
                         });
      return absl::OkStatus();
    case v1::Command::kDiscard:
      rank_->DiscardGradients(head, [this, answer](const absl::Status& status) {
        options_.on_step_end();
        answer.Send(status);
      });
      return absl::OkStatus();
    case v1::Command::kAddGradRows:
    case v1::Command::kWriteRows:
      return StartRows(command, answer);
    case v1::Command::kReadRows:
      return StartRead(head, command->read_rows(), answer);
    case v1::Command::kSetUpdates:
      rank_->SetNumUpdates(head, command->set_updates().num_updates(), answer.Done());
      return absl::OkStatus();
    case v1::Command::COMMAND_NOT_SET:
      break;
  }
  return absl::InternalError("a command that this follower does not know");
}

absl::Status Follower::Impl::StartConnect(const v1::ConnectRank& connect, const Answer& answer) {
  auto store = std::make_shared<LeaderStore>(stub_.get(), connect.generation(), group_.timeout);
  rank_->Connect(connect.generation(), store.get(),
                 [store, answer](const absl::Status& status) { answer.Send(status); });
  return absl::OkStatus();
}

absl::Status Follower::Impl::StartCreate(HeadId head, const v1::CreateShard& create,
                                         const Answer& answer) {
  absl::StatusOr<HeadSpec> spec = HeadSpecFromProto(create.spec());
  if (!spec.ok()) return spec.status();
  const MemoryPlan plan = PlanForSchedule(*spec, spec->schedule,
                                          {.backend = options_.backend,
                                           .num_ranks = group_.ranks_per_replica(),
                                           .num_replicas = group_.num_replicas});
  if (plan.TotalBytes() != create.plan_bytes()) {
    return absl::InternalError(absl::StrCat("this follower's plan of the head has ",
                                            plan.TotalBytes(), " bytes, the leader's ",
                                            create.plan_bytes()));
  }
  vocab_sizes_[head] = spec->vocab_size;
  rank_->CreateHead(head, *spec, plan, answer.Done());
  return absl::OkStatus();
}

absl::Status Follower::Impl::TakeRecipe(HeadId head, const v1::ComputeShardBatch& compute) {
  if (compute.has_recipe()) {
    absl::StatusOr<LossRecipe> recipe = LossRecipeFromProto(compute.recipe(), vocab_sizes_[head]);
    if (!recipe.ok()) return recipe.status();
    recipe_ = std::make_shared<const LossRecipe>(*std::move(recipe));
  }
  if (recipe_ != nullptr) return absl::OkStatus();
  return absl::InternalError("the first batch of a call has no recipe");
}

// The batch, with memory for what lanes carry.
absl::StatusOr<std::shared_ptr<FollowerBatch>> Follower::Impl::ReadBatch(
    const std::shared_ptr<v1::Command>& command) {
  const v1::ComputeShardBatch& compute = command->compute();
  absl::StatusOr<BackwardMode> mode = BackwardModeFromNumber(compute.mode());
  if (!mode.ok()) return mode.status();
  absl::StatusOr<OutputSpec> outputs = OutputSpecFromProto(compute.outputs());
  if (!outputs.ok()) return outputs.status();
  if (absl::Status status = TakeRecipe(command->head(), compute); !status.ok()) return status;
  auto batch = std::make_shared<FollowerBatch>();
  batch->command = command;
  batch->recipe = recipe_;
  batch->mode = *mode;
  batch->outputs = *outputs;
  for (const v1::ShardChunk& chunk : compute.chunks()) {
    absl::StatusOr<ChunkRows> rows = ShardChunkFromProto(chunk);
    if (!rows.ok()) return rows.status();
    if (compute.writes_outputs()) AddOutputs(*outputs, batch->result.add_chunks(), &*rows);
    batch->chunks.push_back(*rows);
  }
  if (!compute.writes_outputs()) return batch;
  if (batch->chunks.empty()) return absl::InternalError("a batch without chunks");
  absl::StatusOr<std::shared_ptr<std::byte>> memory = buffers_.Take(BytesOnLanes(batch->chunks));
  if (!memory.ok()) return memory.status();
  batch->memory = *std::move(memory);
  batch->GiveMemory();
  return batch;
}

absl::Status Follower::Impl::StartBatch(const std::shared_ptr<v1::Command>& command,
                                        const Answer& answer) {
  const v1::ComputeShardBatch& compute = command->compute();
  if (compute.writes_outputs() && answer.lanes == nullptr) {
    return absl::InternalError("a batch comes on lanes, and the call has none");
  }
  const absl::StatusOr<std::shared_ptr<FollowerBatch>> read = ReadBatch(command);
  if (!read.ok()) {
    if (compute.writes_outputs()) answer.lanes->Forget(answer.id);
    return read.status();
  }
  const std::shared_ptr<FollowerBatch>& batch = *read;
  const BatchInput input = {.recipe = batch->recipe.get(),
                            .mode = batch->mode,
                            .chunks = batch->chunks,
                            .outputs = batch->outputs,
                            .broadcast_hidden_states = compute.broadcast_hidden_states()};
  auto done = [batch, answer](const absl::StatusOr<BatchOutput>& output) {
    v1::CommandReply reply;
    if (output.ok()) {
      AnswerBatch(batch.get(), *output, &reply);
      const Lanes::Places grads = GradientsOf(batch->chunks);
      if (answer.lanes != nullptr) {
        answer.lanes->Send(answer.id, {grads.begin(), grads.end()}, batch);
      }
    }
    answer.Send(output.status(), std::move(reply));
  };
  if (!compute.writes_outputs()) {
    rank_->ComputeBatch(command->head(), compute.teacher(), input, std::move(done));
    return absl::OkStatus();
  }
  const auto arrival = std::make_shared<Arrival>();
  answer.lanes->Expect(answer.id, std::move(batch->places),
                       [batch, arrival](const absl::Status& status) {
                         arrival->status = status;
                         arrival->notified.Notify();
                       });
  rank_->ComputeBatchAfter(
      [arrival] {
        arrival->notified.WaitForNotification();
        return arrival->status;
      },
      command->head(), compute.teacher(), input, std::move(done));
  return absl::OkStatus();
}

absl::Status Follower::Impl::StartRows(const std::shared_ptr<v1::Command>& command,
                                       const Answer& answer) {
  // The rank reads from the message.
  Rank::Done done = [command, answer](const absl::Status& status) { answer.Send(status); };
  if (command->has_add_grad_rows()) {
    const v1::AddShardGradRows& add = command->add_grad_rows();
    absl::StatusOr<ConstMatrixView> rows = RowBlockFromProto(add.rows());
    if (!rows.ok()) return rows.status();
    rank_->AddGradRows(command->head(),
                       {add.row_ids().data(), static_cast<size_t>(add.row_ids_size())},
                       add.row_start(), *rows, std::move(done));
    return absl::OkStatus();
  }
  const v1::WriteShardRows& write = command->write_rows();
  absl::StatusOr<ConstMatrixView> rows = RowBlockFromProto(write.rows());
  if (!rows.ok()) return rows.status();
  absl::StatusOr<TensorKind> kind = TensorKindFromNumber(write.kind());
  if (!kind.ok()) return kind.status();
  rank_->WriteRows(command->head(), *kind, write.row_start(), *rows, std::move(done));
  return absl::OkStatus();
}

absl::Status Follower::Impl::StartRead(HeadId head, const v1::ReadShardRows& read,
                                       const Answer& answer) {
  absl::StatusOr<ConstMatrixView> shape = RowBlockFromProto(read.rows());
  if (!shape.ok()) return shape.status();
  absl::StatusOr<TensorKind> kind = TensorKindFromNumber(read.kind());
  if (!kind.ok()) return kind.status();
  auto reply = std::make_shared<v1::CommandReply>();
  reply->mutable_rows()->resize(static_cast<size_t>(shape->size_bytes()));
  const MatrixView rows = {reply->mutable_rows()->data(), shape->rows, shape->cols, shape->dtype};
  rank_->ReadRows(head, *kind, read.row_start(), rows, [reply, answer](const absl::Status& status) {
    if (!status.ok()) reply->clear_rows();
    answer.Send(status, std::move(*reply));
  });
  return absl::OkStatus();
}

// --- Follower ----------------------------------------------------------------------------------

Follower::Follower(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Follower::~Follower() = default;

absl::Status Follower::Run() { return impl_->Run(); }
void Follower::Stop() { impl_->Stop(); }

}  // namespace lmhead
