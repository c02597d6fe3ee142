// The head without a service: what its backend does when nothing has to travel.

#ifndef LMHEAD_BENCH_SERVICE_INPROCESS_H_
#define LMHEAD_BENCH_SERVICE_INPROCESS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "bench/service_data.h"
#include "proto/types/head_spec.h"
#include "server/compute/backend.h"
#include "server/memory/arena.h"
#include "server/memory/host_block.h"
#include "server/memory/memory_plan.h"

namespace lmhead::bench {

// A head of this process on the same device, trained on full batches of spec.batch_tokens rows in
// pinned memory, as many under way as its backend takes. Used by one thread.
class InProcessHead {
 public:
  // REQUIRES: spec is validated; its schedule and batch_tokens are set.
  static absl::StatusOr<std::unique_ptr<InProcessHead>> Create(const HeadSpec& spec,
                                                               DType hidden_dtype,
                                                               BackendKind backend);
  InProcessHead(const InProcessHead&) = delete;
  InProcessHead& operator=(const InProcessHead&) = delete;

  // Seconds that num_tokens rows take, forward and backward; the gradient is thrown away after.
  absl::StatusOr<double> Time(int64_t num_tokens);

 private:
  InProcessHead(const HeadSpec& spec, DType hidden_dtype);

  absl::Status Init(BackendKind backend);

  const HeadSpec spec_;
  const DType hidden_dtype_;
  RandomRows rows_;
  const std::unique_ptr<HostBlock> grad_hidden_states_;
  MemoryAccount account_;
  std::unique_ptr<ComputeBackend> backend_;  // After what its batches touch.
};

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_SERVICE_INPROCESS_H_
