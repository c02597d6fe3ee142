#include "server/compute/executor.h"

#include <algorithm>
#include <utility>

#include "absl/synchronization/notification.h"

namespace lmhead {
namespace {

// Whether two chunks may be computed by one launch.
bool MayShareBatch(const ChunkTask& a, const ChunkTask& b) {
  return a.backend == b.backend && a.teacher == b.teacher && a.mode == b.mode &&
         a.outputs == b.outputs && (a.recipe == b.recipe || *a.recipe == *b.recipe);
}

}  // namespace

// What a launch needs until its completion has run.
struct Executor::Batch {
  std::vector<Entry> entries;
  std::vector<ChunkRows> rows;
  absl::Time launched_at;
};

Executor::Executor(Options options) : options_(std::move(options)), thread_([this] { Loop(); }) {}

Executor::~Executor() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void Executor::Submit(ChunkTask task) {
  absl::MutexLock lock(&mu_);
  queue_.push_back({.chunk = std::move(task), .queued_at = absl::Now()});
  ++num_chunks_queued_;
}

void Executor::Post(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  queue_.push_back({.control = std::move(work), .queued_at = absl::Now()});
}

void Executor::Run(absl::FunctionRef<void()> work) {
  absl::Notification finished;
  Post([&] {
    work();
    finished.Notify();
  });
  finished.WaitForNotification();
}

int64_t Executor::queue_depth() const {
  absl::MutexLock lock(&mu_);
  return num_chunks_queued_;
}

double Executor::busy_seconds() const {
  absl::MutexLock lock(&mu_);
  const absl::Duration current =
      num_under_way_ > 0 ? absl::Now() - busy_since_ : absl::ZeroDuration();
  return absl::ToDoubleSeconds(busy_ + current);
}

bool Executor::ReadyOrStopped() const {
  if (queue_.empty()) return stopping_ && num_under_way_ == 0;
  if (queue_.front().control) return num_under_way_ == 0;
  return num_under_way_ < options_.eager_batches ||
         (num_under_way_ < options_.max_inflight_batches && NextBatchIsFull());
}

// Whether waiting would add nothing to the batch that is next. REQUIRES: the front is a chunk.
bool Executor::NextBatchIsFull() const {
  if (!options_.join_chunks) return true;
  const ChunkTask& front = queue_.front().chunk;
  int64_t room = front.batch_tokens;
  for (const Entry& entry : queue_) {
    if (entry.control) return true;  // Nothing behind it joins what is before.
    if (MayShareBatch(front, entry.chunk)) room -= entry.chunk.rows.hidden_states.rows;
    if (room <= 0) return true;
  }
  return false;
}

void Executor::Loop() {
  for (;;) {
    std::vector<Entry> batch;
    std::function<void()> control;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(
          +[](Executor* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->ReadyOrStopped(); },
          this));
      if (queue_.empty()) return;
      if (queue_.front().control) {
        control = std::move(queue_.front().control);
        queue_.pop_front();
      } else {
        batch = TakeBatch();
      }
      BeginWork();
    }
    if (control) {
      RunControl(control);
    } else {
      Launch(std::move(batch));
    }
  }
}

std::vector<Executor::Entry> Executor::TakeBatch() {
  std::vector<Entry> batch;
  batch.push_back(std::move(queue_.front()));
  queue_.pop_front();
  int64_t room = batch.front().chunk.batch_tokens - batch.front().chunk.rows.hidden_states.rows;
  for (auto it = queue_.begin(); options_.join_chunks && it != queue_.end() && !it->control;) {
    const int64_t rows = it->chunk.rows.hidden_states.rows;
    if (rows <= room && MayShareBatch(batch.front().chunk, it->chunk)) {
      room -= rows;
      batch.push_back(std::move(*it));
      it = queue_.erase(it);
    } else {
      ++it;
    }
  }
  num_chunks_queued_ -= static_cast<int64_t>(batch.size());
  return batch;
}

void Executor::RunControl(const std::function<void()>& work) {
  work();
  absl::MutexLock lock(&mu_);
  EndWork();
}

void Executor::Launch(std::vector<Entry> entries) {
  auto batch = std::make_shared<Batch>();
  batch->entries = std::move(entries);
  batch->launched_at = absl::Now();
  int64_t num_tokens = 0;
  for (const Entry& entry : batch->entries) {
    batch->rows.push_back(entry.chunk.rows);
    num_tokens += entry.chunk.rows.hidden_states.rows;
  }
  if (options_.on_batch) {
    options_.on_batch(static_cast<int64_t>(batch->entries.size()), num_tokens);
  }
  const ChunkTask& first = batch->entries.front().chunk;
  const BatchInput input = {.recipe = first.recipe.get(),
                            .mode = first.mode,
                            .chunks = batch->rows,
                            .outputs = first.outputs,
                            .teacher = first.teacher};
  first.backend->ComputeBatch(input, [this, batch](absl::StatusOr<BatchOutput> output) {
    Finish(*batch, std::move(output));
  });
}

void Executor::Finish(Batch& batch, absl::StatusOr<BatchOutput> output) {
  if (output.ok() && output->sums.size() != batch.entries.size()) {
    output = absl::InternalError("the backend answered another number of chunks than it was given");
  }
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    Entry& entry = batch.entries[i];
    if (!output.ok()) {
      entry.chunk.done(output.status());
      continue;
    }
    ChunkOutput chunk = {.sums = output->sums[i], .timings = output->timings};
    chunk.timings.queue_seconds = absl::ToDoubleSeconds(batch.launched_at - entry.queued_at);
    entry.chunk.done(std::move(chunk));
  }
  absl::MutexLock lock(&mu_);
  EndWork();
}

void Executor::BeginWork() {
  if (num_under_way_++ == 0) busy_since_ = absl::Now();
}

void Executor::EndWork() {
  if (--num_under_way_ == 0) busy_ += absl::Now() - busy_since_;
}

}  // namespace lmhead
