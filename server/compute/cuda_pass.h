// One batch's computation on a GPU: the matrix products and the row kernels between them.
//
// A sweep goes over the tiles of the shard once. Cross entropy, policies and the two KLs take two:
// statistics, and gradients, in opposite directions, so that the second begins with the tile that
// the first has left in memory. The Jensen-Shannon divergence takes one more between them. Under
// retain and frozen there is one tile, whose logits stay.

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_PASS_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_PASS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/pair_stats.h"
#include "kernels/row_types.h"
#include "kernels/topk_teacher.h"
#include "server/compute/backend.h"
#include "server/compute/cuda_head.h"

namespace lmhead {

// What the launches of one batch share.
struct CudaPass {
  const CudaHead& head;
  const BatchInput& input;
  CudaBatch& batch;
  const CudaHead* teacher = nullptr;
  int64_t num_rows = 0;
  // Of an element that came up: of the widest chunk's, so that chunks alike lie without gaps.
  int64_t staged_element_bytes = 0;
  int64_t staged_teacher_element_bytes = 0;
  const float* class_weights = nullptr;  // In device memory, or null for ones.
  bool policy_entropy = false;           // The objective has the entropy in it.

  const LossRecipe& recipe() const { return *input.recipe; }
  bool wants_grad_hidden() const {
    return input.outputs.grad_hidden_states && input.mode != BackwardMode::kNone;
  }

  // Where a batch's row lies among those that came up.
  void* StagedRow(int64_t row) const {
    return static_cast<std::byte*>(batch.device.rows) + StagedBytes(row);
  }
  void* StagedTeacherRow(int64_t row) const {
    return static_cast<std::byte*>(batch.device.teacher_rows) + StagedTeacherBytes(row);
  }
  int64_t StagedBytes(int64_t rows) const {
    return rows * head.spec.hidden_size * staged_element_bytes;
  }
  int64_t StagedTeacherBytes(int64_t rows) const {
    return rows * teacher->spec.hidden_size * staged_teacher_element_bytes;
  }
};

class PassRunner {
 public:
  PassRunner(CudaHead* head, const CudaPass* pass);

  // Queues everything on the head's streams, and records the batch's compute_start, grads_ready and
  // compute_done.
  absl::Status Run();

 private:
  using VocabTile = kernels::VocabTile;

  // Before the sweeps.
  absl::Status LoadHiddenRows();
  absl::Status LoadRows(const ConstMatrixView& from, void* staged, int64_t batch_row, bool teacher);
  absl::Status TeacherTail();

  // Products.
  absl::Status Products(VocabTile tile);
  absl::Status TeacherLogits(int64_t id, int64_t cols);
  absl::Status TeacherLogitsInFloat32(int64_t id, int64_t cols);

  // The sweep of statistics, and what becomes of them.
  absl::Status Forward();
  absl::Status Statistics(VocabTile tile);
  absl::Status RowStatistics(VocabTile tile);
  absl::Status Exchange();
  absl::Status JsdSweep();
  absl::Status FoldTopk();
  absl::Status TokenLosses();
  absl::Status FinishTopk();

  // The sweep of gradients.
  absl::Status Backward();
  absl::Status GradLogits(VocabTile tile);
  absl::Status DivergenceGrad(VocabTile tile);
  absl::Status GradHidden(VocabTile tile, bool first);
  absl::Status GradWeight(VocabTile tile);
  absl::Status FinishGradHidden();
  absl::Status ReduceGradHidden();
  absl::Status ConvertGradHidden(cudaStream_t stream);

  // How far the divergence and its sums reach in a tile.
  int64_t TeacherCols(VocabTile tile) const;
  kernels::LogitsPair PairAt(VocabTile tile) const;

  bool has_topk_teacher() const { return pass_.recipe().teacher_top_k() > 0; }
  const DistillationSpec& distillation() const { return *pass_.recipe().distillation; }
  float kl_inverse_temperature() const { return 1.0f / distillation().kl_temperature; }
  kernels::TopkTeacher TopkTeacherOf() const {
    return {pass_.batch.device.teacher_topk_ids, pass_.batch.device.teacher_topk_logprobs,
            pass_.recipe().teacher_top_k()};
  }
  MatrixView LogitsView(void* logits) const {
    return {logits, pass_.num_rows, CudaLogitsStride(head_.plan), head_.spec.weight_dtype};
  }
  const kernels::RowInput* row_inputs() const {
    return static_cast<const kernels::RowInput*>(pass_.batch.device.row_inputs);
  }
  kernels::RowStats* row_stats() const {
    return static_cast<kernels::RowStats*>(head_.buffers.row_stats);
  }
  // Behind the batch's RowStats; see CudaBuffers.
  kernels::PairStats* pair_stats() const {
    return reinterpret_cast<kernels::PairStats*>(row_stats() + pass_.num_rows);
  }
  kernels::RowStats* outside_stats() const {
    return one_temperature_ ? row_stats() : row_stats() + pass_.num_rows;
  }
  const kernels::RowGrad* row_grads() const {
    return static_cast<const kernels::RowGrad*>(head_.buffers.row_grads);
  }
  kernels::RowDivergenceGrad* divergence_grads() const {
    return static_cast<kernels::RowDivergenceGrad*>(head_.buffers.divergence_grads);
  }

  CudaHead& head_;
  const CudaPass& pass_;
  cudaStream_t const stream_;   // The compute stream.
  const bool entropy_;          // Wanted, or part of the objective.
  const bool one_temperature_;  // Of the divergence and, as far as anyone asks, of the rows.
  const bool pair_is_enough_;   // Its statistics are the student's whole ones, too.
  int64_t resident_ = -1;       // First id of the tile whose logits are in memory.
  bool started_ = false;        // The statistics hold a tile.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_PASS_H_
