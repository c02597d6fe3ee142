// A head: its backend, its steps, and which rows of its weight are there.
//
// Control calls block (they wait for the executor) and belong on threads that may; HeadStream is
// the part that may not block. Control calls of one head run one at a time, except that PrepareStep
// waits for the workers without holding up anyone.
//
// The backend lives on the executor: it is made, used and destroyed there. After Close() the head
// is an empty shell that answers NOT_FOUND, so that streams which still hold it are safe.

#ifndef LMHEAD_SERVER_HEAD_HEAD_H_
#define LMHEAD_SERVER_HEAD_HEAD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/types/head_spec.h"
#include "proto/types/tensor_view.h"
#include "server/compute/backend.h"
#include "server/compute/executor.h"
#include "server/head/head_snapshot.h"
#include "server/head/head_stream.h"
#include "server/head/pairing.h"
#include "server/head/row_set.h"
#include "server/head/step.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"
#include "server/metrics/metrics.h"

namespace lmhead {

// Makes the backend of a head. Runs on the executor's thread.
using BackendFactory = std::function<absl::StatusOr<std::unique_ptr<ComputeBackend>>(
    const HeadSpec& spec, const MemoryPlan& plan)>;

// What all heads of a server share. Everything outlives them.
struct HeadEnvironment {
  Executor* executor = nullptr;
  MemoryAccount* account = nullptr;
  std::vector<MemoryAccount*> other_accounts;  // Of the other ranks in this process.
  Metrics* metrics = nullptr;
  uint64_t incarnation = 0;     // Random id of this server process, not 0.
  int64_t chunk_bytes_max = 0;  // Largest wide fields of a chunk: hidden states, top-k arrays.
  absl::Duration pair_timeout = absl::Seconds(60);  // See --pair_timeout_seconds.
  int32_t num_ranks = 1;                            // That share each head.
};

// What a head is at this moment.
struct HeadStatus {
  HeadSpec spec;
  MemoryPlan plan;
  uint64_t last_committed_step = 0;
  uint64_t open_step = 0;
  bool weights_loaded = false;
  std::string poisoned_by;
  int64_t last_step_tokens = 0;  // Rows of the last step that this process committed.
};

// A piece of the weight's gradient (lmhead.v1.AccumulateWeightGradientRequest). Borrowed.
struct GradientPiece {
  std::string worker;
  uint64_t index = 0;
  uint64_t checksum = 0;  // Of what follows.
  int64_t row_start = 0;  // Of a dense piece, when row_ids is empty.
  std::span<const int32_t> row_ids;
  std::string_view rows;  // float32, [rows, hidden_size]
};

// Shape of a tensor of a head.
struct TensorShape {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;
};

// Thread-safe.
class Head : public std::enable_shared_from_this<Head> {
 public:
  // Makes the backend on the executor's thread and waits for it.
  // REQUIRES: spec is validated; plan is reserved.
  static absl::StatusOr<std::shared_ptr<Head>> Create(HeadSpec spec, const MemoryPlan& plan,
                                                      const BackendFactory& make_backend,
                                                      const HeadEnvironment& environment);
  ~Head();
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  const HeadSpec& spec() const { return spec_; }
  const MemoryPlan& plan() const { return plan_; }
  HeadStatus Status() const;

  // OK while the head can be used and all its ranks are there. UNAVAILABLE while one is away,
  // NOT_FOUND when it was deleted. ABORTED when it is poisoned, which it is from here on when a
  // rank has lost its shard.
  absl::Status CheckState();
  absl::Status CheckStateOnExecutor();  // The same, called on the executor's thread.

  // --- Steps; the comments of lmhead.v1 are the reference ---

  struct BegunStep {
    uint64_t incarnation = 0;
    bool already_open = false;
  };
  // `incarnation` 0 means that the trainer does not know it yet.
  absl::StatusOr<BegunStep> BeginStep(uint64_t step, std::vector<std::string> workers,
                                      uint64_t incarnation);

  // Waits until `deadline` for the workers; `cancelled` is asked several times a second.
  absl::StatusOr<PreparedStep> PrepareStep(uint64_t step, uint64_t incarnation, absl::Time deadline,
                                           absl::FunctionRef<bool()> cancelled);

  absl::StatusOr<CommittedStep> CommitStep(uint64_t step, uint64_t incarnation,
                                           const CommitParameters& parameters);

  // False when the step had been aborted already.
  absl::StatusOr<bool> AbortStep(uint64_t step, uint64_t incarnation, const std::string& reason);

  // Aborts the open step when it is overdue (Step::Overdue) and returns why; nothing otherwise.
  std::optional<std::string> AbortOverdueStep(absl::Time now, const StepLimits& limits);

  // Ends the open step for its streams and callers, with the reason, and leaves its gradient: for a
  // process that is about to end. Never waits. Returns the step; 0 when none is open, or when the
  // optimizer is being applied: that commit counts.
  uint64_t AbandonStep(const std::string& reason);

  // The workers of a step that is open, or was committed or aborted last; none of any other.
  std::vector<std::string> WorkersOf(uint64_t step) const;

  // --- Weights ---

  // Shape of a tensor. INVALID_ARGUMENT when this head has no such tensor.
  absl::StatusOr<TensorShape> ShapeOf(TensorKind kind) const;

  // Writes rows of the weight or the bias. `data` holds num_rows rows in `dtype`; its size and the
  // range are checked. FAILED_PRECONDITION while a step is open.
  absl::Status WriteRows(TensorKind kind, int64_t row_start, int64_t num_rows, DType dtype,
                         std::string_view data);

  // Reads rows into `rows`. FAILED_PRECONDITION for gradients while no step is open.
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows);

  // --- Checkpoints ---

  // Calls `save` with the head as the last commit left it, and holds every other control call of
  // the head up until it returns; chunks go on. FAILED_PRECONDITION when rows of the weight have
  // not been loaded.
  absl::Status Snapshot(absl::FunctionRef<absl::Status(const HeadSnapshot&, TensorReader)> save);

  // Makes the head what the snapshot says; `load` writes all its tensors. FAILED_PRECONDITION,
  // before `load` is called, while a step is open or when the snapshot is of a head of another
  // shape, dtype or optimizer (the difference is named); likewise what CheckState() says. A failure
  // of `load` poisons the head, which is then half written.
  absl::Status Restore(const HeadSnapshot& snapshot,
                       absl::FunctionRef<absl::Status(TensorWriter)> load);

  // --- Gradients computed elsewhere ---

  // Adds rows of a gradient to the open step's, once a (worker, index). True when the ledger had
  // this piece. INVALID_ARGUMENT: a row out of range or twice, a size that does not fit, NaN or
  // infinity, the index with other contents. FAILED_PRECONDITION: the head is not trainable, the
  // step is prepared or another one.
  absl::StatusOr<bool> AccumulateGradient(uint64_t step, uint64_t incarnation,
                                          const GradientPiece& piece);

  // --- Streams ---

  // Admits a stream. `on_abort` is called when the stream's step is aborted or its teacher deleted.
  // FAILED_PRECONDITION: another step or incarnation, or rows of the weight, or of the teacher's,
  // have not been loaded (the first one is named). INVALID_ARGUMENT, ALREADY_EXISTS: see
  // Step::AttachStream. Also what CheckStream and CheckTeacher say.
  // REQUIRES: `teacher` is the head that the recipe names, null when it names none.
  absl::StatusOr<std::shared_ptr<HeadStream>> OpenStream(StreamSpec spec,
                                                         Step::AbortListener on_abort,
                                                         std::shared_ptr<Head> teacher = nullptr);

  // Streams of other heads that learn from this one end here; none can be opened any more.
  // FAILED_PRECONDITION naming them, unless forced; forced, they are aborted.
  absl::Status StopTeaching(bool force);

  // Ends the head: aborts an open step, waits for queued chunks, its own and those it teaches, and
  // destroys the backend. Every later call is NOT_FOUND. May be called again.
  void Close();

 private:
  friend class HeadStream;
  Head(HeadSpec spec, const MemoryPlan& plan, const HeadEnvironment& environment);

  // OK while the head can be used: not closed, not poisoned.
  absl::Status CheckUsable() const ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckUsableLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckIncarnation(uint64_t incarnation) const;
  absl::Status CheckLoaded() const ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckTensorRange(TensorKind kind, int64_t row_start, int64_t num_rows) const;

  // Keeps the first fatal error and returns it as every later call will.
  absl::Status Poison(const absl::Status& error) ABSL_LOCKS_EXCLUDED(mu_);

  // Queues a chunk unless the head, or its teacher (null for none), is closed meanwhile. Never
  // blocks for long.
  absl::Status SubmitTask(ChunkTask task, Head* teacher) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status QueueTask(ChunkTask task) ABSL_LOCKS_EXCLUDED(mu_);

  // Lends the backend to a student until a chunk is queued with it: Close() waits for that, and
  // destroys the backend behind the chunk.
  absl::StatusOr<ComputeBackend*> LendBackend() ABSL_LOCKS_EXCLUDED(mu_);
  void ReturnBackend() ABSL_LOCKS_EXCLUDED(mu_);

  // A stream of another head learns from this one until DetachStudent. `stream` is how errors call
  // it; `on_abort` is called when this head is deleted.
  absl::StatusOr<uint64_t> AttachStudent(std::string stream, Step::AbortListener on_abort)
      ABSL_LOCKS_EXCLUDED(mu_);
  void DetachStudent(uint64_t student_id) ABSL_LOCKS_EXCLUDED(mu_);

  // What a stream's chunks look like. FAILED_PRECONDITION when a slot does not hold one row.
  absl::StatusOr<ChunkShape> ShapeOfChunks(const StreamSpec& spec, const Head* teacher) const;
  // The step of a stream, attached to it; null for evaluation.
  absl::StatusOr<std::shared_ptr<Step>> AttachToStep(const StreamSpec& spec,
                                                     Step::AbortListener on_abort);

  Pairing& pairing() { return pairing_; }

  // Books a computed chunk: in the ledger when it was new to `step`, in the metrics always.
  void BookResult(Step* step, const std::string& worker, const ComputedChunk& chunk);

  // Books a failed batch: it poisons the chunk's step, or the open step it was computed beside,
  // since the accumulators may hold part of it.
  void BookFailure(Step* step, const std::string& worker, const ComputedChunk& chunk,
                   const absl::Status& error);

  // Runs work with the backend on the executor's thread and waits for it.
  absl::Status RunOnBackend(absl::FunctionRef<absl::Status(ComputeBackend&)> work);

  // Throws a step's gradient away and puts the step away. Returns false when it was aborted
  // already.
  absl::StatusOr<bool> AbortAndDiscard(Step& step, const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(control_mu_);
  absl::Status DiscardGradients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(control_mu_);
  absl::StatusOr<CommittedStep> ApplyCommit(Step& step, const CommitParameters& parameters)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(control_mu_);
  absl::StatusOr<std::vector<float>> CheckPiece(const GradientPiece& piece) const;
  // The answer of a commit that a server before this one applied, when this is that commit.
  std::optional<CommittedStep> RestoredCommit(uint64_t step, uint64_t incarnation,
                                              const CommitParameters& parameters) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(control_mu_);

  const HeadSpec spec_;
  const MemoryPlan plan_;
  const HeadEnvironment environment_;
  StepSequence steps_;
  Pairing pairing_;

  std::atomic<bool> discard_needed_{false};           // A batch has failed since the last discard.
  absl::Mutex control_mu_ ABSL_ACQUIRED_BEFORE(mu_);  // Held over whole control calls.
  std::optional<CommitRecord> last_commit_ ABSL_GUARDED_BY(control_mu_);
  mutable absl::Mutex mu_;                   // Never held while waiting.
  std::unique_ptr<ComputeBackend> backend_;  // Touched on the executor's thread; pointer under mu_.
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status poisoned_ ABSL_GUARDED_BY(mu_);
  RowSet loaded_rows_ ABSL_GUARDED_BY(mu_);
  int64_t last_step_tokens_ ABSL_GUARDED_BY(mu_) = 0;

  struct Student {
    std::string stream;
    Step::AbortListener on_abort;
  };
  std::map<uint64_t, Student> students_ ABSL_GUARDED_BY(mu_);
  uint64_t next_student_ ABSL_GUARDED_BY(mu_) = 1;
  bool teaching_over_ ABSL_GUARDED_BY(mu_) = false;
  int num_lent_ ABSL_GUARDED_BY(mu_) = 0;  // LendBackend without ReturnBackend.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_HEAD_H_
