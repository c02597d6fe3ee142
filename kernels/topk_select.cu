#include "kernels/device/topk_select.cuh"
#include "kernels/launch.h"
#include "kernels/topk_select.h"

namespace lmhead::kernels {
namespace {

constexpr int kFinishThreads = 128;

// Room for the list and as many candidates at least. Sorting a small buffer is quicker.
constexpr int kSmallCapacity = 512;
constexpr int kLargeCapacity = 2 * kTopkSelectMax;

template <typename Fn>
cudaError_t DispatchCapacity(int32_t k, Fn&& fn) {
  if (k < 1 || k > kTopkSelectMax) return cudaErrorInvalidValue;
  if (k <= kSmallCapacity / 2) return fn(std::integral_constant<int, kSmallCapacity>{});
  return fn(std::integral_constant<int, kLargeCapacity>{});
}

}  // namespace

cudaError_t LaunchTopkSelect(ConstMatrixView logits, VocabTile tile,
                             const LogitTransform& transform, int32_t k, bool merge,
                             TopkEntry* entries, cudaStream_t stream) {
  if (tile.cols > logits.cols) return cudaErrorInvalidValue;
  return DispatchLogitsDType(logits.dtype, [&](auto zero) {
    return DispatchCapacity(k, [&](auto capacity) {
      using T = decltype(zero);
      device::TopkSelectKernel<T, capacity.value>
          <<<static_cast<unsigned>(logits.rows), device::kSelectThreads, 0, stream>>>(
              static_cast<const T*>(logits.data), logits.cols, tile, transform,
              NeedsTransform(transform), k, merge, entries);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchTopkMerge(const TopkEntry* lists, int32_t num_lists, int64_t num_rows, int32_t k,
                            TopkEntry* entries, cudaStream_t stream) {
  return DispatchCapacity(k, [&](auto capacity) {
    device::TopkMergeKernel<capacity.value>
        <<<static_cast<unsigned>(num_rows), device::kSelectThreads, 0, stream>>>(
            lists, num_lists, num_rows, k, entries);
    return cudaGetLastError();
  });
}

cudaError_t LaunchTopkFinish(const TopkEntry* entries, int64_t num_rows, int32_t k,
                             const RowInput* rows, const RowStats* stats, const uint8_t* nonfinite,
                             const LogitTransform& transform, int32_t* ids, float* logprobs,
                             cudaStream_t stream) {
  const int64_t count = num_rows * k;
  device::TopkFinishKernel<<<static_cast<unsigned>(CeilDiv(count, kFinishThreads)), kFinishThreads,
                             0, stream>>>(entries, count, k, rows, stats, nonfinite, transform,
                                          NeedsTransform(transform), ids, logprobs);
  return cudaGetLastError();
}

}  // namespace lmhead::kernels
