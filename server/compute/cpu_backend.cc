#include "server/compute/cpu_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "server/compute/cpu_batch.h"
#include "server/compute/cpu_parameters.h"
#include "server/compute/cpu_products.h"

namespace lmhead {
namespace {

class CpuBackend final : public ComputeBackend {
 public:
  CpuBackend(const HeadSpec& spec, const MemoryPlan& plan, const RankContext& context,
             std::unique_ptr<HostArena> arena)
      : arena_(std::move(arena)),
        parameters_(spec, plan, context, arena_.get()),
        products_(plan, &parameters_, arena_.get()),
        batch_(plan, context, &products_, arena_.get()) {
    arena_->Seal();
    parameters_.InitialiseWeight(batch_.hidden_scratch(), plan.batch_tokens);
  }

  void ComputeBatch(const BatchInput& input, BatchDone done) override {
    auto* const teacher = static_cast<CpuBackend*>(input.teacher);
    done(batch_.Compute(input, teacher != nullptr ? &teacher->products_ : nullptr));
  }

  absl::Status ReduceGradients() override { return parameters_.ReduceGradients(); }

  absl::StatusOr<double> GradSquaredNorm() override { return parameters_.GradSquaredNorm(); }

  absl::Status ApplyUpdate(const OptimizerUpdate& update) override {
    return parameters_.ApplyUpdate(update);
  }

  absl::Status DiscardGradients() override {
    parameters_.DiscardGradients();
    return absl::OkStatus();
  }

  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows) override {
    return parameters_.AddGradRows(row_ids, row_start, rows);
  }

  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) override {
    return parameters_.WriteRows(kind, row_start, rows);
  }

  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) override {
    return parameters_.ReadRows(kind, row_start, rows);
  }

  int64_t num_updates() const override { return parameters_.num_updates(); }
  void set_num_updates(int64_t num_updates) override { parameters_.set_num_updates(num_updates); }

 private:
  const std::unique_ptr<HostArena> arena_;  // First: the others are carved from it.
  CpuParameters parameters_;
  CpuProducts products_;
  CpuBatch batch_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateCpuBackend(const HeadSpec& spec,
                                                                 const MemoryPlan& plan,
                                                                 MemoryAccount* account,
                                                                 const RankContext& context) {
  LMHEAD_CHECK(plan.num_ranks == context.num_ranks,
               absl::StrCat("a plan of ", plan.num_ranks, " ranks for ", context.num_ranks));
  LMHEAD_CHECK(
      plan.num_replicas == context.num_replicas,
      absl::StrCat("a plan of ", plan.num_replicas, " replicas for ", context.num_replicas));
  LMHEAD_CHECK((context.collective != nullptr) == (context.num_ranks > 1), spec.name);
  LMHEAD_CHECK((context.peers != nullptr) == (context.num_replicas > 1), spec.name);
  absl::StatusOr<std::unique_ptr<HostArena>> arena = HostArena::Create(plan, account);
  if (!arena.ok()) return arena.status();
  return std::make_unique<CpuBackend>(spec, plan, context, *std::move(arena));
}

}  // namespace lmhead
