// The one thread that drives a rank's device: a first-in-first-out queue of chunks and control
// work.
//
// Every call of every ComputeBackend of the rank runs on this thread, so that backends need no
// locks. Waiting chunks that may share a launch are joined into one batch, also over workers and
// streams: GEMMs and fp32 accumulation want thousands of rows, messages are better small. The queue
// needs no bound of its own: each chunk in it holds a staging slot, and slots are bounded.
//
// Thread-safe. Submit and Post never wait for the device.

#ifndef LMHEAD_SERVER_COMPUTE_EXECUTOR_H_
#define LMHEAD_SERVER_COMPUTE_EXECUTOR_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/compute/backend.h"

namespace lmhead {

// What one chunk's share of a batch came to.
struct ChunkOutput {
  LossSums sums;
  StageTimings timings;  // queue_seconds of the chunk, the rest of its whole batch.
};

// One chunk to compute. Everything it points to stays alive until `done` has run.
struct ChunkTask {
  ComputeBackend* backend = nullptr;
  ComputeBackend* teacher = nullptr;  // Exactly when recipe->has_teacher_head().
  std::shared_ptr<const LossRecipe> recipe;
  OutputSpec outputs;
  BackwardMode mode = BackwardMode::kNone;
  int64_t batch_tokens = 0;  // Most rows of a batch; the plan's.
  ChunkRows rows;
  // Called exactly once, on any thread; must not block for long.
  std::function<void(absl::StatusOr<ChunkOutput>)> done;
};

class Executor {
 public:
  struct Options {
    // Join waiting chunks. Off, every chunk is a batch of its own, which makes a step of one worker
    // and one stream bitwise reproducible.
    bool join_chunks = false;
    // Batches that may be unfinished before the next is launched. While the device is that far
    // behind, chunks wait here, where they can still be joined.
    int32_t max_inflight_batches = 1;
    // As long as fewer are unfinished, a batch is launched whatever its size; above, only one that
    // nothing more could join: the device has enough to do meanwhile, and large batches are faster.
    // At most max_inflight_batches.
    int32_t eager_batches = 1;
    // Told of every launch; called on the executor's thread.
    std::function<void(int64_t num_chunks, int64_t num_tokens)> on_batch;
  };

  explicit Executor(Options options);
  ~Executor();  // Runs what is queued, then stops.
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queues a chunk. Chunks of the same backend, recipe, outputs and mode may share a batch, and a
  // batch may overtake chunks it could not take in, but nothing passes a control task.
  // REQUIRES: 1 <= rows <= batch_tokens.
  void Submit(ChunkTask task);

  // Queues control work. It runs alone: every chunk queued before it has been computed and its
  // `done` has returned, no later one has started.
  void Post(std::function<void()> work);

  // Post, then waits for it. REQUIRES: not called on the executor's thread.
  void Run(absl::FunctionRef<void()> work);

  int64_t queue_depth() const;  // Chunks queued and not launched.
  double busy_seconds() const;  // Total time with a batch or control work under way.

 private:
  struct Entry {
    ChunkTask chunk;
    std::function<void()> control;  // Set exactly for control work.
    absl::Time queued_at;
  };
  struct Batch;

  void Loop();
  bool ReadyOrStopped() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool NextBatchIsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<Entry> TakeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunControl(const std::function<void()>& work);
  void Launch(std::vector<Entry> entries);
  void Finish(Batch& batch, absl::StatusOr<BatchOutput> output);
  void BeginWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  mutable absl::Mutex mu_;
  std::deque<Entry> queue_ ABSL_GUARDED_BY(mu_);
  int64_t num_chunks_queued_ ABSL_GUARDED_BY(mu_) = 0;
  int32_t num_under_way_ ABSL_GUARDED_BY(mu_) = 0;  // Batches launched, or the control task.
  absl::Time busy_since_ ABSL_GUARDED_BY(mu_);
  absl::Duration busy_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // Last: starts when everything else is there.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_EXECUTOR_H_
