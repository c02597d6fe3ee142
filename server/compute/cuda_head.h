// What the parts of a CUDA backend share: the head, its place among the ranks, its device memory,
// streams and products.
//
//   cuda_backend     the calls of ComputeBackend, and creation
//   cuda_parameters  weight, bias, their gradients and optimizer state
//   cuda_batch_ring  batches under way, and the thread that completes them
//   cuda_transfers   what goes up before a batch is computed and down after
//   cuda_pass        one batch's computation
//   staged_collective  what a pass asks of the other ranks, where NCCL cannot

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_HEAD_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_HEAD_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/row_types.h"
#include "proto/types/head_spec.h"
#include "proto/types/vocab_range.h"
#include "server/compute/collective.h"
#include "server/compute/cublaslt_gemm.h"
#include "server/compute/cuda_batch_ring.h"
#include "server/memory/cuda_layout.h"
#include "server/memory/device_arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

struct CudaHead {
  const HeadSpec spec;
  const MemoryPlan plan;
  const int device;
  const RankContext ranks;
  const VocabRange range;  // The rows that are here; may be empty.
  const VocabRange owned;  // Those of them whose optimizer state is here; without peers all.

  std::unique_ptr<DeviceArena> arena = nullptr;
  CudaBuffers buffers = {};
  CudaStreams streams = {};
  std::unique_ptr<HeadGemm> gemm = nullptr;
  std::unique_ptr<Collective> staged =
      nullptr;                       // Over ranks.collective, if that is in host memory.
  Collective* collective = nullptr;  // In device memory; null for one rank.
  std::unique_ptr<Collective> staged_peers = nullptr;  // Likewise over ranks.peers,
  Collective* peers = nullptr;                         // and of those; null without replicas.
  cudaEvent_t grad_hidden_free = nullptr;              // The last batch's has been reduced.

  CudaHead(const HeadSpec& head_spec, const MemoryPlan& head_plan, int on_device,
           const RankContext& context)
      : spec(head_spec),
        plan(head_plan),
        device(on_device),
        ranks(context),
        range(ShardRange(head_spec, context.num_ranks, context.rank)),
        owned(OwnedRange(range, context.num_replicas, context.replica)) {}
  ~CudaHead() {
    if (grad_hidden_free != nullptr) cudaEventDestroy(grad_hidden_free);
  }
  CudaHead(const CudaHead&) = delete;
  CudaHead& operator=(const CudaHead&) = delete;

  // Tiles are numbered from the shard's start. A shard without rows has one tile without columns.
  int64_t num_tiles() const {
    return std::max<int64_t>(1, (range.size() + plan.vocab_tile - 1) / plan.vocab_tile);
  }
  kernels::VocabTile TileAt(int64_t index) const {
    const int64_t start = range.start + index * plan.vocab_tile;
    return {start, std::min(plan.vocab_tile, range.stop - start)};
  }

  int64_t weight_count() const { return range.size() * spec.hidden_size; }
  int64_t owned_offset() const { return owned.start - range.start; }  // In rows.

  // The weight's row of a vocabulary id.
  void* WeightAt(int64_t id) const {
    return static_cast<std::byte*>(buffers.weight) +
           (id - range.start) * spec.hidden_size * BytesPerElement(spec.weight_dtype);
  }
  // What the products add to logits of `dtype` from an id on: the bias in that dtype, or null.
  const void* BiasAt(int64_t id, DType dtype) const {
    if (!spec.has_bias) return nullptr;
    if (dtype == DType::kFloat32) return buffers.bias + (id - range.start);
    return static_cast<const uint16_t*>(buffers.rounded_bias) + (id - range.start);
  }

  kernels::LogitTransform Transform() const { return {spec.logit_scale, spec.softcap}; }
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_HEAD_H_
