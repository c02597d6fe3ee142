// The matrix products of a head's vocabulary tiles on the host's processor.
//
// A bfloat16 weight is converted one tile at a time, into scratch of the head's own: so a teacher
// multiplies for its students with its own products.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_PRODUCTS_H_
#define LMHEAD_SERVER_COMPUTE_CPU_PRODUCTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/row_passes.h"
#include "server/compute/cpu_parameters.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Thread-hostile. Tiles lie in the parameters' range and have at most max_cols() columns.
class CpuProducts {
 public:
  // Carves the scratch. `parameters` and `arena` must outlive the products.
  CpuProducts(const MemoryPlan& plan, const CpuParameters* parameters, HostArena* arena);

  const HeadSpec& spec() const { return parameters_->spec(); }
  VocabRange range() const { return parameters_->range(); }
  int64_t max_cols() const { return max_cols_; }

  // What the row passes need to know of the head.
  cpu::RowConfig MakeRowConfig() const;

  // logits [rows, tile.cols] = hidden [rows, hidden_size] weight^T
  absl::Status Logits(cpu::VocabTile tile, int64_t rows, const float* hidden, float* logits);

  // grad_hidden [rows, hidden_size] += grad_logits [rows, tile.cols] weight
  absl::Status AddGradHidden(cpu::VocabTile tile, int64_t rows, const float* grad_logits,
                             float* grad_hidden);

  // Adds to the accumulators of the weight and of the bias.
  absl::Status AddGradWeight(cpu::VocabTile tile, int64_t rows, const float* grad_logits,
                             const float* hidden);

 private:
  const float* WeightOf(cpu::VocabTile tile);
  cpu::Gemm::Shape ShapeOf(cpu::VocabTile tile, int64_t rows) const;

  const CpuParameters* const parameters_;
  const int64_t max_cols_;
  float* const weight_tile_;  // [max_cols, hidden_size]; null for a float32 weight.
  cpu::Gemm gemm_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_PRODUCTS_H_
