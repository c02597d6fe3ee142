// Device code of kernels/topk_select.h.
//
// A block keeps the list and a buffer of candidates behind it in shared memory. A candidate is an
// entry larger than the smallest of the list; when the buffer is full it is sorted with the list,
// whose smallest entry rises. An empty list starts from the largest entries of the threads, so that
// hardly any element is ever a candidate.

#ifndef LMHEAD_KERNELS_DEVICE_TOPK_SELECT_CUH_
#define LMHEAD_KERNELS_DEVICE_TOPK_SELECT_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"
#include "kernels/topk_select.h"

namespace lmhead::kernels::device {

constexpr int kSelectThreads = 512;
constexpr int kSelectUnroll = 4;  // Vectors in flight a thread.

// Larger floats become larger integers.
__device__ __forceinline__ uint32_t OrderedBits(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float FromOrderedBits(uint32_t ordered) {
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// -0 counts as 0: they are equal.
__device__ __forceinline__ TopkEntry MakeEntry(float value, int32_t id) {
  const uint32_t bits = OrderedBits(value + 0.0f);
  return static_cast<TopkEntry>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ float ValueOfEntry(TopkEntry entry) {
  return FromOrderedBits(static_cast<uint32_t>(entry >> 32));
}
__device__ __forceinline__ int32_t IdOfEntry(TopkEntry entry) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(entry));
}

// The list and the candidates behind it.
template <int kCapacity>
struct Selection {
  TopkEntry* entries;  // [kCapacity], shared.
  int* count;          // Shared: entries that are set; may exceed kCapacity.
  int32_t k;
  TopkEntry threshold;  // Of the list: candidates are larger. The same in every thread.

  // Sorts, falling, and keeps the first k. Every thread calls it.
  __device__ void Sort() {
    __syncthreads();
    const int filled = min(*count, kCapacity);
    for (int i = filled + threadIdx.x; i < kCapacity; i += kSelectThreads) {
      entries[i] = kNoTopkEntry;
    }
    __syncthreads();
    for (int size = 2; size <= kCapacity; size *= 2) {  // Bitonic.
      for (int stride = size / 2; stride > 0; stride /= 2) {
        for (int i = threadIdx.x; i < kCapacity / 2; i += kSelectThreads) {
          const int low = 2 * i - (i & (stride - 1));
          const int high = low + stride;
          const bool falling = (low & size) == 0;
          const TopkEntry a = entries[low];
          const TopkEntry b = entries[high];
          if ((a < b) == falling) {
            entries[low] = b;
            entries[high] = a;
          }
        }
        __syncthreads();
      }
    }
    if (threadIdx.x == 0) *count = k;
    threshold = entries[k - 1];
    __syncthreads();
  }

  // Raises the threshold of an empty list, given one entry of each thread that it will offer: the
  // k-th largest of those is no larger than the k-th largest of all.
  __device__ void Seed(TopkEntry mine) {
    if (k > kSelectThreads) return;
    entries[threadIdx.x] = mine;
    if (threadIdx.x == 0) *count = kSelectThreads;
    Sort();
    if (threshold != kNoTopkEntry) --threshold;  // It is offered, too.
    if (threadIdx.x == 0) *count = 0;
    __syncthreads();
  }

  // Takes the entries of the thread that `pending` has a bit for; entry(i) is the i-th. Every
  // thread calls it, as often as any.
  template <int kEntries, typename Entry>
  __device__ __forceinline__ void Add(unsigned pending, Entry&& entry) {
    while (true) {
      if (pending != 0) {
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          if ((pending & 1u << i) == 0) continue;
          const TopkEntry mine = entry(i);
          if (mine > threshold) {
            const int at = atomicAdd(count, 1);
            if (at >= kCapacity) continue;  // Until after the sort.
            entries[at] = mine;
          }
          pending &= ~(1u << i);
        }
      }
      if (!__syncthreads_or(pending != 0)) return;
      Sort();
    }
  }

  __device__ void Write(TopkEntry* to) {
    Sort();
    for (int i = threadIdx.x; i < k; i += kSelectThreads) to[i] = entries[i];
  }
};

template <int kCapacity>
__device__ __forceinline__ Selection<kCapacity> StartSelection(int32_t k, const TopkEntry* list) {
  __shared__ TopkEntry entries[kCapacity];
  __shared__ int count;
  for (int i = threadIdx.x; i < k; i += kSelectThreads) {
    entries[i] = list != nullptr ? list[i] : kNoTopkEntry;
  }
  // An empty list has no entries to keep: its places are candidates'.
  if (threadIdx.x == 0) count = list != nullptr ? k : 0;
  __syncthreads();
  Selection<kCapacity> selection = {entries, &count, k, kNoTopkEntry};
  if (list != nullptr) selection.threshold = entries[k - 1];
  __syncthreads();
  return selection;
}

// What a thread has loaded at once: kSelectUnroll vectors, kSelectThreads vectors apart.
template <typename T>
struct SelectRun {
  static constexpr int kCount = Vector<T>::kCount;
  static constexpr int kElements = kSelectUnroll * kCount;
  static constexpr int64_t kVectorStep = kSelectThreads * kCount;
  static constexpr int64_t kStep = kSelectUnroll * kVectorStep;
  static_assert(kElements <= 32, "A bit each");

  Vector<T> raw[kSelectUnroll];
  int64_t col;  // Of the first element.

  // The row stride covers whole vectors, so the last one may reach past cols.
  __device__ __forceinline__ void Load(const T* logits, int64_t start, int64_t cols) {
    col = start + threadIdx.x * kCount;
#pragma unroll
    for (int u = 0; u < kSelectUnroll; ++u) {
      if (col + u * kVectorStep < cols) raw[u] = Vector<T>::Load(logits + col + u * kVectorStep);
    }
  }
  __device__ __forceinline__ int64_t ColOf(int i) const {
    return col + i / kCount * kVectorStep + i % kCount;
  }
  __device__ __forceinline__ float RawOf(int i) const {
    return ToFloat(raw[i / kCount].values[i % kCount]);
  }
};

// One block a row.
template <typename T, int kCapacity>
__global__ void __launch_bounds__(kSelectThreads)
    TopkSelectKernel(const T* all_logits, int64_t row_stride, VocabTile tile,
                     LogitTransform transform, bool transform_needed, int32_t k, bool merge,
                     TopkEntry* all_entries) {
  using Run = SelectRun<T>;
  const int64_t row = blockIdx.x;  // 64-bit: row * row_stride exceeds 2^31.
  const T* const logits = all_logits + row * row_stride;
  const float inverse_softcap = transform.softcap != 0.0f ? 1.0f / transform.softcap : 0.0f;
  TopkEntry* const list = all_entries + row * k;
  Run run;
  const auto entry = [&](int i) {
    float value = run.RawOf(i);
    if (transform_needed) {
      value =
          Transform<T>(value, transform.logit_scale, transform.softcap, inverse_softcap, 1.0f).z;
    }
    return MakeEntry(value, static_cast<int32_t>(tile.start + run.ColOf(i)));
  };

  Selection<kCapacity> selection = StartSelection<kCapacity>(k, merge ? list : nullptr);
  for (int64_t start = 0; start < tile.cols; start += Run::kStep) {
    run.Load(logits, start, tile.cols);
    if (start == 0 && !merge) {
      TopkEntry largest = kNoTopkEntry;
#pragma unroll
      for (int i = 0; i < Run::kElements; ++i) {
        if (run.ColOf(i) < tile.cols) largest = max(largest, entry(i));
      }
      selection.Seed(largest);
    }
    const auto least = static_cast<uint32_t>(selection.threshold >> 32);
    unsigned pending = 0;
#pragma unroll
    for (int i = 0; i < Run::kElements; ++i) {
      if (run.ColOf(i) >= tile.cols) continue;
      if (static_cast<uint32_t>(entry(i) >> 32) >= least) pending |= 1u << i;
    }
    selection.template Add<Run::kElements>(pending, entry);
  }
  selection.Write(list);
}

// One block a row.
template <int kCapacity>
__global__ void __launch_bounds__(kSelectThreads)
    TopkMergeKernel(const TopkEntry* lists, int32_t num_lists, int64_t num_rows, int32_t k,
                    TopkEntry* all_entries) {
  const int64_t row = blockIdx.x;
  Selection<kCapacity> selection = StartSelection<kCapacity>(k, lists + row * k);
  for (int32_t list = 1; list < num_lists; ++list) {
    const TopkEntry* const from = lists + (list * num_rows + row) * k;
    for (int32_t start = 0; start < k; start += kSelectThreads) {
      const int32_t i = start + static_cast<int32_t>(threadIdx.x);
      const TopkEntry mine = i < k ? from[i] : kNoTopkEntry;
      selection.template Add<1>(1u, [mine](int) { return mine; });
    }
  }
  selection.Write(all_entries + row * k);
}

// One thread an entry.
__global__ void TopkFinishKernel(const TopkEntry* entries, int64_t count, int32_t k,
                                 const RowInput* rows, const RowStats* stats,
                                 const uint8_t* nonfinite, LogitTransform transform,
                                 bool transform_needed, int32_t* ids, float* logprobs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / k;
  ids[i] = 0;
  logprobs[i] = 0.0f;
  if (nonfinite[row] != 0) return;
  const TopkEntry entry = entries[i];
  logprobs[i] = MinusInfinity();
  if (entry == kNoTopkEntry) return;
  ids[i] = IdOfEntry(entry);
  const float value = ValueOfEntry(entry);
  if (value == MinusInfinity()) return;
  const float scale = transform_needed ? 1.0f : transform.logit_scale;
  const float z = value * (scale * rows[row].inverse_temperature);
  logprobs[i] = fminf(0.0f, (z - stats[row].logits_max) - logf(stats[row].sum_exp));
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_TOPK_SELECT_CUH_
