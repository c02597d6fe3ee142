#include "server/memory/cuda_layout.h"

#include <algorithm>

namespace lmhead {
namespace {

// Tiles are whole multiples of it: full tiles of the matrix product, aligned rows of the weight.
constexpr int64_t kTileMultiple = 64;

// A tile of recompute and eval holds at most this share of the whole logits.
constexpr int64_t kTilesMin = 4;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool KeepsWholeShard(Schedule schedule) {
  return schedule == Schedule::kRetain || schedule == Schedule::kFrozen;
}

int64_t VocabTile(const HeadSpec& spec, const MemoryPlan& plan) {
  if (KeepsWholeShard(plan.schedule)) return plan.shard_size;
  const int64_t fits = kCudaTileBytesMax / BytesPerElement(spec.weight_dtype) / plan.batch_tokens;
  const int64_t quarter = (plan.shard_size + kTilesMin - 1) / kTilesMin;
  const int64_t tile =
      std::min(fits / kTileMultiple * kTileMultiple, RoundUp(quarter, kTileMultiple));
  return std::min(plan.shard_size, std::max(tile, kTileMultiple));
}

using Carve = absl::FunctionRef<void*(MemoryCategory, int64_t)>;

// Statistics of a row that ranks exchange.
int64_t PackedRowBytes(const HeadSpec& spec) {
  if (spec.top_k_max > 0) return 2 * kRowStatsBytes;
  return kRowStatsBytes + (spec.teacher_hidden_size > 0 ? kPairStatsBytes : 0);
}

// What teachers and top-k outputs need.
void LayOutObjectives(const HeadSpec& spec, const MemoryPlan& plan, Carve carve,
                      CudaBuffers* buffers) {
  using enum MemoryCategory;
  const int64_t rows = plan.batch_tokens;
  const int64_t float_bytes = BytesPerElement(DType::kFloat32);
  if (spec.teacher_hidden_size > 0) {
    const int64_t logits_bytes = rows * CudaLogitsStride(plan) * BytesPerElement(spec.weight_dtype);
    buffers->teacher_logits = carve(kLogitsScratch, logits_bytes);
    buffers->teacher_hidden = carve(kDeviceStaging, rows * spec.teacher_hidden_size * float_bytes);
    buffers->jsd_sums = static_cast<float*>(carve(kDeviceStaging, rows * 2 * float_bytes));
  }
  if (spec.top_k_max > 0) {
    const int64_t entries = rows * spec.top_k_max;
    buffers->topk_values = static_cast<float*>(carve(kDeviceStaging, entries * float_bytes));
    buffers->topk_stats = carve(kDeviceStaging, rows * kTopkStatsBytes);
    buffers->topk_entries = carve(kDeviceStaging, entries * kTopkEntryBytes);
  }
  if (spec.teacher_hidden_size > 0 || spec.top_k_max > 0) {
    buffers->divergence_grads = carve(kDeviceStaging, rows * kRowDivergenceGradBytes);
  }
}

}  // namespace

int64_t CudaLogitsStride(const MemoryPlan& plan) { return RoundUp(plan.vocab_tile, kTileMultiple); }

int64_t CudaExchangedBytes(const HeadSpec& spec, const MemoryPlan& plan) {
  return plan.batch_tokens * std::max(PackedRowBytes(spec), spec.top_k_max * kTopkEntryBytes);
}

CudaBuffers LayOutCuda(const HeadSpec& spec, const MemoryPlan& plan, Carve carve) {
  using enum MemoryCategory;
  const auto floats = [&](MemoryCategory category, int64_t count) {
    return static_cast<float*>(carve(category, count * BytesPerElement(DType::kFloat32)));
  };
  const int64_t weight_elements = plan.shard_size * spec.hidden_size;
  const int64_t owned_elements = plan.owned_rows * spec.hidden_size;
  const int64_t bias_elements = spec.has_bias ? plan.shard_size : 0;
  const int64_t owned_bias_elements = spec.has_bias ? plan.owned_rows : 0;
  const int64_t rows = plan.batch_tokens;
  const int64_t row_elements = rows * spec.hidden_size;
  const int64_t weight_bytes = BytesPerElement(spec.weight_dtype);

  CudaBuffers buffers;
  buffers.weight = carve(kWeight, weight_elements * weight_bytes);
  buffers.bias = floats(kWeight, bias_elements);
  if (spec.weight_dtype != DType::kFloat32) {
    buffers.rounded_bias = carve(kWeight, bias_elements * weight_bytes);
  }
  if (spec.trainable) {
    if (spec.weight_dtype != DType::kFloat32) {
      buffers.master_weight = floats(kMasterWeight, owned_elements);
    }
    const bool momentum =
        spec.optimizer.kind == OptimizerKind::kAdamW ||
        (spec.optimizer.kind == OptimizerKind::kSgd && spec.optimizer.momentum > 0);
    const bool second_moment = spec.optimizer.kind == OptimizerKind::kAdamW;
    const auto parameter = [&](int64_t elements, int64_t owned) {
      CudaParameter state;
      state.grad = floats(kGradWeight, elements);
      if (momentum) state.exp_avg = floats(kOptimizerState, owned);
      if (second_moment) state.exp_avg_sq = floats(kOptimizerState, owned);
      return state;
    };
    buffers.weight_state = parameter(weight_elements, owned_elements);
    buffers.bias_state = parameter(bias_elements, owned_bias_elements);
  }
  buffers.logits = carve(kLogitsScratch, rows * CudaLogitsStride(plan) * weight_bytes);
  buffers.hidden = carve(kDeviceStaging, row_elements * weight_bytes);
  if (plan.schedule != Schedule::kEval) buffers.grad_hidden = floats(kDeviceStaging, row_elements);
  buffers.row_stats = carve(kDeviceStaging, rows * PackedRowBytes(spec));
  buffers.row_grads = carve(kDeviceStaging, rows * kRowGradBytes);
  LayOutObjectives(spec, plan, carve, &buffers);
  if (plan.num_ranks > 1) {
    buffers.gathered = carve(kCollective, plan.num_ranks * CudaExchangedBytes(spec, plan));
  }
  buffers.nonfinite = static_cast<uint8_t*>(carve(kDeviceStaging, rows));
  buffers.class_weights = floats(kDeviceStaging, spec.vocab_size);
  const int64_t double_bytes = sizeof(double);
  buffers.norm_partials = static_cast<double*>(carve(kDeviceStaging, kNormPartials * double_bytes));
  buffers.norm = static_cast<double*>(carve(kDeviceStaging, double_bytes));
  buffers.workspace = carve(kLibraryWorkspace, kCudaWorkspaceBytes);
  for (CudaBatchBuffers& batch : buffers.batches) {
    batch.rows = floats(kDeviceStaging, row_elements);
    batch.row_inputs = carve(kDeviceStaging, rows * kRowInputBytes);
    batch.row_policies = carve(kDeviceStaging, rows * kRowPolicyBytes);
    batch.row_losses = carve(kDeviceStaging, rows * kRowLossBytes);
    if (spec.teacher_hidden_size > 0) {
      batch.teacher_rows = floats(kDeviceStaging, rows * spec.teacher_hidden_size);
    }
    if (spec.top_k_max > 0) {
      const int64_t entries = rows * spec.top_k_max;
      batch.teacher_topk_ids = reinterpret_cast<int32_t*>(floats(kDeviceStaging, entries));
      batch.teacher_topk_logprobs = floats(kDeviceStaging, entries);
      batch.topk_ids = reinterpret_cast<int32_t*>(floats(kDeviceStaging, entries));
      batch.topk_logprobs = floats(kDeviceStaging, entries);
    }
  }
  return buffers;
}

void PlanCuda(const HeadSpec& spec, MemoryPlan* plan) {
  plan->vocab_tile = VocabTile(spec, *plan);
  plan->bytes = {};
  LayOutCuda(spec, *plan, [plan](MemoryCategory category, int64_t bytes) -> void* {
    plan->bytes[static_cast<size_t>(category)] += RoundUp(bytes, kDeviceAlignment);
    return nullptr;
  });
}

}  // namespace lmhead
