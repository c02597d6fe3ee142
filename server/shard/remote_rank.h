// A rank that a follower holds, as the leader drives it: commands out, replies in.
//
// The rank is there while a call of the follower is attached to it, with all its lanes. When it
// goes away (the call or a lane ends, or the follower has been silent for too long) every command
// under way is answered with the reason, so that none hangs, and the owner is told, who ends the
// group for the other ranks.

#ifndef LMHEAD_SERVER_SHARD_REMOTE_RANK_H_
#define LMHEAD_SERVER_SHARD_REMOTE_RANK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "lmhead/v1/shard.pb.h"
#include "server/compute/rank.h"
#include "server/metrics/metrics.h"
#include "server/shard/lanes.h"
#include "server/shard/outbox.h"

namespace lmhead {

using LeaderOutbox = Outbox<v1::FollowResponse>;

// Thread-safe.
class RemoteRank final : public Rank {
 public:
  // A follower that says nothing for `silence_limit` is gone. The rank in place 0 of its replica
  // answers for the replica's batches.
  RemoteRank(int32_t rank, int32_t place_in_replica, absl::Duration silence_limit);
  ~RemoteRank() override;

  // Told of every loss, on any thread. Set before the first call is attached.
  void SetOnLost(std::function<void(const absl::Status&)> on_lost);

  // --- For the owner of the follower's call ---

  // The first rank of its replica gets batches, on lanes.
  bool TakesBatches() const { return place_in_replica_ == 0; }

  // The follower's call now stands for the rank; its outbox starts with `welcome`, to which the
  // number of the call and of its lanes are added. `lanes` are those of a rank that takes batches,
  // else null; closed when the call is detached. Takes the place of an earlier call of the same
  // session, or one that has been silent. ALREADY_EXISTS while another process has the rank.
  absl::Status Attach(const v1::JoinGroup& join, const std::string& peer, v1::Welcome welcome,
                      std::shared_ptr<LeaderOutbox> outbox, std::shared_ptr<Lanes> lanes);
  // The lanes that this one is of. FAILED_PRECONDITION when it is not of the call that is attached.
  absl::StatusOr<std::shared_ptr<Lanes>> FindLanes(const v1::JoinLane& join);
  // From that call. Nothing when it is not attached any more. Takes what it keeps of the message.
  void Receive(const LeaderOutbox* from, v1::FollowRequest* message);
  // The rank is away, with a reason.
  void Detach(const LeaderOutbox* from, const absl::Status& reason);

  // Pings, and detaches a call that has been silent. Called several times a silence limit.
  void Tick();

  // Bytes of the batches that it has been given and not answered.
  int64_t batch_bytes() const { return batch_bytes_; }

  // The follower's side of GetServerInfo; nothing while none has ever been there.
  std::optional<v1::JoinGroup> facts() const;
  RankMemory memory() const;

  // --- Rank ---

  void Connect(uint64_t generation, RendezvousStore* store, Done done) override;
  void Abort(const absl::Status& reason) override;
  uint64_t session() const override;
  void CreateHead(HeadId head, const HeadSpec& spec, const MemoryPlan& plan, Done done) override;
  void DestroyHead(HeadId head, Done done) override;
  // Of the first rank of its replica: hidden states go on the lanes and their gradients come from
  // there; other inputs go in the command, and other outputs come in the reply.
  void ComputeBatch(HeadId head, HeadId teacher, const BatchInput& input,
                    ComputeBackend::BatchDone done) override;
  void ReduceGradients(HeadId head, Done done) override;
  void GradSquaredNorm(HeadId head, SumDone done) override;
  void ApplyUpdate(HeadId head, const OptimizerUpdate& update, Done done) override;
  void DiscardGradients(HeadId head, Done done) override;
  void AddGradRows(HeadId head, std::span<const int32_t> row_ids, int64_t row_start,
                   ConstMatrixView rows, Done done) override;
  void WriteRows(HeadId head, TensorKind kind, int64_t row_start, ConstMatrixView rows,
                 Done done) override;
  void ReadRows(HeadId head, TensorKind kind, int64_t row_start, MatrixView rows,
                Done done) override;
  void SetNumUpdates(HeadId head, int64_t num_updates, Done done) override;

 private:
  using ReplyDone = std::function<void(const absl::Status&, const v1::CommandReply&)>;

  // What lanes carry of a command.
  struct Bulk {
    Lanes::Arrays arrays;
    Lanes::Places places;
  };
  // A command without an answer.
  struct Pending {
    ReplyDone done;
    bool awaits_arrays = false;             // From the lanes.
    std::optional<v1::CommandReply> reply;  // That has come before them.
  };

  void Send(v1::Command command, ReplyDone done, Bulk bulk = {});
  void ArraysArrived(uint64_t command);
  void SendSimple(v1::Command command, Done done);
  void DetachIf(const std::function<bool()>& condition, const absl::Status& reason);

  const int32_t rank_;
  const int32_t place_in_replica_;
  const absl::Duration silence_limit_;
  std::atomic<int64_t> batch_bytes_{0};
  std::function<void(const absl::Status&)> on_lost_;
  mutable absl::Mutex mu_;
  std::shared_ptr<LeaderOutbox> outbox_ ABSL_GUARDED_BY(mu_);  // Null while the rank is away.
  std::shared_ptr<Lanes> lanes_ ABSL_GUARDED_BY(mu_);  // Of the same call; null: it has none.
  uint64_t last_call_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<v1::JoinGroup> join_ ABSL_GUARDED_BY(mu_);  // Of the last call.
  std::string peer_ ABSL_GUARDED_BY(mu_);
  absl::Time last_heard_ ABSL_GUARDED_BY(mu_);
  v1::MemoryReport memory_ ABSL_GUARDED_BY(mu_);
  uint64_t last_command_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mu_);
  std::optional<LossRecipe> last_recipe_ ABSL_GUARDED_BY(mu_);  // That this call was sent.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_REMOTE_RANK_H_
