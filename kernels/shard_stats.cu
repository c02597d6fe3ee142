#include "kernels/device/shard_stats.cuh"
#include "kernels/launch.h"
#include "kernels/shard_stats.h"

namespace lmhead::kernels {

cudaError_t LaunchShardStats(ConstMatrixView logits, VocabTile tile, const RowInput* rows,
                             const ShardStatsOptions& options, RowStats* stats,
                             cudaStream_t stream) {
  if (tile.cols > logits.cols) return cudaErrorInvalidValue;
  const LogitTransform& transform = options.transform;
  device::ShardStatsArguments args{};
  args.logits = logits.data;
  args.row_stride = logits.cols;
  args.cols = static_cast<int32_t>(tile.cols);
  args.vocab_start = static_cast<int32_t>(tile.start);
  args.rows = rows;
  args.class_weights =
      options.class_weights != nullptr ? options.class_weights + tile.start : nullptr;
  args.logit_scale = transform.logit_scale;
  args.softcap = transform.softcap;
  args.inverse_temperature = options.inverse_temperature;
  args.merge = options.merge;
  args.stats = stats;
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    return DispatchBool(NeedsTransform(transform), [&](auto transformed) {
      return DispatchBool(options.entropy, [&](auto entropy) {
        return DispatchBool(options.smoothing, [&](auto smoothing) {
          device::ShardStatsKernel<decltype(zero), transformed.value, entropy.value,
                                   smoothing.value>
              <<<static_cast<unsigned>(logits.rows), device::kStatsThreads, 0, stream>>>(args);
          return cudaGetLastError();
        });
      });
    });
  });
}

}  // namespace lmhead::kernels
