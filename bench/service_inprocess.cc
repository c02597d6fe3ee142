#include "bench/service_inprocess.h"

#include <algorithm>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/compute/cpu_backend.h"
#include "server/compute/cuda_backend.h"

namespace lmhead::bench {
namespace {

constexpr int kDevice = 0;

}  // namespace

InProcessHead::InProcessHead(const HeadSpec& spec, DType hidden_dtype)
    : spec_(spec),
      hidden_dtype_(hidden_dtype),
      rows_(spec.batch_tokens, spec.hidden_size, hidden_dtype, spec.vocab_size),
      grad_hidden_states_(HostBlock::Map(rows_.size_bytes()).value()) {}

absl::StatusOr<std::unique_ptr<InProcessHead>> InProcessHead::Create(const HeadSpec& spec,
                                                                     DType hidden_dtype,
                                                                     BackendKind backend) {
  std::unique_ptr<InProcessHead> head(new InProcessHead(spec, hidden_dtype));
  if (absl::Status status = head->Init(backend); !status.ok()) return status;
  return head;
}

absl::Status InProcessHead::Init(BackendKind backend) {
  const MemoryPlan plan = PlanForSchedule(spec_, spec_.schedule, {.backend = backend});
  auto created = backend == BackendKind::kCuda ? CreateCudaBackend(spec_, plan, &account_, kDevice)
                                               : CreateCpuBackend(spec_, plan, &account_);
  if (!created.ok()) return created.status();
  backend_ = *std::move(created);
  if (backend == BackendKind::kCpu) return absl::OkStatus();
  absl::Status status = rows_.Pin(kDevice);
  status.Update(grad_hidden_states_->Pin(kDevice));
  return status;
}

absl::StatusOr<double> InProcessHead::Time(int64_t num_tokens) {
  const LossRecipe recipe;
  const int64_t num_batches = (num_tokens + spec_.batch_tokens - 1) / spec_.batch_tokens;
  absl::Mutex mu;
  int64_t num_done = 0;
  absl::Status failure;
  const absl::Time start = absl::Now();
  for (int64_t row = 0; row < num_tokens; row += spec_.batch_tokens) {
    const int64_t num_rows = std::min(spec_.batch_tokens, num_tokens - row);
    // Batches share the place for their gradients: nobody reads it.
    const ChunkRows chunk = {.hidden_states = rows_.hidden_states(num_rows),
                             .targets = rows_.targets(num_rows),
                             .grad_hidden_states = {grad_hidden_states_->data(), num_rows,
                                                    spec_.hidden_size, hidden_dtype_}};
    const BatchInput input = {.recipe = &recipe,
                              .mode = BackwardMode::kHiddenAndWeight,
                              .chunks = {&chunk, 1},
                              .outputs = {.grad_hidden_states = true}};
    backend_->ComputeBatch(input, [&](const absl::StatusOr<BatchOutput>& output) {
      const absl::MutexLock lock(&mu);
      ++num_done;
      failure.Update(output.status());
    });
  }
  const auto all_done = [&] { return num_done == num_batches; };
  {
    const absl::MutexLock lock(&mu);
    mu.Await(absl::Condition(&all_done));
  }
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  failure.Update(backend_->DiscardGradients());
  if (!failure.ok()) return failure;
  return seconds;
}

}  // namespace lmhead::bench
