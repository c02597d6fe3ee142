// The batch that a CpuBackend is computing: scratch of the arena, and what the batch set in it.
//
// Filled by UploadBatch (cpu_upload.h), computed by CpuBatch (cpu_batch.h), merged over the ranks
// by cpu_merge.h, and turned into answers by cpu_outputs.h.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_BATCH_STATE_H_
#define LMHEAD_SERVER_COMPUTE_CPU_BATCH_STATE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kernels/cpu/divergence.h"
#include "kernels/cpu/row_passes.h"
#include "kernels/cpu/top_k.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"

namespace lmhead {

struct CpuBatchState {
  // Scratch; null for what the head does without. Rows beyond num_rows are zero in the products.
  float* logits = nullptr;          // Tile after tile, each [padded_rows, its columns].
  float* teacher_logits = nullptr;  // Likewise.
  float* hidden = nullptr;          // [padded_rows, hidden_size]
  float* teacher_hidden = nullptr;  // [padded_rows, the teacher's hidden_size]
  float* grad_hidden = nullptr;     // [padded_rows, hidden_size]; null under schedule eval.
  cpu::RowState* rows = nullptr;
  cpu::DivergenceState* divergences = nullptr;
  cpu::TeacherEntry* entries = nullptr;      // [num_rows, teacher_top_k], of a row by rising ids.
  cpu::LogitEntry* top_k_entries = nullptr;  // [num_rows, top_k]
  std::byte* exchange = nullptr;             // What goes through the collective.

  // The batch.
  const BatchInput* input = nullptr;
  int64_t num_rows = 0;
  int64_t padded_rows = 0;
  cpu::RowConfig config;
  std::optional<cpu::DivergenceConfig> divergence;
  int32_t teacher_top_k = 0;
  int32_t top_k = 0;

  std::span<cpu::TeacherEntry> EntriesOf(int64_t row) const {
    return {entries + row * teacher_top_k, static_cast<size_t>(teacher_top_k)};
  }
  std::span<cpu::LogitEntry> TopKOf(int64_t row) const {
    return {top_k_entries + row * top_k, static_cast<size_t>(top_k)};
  }
  // What final logits are multiplied by to be at kl_temperature.
  float ScaleOf(int64_t row) const { return rows[row].temperature / divergence->kl_temperature; }
  bool is_jsd() const {
    return divergence.has_value() && divergence->divergence == Divergence::kJsd;
  }
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_BATCH_STATE_H_
