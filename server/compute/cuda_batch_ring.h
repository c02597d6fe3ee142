// The batches a CUDA backend has under way, and the thread that completes them.
//
// Begin lends one of kCudaBatchesInFlight records, Finish hands it to the completion thread, which
// waits for its events, writes the per-token outputs, sums up the losses and calls `done`, in the
// order of the calls of Begin.

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_BATCH_RING_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_BATCH_RING_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/row_types.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/memory/cuda_layout.h"
#include "server/memory/host_block.h"

namespace lmhead {

// The first fatal error of a head: kept, and returned by everything from then on. Thread-safe.
class FirstError {
 public:
  explicit FirstError(std::string head) : head_(std::move(head)) {}

  absl::Status Get() const;

  // OK passes. Anything else is fatal: keeps it unless there is one already; returns what is kept.
  absl::Status Check(const absl::Status& status);

 private:
  const std::string head_;
  mutable absl::Mutex mu_;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

// The streams of a backend.
struct CudaStreams {
  cudaStream_t upload = nullptr;
  cudaStream_t compute = nullptr;
  cudaStream_t exchange = nullptr;  // Sums grad_hidden over the ranks, while grad_weight runs.
  cudaStream_t download = nullptr;

  CudaStreams() = default;
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;
  ~CudaStreams();
  absl::Status Create();
  absl::Status Synchronize() const;
};

// One batch under way. The executor's thread fills it in between Begin and Finish.
struct CudaBatch {
  CudaBatchBuffers device;
  kernels::RowInput* row_inputs = nullptr;  // Pinned, [batch_tokens], like the next two.
  kernels::RowPolicy* row_policies = nullptr;
  kernels::RowLoss* row_losses = nullptr;

  cudaEvent_t upload_start = nullptr;
  cudaEvent_t upload_done = nullptr;
  cudaEvent_t compute_start = nullptr;
  cudaEvent_t grad_hidden_done = nullptr;  // This rank's part of it; with several ranks.
  cudaEvent_t grads_ready = nullptr;       // What goes down has been computed.
  cudaEvent_t compute_done = nullptr;
  cudaEvent_t download_start = nullptr;
  cudaEvent_t download_done = nullptr;

  std::vector<ChunkRows> chunks;
  ComputeBackend::BatchDone done;
  absl::Status status;  // Of the launches.

  CudaBatch() = default;
  CudaBatch(const CudaBatch&) = delete;
  CudaBatch& operator=(const CudaBatch&) = delete;
  ~CudaBatch();
  absl::Status CreateEvents();
};

class CudaBatchRing {
 public:
  // `collective` is null for a head of one rank. It, `streams` and `first_error` must outlive the
  // ring.
  static absl::StatusOr<std::unique_ptr<CudaBatchRing>> Create(const CudaBuffers& buffers,
                                                               int64_t batch_tokens, int device,
                                                               const CudaStreams* streams,
                                                               Collective* collective,
                                                               FirstError* first_error);
  ~CudaBatchRing();  // Completes what is under way.
  CudaBatchRing(const CudaBatchRing&) = delete;
  CudaBatchRing& operator=(const CudaBatchRing&) = delete;

  // Waits for a free record.
  CudaBatch* Begin(const BatchInput& input, ComputeBackend::BatchDone done);
  void Finish(CudaBatch* batch);

  // Waits until every `done` has returned.
  void Drain();

 private:
  CudaBatchRing(int device, const CudaStreams* streams, Collective* collective,
                FirstError* first_error)
      : device_(device), streams_(streams), collective_(collective), first_error_(first_error) {}

  void CompleteAll();
  absl::StatusOr<BatchOutput> Complete(CudaBatch* batch);
  bool HasFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return num_under_way_ < kCudaBatchesInFlight;
  }
  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return num_under_way_ == 0; }
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stopping_ || !finished_.empty();
  }

  const int device_;
  const CudaStreams* const streams_;
  Collective* const collective_;
  FirstError* const first_error_;
  std::unique_ptr<HostBlock> pinned_;
  std::array<CudaBatch, kCudaBatchesInFlight> batches_;
  int next_ = 0;  // Of Begin's caller.
  absl::Mutex mu_;
  std::deque<CudaBatch*> finished_ ABSL_GUARDED_BY(mu_);
  int num_under_way_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // Started last.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_BATCH_RING_H_
