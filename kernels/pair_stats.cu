#include "kernels/device/pair_stats.cuh"
#include "kernels/launch.h"
#include "kernels/pair_launch.h"
#include "kernels/pair_stats.h"

namespace lmhead::kernels {
namespace {

using device::CrossSum;

template <typename T, CrossSum kCross>
cudaError_t Launch(const LogitsPair& pair, const device::PairStatsArguments& args,
                   cudaStream_t stream) {
  return DispatchBool(NeedsTransform(pair), [&](auto transformed) {
    device::PairStatsKernel<T, kCross, transformed.value>
        <<<static_cast<unsigned>(pair.student.rows), device::kPairThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t LaunchPairStats(const LogitsPair& pair, const PairStatsOptions& options,
                            PairStats* stats, cudaStream_t stream) {
  if (!IsValid(pair)) return cudaErrorInvalidValue;
  const device::PairStatsArguments args = {.student = StudentSide(pair),
                                           .teacher = TeacherSide(pair),
                                           .row_stride = pair.student.cols,
                                           .inverse_temperature = pair.inverse_temperature,
                                           .vocab_start = static_cast<int32_t>(pair.tile.start),
                                           .merge = options.merge,
                                           .stats = stats,
                                           .student_stats = options.student_stats,
                                           .rows = options.rows};
  return DispatchLogitsDType(pair.student.dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (options.divergence) {
      case Divergence::kForwardKl:
        return Launch<T, CrossSum::kForward>(pair, args, stream);
      case Divergence::kReverseKl:
        return Launch<T, CrossSum::kReverse>(pair, args, stream);
      case Divergence::kJsd:
        return Launch<T, CrossSum::kNone>(pair, args, stream);
      case Divergence::kTopkForwardKl:
        break;
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t LaunchTeacherTailStats(ConstMatrixView logits, int64_t cols,
                                   const LogitTransform& transform, float inverse_temperature,
                                   PairStats* stats, cudaStream_t stream) {
  if (cols > logits.cols) return cudaErrorInvalidValue;
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    device::TeacherTailStatsKernel<decltype(zero)>
        <<<static_cast<unsigned>(logits.rows), device::kPairThreads, 0, stream>>>(
            SideOf(logits, cols, transform), logits.cols, inverse_temperature, stats);
    return cudaGetLastError();
  });
}

}  // namespace lmhead::kernels
