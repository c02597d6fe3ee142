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

}  // namespace

int64_t CudaLogitsStride(const MemoryPlan& plan) { return RoundUp(plan.vocab_tile, kTileMultiple); }

CudaBuffers LayOutCuda(const HeadSpec& spec, const MemoryPlan& plan,
                       absl::FunctionRef<void*(MemoryCategory, int64_t)> carve) {
  using enum MemoryCategory;
  const auto floats = [&](MemoryCategory category, int64_t count) {
    return static_cast<float*>(carve(category, count * BytesPerElement(DType::kFloat32)));
  };
  const int64_t weight_elements = plan.shard_size * spec.hidden_size;
  const int64_t bias_elements = spec.has_bias ? plan.shard_size : 0;
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
      buffers.master_weight = floats(kMasterWeight, weight_elements);
    }
    const bool momentum =
        spec.optimizer.kind == OptimizerKind::kAdamW ||
        (spec.optimizer.kind == OptimizerKind::kSgd && spec.optimizer.momentum > 0);
    const bool second_moment = spec.optimizer.kind == OptimizerKind::kAdamW;
    const auto parameter = [&](int64_t elements) {
      CudaParameter state;
      state.grad = floats(kGradWeight, elements);
      if (momentum) state.exp_avg = floats(kOptimizerState, elements);
      if (second_moment) state.exp_avg_sq = floats(kOptimizerState, elements);
      return state;
    };
    buffers.weight_state = parameter(weight_elements);
    buffers.bias_state = parameter(bias_elements);
  }
  buffers.logits = carve(kLogitsScratch, rows * CudaLogitsStride(plan) * weight_bytes);
  buffers.hidden = carve(kDeviceStaging, row_elements * weight_bytes);
  if (plan.schedule != Schedule::kEval) buffers.grad_hidden = floats(kDeviceStaging, row_elements);
  buffers.row_stats = carve(kDeviceStaging, rows * kRowStatsBytes);
  buffers.row_grads = carve(kDeviceStaging, rows * kRowGradBytes);
  buffers.nonfinite = static_cast<uint8_t*>(carve(kDeviceStaging, rows));
  buffers.class_weights = floats(kDeviceStaging, spec.vocab_size);
  const int64_t double_bytes = sizeof(double);
  buffers.norm_partials = static_cast<double*>(carve(kDeviceStaging, kNormPartials * double_bytes));
  buffers.norm = static_cast<double*>(carve(kDeviceStaging, double_bytes));
  buffers.workspace = carve(kLibraryWorkspace, kCudaWorkspaceBytes);
  for (CudaBatchBuffers& batch : buffers.batches) {
    batch.rows = floats(kDeviceStaging, row_elements);
    batch.row_inputs = carve(kDeviceStaging, rows * kRowInputBytes);
    batch.row_losses = carve(kDeviceStaging, rows * kRowLossBytes);
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
