// The one formula for how many bytes a head needs, by category.
//
// Four callers share it: `lmhead estimate` prints it, admission reserves it, the arena is carved
// from it, and tests check measured peaks against it. Pure: no allocation, no CUDA.

#ifndef LMHEAD_SERVER_MEMORY_MEMORY_PLAN_H_
#define LMHEAD_SERVER_MEMORY_MEMORY_PLAN_H_

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "proto/types/head_spec.h"

namespace lmhead {

// Wire values (lmhead.v1.MemoryCategory) minus one.
enum class MemoryCategory : uint8_t {
  kWeight,
  kMasterWeight,
  kGradWeight,
  kOptimizerState,
  kLogitsScratch,
  kDeviceStaging,
  kCollective,
  kLibraryWorkspace,
};
inline constexpr int kNumMemoryCategories = 8;

// "weight", "master_weight", ...: the values of the metrics' `category` label.
std::string_view MemoryCategoryName(MemoryCategory category);

// Which formula for scratch: the layouts of the two backends differ.
enum class BackendKind : uint8_t { kCpu, kCuda };

inline constexpr int64_t kUnboundedBytes = std::numeric_limits<int64_t>::max();

// What the plan depends on besides the head itself.
struct PlanOptions {
  BackendKind backend = BackendKind::kCpu;
  int32_t num_ranks = 1;     // That the rows are split over.
  int32_t num_replicas = 1;  // Of each of them.
  int64_t batch_tokens = 0;  // Used when the head does not say; 0 means the backend's default.
  int64_t budget_bytes = kUnboundedBytes;  // What the plan must fit in.
};

// Bytes of one head on each rank, under one schedule. Every rank takes what the largest shard
// needs.
struct MemoryPlan {
  Schedule schedule = Schedule::kAuto;
  int32_t num_ranks = 1;
  int32_t num_replicas = 1;
  int64_t batch_tokens = 0;
  int64_t vocab_tile = 0;  // Columns of one tile of logits.
  int64_t shard_size = 0;  // Vocabulary rows of the largest shard: LargestShard().
  int64_t owned_rows = 0;  // Most of them that one replica owns; without replicas all.
  std::array<int64_t, kNumMemoryCategories> bytes{};

  int64_t operator[](MemoryCategory category) const { return bytes[static_cast<size_t>(category)]; }
  int64_t TotalBytes() const;

  // One line a category that is not empty and the total, in bytes and in MiB, largest first.
  std::string Breakdown() const;
};

// Pieces of a rank's scratch in the CPU backend, in bytes; 0 for one that the head does without.
// The plan sums them and the backend carves them, each rounded up to the arena's alignment.
struct CpuScratch {
  // kLogitsScratch: float32 [batch_tokens, vocab_tile or shard_size].
  int64_t logits_bytes = 0;
  int64_t teacher_logits_bytes = 0;  // With a teacher_hidden_size.

  // kDeviceStaging.
  int64_t hidden_bytes = 0;           // float32 [batch_tokens, hidden_size]
  int64_t grad_hidden_bytes = 0;      // float32 [batch_tokens, hidden_size]
  int64_t row_state_bytes = 0;        // kCpuRowStateBytes a row.
  int64_t teacher_hidden_bytes = 0;   // float32 [batch_tokens, teacher_hidden_size]
  int64_t divergence_bytes = 0;       // kCpuDivergenceStateBytes a row, for any teacher.
  int64_t teacher_entries_bytes = 0;  // kCpuTeacherEntryBytes for each of top_k_max entries a row.
  int64_t top_k_bytes = 0;            // kCpuTopKEntryBytes for each of top_k_max entries a row.

  // kCollective: what the ranks exchange at a time, the most of it; see CpuCollective.
  int64_t collective_bytes = 0;

  // kLibraryWorkspace.
  int64_t weight_tile_bytes = 0;   // bfloat16 head: float32 [vocab_tile, hidden_size]
  int64_t gemm_scratch_bytes = 0;  // Scratch of one oneDNN product; see below.
};

// gemm_scratch_bytes is an eighth of the shard's weight in float32, held within these bounds. What
// oneDNN wants grows with its threads (at most about 1 MiB each in practice), so the backend gives
// a product no more threads than this scratch serves.
inline constexpr int64_t kCpuGemmScratchBytesMin = int64_t{4} << 20;
inline constexpr int64_t kCpuGemmScratchBytesMax = int64_t{64} << 20;

// The CPU backend's tile: its logits stay in the cache between the product and the row passes.
inline constexpr int64_t kCpuVocabTile = 1024;

// Bytes of what kernels/cpu keeps of a row: inputs, statistics and what the gradient needs; of its
// divergence; of an entry of a top-k teacher's list, and of a top-k output.
inline constexpr int64_t kCpuRowStateBytes = 80;
inline constexpr int64_t kCpuDivergenceStateBytes = 152;
inline constexpr int64_t kCpuTeacherEntryBytes = 12;
inline constexpr int64_t kCpuTopKEntryBytes = 8;

// Bytes a row of what a rank tells the others: its statistics, and those of a divergence.
inline constexpr int64_t kCpuPackedRowBytes = 48;
inline constexpr int64_t kCpuPackedDivergenceBytes = 72;

// `plan` has its schedule, num_ranks, batch_tokens, vocab_tile and shard_size set.
CpuScratch PlanCpuScratch(const HeadSpec& spec, const MemoryPlan& plan);

// The schedules a head may have, fastest first: retain and recompute when it is trainable, else
// frozen alone. (Eval is what a stream without gradients runs on either.)
std::span<const Schedule> SchedulesOf(const HeadSpec& spec);

// The plan of `spec` under `schedule`, which must not be kAuto.
// REQUIRES: spec is validated.
MemoryPlan PlanForSchedule(const HeadSpec& spec, Schedule schedule, const PlanOptions& options);

// The plan of `spec` as it would be created: its own schedule, or for kAuto the fastest one that
// fits options.budget_bytes (retain before recompute; frozen for a head that is not trainable).
// RESOURCE_EXHAUSTED with the breakdown of the smallest candidate when none fits.
// REQUIRES: spec is validated.
absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec, const PlanOptions& options);

// What a trainer with dense logits would hold for num_tokens tokens: logits in the head's dtype,
// their float32 upcast (0 for a float32 head), log_softmax in float32 kept for the backward pass,
// and the gradient of the logits in the head's dtype.
struct DenseLogits {
  int64_t logits_bytes = 0;
  int64_t float32_logits_bytes = 0;
  int64_t log_softmax_bytes = 0;
  int64_t grad_logits_bytes = 0;

  int64_t TotalBytes() const {
    return logits_bytes + float32_logits_bytes + log_softmax_bytes + grad_logits_bytes;
  }
};
DenseLogits PlanDenseLogits(int64_t num_tokens, int64_t vocab_size, DType dtype);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_MEMORY_PLAN_H_
