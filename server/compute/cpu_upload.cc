#include "server/compute/cpu_upload.h"

#include <omp.h>

#include <algorithm>

#include "kernels/cpu/convert.h"

namespace lmhead {
namespace {

// The rows of one side of a chunk, of every rank.
absl::StatusOr<ConstMatrixView> RowsOf(const RankContext& context, const BatchInput& input,
                                       const ConstMatrixView& rows, std::byte* exchange) {
  if (!input.broadcast_hidden_states || context.num_ranks == 1) return rows;
  // Of the root the data is only read.
  void* const data = context.rank == 0 ? const_cast<void*>(rows.data) : exchange;
  absl::Status status = context.collective->Broadcast(data, rows.size_bytes(), 0, nullptr);
  if (!status.ok()) return status;
  return ConstMatrixView{data, rows.rows, rows.cols, rows.dtype};
}

// Converts rows to `to`. A row that is not finite becomes a row of zeros, so that it contributes
// nothing to any product, and is marked.
void UploadRows(const ConstMatrixView& from, float* to, cpu::RowState* rows) {
  const int64_t row_bytes = from.cols * BytesPerElement(from.dtype);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < from.rows; ++row) {
    float* const row_to = to + row * from.cols;
    const auto* const row_from = static_cast<const std::byte*>(from.data) + row * row_bytes;
    if (cpu::UpcastRow(from.dtype, row_from, from.cols, row_to)) continue;
    std::fill(row_to, row_to + from.cols, 0.0f);
    rows[row].finite = false;
  }
}

void BeginRow(const ChunkRows& chunk, int64_t row, int64_t batch_row, CpuBatchState* state) {
  const LossRecipe& recipe = *state->input->recipe;
  cpu::RowState& to = state->rows[batch_row];
  to.target = chunk.targets[row];
  to.valid = to.finite && to.target != recipe.ignore_index;
  to.temperature =
      chunk.token_temperature.empty() ? recipe.temperature : chunk.token_temperature[row];
  const float weight = chunk.token_weights.empty() ? 1.0f : chunk.token_weights[row];
  to.coefficient = to.valid ? weight * chunk.grad_scale : 0.0f;
  cpu::BeginRow(&to);
  if (!state->divergence.has_value()) return;
  cpu::BeginDivergence(&state->divergences[batch_row]);
  if (state->teacher_top_k == 0) return;
  const auto first = static_cast<size_t>(row * state->teacher_top_k);
  const auto count = static_cast<size_t>(state->teacher_top_k);
  cpu::BeginEntries(chunk.teacher_topk_ids.subspan(first, count),
                    chunk.teacher_topk_logprobs.subspan(first, count),
                    state->EntriesOf(batch_row).data(), &state->divergences[batch_row]);
}

absl::Status UploadChunk(const RankContext& context, const ChunkRows& chunk, int64_t first_row,
                         CpuBatchState* state) {
  const int64_t num_rows = chunk.hidden_states.rows;
  cpu::RowState* const rows = state->rows + first_row;
  for (int64_t row = 0; row < num_rows; ++row) rows[row].finite = true;
  const auto hidden = RowsOf(context, *state->input, chunk.hidden_states, state->exchange);
  if (!hidden.ok()) return hidden.status();
  UploadRows(*hidden, state->hidden + first_row * hidden->cols, rows);
  if (state->input->recipe->has_teacher_head()) {
    const auto teacher =
        RowsOf(context, *state->input, chunk.teacher_hidden_states, state->exchange);
    if (!teacher.ok()) return teacher.status();
    UploadRows(*teacher, state->teacher_hidden + first_row * teacher->cols, rows);
  }
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) BeginRow(chunk, row, first_row + row, state);
  return absl::OkStatus();
}

}  // namespace

absl::Status UploadBatch(const RankContext& context, CpuBatchState* state) {
  int64_t first_row = 0;
  for (const ChunkRows& chunk : state->input->chunks) {
    absl::Status status = UploadChunk(context, chunk, first_row, state);
    if (!status.ok()) return status;
    first_row += chunk.hidden_states.rows;
  }
  const ChunkRows& chunk = state->input->chunks.front();
  const auto pad = [&](float* matrix, int64_t cols) {
    std::fill(matrix + state->num_rows * cols, matrix + state->padded_rows * cols, 0.0f);
  };
  pad(state->hidden, chunk.hidden_states.cols);
  if (state->input->recipe->has_teacher_head()) {
    pad(state->teacher_hidden, chunk.teacher_hidden_states.cols);
  }
  return absl::OkStatus();
}

}  // namespace lmhead
