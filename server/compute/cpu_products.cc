#include "server/compute/cpu_products.h"

#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"

namespace lmhead {

CpuProducts::CpuProducts(const MemoryPlan& plan, const CpuParameters* parameters, HostArena* arena)
    : parameters_(parameters),
      max_cols_(plan.vocab_tile),
      weight_tile_(static_cast<float*>(
          arena->Carve(MemoryCategory::kLibraryWorkspace,
                       PlanCpuScratch(parameters->spec(), plan).weight_tile_bytes))),
      gemm_(static_cast<std::byte*>(
                arena->Carve(MemoryCategory::kLibraryWorkspace,
                             PlanCpuScratch(parameters->spec(), plan).gemm_scratch_bytes)),
            PlanCpuScratch(parameters->spec(), plan).gemm_scratch_bytes) {}

cpu::RowConfig CpuProducts::MakeRowConfig() const {
  return {.vocab_size = spec().vocab_size,
          .bias = parameters_->bias(),
          .bias_start = range().start,
          .logit_scale = spec().logit_scale,
          .softcap = spec().softcap};
}

const float* CpuProducts::WeightOf(cpu::VocabTile tile) {
  const ConstMatrixView weight = parameters_->WeightRows(tile.start, tile.cols);
  if (weight.dtype == DType::kFloat32) return static_cast<const float*>(weight.data);
  cpu::ConvertMatrix(weight, {weight_tile_, weight.rows, weight.cols, DType::kFloat32});
  return weight_tile_;
}

cpu::Gemm::Shape CpuProducts::ShapeOf(cpu::VocabTile tile, int64_t rows) const {
  return {.rows = rows, .cols = tile.cols, .hidden_size = spec().hidden_size};
}

absl::Status CpuProducts::Logits(cpu::VocabTile tile, int64_t rows, const float* hidden,
                                 float* logits) {
  return gemm_.Logits(ShapeOf(tile, rows), hidden, WeightOf(tile), logits);
}

absl::Status CpuProducts::AddGradHidden(cpu::VocabTile tile, int64_t rows, const float* grad_logits,
                                        float* grad_hidden) {
  return gemm_.AddGradHidden(ShapeOf(tile, rows), grad_logits, WeightOf(tile), grad_hidden);
}

absl::Status CpuProducts::AddGradWeight(cpu::VocabTile tile, int64_t rows, const float* grad_logits,
                                        const float* hidden) {
  if (spec().has_bias) {
    cpu::AddColumnSums(grad_logits, rows, tile.cols, parameters_->GradBiasAt(tile.start));
  }
  return gemm_.AddGradWeight(ShapeOf(tile, rows), grad_logits, hidden,
                             parameters_->GradWeightAt(tile.start));
}

}  // namespace lmhead
