#include "server/memory/memory_plan.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/check.h"
#include "proto/types/limits.h"
#include "proto/types/vocab_range.h"
#include "server/memory/arena.h"
#include "server/memory/cuda_layout.h"

namespace lmhead {
namespace {

constexpr int64_t kFloatBytes = BytesPerElement(DType::kFloat32);

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// What the arena takes for a piece of that many bytes.
int64_t Piece(int64_t bytes) { return RoundUp(bytes, HostArena::kAlignment); }

bool KeepsWholeShard(Schedule schedule) {
  return schedule == Schedule::kRetain || schedule == Schedule::kFrozen;
}

// Float32 copies of weight and bias that the optimizer keeps.
int64_t OptimizerCopies(const OptimizerSpec& optimizer) {
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
      return 0;
    case OptimizerKind::kAdamW:
      return 2;
    case OptimizerKind::kSgd:
      return optimizer.momentum > 0.0 ? 1 : 0;
  }
  return 0;
}

int64_t& BytesOf(MemoryPlan& plan, MemoryCategory category) {
  return plan.bytes[static_cast<size_t>(category)];
}

// Weight, master weight, gradient and optimizer state: the same for every schedule.
void PlanState(const HeadSpec& spec, MemoryPlan* plan) {
  const int64_t elements = plan->shard_size * spec.hidden_size;
  const int64_t owned_bytes = plan->owned_rows * spec.hidden_size * kFloatBytes;
  const auto bias = [&](int64_t rows) { return spec.has_bias ? Piece(rows * kFloatBytes) : 0; };
  BytesOf(*plan, MemoryCategory::kWeight) =
      Piece(elements * BytesPerElement(spec.weight_dtype)) + bias(plan->shard_size);
  if (!spec.trainable) return;
  if (spec.weight_dtype != DType::kFloat32) {
    BytesOf(*plan, MemoryCategory::kMasterWeight) = Piece(owned_bytes);
  }
  BytesOf(*plan, MemoryCategory::kGradWeight) =
      Piece(elements * kFloatBytes) + bias(plan->shard_size);
  BytesOf(*plan, MemoryCategory::kOptimizerState) =
      OptimizerCopies(spec.optimizer) * (Piece(owned_bytes) + bias(plan->owned_rows));
}

// Broadcast rows as they arrived, of up to 4 bytes an element; or one rank's statistics or top-k
// lists, and those of all ranks.
int64_t CpuCollectiveBytes(const HeadSpec& spec, const MemoryPlan& plan, bool has_divergence) {
  if (plan.num_ranks == 1) return 0;
  const int64_t rows = plan.batch_tokens;
  const int64_t broadcast = rows * std::max(spec.hidden_size, spec.teacher_hidden_size) * 4;
  const int64_t packed = kCpuPackedRowBytes + (has_divergence ? kCpuPackedDivergenceBytes : 0);
  const int64_t gathered = std::max(packed, spec.top_k_max * kCpuTopKEntryBytes);
  return std::max(broadcast, (plan.num_ranks + 1) * rows * gathered);
}

void PlanCpu(const HeadSpec& spec, MemoryPlan* plan) {
  plan->vocab_tile = std::min(plan->shard_size, kCpuVocabTile);
  const CpuScratch scratch = PlanCpuScratch(spec, *plan);
  BytesOf(*plan, MemoryCategory::kLogitsScratch) =
      Piece(scratch.logits_bytes) + Piece(scratch.teacher_logits_bytes);
  BytesOf(*plan, MemoryCategory::kDeviceStaging) =
      Piece(scratch.hidden_bytes) + Piece(scratch.grad_hidden_bytes) +
      Piece(scratch.row_state_bytes) + Piece(scratch.teacher_hidden_bytes) +
      Piece(scratch.divergence_bytes) + Piece(scratch.teacher_entries_bytes) +
      Piece(scratch.top_k_bytes);
  BytesOf(*plan, MemoryCategory::kCollective) = Piece(scratch.collective_bytes);
  BytesOf(*plan, MemoryCategory::kLibraryWorkspace) =
      Piece(scratch.weight_tile_bytes) + Piece(scratch.gemm_scratch_bytes);
}

int64_t BatchTokens(const HeadSpec& spec, const PlanOptions& options) {
  if (spec.batch_tokens > 0) return spec.batch_tokens;
  if (options.batch_tokens > 0) return options.batch_tokens;
  return options.backend == BackendKind::kCpu ? kDefaultBatchTokensCpu : kDefaultBatchTokensCuda;
}

// The schedules PlanHead may choose from.
std::span<const Schedule> Candidates(const HeadSpec& spec) {
  if (spec.schedule != Schedule::kAuto) return {&spec.schedule, 1};
  return SchedulesOf(spec);
}

}  // namespace

std::string_view MemoryCategoryName(MemoryCategory category) {
  constexpr std::array<std::string_view, kNumMemoryCategories> kNames = {
      "weight",         "master_weight",  "grad_weight", "optimizer_state",
      "logits_scratch", "device_staging", "collective",  "library_workspace"};
  return kNames[static_cast<size_t>(category)];
}

int64_t MemoryPlan::TotalBytes() const {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

std::string MemoryPlan::Breakdown() const {
  std::vector<int> order(kNumMemoryCategories);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [this](int a, int b) { return bytes[a] > bytes[b]; });
  const auto line = [](std::string_view name, int64_t size) {
    return absl::StrFormat("  %-17s %15d bytes %12.1f MiB", std::string(name), size,
                           static_cast<double>(size) / kMiB);
  };
  std::string text;
  for (const int i : order) {
    if (bytes[i] == 0) continue;
    absl::StrAppend(&text, line(MemoryCategoryName(static_cast<MemoryCategory>(i)), bytes[i]),
                    "\n");
  }
  absl::StrAppend(&text, line("total", TotalBytes()));
  return text;
}

CpuScratch PlanCpuScratch(const HeadSpec& spec, const MemoryPlan& plan) {
  const int64_t rows = plan.batch_tokens;
  const int64_t logits_columns = KeepsWholeShard(plan.schedule) ? plan.shard_size : plan.vocab_tile;
  CpuScratch scratch;
  scratch.logits_bytes = rows * logits_columns * kFloatBytes;
  scratch.hidden_bytes = rows * spec.hidden_size * kFloatBytes;
  if (plan.schedule != Schedule::kEval) {
    scratch.grad_hidden_bytes = rows * spec.hidden_size * kFloatBytes;
  }
  scratch.row_state_bytes = rows * kCpuRowStateBytes;
  const bool has_divergence = spec.teacher_hidden_size > 0 || spec.top_k_max > 0;
  if (has_divergence) scratch.divergence_bytes = rows * kCpuDivergenceStateBytes;
  if (spec.teacher_hidden_size > 0) {
    scratch.teacher_logits_bytes = scratch.logits_bytes;
    scratch.teacher_hidden_bytes = rows * spec.teacher_hidden_size * kFloatBytes;
  }
  scratch.teacher_entries_bytes = rows * spec.top_k_max * kCpuTeacherEntryBytes;
  scratch.top_k_bytes = rows * spec.top_k_max * kCpuTopKEntryBytes;
  scratch.collective_bytes = CpuCollectiveBytes(spec, plan, has_divergence);
  if (spec.weight_dtype != DType::kFloat32) {
    scratch.weight_tile_bytes = plan.vocab_tile * spec.hidden_size * kFloatBytes;
  }
  scratch.gemm_scratch_bytes = std::clamp(plan.shard_size * spec.hidden_size * kFloatBytes / 8,
                                          kCpuGemmScratchBytesMin, kCpuGemmScratchBytesMax);
  return scratch;
}

std::span<const Schedule> SchedulesOf(const HeadSpec& spec) {
  static constexpr Schedule kTrainable[] = {Schedule::kRetain, Schedule::kRecompute};
  static constexpr Schedule kNotTrainable[] = {Schedule::kFrozen};
  return spec.trainable ? std::span<const Schedule>(kTrainable)
                        : std::span<const Schedule>(kNotTrainable);
}

MemoryPlan PlanForSchedule(const HeadSpec& spec, Schedule schedule, const PlanOptions& options) {
  LMHEAD_CHECK(schedule != Schedule::kAuto, spec.name);
  LMHEAD_CHECK(spec.vocab_size > 0 && spec.hidden_size > 0 && options.num_ranks > 0 &&
                   options.num_replicas > 0,
               spec.name);
  MemoryPlan plan;
  plan.schedule = schedule;
  plan.batch_tokens = BatchTokens(spec, options);
  plan.num_ranks = options.num_ranks;
  plan.num_replicas = options.num_replicas;
  plan.shard_size = LargestShard(spec, options.num_ranks);
  plan.owned_rows = OwnedRange({0, plan.shard_size}, options.num_replicas, 0).size();
  if (options.backend == BackendKind::kCpu) {
    PlanState(spec, &plan);
    PlanCpu(spec, &plan);
  } else {
    PlanCuda(spec, &plan);
  }
  return plan;
}

absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec, const PlanOptions& options) {
  MemoryPlan smallest;
  for (const Schedule schedule : Candidates(spec)) {
    const MemoryPlan plan = PlanForSchedule(spec, schedule, options);
    if (plan.TotalBytes() <= options.budget_bytes) return plan;
    if (smallest.schedule == Schedule::kAuto || plan.TotalBytes() < smallest.TotalBytes()) {
      smallest = plan;
    }
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "head %s needs %d bytes under schedule %s with batch_tokens %d, %d are free:\n%s", spec.name,
      smallest.TotalBytes(), std::string(ScheduleName(smallest.schedule)), smallest.batch_tokens,
      options.budget_bytes, smallest.Breakdown()));
}

DenseLogits PlanDenseLogits(int64_t num_tokens, int64_t vocab_size, DType dtype) {
  const int64_t elements = num_tokens * vocab_size;
  return {.logits_bytes = elements * BytesPerElement(dtype),
          .float32_logits_bytes = dtype == DType::kFloat32 ? 0 : elements * kFloatBytes,
          .log_softmax_bytes = elements * kFloatBytes,
          .grad_logits_bytes = elements * BytesPerElement(dtype)};
}

}  // namespace lmhead
