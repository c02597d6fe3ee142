#include "kernels/device/divergence_grad.cuh"
#include "kernels/divergence_grad.h"
#include "kernels/launch.h"
#include "kernels/pair_launch.h"

namespace lmhead::kernels {
namespace {

using device::DivergenceTerm;

template <typename T, DivergenceTerm kTerm>
cudaError_t Launch(bool transform, int64_t num_rows, const device::DivergenceGradArguments& args,
                   cudaStream_t stream) {
  return DispatchBool(transform, [&](auto transformed) {
    device::DivergenceGradKernel<T, kTerm, transformed.value>
        <<<static_cast<unsigned>(num_rows), device::kGradThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t LaunchDivergenceGrad(const LogitsPair& pair, const DivergenceGradOptions& options,
                                 const RowGrad* rows, const RowDivergenceGrad* divergence_rows,
                                 cudaStream_t stream) {
  const bool has_teacher = options.divergence != Divergence::kTopkForwardKl;
  if (has_teacher && !IsValid(pair)) return cudaErrorInvalidValue;
  const float* const weights = options.class_weights;
  const device::DivergenceGradArguments args = {
      .student = StudentSide(pair),
      .teacher = TeacherSide(pair),
      .row_stride = pair.student.cols,
      .vocab_start = static_cast<int32_t>(pair.tile.start),
      .divergence_cols = static_cast<int32_t>(options.divergence_cols),
      .inverse_temperature = pair.inverse_temperature,
      .beta = options.beta,
      .cross_entropy = options.cross_entropy,
      .class_weights = weights != nullptr ? weights + pair.tile.start : nullptr,
      .rows = rows,
      .divergence_rows = divergence_rows};
  const bool transform =
      has_teacher ? NeedsTransform(pair) : NeedsTransform(pair.student_transform);
  const int64_t num_rows = pair.student.rows;
  return DispatchLogitsDType(pair.student.dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (options.divergence) {
      case Divergence::kForwardKl:
        return Launch<T, DivergenceTerm::kForward>(transform, num_rows, args, stream);
      case Divergence::kReverseKl:
        return Launch<T, DivergenceTerm::kReverse>(transform, num_rows, args, stream);
      case Divergence::kJsd:
        return Launch<T, DivergenceTerm::kJsd>(transform, num_rows, args, stream);
      case Divergence::kTopkForwardKl:
        return Launch<T, DivergenceTerm::kOutsideTopk>(transform, num_rows, args, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace lmhead::kernels
