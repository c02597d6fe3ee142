#include "kernels/device/grad_logits.cuh"
#include "kernels/grad_logits.h"
#include "kernels/launch.h"

namespace lmhead::kernels {

cudaError_t LaunchGradLogits(MatrixView logits, VocabTile tile, const RowGrad* rows,
                             const LogitTransform& transform, const float* class_weights,
                             cudaStream_t stream) {
  if (tile.cols > logits.cols) return cudaErrorInvalidValue;
  device::GradLogitsArguments args{};
  args.logits = logits.data;
  args.row_stride = logits.cols;
  args.cols = static_cast<int32_t>(tile.cols);
  args.vocab_start = static_cast<int32_t>(tile.start);
  args.rows = rows;
  args.class_weights = class_weights != nullptr ? class_weights + tile.start : nullptr;
  args.logit_scale = transform.logit_scale;
  args.softcap = transform.softcap;
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    return DispatchBool(NeedsTransform(transform), [&](auto transformed) {
      return DispatchBool(class_weights != nullptr, [&](auto class_weights) {
        device::GradLogitsKernel<decltype(zero), transformed.value, class_weights.value>
            <<<static_cast<unsigned>(logits.rows), device::kGradThreads, 0, stream>>>(args);
        return cudaGetLastError();
      });
    });
  });
}

}  // namespace lmhead::kernels
