// One step of one head: the transaction that several workers feed, and its ledger of chunks.
//
//   open --(all workers ended, all chunks counted)--> prepared --> committed
//     |                                                   |
//     +-------------------------> aborted <---------------+
//
// States only move forward. The ledger knows every chunk by (worker, chunk index) with its
// checksum, so that a chunk sent again is recognised: nothing is lost, nothing is counted twice. A
// failed batch poisons the step: its gradient is incomplete for good, so only abort remains.
//
// Pure bookkeeping: no compute, no gRPC, no thread of its own. Thread-safe.

#ifndef LMHEAD_SERVER_HEAD_STEP_H_
#define LMHEAD_SERVER_HEAD_STEP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/types/loss_recipe.h"
#include "server/head/chunk.h"

namespace lmhead {

enum class StepState : uint8_t { kOpen, kPrepared, kCommitted, kAborted };

// What the ledger says of a chunk that arrived.
enum class ChunkVerdict : uint8_t {
  kNew,        // Accumulate it, then call ChunkAccumulated or ChunkFailed.
  kDuplicate,  // Counted, or being counted: compute the answer again, accumulate nothing.
};

// What PrepareStep answers, to every caller alike.
struct PreparedStep {
  LossSums sums;
  double grad_squared_norm = 0.0;
  uint64_t num_chunks = 0;
};

// What a commit is told. Two commits are the same exactly when these are equal.
struct CommitParameters {
  double learning_rate = 0.0;
  double grad_multiplier = 1.0;
  bool allow_nonfinite_rows = false;

  friend bool operator==(const CommitParameters&, const CommitParameters&) = default;
};

// When a step is ended for want of life; a zero duration means never.
struct StepLimits {
  absl::Duration worker_lease;  // Since a worker that has not ended was last heard of.
  absl::Duration step_timeout;  // Since BeginStep.
};

// What CommitStep answers.
struct CommittedStep {
  uint64_t step = 0;
  uint64_t num_updates = 0;
  double grad_norm = 0.0;
  bool repeated = false;
};

class Step {
 public:
  // Tells a stream that its step has ended early, and why. Called without locks held, on the thread
  // that aborts; must not block.
  using AbortListener = std::function<void(const absl::Status&)>;

  // REQUIRES: workers are valid names, sorted, distinct, at least one.
  Step(std::string head, uint64_t number, std::vector<std::string> workers);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  uint64_t number() const { return number_; }
  const std::vector<std::string>& workers() const { return workers_; }
  absl::Time begun_at() const { return begun_at_; }
  StepState state() const;

  // --- Streams ---

  // Registers a stream of `worker`. INVALID_ARGUMENT for a worker the step was not begun with;
  // ALREADY_EXISTS while another stream has this index; FAILED_PRECONDITION or ABORTED once the
  // step takes no streams. A prepared step still takes one: a worker whose connection broke may
  // have to repeat its end. The two sides of paired streams count their indices apart; a worker
  // with a stream of either side is complete only when its teacher's side has ended, too.
  absl::Status AttachStream(const std::string& worker, uint32_t stream_index,
                            AbortListener on_abort, StreamSide side = StreamSide::kWhole);

  // The stream is gone. Its listener is not called after this, unless a call is under way.
  void DetachStream(const std::string& worker, uint32_t stream_index,
                    StreamSide side = StreamSide::kWhole);

  // --- The ledger ---

  // Asks what to do with a chunk. INVALID_ARGUMENT: same index with another checksum, an index
  // above kChunksPerWorkerMax or beyond the worker's stated count. FAILED_PRECONDITION: the step is
  // prepared or over. ABORTED: the step is aborted or poisoned.
  // `teacher_checksum` is of the teacher's side of a chunk that came on paired streams.
  absl::StatusOr<ChunkVerdict> AcceptChunk(const std::string& worker, uint64_t chunk_index,
                                           uint64_t checksum,
                                           std::optional<uint64_t> teacher_checksum = std::nullopt);

  // A new chunk's gradient is in the accumulators. REQUIRES: AcceptChunk said kNew.
  void ChunkAccumulated(const std::string& worker, uint64_t chunk_index, const LossSums& sums);

  // A new chunk could not be computed: poisons the step with `error`. REQUIRES: as above.
  void ChunkFailed(const std::string& worker, uint64_t chunk_index, const absl::Status& error);

  // The worker says that its step has `num_chunks` chunks, over all its streams. Returns how many
  // are counted so far. INVALID_ARGUMENT: another count than stated before, or lower than a chunk
  // index seen. May be repeated, also once prepared.
  absl::StatusOr<uint64_t> EndWorker(const std::string& worker, uint64_t num_chunks);

  // The same for a piece of gradient that comes without hidden states: its indices are apart from
  // those of the chunks, no count is stated, and one that was counted is known as a duplicate also
  // once the step is prepared. kNew: PieceAccumulated or Poison must follow, and the caller
  // lets no other call of the step's head in between.
  absl::StatusOr<ChunkVerdict> AcceptPiece(const std::string& worker, uint64_t index,
                                           uint64_t checksum);
  void PieceAccumulated(const std::string& worker, uint64_t index, uint64_t checksum);

  // The same of the teacher's side of the worker's paired streams: chunks sent on that side.
  absl::Status EndTeacherSide(const std::string& worker, uint64_t num_chunks);

  // The student's client has the result of a chunk that came on paired streams, and will not send
  // it again. INVALID_ARGUMENT when that chunk has not been counted.
  absl::Status MarkReceived(const std::string& worker, uint64_t chunk_index);

  // Whether that is so, asked by the teacher's side that sends the chunk (again).
  // INVALID_ARGUMENT: the chunk was counted with other contents on the teacher's side. Otherwise
  // as AcceptChunk.
  absl::StatusOr<bool> IsReceived(const std::string& worker, uint64_t chunk_index,
                                  uint64_t teacher_checksum) const;

  // Distinct chunks of the worker counted so far; those of them that came on paired streams.
  uint64_t NumChunksCounted(const std::string& worker) const;
  uint64_t NumPairsCounted(const std::string& worker) const;

  // --- Prepare, commit, abort ---

  // OK when every worker has ended and every chunk is counted; else FAILED_PRECONDITION naming the
  // workers that have not ended and the chunks that are missing.
  absl::Status CheckComplete() const;

  // Waits until the step is complete or can no longer become so. OK: complete (or already prepared
  // or committed). At `deadline`, CheckComplete()'s error. CANCELLED once `cancelled` says so; it
  // is asked several times a second.
  absl::Status AwaitComplete(absl::Time deadline, absl::FunctionRef<bool()> cancelled) const;

  // Sums over all chunks counted.
  LossSums sums() const;

  // open -> prepared. ABORTED when the step has been aborted or poisoned since it was found
  // complete. REQUIRES: complete, and not prepared yet.
  absl::StatusOr<PreparedStep> Prepare(double grad_squared_norm);

  // The stored result; nothing before Prepare.
  std::optional<PreparedStep> prepared() const;

  // Whether a commit with these parameters may be applied now (nullopt), or what it already came
  // to, marked as repeated. INVALID_ARGUMENT: committed with other parameters. FAILED_PRECONDITION:
  // not prepared, or rows with NaN or infinity were left out and the commit does not allow it.
  absl::StatusOr<std::optional<CommittedStep>> CheckCommit(
      const CommitParameters& parameters) const;

  // The optimizer is about to be applied: until CommitFailed(), Abort() is refused. ABORTED when
  // the step has been aborted or poisoned since CheckCommit(). REQUIRES: CheckCommit() said that it
  // may be applied.
  absl::Status StartCommit();

  // prepared -> committed. REQUIRES: StartCommit() was OK.
  void Commit(const CommitParameters& parameters, const CommittedStep& result);

  // The optimizer was not applied, or not everywhere. REQUIRES: as above.
  void CommitFailed();

  // open or prepared -> aborted, and tells streams and waiting AwaitComplete calls. False when the
  // step was aborted already. FAILED_PRECONDITION when it is committed, or is being.
  absl::StatusOr<bool> Abort(const std::string& reason);

  // --- Signs of life ---

  // A call about the step has come that names no worker, such as PrepareStep.
  void NoteCall();

  // Why the step should be aborted now; nothing while it should not. A worker lives while it has a
  // stream; without one its lease runs from its last stream, chunk or end, and stops once all it
  // stated is counted. When that is so of all workers, the lease runs for the step, which waits for
  // PrepareStep or CommitStep.
  std::optional<std::string> Overdue(absl::Time now, const StepLimits& limits) const;

  // What an aborted step answers, with the reason; OK of any other.
  absl::Status abort_status() const;

  // Waits until no new chunk is between AcceptChunk and ChunkAccumulated or ChunkFailed: after
  // that, nothing of an aborted step reaches the accumulators any more.
  void AwaitNoneInFlight() const;

  // A batch failed, of this step or of an evaluation beside it: the accumulators are unusable.
  // Keeps the first error; every later call but Abort returns it. No effect once the step is over.
  void Poison(const absl::Status& error);

  // OK, or the ABORTED error that a failed batch left.
  absl::Status failure() const;

 private:
  struct LedgerEntry {
    uint64_t checksum = 0;
    std::optional<uint64_t> teacher_checksum;  // Of a chunk that came on paired streams.
    bool accumulated = false;
    bool received = false;  // See MarkReceived.
  };
  struct Worker {
    absl::flat_hash_map<uint64_t, LedgerEntry> chunks;
    absl::flat_hash_map<uint64_t, uint64_t> pieces;  // Index to checksum.
    uint64_t num_accumulated = 0;
    uint64_t chunk_index_end = 0;                // Highest index seen, plus one.
    std::optional<uint64_t> num_chunks;          // As stated by EndWorker.
    bool is_paired = false;                      // Has had a stream of either side.
    uint64_t num_pairs = 0;                      // Of num_accumulated, those of paired streams.
    std::optional<uint64_t> num_teacher_chunks;  // As stated by EndTeacherSide.
    int num_streams = 0;
    absl::Time last_seen;

    bool IsComplete() const {
      return num_chunks.has_value() && num_accumulated == *num_chunks &&
             (!is_paired || num_teacher_chunks == num_pairs);
    }
  };

  // Worker, whether it is of a teacher's side, stream_index.
  using StreamKey = std::tuple<std::string, bool, uint32_t>;

  absl::Status CheckTakesChunks() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckCompleteLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Worker*> FindWorker(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status OtherTeacherContents(const std::string& worker, uint64_t chunk_index) const;
  // What a worker that has ended still lacks. REQUIRES: it is not complete.
  static std::string Lacking(const std::string& name, const Worker& worker);
  void CountIfComplete(Worker& worker, bool was_complete) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PoisonLocked(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string Name() const;  // "step 7 of head lm".

  const std::string head_;
  const uint64_t number_;
  const std::vector<std::string> workers_;
  const absl::Time begun_at_;

  mutable absl::Mutex mu_;
  StepState state_ ABSL_GUARDED_BY(mu_) = StepState::kOpen;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);       // Of a batch: poisons the step.
  absl::Status abort_status_ ABSL_GUARDED_BY(mu_);  // What callers of an aborted step are told.
  std::map<std::string, Worker, std::less<>> ledger_ ABSL_GUARDED_BY(mu_);
  size_t num_complete_workers_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t num_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_call_ ABSL_GUARDED_BY(mu_);  // About the step as a whole.
  LossSums sums_ ABSL_GUARDED_BY(mu_);
  std::optional<PreparedStep> prepared_ ABSL_GUARDED_BY(mu_);
  bool committing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<std::pair<CommitParameters, CommittedStep>> committed_ ABSL_GUARDED_BY(mu_);
  std::map<StreamKey, AbortListener> streams_ ABSL_GUARDED_BY(mu_);
};

// The steps of one head, in order: at most one is open. Remembers the last one committed and the
// last one aborted, so that a repeated call finds its answer. Thread-safe.
class StepSequence {
 public:
  struct Begun {
    std::shared_ptr<Step> step;
    bool already_open = false;
  };

  explicit StepSequence(std::string head) : head_(std::move(head)) {}

  // Opens step `number`, or finds it open with the same workers. INVALID_ARGUMENT: number 0, no
  // workers, too many, or a doubled name. ABORTED: it is poisoned. FAILED_PRECONDITION: another
  // step is open (it is named), other workers, or not greater than the last committed step.
  // REQUIRES: names are valid.
  absl::StatusOr<Begun> Begin(uint64_t number, std::vector<std::string> workers);

  // The open step when it is `number`. FAILED_PRECONDITION naming the one that is open.
  absl::StatusOr<std::shared_ptr<Step>> FindOpen(uint64_t number) const;

  // As above, but also the last committed step, for repeated prepares and commits.
  absl::StatusOr<std::shared_ptr<Step>> FindOpenOrCommitted(uint64_t number) const;

  // As above, but also the last aborted and the last committed step, for repeated aborts.
  absl::StatusOr<std::shared_ptr<Step>> FindEver(uint64_t number) const;

  // Puts the open step away. REQUIRES: it is committed or aborted.
  void Close();

  // Goes on after `number`, which a server before this one committed: 0 for none.
  // REQUIRES: no step is open.
  void Restore(uint64_t number);

  std::shared_ptr<Step> open() const;  // Null when none is.
  uint64_t last_committed_step() const;

 private:
  absl::Status NotOpen(uint64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string head_;
  mutable absl::Mutex mu_;
  std::shared_ptr<Step> open_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Step> last_committed_ ABSL_GUARDED_BY(mu_);
  uint64_t last_number_ ABSL_GUARDED_BY(mu_) = 0;  // Of the last commit, also a restored one.
  std::shared_ptr<Step> last_aborted_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_STEP_H_
