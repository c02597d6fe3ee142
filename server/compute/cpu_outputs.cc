#include "server/compute/cpu_outputs.h"

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/convert.h"

namespace lmhead {
namespace {

using cpu::DivergenceOutputs;
using cpu::PolicyInputs;
using cpu::RowOutputs;
using cpu::RowState;

// Everything that one row came to.
struct RowResult {
  RowOutputs outputs;
  DivergenceOutputs divergence;

  double token_loss() const {
    return outputs.cross_entropy + outputs.z_loss + outputs.policy + divergence.divergence;
  }
};

PolicyInputs PolicyInputsOf(const ChunkRows& chunk, int64_t row) {
  const auto at = [row](std::span<const float> values) {
    return values.empty() ? 0.0f : values[static_cast<size_t>(row)];
  };
  return {.logprob_grad = at(chunk.logprob_grad),
          .entropy_grad = at(chunk.entropy_grad),
          .old_logprob = at(chunk.old_logprob),
          .advantage = at(chunk.advantage),
          .reference_logprob = at(chunk.reference_logprob)};
}

void AddToSums(const RowState& row, const RowResult& result, float token_weight,
               const float* class_weights, LossSums* sums) {
  ++sums->num_tokens;
  if (!row.finite) ++sums->num_nonfinite_rows;
  if (!row.valid) return;
  ++sums->num_valid_tokens;
  if (row.stats.argmax == row.target) ++sums->num_correct;
  const double weight = token_weight;
  const auto weighted = [weight](double value) { return weight == 0.0 ? 0.0 : weight * value; };
  const RowOutputs& outputs = result.outputs;
  sums->weight_sum += class_weights != nullptr ? weight * class_weights[row.target] : weight;
  sums->cross_entropy_sum += weighted(outputs.cross_entropy);
  sums->z_loss_sum += weighted(outputs.z_loss);
  sums->policy_sum += weighted(outputs.policy);
  sums->divergence_sum += weighted(result.divergence.divergence);
  sums->loss_sum += weighted(result.token_loss());
  sums->entropy_sum += outputs.entropy;
  sums->dropped_teacher_mass_sum += result.divergence.dropped_teacher_mass;
  if (outputs.clipped) ++sums->num_clipped;
  sums->old_policy_kl_sum += outputs.old_policy_kl;
}

// Writes the outputs of one row that the chunk wants.
void WriteOutputs(const RowState& state, const RowResult& result, int64_t row,
                  const ChunkRows& chunk) {
  const RowOutputs& outputs = result.outputs;
  if (chunk.token_loss != nullptr) chunk.token_loss[row] = static_cast<float>(result.token_loss());
  if (chunk.logprob != nullptr) chunk.logprob[row] = static_cast<float>(outputs.logprob);
  if (chunk.lse != nullptr) chunk.lse[row] = static_cast<float>(outputs.lse);
  if (chunk.entropy != nullptr) chunk.entropy[row] = static_cast<float>(outputs.entropy);
  if (chunk.argmax != nullptr) chunk.argmax[row] = state.finite ? state.stats.argmax : 0;
}

// Calls visit(chunk, its index, row of the chunk, row of the batch) for every row in order.
void ForEachRow(const BatchInput& input,
                absl::FunctionRef<void(const ChunkRows&, size_t, int64_t, int64_t)> visit) {
  int64_t batch_row = 0;
  for (size_t i = 0; i < input.chunks.size(); ++i) {
    const ChunkRows& chunk = input.chunks[i];
    for (int64_t row = 0; row < chunk.hidden_states.rows; ++row) visit(chunk, i, row, batch_row++);
  }
}

}  // namespace

std::vector<LossSums> FinishRows(CpuBatchState* state) {
  std::vector<LossSums> sums(state->input->chunks.size());
  const auto finish = [&](const ChunkRows& chunk, size_t index, int64_t row, int64_t batch_row) {
    RowState& row_state = state->rows[batch_row];
    RowResult result;
    result.outputs = cpu::FinishRow(state->config, PolicyInputsOf(chunk, row), &row_state);
    if (state->divergence.has_value() && row_state.valid) {
      result.divergence = cpu::FinishDivergence(*state->divergence, row_state.temperature,
                                                &state->divergences[batch_row]);
    }
    WriteOutputs(row_state, result, row, chunk);
    const float weight = chunk.token_weights.empty() ? 1.0f : chunk.token_weights[row];
    AddToSums(row_state, result, weight, state->config.class_weights, &sums[index]);
  };
  ForEachRow(*state->input, finish);
  return sums;
}

void WriteTopK(const CpuBatchState& state) {
  const auto write = [&](const ChunkRows& chunk, size_t, int64_t row, int64_t batch_row) {
    if (chunk.topk_ids == nullptr || chunk.topk_logprobs == nullptr) return;
    const RowState& row_state = state.rows[batch_row];
    const double log_sum = cpu::LogSumOf(row_state.stats);
    const std::span<const cpu::LogitEntry> entries = state.TopKOf(batch_row);
    for (size_t k = 0; k < entries.size(); ++k) {
      const size_t to = static_cast<size_t>(row) * entries.size() + k;
      chunk.topk_ids[to] = row_state.finite ? entries[k].id : 0;
      const double logprob = cpu::LogProbOf(row_state.stats, log_sum, entries[k].logit);
      chunk.topk_logprobs[to] = row_state.finite ? static_cast<float>(logprob) : 0.0f;
    }
  };
  ForEachRow(*state.input, write);
}

void WriteGradHidden(const CpuBatchState& state) {
  const float* from = state.grad_hidden;
  for (const ChunkRows& chunk : state.input->chunks) {
    const ConstMatrixView rows = {from, chunk.hidden_states.rows, chunk.hidden_states.cols,
                                  DType::kFloat32};
    if (chunk.grad_hidden_states.data != nullptr) {
      cpu::ConvertMatrix(rows, chunk.grad_hidden_states);
    }
    from += rows.rows * rows.cols;
  }
}

}  // namespace lmhead
