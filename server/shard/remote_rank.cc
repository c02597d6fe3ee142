#include "server/shard/remote_rank.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/wire/convert.h"
#include "server/shard/shard_messages.h"

namespace lmhead {
namespace {

v1::Command CommandFor(HeadId head) {
  v1::Command command;
  command.set_head(head);
  return command;
}

absl::Status Away() { return absl::UnavailableError("it is away"); }

}  // namespace

RemoteRank::RemoteRank(int32_t rank, int32_t place_in_replica, absl::Duration silence_limit)
    : rank_(rank), place_in_replica_(place_in_replica), silence_limit_(silence_limit) {}

RemoteRank::~RemoteRank() {
  DetachIf([] { return true; }, absl::CancelledError("the leader ends"));
}

void RemoteRank::SetOnLost(std::function<void(const absl::Status&)> on_lost) {
  on_lost_ = std::move(on_lost);
}

// --- The follower's call -----------------------------------------------------------------------

absl::Status RemoteRank::Attach(const v1::JoinGroup& join, const std::string& peer,
                                v1::Welcome welcome, std::shared_ptr<LeaderOutbox> outbox,
                                std::shared_ptr<Lanes> lanes) {
  {
    absl::MutexLock lock(&mu_);
    const bool alive = outbox_ != nullptr && absl::Now() - last_heard_ < silence_limit_;
    if (alive && join.session() != join_->session()) {
      return absl::AlreadyExistsError(
          absl::StrCat("rank ", rank_, " is taken by the follower at ", peer_,
                       "; start this one with another --rank, or wait until that one has ended"));
    }
  }
  DetachIf([] { return true; }, absl::UnavailableError("its follower has called anew"));
  absl::MutexLock lock(&mu_);
  if (outbox_ != nullptr) return absl::AlreadyExistsError("two followers called at once");
  welcome.set_call(++last_call_);
  if (lanes != nullptr) welcome.set_num_lanes(lanes->num_lanes());
  lanes_ = std::move(lanes);
  v1::FollowResponse first;
  *first.mutable_welcome() = std::move(welcome);
  outbox->Push(std::move(first));
  outbox_ = std::move(outbox);
  join_ = join;
  peer_ = peer;
  last_heard_ = absl::Now();
  last_recipe_.reset();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Lanes>> RemoteRank::FindLanes(const v1::JoinLane& join) {
  absl::MutexLock lock(&mu_);
  if (lanes_ != nullptr && join.session() == join_->session() && join.call() == last_call_) {
    return lanes_;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank_, " has no Follow call ", join.call(), " with lanes"));
}

void RemoteRank::Receive(const LeaderOutbox* from, v1::FollowRequest* message) {
  ReplyDone done;
  std::shared_ptr<Lanes> lanes;
  const v1::CommandReply& reply = message->reply();
  {
    absl::MutexLock lock(&mu_);
    if (outbox_.get() != from) return;
    last_heard_ = absl::Now();
    if (message->has_state()) memory_ = message->state().memory();
    if (!message->has_reply()) return;
    const auto found = pending_.find(reply.id());
    if (found == pending_.end()) return;
    if (found->second.awaits_arrays && reply.code() == 0) {
      found->second.reply = std::move(*message->mutable_reply());
      return;
    }
    done = std::move(found->second.done);
    pending_.erase(found);
    lanes = lanes_;
  }
  // An answer that came before its arrays were sent: their memory is given back now.
  if (lanes != nullptr) lanes->Forget(reply.id());
  done(StatusFromReply(reply), reply);
}

void RemoteRank::ArraysArrived(uint64_t command) {
  Pending pending;
  std::shared_ptr<Lanes> lanes;
  {
    absl::MutexLock lock(&mu_);
    const auto found = pending_.find(command);
    if (found == pending_.end()) return;
    found->second.awaits_arrays = false;
    if (!found->second.reply.has_value()) return;
    pending = std::move(found->second);
    pending_.erase(found);
    lanes = lanes_;
  }
  if (lanes != nullptr) lanes->Forget(command);
  pending.done(absl::OkStatus(), *pending.reply);
}

void RemoteRank::Detach(const LeaderOutbox* from, const absl::Status& reason) {
  DetachIf([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return outbox_.get() == from; }, reason);
}

// The condition is asked with the lock held.
void RemoteRank::DetachIf(const std::function<bool()>& condition, const absl::Status& reason) {
  std::shared_ptr<LeaderOutbox> outbox;
  std::shared_ptr<Lanes> lanes;
  std::map<uint64_t, Pending> pending;
  absl::Status named;
  {
    absl::MutexLock lock(&mu_);
    if (outbox_ == nullptr || !condition()) return;
    outbox = std::exchange(outbox_, nullptr);
    lanes = std::exchange(lanes_, nullptr);
    pending = std::exchange(pending_, {});
    named = absl::Status(reason.code(),
                         absl::StrCat("the follower at ", peer_, ": ", reason.message()));
  }
  outbox->Cancel();
  // First: the other ranks wait for this one, and so may the callers of the commands.
  if (on_lost_) on_lost_(named);
  // Then nothing of a batch is read or written any more.
  if (lanes != nullptr) lanes->Close(named);
  for (const auto& [id, each] : pending) each.done(named, {});
}

void RemoteRank::Tick() {
  {
    absl::MutexLock lock(&mu_);
    if (outbox_ == nullptr) return;
    v1::FollowResponse ping;
    ping.mutable_ping();
    outbox_->Push(std::move(ping));
  }
  DetachIf(
      [this]()
          ABSL_NO_THREAD_SAFETY_ANALYSIS { return absl::Now() - last_heard_ > silence_limit_; },
      absl::UnavailableError(
          absl::StrCat("it has been silent for ", absl::FormatDuration(silence_limit_))));
}

std::optional<v1::JoinGroup> RemoteRank::facts() const {
  absl::MutexLock lock(&mu_);
  return join_;
}

RankMemory RemoteRank::memory() const {
  absl::MutexLock lock(&mu_);
  return MemoryFromProto(memory_, rank_);
}

uint64_t RemoteRank::session() const {
  absl::MutexLock lock(&mu_);
  const bool there = outbox_ != nullptr && (lanes_ == nullptr || lanes_->complete());
  return there ? join_->session() : 0;
}

// --- Commands ----------------------------------------------------------------------------------

void RemoteRank::Send(v1::Command command, ReplyDone done, Bulk bulk) {
  {
    absl::MutexLock lock(&mu_);
    if (outbox_ != nullptr) {
      const uint64_t id = ++last_command_;
      command.set_id(id);
      const bool awaits_arrays =
          std::ranges::any_of(bulk.places, [](const auto& place) { return !place.empty(); });
      pending_.emplace(id, Pending{.done = std::move(done), .awaits_arrays = awaits_arrays});
      v1::FollowResponse message;
      *message.mutable_command() = std::move(command);
      outbox_->Push(std::move(message));
      if (lanes_ == nullptr) return;
      if (awaits_arrays) {
        // When the lanes are closed the command is answered by whoever has closed them.
        lanes_->Expect(id, std::move(bulk.places), [this, id](const absl::Status& status) {
          if (status.ok()) ArraysArrived(id);
        });
      }
      lanes_->Send(id, std::move(bulk.arrays), /*keep=*/nullptr);
      return;
    }
  }
  done(Away(), {});
}

void RemoteRank::SendSimple(v1::Command command, Done done) {
  Send(std::move(command),
       [done = std::move(done)](const absl::Status& status, const v1::CommandReply& reply) {
         done(status);
       });
}

void RemoteRank::Connect(uint64_t generation, RendezvousStore* store, Done done) {
  v1::Command command;
  command.mutable_connect()->set_generation(generation);
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::Abort(const absl::Status& reason) {
  v1::FollowResponse message;
  message.mutable_abort()->set_code(static_cast<int32_t>(reason.code()));
  message.mutable_abort()->set_message(std::string(reason.message()));
  absl::MutexLock lock(&mu_);
  if (outbox_ != nullptr) outbox_->Push(std::move(message));
}

void RemoteRank::CreateHead(HeadId head, const HeadSpec& spec, const MemoryPlan& plan, Done done) {
  HeadSpec planned = spec;
  planned.schedule = plan.schedule;
  planned.batch_tokens = plan.batch_tokens;
  v1::Command command = CommandFor(head);
  *command.mutable_create()->mutable_spec() = HeadSpecToProto(planned);
  command.mutable_create()->set_plan_bytes(plan.TotalBytes());
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::DestroyHead(HeadId head, Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_destroy();
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::ComputeBatch(HeadId head, HeadId teacher, const BatchInput& input,
                              ComputeBackend::BatchDone done) {
  v1::Command command = CommandFor(head);
  v1::ComputeShardBatch& batch = *command.mutable_compute();
  batch.set_teacher(teacher);
  batch.set_mode(static_cast<int32_t>(input.mode));
  *batch.mutable_outputs() = OutputSpecToProto(input.outputs);
  batch.set_broadcast_hidden_states(input.broadcast_hidden_states);
  for (const ChunkRows& chunk : input.chunks) *batch.add_chunks() = ShardChunkToProto(chunk);
  const bool answers = TakesBatches();
  batch.set_writes_outputs(answers);
  {
    // Class weights of a large vocabulary are not sent with every batch.
    absl::MutexLock lock(&mu_);
    if (last_recipe_ != *input.recipe) {
      last_recipe_ = *input.recipe;
      *batch.mutable_recipe() = LossRecipeToProto(*input.recipe);
    }
  }
  // Nobody reads the sums of a rank that does not answer them.
  if (!answers) {
    Send(std::move(command), [num_chunks = input.chunks.size(), done = std::move(done)](
                                 const absl::Status& status, const v1::CommandReply& reply) {
      if (!status.ok()) return done(status);
      done(BatchOutput{.sums = std::vector<LossSums>(num_chunks)});
    });
    return;
  }
  Bulk bulk = {.arrays = HiddenStatesOf(input.chunks)};
  if (WantsGradients(input.outputs, input.mode)) bulk.places = GradientsOf(input.chunks);
  auto bytes = static_cast<int64_t>(command.ByteSizeLong());
  for (const auto& array : bulk.arrays) bytes += static_cast<int64_t>(array.size());
  batch_bytes_ += bytes;
  std::vector<ChunkRows> chunks(input.chunks.begin(), input.chunks.end());
  Send(
      std::move(command),
      [this, bytes, outputs = input.outputs, chunks = std::move(chunks), done = std::move(done)](
          const absl::Status& status, const v1::CommandReply& reply) {
        batch_bytes_ -= bytes;
        if (!status.ok()) return done(status);
        done(ReadBatchResult(reply.batch(), outputs, chunks));
      },
      std::move(bulk));
}

void RemoteRank::ReduceGradients(HeadId head, Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_reduce();
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::GradSquaredNorm(HeadId head, SumDone done) {
  v1::Command command = CommandFor(head);
  command.mutable_squared_norm();
  Send(std::move(command),
       [done = std::move(done)](const absl::Status& status, const v1::CommandReply& reply) {
         if (!status.ok()) return done(status);
         done(reply.sum());
       });
}

void RemoteRank::ApplyUpdate(HeadId head, const OptimizerUpdate& update, Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_update()->set_learning_rate(update.learning_rate);
  command.mutable_update()->set_grad_multiplier(update.grad_multiplier);
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::DiscardGradients(HeadId head, Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_discard();
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::AddGradRows(HeadId head, std::span<const int32_t> row_ids, int64_t row_start,
                             ConstMatrixView rows, Done done) {
  v1::Command command = CommandFor(head);
  v1::AddShardGradRows& add = *command.mutable_add_grad_rows();
  add.mutable_row_ids()->Assign(row_ids.begin(), row_ids.end());
  add.set_row_start(row_start);
  *add.mutable_rows() = RowBlockToProto(rows, /*with_data=*/true);
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::WriteRows(HeadId head, TensorKind kind, int64_t row_start, ConstMatrixView rows,
                           Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_write_rows()->set_kind(static_cast<int32_t>(kind));
  command.mutable_write_rows()->set_row_start(row_start);
  *command.mutable_write_rows()->mutable_rows() = RowBlockToProto(rows, /*with_data=*/true);
  SendSimple(std::move(command), std::move(done));
}

void RemoteRank::ReadRows(HeadId head, TensorKind kind, int64_t row_start, MatrixView rows,
                          Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_read_rows()->set_kind(static_cast<int32_t>(kind));
  command.mutable_read_rows()->set_row_start(row_start);
  *command.mutable_read_rows()->mutable_rows() = RowBlockToProto(rows, /*with_data=*/false);
  Send(std::move(command), [rows, done = std::move(done)](const absl::Status& status,
                                                          const v1::CommandReply& reply) {
    if (!status.ok()) return done(status);
    if (static_cast<int64_t>(reply.rows().size()) != rows.size_bytes()) {
      return done(absl::InternalError(absl::StrCat("a follower answered ", reply.rows().size(),
                                                   " bytes of rows, wanted ", rows.size_bytes())));
    }
    std::memcpy(rows.data, reply.rows().data(), reply.rows().size());
    done(absl::OkStatus());
  });
}

void RemoteRank::SetNumUpdates(HeadId head, int64_t num_updates, Done done) {
  v1::Command command = CommandFor(head);
  command.mutable_set_updates()->set_num_updates(num_updates);
  SendSimple(std::move(command), std::move(done));
}

}  // namespace lmhead
