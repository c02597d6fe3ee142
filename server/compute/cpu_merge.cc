#include "server/compute/cpu_merge.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/functional/function_ref.h"
#include "proto/types/vocab_range.h"
#include "server/memory/memory_plan.h"

namespace lmhead {
namespace {

static_assert(sizeof(cpu::RowStatistics) == kCpuPackedRowBytes);
static_assert(sizeof(cpu::DivergenceStatistics) == kCpuPackedDivergenceBytes);
static_assert(sizeof(cpu::MixtureSums) <= kCpuPackedDivergenceBytes);
static_assert(sizeof(cpu::LogitEntry) == kCpuTopKEntryBytes);

// An all-gather of `row_bytes` a row: pack(row, to) on this rank, then unpack(row, part of a rank),
// rank after rank. A rank's part of row r is at from(rank, r).
class Exchange {
 public:
  Exchange(const RankContext& context, const CpuBatchState& state, int64_t row_bytes)
      : context_(context),
        row_bytes_(row_bytes),
        rank_bytes_(state.num_rows * row_bytes),
        send_(state.exchange),
        receive_(state.exchange + rank_bytes_) {}

  std::byte* to(int64_t row) { return send_ + row * row_bytes_; }
  const std::byte* from(int32_t rank, int64_t row) const {
    return receive_ + rank * rank_bytes_ + row * row_bytes_;
  }
  absl::Status Gather() {
    return context_.collective->AllGather(send_, receive_, rank_bytes_, nullptr);
  }

 private:
  const RankContext& context_;
  const int64_t row_bytes_;
  const int64_t rank_bytes_;
  std::byte* const send_;
  std::byte* const receive_;
};

template <typename T>
T Read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace

absl::Status MergeRows(const HeadSpec& spec, const RankContext& context, CpuBatchState* state) {
  if (context.num_ranks == 1) return absl::OkStatus();
  const bool has_divergence = state->divergence.has_value();
  Exchange exchange(context, *state,
                    kCpuPackedRowBytes + (has_divergence ? kCpuPackedDivergenceBytes : 0));
  for (int64_t row = 0; row < state->num_rows; ++row) {
    std::memcpy(exchange.to(row), &state->rows[row].stats, kCpuPackedRowBytes);
    if (!has_divergence) continue;
    std::memcpy(exchange.to(row) + kCpuPackedRowBytes, &state->divergences[row].stats,
                kCpuPackedDivergenceBytes);
  }
  if (absl::Status status = exchange.Gather(); !status.ok()) return status;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < state->num_rows; ++row) {
    cpu::RowState& to = state->rows[row];
    for (int32_t rank = 0; rank < context.num_ranks; ++rank) {
      const std::byte* const from = exchange.from(rank, row);
      const auto part = Read<cpu::RowStatistics>(from);
      if (rank == 0) {
        to.stats = part;
      } else {
        cpu::MergeStatistics(part, &to.stats);
      }
      if (ShardRange(spec, context.num_ranks, rank).Contains(to.target)) {
        to.stats.target_logit = part.target_logit;
      }
      if (!has_divergence) continue;
      const auto divergence = Read<cpu::DivergenceStatistics>(from + kCpuPackedRowBytes);
      if (rank == 0) {
        state->divergences[row].stats = divergence;
      } else {
        cpu::MergeDivergence(state->divergence->divergence, divergence,
                             &state->divergences[row].stats);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status MergeMixtures(const RankContext& context, CpuBatchState* state) {
  if (context.num_ranks == 1) return absl::OkStatus();
  Exchange exchange(context, *state, sizeof(cpu::MixtureSums));
  for (int64_t row = 0; row < state->num_rows; ++row) {
    std::memcpy(exchange.to(row), &state->divergences[row].mixture, sizeof(cpu::MixtureSums));
  }
  if (absl::Status status = exchange.Gather(); !status.ok()) return status;
  for (int64_t row = 0; row < state->num_rows; ++row) {
    cpu::MixtureSums sums;
    for (int32_t rank = 0; rank < context.num_ranks; ++rank) {
      const auto part = Read<cpu::MixtureSums>(exchange.from(rank, row));
      sums.student += part.student;
      sums.teacher += part.teacher;
    }
    state->divergences[row].mixture = sums;
  }
  return absl::OkStatus();
}

absl::Status MergeTopK(const HeadSpec& spec, const RankContext& context, CpuBatchState* state) {
  if (state->top_k == 0) return absl::OkStatus();
  const auto length_of = [&](int32_t rank) {
    return std::min<int64_t>(state->top_k, ShardRange(spec, context.num_ranks, rank).size());
  };
  const auto own_length = static_cast<size_t>(length_of(context.rank));
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < state->num_rows; ++row) {
    cpu::SortTopK(state->TopKOf(row).first(own_length));
  }
  if (context.num_ranks == 1) return absl::OkStatus();

  Exchange exchange(context, *state, state->top_k * kCpuTopKEntryBytes);
  for (int64_t row = 0; row < state->num_rows; ++row) {
    const std::span<const cpu::LogitEntry> list = state->TopKOf(row);
    std::memcpy(exchange.to(row), list.data(), list.size_bytes());
  }
  if (absl::Status status = exchange.Gather(); !status.ok()) return status;
#pragma omp parallel
  {
    std::vector<cpu::LogitEntry> all;  // A thread's; the ranks' lists of one row.
#pragma omp for schedule(static)
    for (int64_t row = 0; row < state->num_rows; ++row) {
      all.clear();
      for (int32_t rank = 0; rank < context.num_ranks; ++rank) {
        const auto* const from = reinterpret_cast<const cpu::LogitEntry*>(exchange.from(rank, row));
        all.insert(all.end(), from, from + length_of(rank));
      }
      cpu::SortTopK(all);
      const std::span<cpu::LogitEntry> list = state->TopKOf(row);
      std::copy_n(all.begin(), list.size(), list.begin());
    }
  }
  return absl::OkStatus();
}

}  // namespace lmhead
