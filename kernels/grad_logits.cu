#include "kernels/device/grad_logits.cuh"
#include "kernels/grad_logits.h"
#include "kernels/launch.h"

namespace lmhead::kernels {
namespace {

using device::GradTerm;

template <typename T, GradTerm kTerm>
cudaError_t Launch(bool transform, int64_t num_rows, const device::GradLogitsArguments& args,
                   cudaStream_t stream) {
  return DispatchBool(transform, [&](auto transformed) {
    device::GradLogitsKernel<T, transformed.value, kTerm>
        <<<static_cast<unsigned>(num_rows), device::kGradThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t LaunchGradLogits(MatrixView logits, VocabTile tile, const RowGrad* rows,
                             const LogitTransform& transform, const float* class_weights,
                             bool entropy, cudaStream_t stream) {
  if (tile.cols > logits.cols || (entropy && class_weights != nullptr))
    return cudaErrorInvalidValue;
  device::GradLogitsArguments args{};
  args.logits = logits.data;
  args.row_stride = logits.cols;
  args.cols = static_cast<int32_t>(tile.cols);
  args.vocab_start = static_cast<int32_t>(tile.start);
  args.rows = rows;
  args.class_weights = class_weights != nullptr ? class_weights + tile.start : nullptr;
  args.logit_scale = transform.logit_scale;
  args.softcap = transform.softcap;
  const bool transform_needed = NeedsTransform(transform);
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (entropy) return Launch<T, GradTerm::kEntropy>(transform_needed, logits.rows, args, stream);
    if (class_weights == nullptr) {
      return Launch<T, GradTerm::kNone>(transform_needed, logits.rows, args, stream);
    }
    return Launch<T, GradTerm::kClassWeights>(transform_needed, logits.rows, args, stream);
  });
}

}  // namespace lmhead::kernels
