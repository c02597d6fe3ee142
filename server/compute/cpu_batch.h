// Computes one batch after another on a rank's shard: forward over the vocabulary tiles, the
// exchange with the other ranks, backward over the tiles.
//
// Under schedules retain and frozen the logits of a batch stay where the forward pass left them;
// under recompute and eval there is one tile of them, multiplied again when it is needed again. A
// teacher's logits lie beside them in the same way.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_BATCH_H_
#define LMHEAD_SERVER_COMPUTE_CPU_BATCH_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/row_passes.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/compute/cpu_batch_state.h"
#include "server/compute/cpu_products.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Thread-hostile.
class CpuBatch {
 public:
  // Carves the scratch. `products` and `arena` must outlive the batch.
  CpuBatch(const MemoryPlan& plan, const RankContext& context, CpuProducts* products,
           HostArena* arena);

  // As ComputeBackend::ComputeBatch. `teacher` multiplies for input.teacher; null without one.
  absl::StatusOr<BatchOutput> Compute(const BatchInput& input, CpuProducts* teacher);

  // Scratch for hidden states, float32 [batch_tokens, hidden_size], between batches.
  float* hidden_scratch() { return state_.hidden; }

 private:
  // What ComputeTile does with the final logits of a row.
  enum class Sweep : uint8_t { kStatistics, kNothing };

  void Begin(const BatchInput& input, CpuProducts* teacher);
  absl::Status Forward();
  absl::Status SweepBeyond();
  absl::Status SweepMixtures();
  absl::Status Backward(BackwardMode mode);
  absl::Status BackwardTile(int64_t tile, BackwardMode mode);

  absl::Status ComputeTile(int64_t tile, Sweep sweep);
  absl::Status ComputeTeacherTile(cpu::VocabTile columns, float* logits);
  absl::Status EnsureTile(int64_t tile);
  void AccumulateRow(cpu::VocabTile columns, int64_t tile, int64_t row);
  void AccumulateLists();

  bool has_teacher() const { return teacher_ != nullptr; }
  bool has_lists() const { return state_.teacher_top_k > 0; }
  cpu::VocabTile TileAt(int64_t tile) const;
  cpu::VocabTile TeacherColumns(cpu::VocabTile columns) const;
  cpu::JointTile JointOf(cpu::VocabTile columns, int64_t tile, int64_t row) const;
  float* LogitsOf(int64_t tile) const { return state_.logits + OffsetOf(tile); }
  float* TeacherLogitsOf(int64_t tile) const { return state_.teacher_logits + OffsetOf(tile); }
  int64_t OffsetOf(int64_t tile) const {
    return keeps_logits_ ? tile * plan_.vocab_tile * state_.padded_rows : 0;
  }
  void ForEachRow(absl::FunctionRef<void(int64_t row)> body) const;

  const MemoryPlan plan_;
  const RankContext context_;
  CpuProducts* const products_;
  const int64_t num_tiles_;
  const bool keeps_logits_;  // Every tile of a batch has its place; else all share one.
  const cpu::RowPasses& passes_;
  CpuBatchState state_;

  // Of the batch.
  CpuProducts* teacher_ = nullptr;
  cpu::RowConfig teacher_config_;
  cpu::RowState teacher_row_;     // The temperature of every teacher row.
  int64_t tile_in_scratch_ = -1;  // Whose final logits are there, when all share one place.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_BATCH_H_
