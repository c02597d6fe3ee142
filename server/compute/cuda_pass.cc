#include "server/compute/cuda_pass.h"

#include <algorithm>
#include <nvtx3/nvtx3.hpp>

#include "kernels/column_sums.h"
#include "kernels/convert.h"
#include "kernels/divergence_grad.h"
#include "kernels/grad_logits.h"
#include "kernels/hidden_rows.h"
#include "kernels/jsd_sums.h"
#include "kernels/merge_stats.h"
#include "kernels/shard_stats.h"
#include "kernels/token_loss.h"
#include "kernels/topk_select.h"
#include "server/compute/cuda_status.h"

namespace lmhead {
namespace {

using kernels::LogitsPair;
using kernels::PairStats;
using kernels::RowGrad;
using kernels::RowLoss;
using kernels::RowStats;
using kernels::TopkEntry;
using kernels::TopkStats;
using kernels::VocabTile;

static_assert(sizeof(kernels::RowInput) == kRowInputBytes &&
                  sizeof(kernels::RowPolicy) == kRowPolicyBytes &&
                  sizeof(RowLoss) == kRowLossBytes && sizeof(RowStats) == kRowStatsBytes &&
                  sizeof(PairStats) == kPairStatsBytes && sizeof(TopkStats) == kTopkStatsBytes &&
                  sizeof(RowGrad) == kRowGradBytes &&
                  sizeof(kernels::RowDivergenceGrad) == kRowDivergenceGradBytes &&
                  sizeof(TopkEntry) == kTopkEntryBytes,
              "The memory plan counts the records of the row kernels");

// Whether anything depends on the rows' own temperature.
bool NeedsRowTemperature(const CudaPass& pass) {
  const LossRecipe& recipe = pass.recipe();
  const OutputSpec& outputs = pass.input.outputs;
  return !recipe.distillation.has_value() || recipe.distillation->cross_entropy_weight != 0.0f ||
         outputs.logprob || outputs.lse || outputs.entropy || outputs.top_k > 0;
}

bool IsOneTemperature(const CudaPass& pass) {
  const LossRecipe& recipe = pass.recipe();
  if (!recipe.distillation.has_value()) return false;
  if (!NeedsRowTemperature(pass)) return true;
  const auto has_none = [](const ChunkRows& chunk) { return chunk.token_temperature.empty(); };
  return recipe.temperature == recipe.distillation->kl_temperature &&
         std::all_of(pass.batch.chunks.begin(), pass.batch.chunks.end(), has_none);
}

// Whether the divergence is taken over all ids of the student.
bool CoversStudent(const CudaPass& pass) {
  return pass.recipe().distillation->vocabulary != TeacherVocabulary::kCommon ||
         pass.teacher->spec.vocab_size >= pass.head.spec.vocab_size;
}

}  // namespace

PassRunner::PassRunner(CudaHead* head, const CudaPass* pass)
    : head_(*head),
      pass_(*pass),
      stream_(head->streams.compute),
      entropy_(pass->input.outputs.entropy || pass->policy_entropy),
      one_temperature_(IsOneTemperature(*pass)),
      pair_is_enough_(pass->teacher != nullptr && one_temperature_ && !entropy_ &&
                      pass->recipe().label_smoothing == 0.0f && CoversStudent(*pass)) {}

absl::Status PassRunner::Run() {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(pass_.batch.compute_start, stream_));
  LMHEAD_RETURN_IF_ERROR(LoadHiddenRows());
  LMHEAD_RETURN_IF_ERROR(Forward());
  LMHEAD_RETURN_IF_ERROR(Exchange());
  LMHEAD_RETURN_IF_ERROR(JsdSweep());
  LMHEAD_RETURN_IF_ERROR(FoldTopk());
  LMHEAD_RETURN_IF_ERROR(TokenLosses());
  LMHEAD_RETURN_IF_ERROR(FinishTopk());
  return Backward();
}

// --- Before the sweeps -------------------------------------------------------------------------

absl::Status PassRunner::LoadHiddenRows() {
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : pass_.batch.chunks) {
    LMHEAD_RETURN_IF_ERROR(
        LoadRows(chunk.hidden_states, pass_.StagedRow(batch_row), batch_row, /*teacher=*/false));
    if (pass_.teacher != nullptr) {
      LMHEAD_RETURN_IF_ERROR(LoadRows(chunk.teacher_hidden_states,
                                      pass_.StagedTeacherRow(batch_row), batch_row,
                                      /*teacher=*/true));
    }
    batch_row += chunk.hidden_states.rows;
  }
  return absl::OkStatus();
}

// A row that is not finite on either side is flagged.
absl::Status PassRunner::LoadRows(const ConstMatrixView& from, void* staged, int64_t batch_row,
                                  bool teacher) {
  if (from.rows == 0) return absl::OkStatus();
  const DType dtype = teacher ? pass_.teacher->spec.weight_dtype : head_.spec.weight_dtype;
  void* const rows = teacher ? head_.buffers.teacher_hidden : head_.buffers.hidden;
  const MatrixView to = {
      static_cast<std::byte*>(rows) + batch_row * from.cols * BytesPerElement(dtype), from.rows,
      from.cols, dtype};
  return CudaStatus(kernels::LaunchLoadHiddenRows({staged, from.rows, from.cols, from.dtype}, to,
                                                  /*keep_flags=*/teacher,
                                                  head_.buffers.nonfinite + batch_row, stream_),
                    "hidden_rows");
}

// The ids that the teacher alone has go through the teacher's scratch before the first tile does.
absl::Status PassRunner::TeacherTail() {
  const VocabRange teacher = pass_.teacher->range;
  const int64_t start = std::max(teacher.start, head_.range.stop);
  if (start >= teacher.stop) return absl::OkStatus();
  LMHEAD_RETURN_IF_ERROR(Statistics({head_.range.start, 0}));  // Starts them, of no columns.
  for (int64_t id = start; id < teacher.stop; id += head_.plan.vocab_tile) {
    const int64_t cols = std::min(head_.plan.vocab_tile, teacher.stop - id);
    LMHEAD_RETURN_IF_ERROR(TeacherLogits(id, cols));
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchTeacherTailStats(
        LogitsView(head_.buffers.teacher_logits), cols, pass_.teacher->Transform(),
        kl_inverse_temperature(), pair_stats(), stream_));
  }
  return absl::OkStatus();
}

// --- Products ----------------------------------------------------------------------------------

int64_t PassRunner::TeacherCols(VocabTile tile) const {
  return std::clamp<int64_t>(pass_.teacher->range.stop - tile.start, 0, tile.cols);
}

LogitsPair PassRunner::PairAt(VocabTile tile) const {
  LogitsPair pair = {.student = LogitsView(head_.buffers.logits),
                     .tile = tile,
                     .student_transform = head_.Transform(),
                     .inverse_temperature = kl_inverse_temperature()};
  if (pass_.teacher == nullptr) return pair;
  pair.teacher = LogitsView(head_.buffers.teacher_logits);
  pair.teacher_cols = TeacherCols(tile);
  pair.teacher_transform = pass_.teacher->Transform();
  return pair;
}

// The logits of a tile, on both sides, unless they are there.
absl::Status PassRunner::Products(VocabTile tile) {
  if (resident_ == tile.start || tile.cols == 0) return absl::OkStatus();
  resident_ = tile.start;
  if (pass_.teacher != nullptr)
    LMHEAD_RETURN_IF_ERROR(TeacherLogits(tile.start, TeacherCols(tile)));
  return head_.gemm->Run({.product = HeadProduct::kLogits,
                          .rows = pass_.num_rows,
                          .cols = tile.cols,
                          .hidden = head_.buffers.hidden,
                          .weight = head_.WeightAt(tile.start),
                          .logits = head_.buffers.logits,
                          .bias = head_.BiasAt(tile.start, head_.spec.weight_dtype)},
                         stream_);
}

// The teacher's logits are held in the student's dtype.
absl::Status PassRunner::TeacherLogits(int64_t id, int64_t cols) {
  if (cols == 0) return absl::OkStatus();
  const CudaHead& teacher = *pass_.teacher;
  const DType dtype = head_.spec.weight_dtype;
  if (teacher.spec.weight_dtype == DType::kFloat32 && dtype != DType::kFloat32) {
    return TeacherLogitsInFloat32(id, cols);
  }
  return head_.gemm->Run({.product = HeadProduct::kTeacherLogits,
                          .rows = pass_.num_rows,
                          .cols = cols,
                          .hidden = head_.buffers.teacher_hidden,
                          .weight = teacher.WeightAt(id),
                          .logits = head_.buffers.teacher_logits,
                          .bias = teacher.BiasAt(id, dtype),
                          .teacher = {.hidden_size = teacher.spec.hidden_size,
                                      .dtype = teacher.spec.weight_dtype,
                                      .logits_dtype = dtype,
                                      .logits_stride = CudaLogitsStride(head_.plan)}},
                         stream_);
}

// A product of float32 gives float32: half a tile at a time in the student's logits, which the
// student's product has not filled yet, and rounded from there.
absl::Status PassRunner::TeacherLogitsInFloat32(int64_t id, int64_t cols) {
  const CudaHead& teacher = *pass_.teacher;
  const int64_t stride = CudaLogitsStride(head_.plan) / 2;
  for (int64_t start = 0; start < cols; start += stride) {
    const int64_t count = std::min(stride, cols - start);
    LMHEAD_RETURN_IF_ERROR(head_.gemm->Run({.product = HeadProduct::kTeacherLogits,
                                            .rows = pass_.num_rows,
                                            .cols = count,
                                            .hidden = head_.buffers.teacher_hidden,
                                            .weight = teacher.WeightAt(id + start),
                                            .logits = head_.buffers.logits,
                                            .bias = teacher.BiasAt(id + start, DType::kFloat32),
                                            .teacher = {.hidden_size = teacher.spec.hidden_size,
                                                        .dtype = DType::kFloat32,
                                                        .logits_dtype = DType::kFloat32,
                                                        .logits_stride = stride}},
                                           stream_));
    MatrixView to = LogitsView(head_.buffers.teacher_logits);
    to.data = static_cast<std::byte*>(to.data) + start * BytesPerElement(to.dtype);
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvertColumns(
        {head_.buffers.logits, pass_.num_rows, stride, DType::kFloat32}, to, count, stream_));
  }
  return absl::OkStatus();
}

// --- The sweep of statistics -------------------------------------------------------------------

absl::Status PassRunner::Forward() {
  const nvtx3::scoped_range range("lmhead.forward");
  if (has_topk_teacher()) {
    const int64_t count = pass_.num_rows * pass_.recipe().teacher_top_k();
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(
        head_.buffers.topk_values, 0, static_cast<size_t>(count) * sizeof(float), stream_));
  }
  if (pass_.teacher != nullptr) LMHEAD_RETURN_IF_ERROR(TeacherTail());
  for (int64_t i = 0; i < head_.num_tiles(); ++i) {
    LMHEAD_RETURN_IF_ERROR(Products(head_.TileAt(i)));
    LMHEAD_RETURN_IF_ERROR(Statistics(head_.TileAt(i)));
  }
  return absl::OkStatus();
}

// Top-k outputs see the tile before the k ids of a teacher are taken out of it.
absl::Status PassRunner::Statistics(VocabTile tile) {
  const int32_t top_k = pass_.input.outputs.top_k;
  const MatrixView logits = LogitsView(head_.buffers.logits);
  if (top_k > 0) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchTopkSelect(logits, tile, head_.Transform(), top_k, started_,
                                  static_cast<TopkEntry*>(head_.buffers.topk_entries), stream_));
  }
  if (has_topk_teacher()) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchTakeTopk(logits, tile, TopkTeacherOf(), head_.buffers.topk_values, stream_));
  }
  if (!pair_is_enough_) LMHEAD_RETURN_IF_ERROR(RowStatistics(tile));
  if (pass_.teacher != nullptr) {
    LogitsPair pair = PairAt(tile);
    if (distillation().vocabulary == TeacherVocabulary::kCommon) pair.tile.cols = pair.teacher_cols;
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchPairStats(pair,
                                 {.divergence = distillation().divergence,
                                  .merge = started_,
                                  .student_stats = pair_is_enough_ ? row_stats() : nullptr,
                                  .rows = row_inputs()},
                                 pair_stats(), stream_));
  }
  started_ = true;
  return absl::OkStatus();
}

absl::Status PassRunner::RowStatistics(VocabTile tile) {
  const MatrixView logits = LogitsView(head_.buffers.logits);
  LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchShardStats(
      logits, tile, row_inputs(),
      {.transform = head_.Transform(),
       .class_weights = pass_.class_weights,
       .entropy = entropy_,
       .smoothing = pass_.recipe().label_smoothing != 0.0f,
       .inverse_temperature = one_temperature_ ? kl_inverse_temperature() : 0.0f,
       .merge = started_},
      row_stats(), stream_));
  if (!has_topk_teacher() || one_temperature_) return absl::OkStatus();
  return CudaStatus(kernels::LaunchShardStats(logits, tile, row_inputs(),
                                              {.transform = head_.Transform(),
                                               .inverse_temperature = kl_inverse_temperature(),
                                               .merge = started_},
                                              outside_stats(), stream_),
                    "shard_stats");
}

// From this shard's statistics to those of the whole vocabulary, on every rank.
absl::Status PassRunner::Exchange() {
  if (head_.collective == nullptr) return absl::OkStatus();
  const int64_t rows = pass_.num_rows;
  const int32_t num_ranks = head_.ranks.num_ranks;
  auto* const gathered = static_cast<std::byte*>(head_.buffers.gathered);
  const bool has_outside = has_topk_teacher() && !one_temperature_;
  int64_t bytes = rows * kRowStatsBytes;
  if (pass_.teacher != nullptr) bytes += rows * kPairStatsBytes;
  if (has_outside) bytes += rows * kRowStatsBytes;
  LMHEAD_RETURN_IF_ERROR(
      head_.collective->AllGather(head_.buffers.row_stats, gathered, bytes, stream_));
  LMHEAD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchMergeRowStats(gathered, bytes, num_ranks, rows, row_stats(), stream_));
  const std::byte* const second = gathered + rows * kRowStatsBytes;
  if (pass_.teacher != nullptr) {
    const bool reverse = distillation().divergence == Divergence::kReverseKl;
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchMergePairStats(second, bytes, num_ranks, rows,
                                                              reverse, pair_stats(), stream_));
  }
  if (has_outside) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchMergeRowStats(second, bytes, num_ranks, rows, outside_stats(), stream_));
  }
  if (has_topk_teacher()) {
    LMHEAD_RETURN_IF_ERROR(head_.collective->AllReduce(
        head_.buffers.topk_values, rows * pass_.recipe().teacher_top_k(), stream_));
  }
  const int32_t top_k = pass_.input.outputs.top_k;
  if (top_k == 0) return absl::OkStatus();
  auto* const entries = static_cast<TopkEntry*>(head_.buffers.topk_entries);
  LMHEAD_RETURN_IF_ERROR(
      head_.collective->AllGather(entries, gathered, rows * top_k * kTopkEntryBytes, stream_));
  return CudaStatus(kernels::LaunchTopkMerge(reinterpret_cast<const TopkEntry*>(gathered),
                                             num_ranks, rows, top_k, entries, stream_),
                    "topk_merge");
}

// From the last tile, whose logits are there, to the first.
absl::Status PassRunner::JsdSweep() {
  if (pass_.teacher == nullptr || distillation().divergence != Divergence::kJsd) {
    return absl::OkStatus();
  }
  const bool with_tail = distillation().vocabulary == TeacherVocabulary::kPad;
  const int64_t last = head_.num_tiles() - 1;
  for (int64_t i = last; i >= 0; --i) {
    const VocabTile tile = head_.TileAt(i);
    LMHEAD_RETURN_IF_ERROR(Products(tile));
    LogitsPair pair = PairAt(tile);
    if (distillation().vocabulary == TeacherVocabulary::kCommon) pair.tile.cols = pair.teacher_cols;
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchJsdSums(pair, pair_stats(), distillation().jsd_beta, with_tail,
                               /*add=*/i != last, head_.buffers.jsd_sums, stream_));
  }
  if (head_.collective == nullptr) return absl::OkStatus();
  return head_.collective->AllReduce(head_.buffers.jsd_sums, 2 * pass_.num_rows, stream_);
}

absl::Status PassRunner::FoldTopk() {
  if (!has_topk_teacher()) return absl::OkStatus();
  return CudaStatus(
      kernels::LaunchFoldTopk(
          pass_.num_rows, row_inputs(), TopkTeacherOf(), head_.buffers.topk_values,
          {.transform = head_.Transform(),
           .class_weights = pass_.class_weights,
           .entropy = entropy_,
           .smoothing = pass_.recipe().label_smoothing != 0.0f,
           .inverse_temperature = kl_inverse_temperature()},
          outside_stats(), row_stats(), static_cast<TopkStats*>(head_.buffers.topk_stats), stream_),
      "topk_fold");
}

absl::Status PassRunner::TokenLosses() {
  const LossRecipe& recipe = pass_.recipe();
  kernels::TokenLossOptions options = {.label_smoothing = recipe.label_smoothing,
                                       .z_loss = recipe.z_loss,
                                       .class_weights = pass_.class_weights,
                                       .vocab_size = head_.spec.vocab_size,
                                       .logit_scale = head_.spec.logit_scale,
                                       .softcap = head_.spec.softcap,
                                       .entropy = entropy_};
  if (recipe.policy.has_value()) {
    options.policy = {static_cast<const kernels::RowPolicy*>(pass_.batch.device.row_policies),
                      *recipe.policy};
  }
  if (recipe.distillation.has_value()) {
    const DistillationSpec& spec = *recipe.distillation;
    const float squared = spec.kl_temperature * spec.kl_temperature;
    options.cross_entropy_weight = spec.cross_entropy_weight;
    options.divergence = {
        .grads = divergence_grads(),
        .kind = spec.divergence,
        .topk_mass = spec.topk_mass,
        .vocabulary = spec.vocabulary,
        .beta = spec.jsd_beta,
        .weight = spec.divergence_weight * (spec.scale_by_temperature_squared ? squared : 1.0f),
        .inverse_temperature = kl_inverse_temperature(),
        .ids_outside = spec.top_k < head_.spec.vocab_size,
        .pairs = pair_stats(),
        .jsd_sums = head_.buffers.jsd_sums,
        .topk = static_cast<const TopkStats*>(head_.buffers.topk_stats)};
  }
  const bool has_grads = pass_.input.mode != BackwardMode::kNone;
  return CudaStatus(
      kernels::LaunchTokenLoss(pass_.num_rows, row_inputs(), row_stats(), head_.buffers.nonfinite,
                               options, static_cast<RowLoss*>(pass_.batch.device.row_losses),
                               has_grads ? static_cast<RowGrad*>(head_.buffers.row_grads) : nullptr,
                               stream_),
      "token_loss");
}

absl::Status PassRunner::FinishTopk() {
  const int32_t top_k = pass_.input.outputs.top_k;
  if (top_k == 0) return absl::OkStatus();
  const CudaBatchBuffers& device = pass_.batch.device;
  return CudaStatus(kernels::LaunchTopkFinish(
                        static_cast<const TopkEntry*>(head_.buffers.topk_entries), pass_.num_rows,
                        top_k, row_inputs(), row_stats(), head_.buffers.nonfinite,
                        head_.Transform(), device.topk_ids, device.topk_logprobs, stream_),
                    "topk_finish");
}

// --- The sweep of gradients --------------------------------------------------------------------

// What goes down is ready before the last grad_weight, which hides the copy, and with several ranks
// the sum over them.
absl::Status PassRunner::Backward() {
  const nvtx3::scoped_range range("lmhead.backward");
  CudaBatch& batch = pass_.batch;
  if (!pass_.wants_grad_hidden()) {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(batch.grads_ready, stream_));
  }
  const int64_t num_tiles = pass_.input.mode == BackwardMode::kNone ? 0 : head_.num_tiles();
  // Away from the tile that the sweep before has left.
  const bool ascending = resident_ == head_.range.start;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const bool last = i == num_tiles - 1;
    const VocabTile tile = head_.TileAt(ascending ? i : num_tiles - 1 - i);
    LMHEAD_RETURN_IF_ERROR(Products(tile));
    LMHEAD_RETURN_IF_ERROR(GradLogits(tile));
    if (pass_.wants_grad_hidden()) {
      LMHEAD_RETURN_IF_ERROR(GradHidden(tile, i == 0));
      if (last) LMHEAD_RETURN_IF_ERROR(FinishGradHidden());
    }
    if (pass_.input.mode == BackwardMode::kHiddenAndWeight)
      LMHEAD_RETURN_IF_ERROR(GradWeight(tile));
  }
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(batch.compute_done, stream_));
  return pass_.wants_grad_hidden() ? ReduceGradHidden() : absl::OkStatus();
}

absl::Status PassRunner::GradLogits(VocabTile tile) {
  if (pass_.recipe().distillation.has_value()) return DivergenceGrad(tile);
  const bool smoothing = pass_.recipe().label_smoothing != 0.0f;
  return CudaStatus(kernels::LaunchGradLogits(
                        LogitsView(head_.buffers.logits), tile, row_grads(), head_.Transform(),
                        smoothing ? pass_.class_weights : nullptr, pass_.policy_entropy, stream_),
                    "grad_logits");
}

absl::Status PassRunner::DivergenceGrad(VocabTile tile) {
  const DistillationSpec& spec = distillation();
  const bool smoothing = pass_.recipe().label_smoothing != 0.0f;
  const bool common = spec.vocabulary == TeacherVocabulary::kCommon && pass_.teacher != nullptr;
  const bool cross_entropy = spec.cross_entropy_weight != 0.0f;
  const float* const class_weights = smoothing ? pass_.class_weights : nullptr;
  LMHEAD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchDivergenceGrad(PairAt(tile),
                                    {.divergence = spec.divergence,
                                     .beta = spec.jsd_beta,
                                     .divergence_cols = common ? TeacherCols(tile) : tile.cols,
                                     .cross_entropy = cross_entropy,
                                     .class_weights = class_weights},
                                    row_grads(), divergence_grads(), stream_));
  if (!has_topk_teacher()) return absl::OkStatus();
  return CudaStatus(kernels::LaunchTopkGrads(LogitsView(head_.buffers.logits), tile,
                                             TopkTeacherOf(), head_.buffers.topk_values,
                                             {.transform = head_.Transform(),
                                              .class_weights = class_weights,
                                              .cross_entropy = cross_entropy,
                                              .inverse_temperature = kl_inverse_temperature()},
                                             row_grads(), divergence_grads(), stream_),
                    "topk_grads");
}

absl::Status PassRunner::GradHidden(VocabTile tile, bool first) {
  if (first && head_.collective != nullptr) {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream_, head_.grad_hidden_free, 0));
  }
  if (tile.cols == 0) {  // A shard without rows adds nothing.
    const int64_t count = pass_.num_rows * head_.spec.hidden_size;
    return CudaStatus(cudaMemsetAsync(head_.buffers.grad_hidden, 0,
                                      static_cast<size_t>(count) * sizeof(float), stream_),
                      "grad_hidden");
  }
  return head_.gemm->Run({.product = HeadProduct::kGradHidden,
                          .rows = pass_.num_rows,
                          .cols = tile.cols,
                          .weight = head_.WeightAt(tile.start),
                          .logits = head_.buffers.logits,
                          .grad = head_.buffers.grad_hidden,
                          .beta = first ? 0.0f : 1.0f},
                         stream_);
}

absl::Status PassRunner::FinishGradHidden() {
  if (head_.collective != nullptr) {
    return CudaStatus(cudaEventRecord(pass_.batch.grad_hidden_done, stream_), "grad_hidden_done");
  }
  LMHEAD_RETURN_IF_ERROR(ConvertGradHidden(stream_));
  return CudaStatus(cudaEventRecord(pass_.batch.grads_ready, stream_), "grads_ready");
}

// Queued behind grad_weight on the host, beside it on the device.
absl::Status PassRunner::ReduceGradHidden() {
  if (head_.collective == nullptr) return absl::OkStatus();
  cudaStream_t const stream = head_.streams.exchange;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream, pass_.batch.grad_hidden_done, 0));
  LMHEAD_RETURN_IF_ERROR(head_.collective->Reduce(
      head_.buffers.grad_hidden, pass_.num_rows * head_.spec.hidden_size, /*root=*/0, stream));
  if (head_.ranks.rank == 0) LMHEAD_RETURN_IF_ERROR(ConvertGradHidden(stream));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(head_.grad_hidden_free, stream));
  return CudaStatus(cudaEventRecord(pass_.batch.grads_ready, stream), "grads_ready");
}

// The float32 sums, rounded once to what each chunk wants, over the rows that came up.
absl::Status PassRunner::ConvertGradHidden(cudaStream_t stream) {
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : pass_.batch.chunks) {
    MatrixView to = chunk.grad_hidden_states;
    if (to.data != nullptr) {
      to.data = pass_.StagedRow(batch_row);
      const ConstMatrixView from = {head_.buffers.grad_hidden + batch_row * head_.spec.hidden_size,
                                    to.rows, to.cols, DType::kFloat32};
      LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvert(from, to, stream));
    }
    batch_row += chunk.hidden_states.rows;
  }
  return absl::OkStatus();
}

absl::Status PassRunner::GradWeight(VocabTile tile) {
  if (tile.cols == 0) return absl::OkStatus();
  const int64_t local = tile.start - head_.range.start;
  if (head_.spec.has_bias) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchAddColumnSums(LogitsView(head_.buffers.logits), tile.cols,
                                     head_.buffers.bias_state.grad + local, stream_));
  }
  return head_.gemm->Run({.product = HeadProduct::kGradWeight,
                          .rows = pass_.num_rows,
                          .cols = tile.cols,
                          .hidden = head_.buffers.hidden,
                          .logits = head_.buffers.logits,
                          .grad = head_.buffers.weight_state.grad + local * head_.spec.hidden_size,
                          .beta = 1.0f},
                         stream_);
}

}  // namespace lmhead
