#include "kernels/device/topk_teacher.cuh"
#include "kernels/launch.h"
#include "kernels/topk_teacher.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 128;

unsigned BlocksFor(int64_t count) { return static_cast<unsigned>(CeilDiv(count, kThreads)); }

}  // namespace

cudaError_t LaunchTakeTopk(MatrixView logits, VocabTile tile, const TopkTeacher& teacher,
                           float* values, cudaStream_t stream) {
  if (tile.cols > logits.cols || teacher.k < 1) return cudaErrorInvalidValue;
  const int64_t count = logits.rows * teacher.k;
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::TakeTopkKernel<<<BlocksFor(count), kThreads, 0, stream>>>(
        static_cast<T*>(logits.data), logits.cols, tile, count, teacher, values);
    return cudaGetLastError();
  });
}

cudaError_t LaunchFoldTopk(int64_t num_rows, const RowInput* rows, const TopkTeacher& teacher,
                           const float* values, const FoldTopkOptions& options,
                           const RowStats* outside, RowStats* row_stats, TopkStats* topk_stats,
                           cudaStream_t stream) {
  device::FoldTopkKernel<<<BlocksFor(num_rows * device::kWarpSize), kThreads, 0, stream>>>(
      num_rows, rows, teacher, values, options, outside, row_stats, topk_stats);
  return cudaGetLastError();
}

cudaError_t LaunchTopkGrads(MatrixView logits, VocabTile tile, const TopkTeacher& teacher,
                            const float* values, const TopkGradOptions& options,
                            const RowGrad* rows, const RowDivergenceGrad* divergence_rows,
                            cudaStream_t stream) {
  if (tile.cols > logits.cols || teacher.k < 1) return cudaErrorInvalidValue;
  const int64_t count = logits.rows * teacher.k;
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::TopkGradsKernel<<<BlocksFor(count), kThreads, 0, stream>>>(
        static_cast<T*>(logits.data), logits.cols, tile, count, teacher, values, options, rows,
        divergence_rows);
    return cudaGetLastError();
  });
}

}  // namespace lmhead::kernels
