// Weight, bias, their gradients and optimizer state of a shard on a GPU.
//
// Thread-hostile. Every call but those that say so waits for the compute stream; none waits for
// batches, which is its caller's to do. Errors are those of CUDA, or INVALID_ARGUMENT and
// FAILED_PRECONDITION before anything was touched.

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_PARAMETERS_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_PARAMETERS_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/compute/backend.h"
#include "server/compute/cuda_head.h"

namespace lmhead {

class CudaParameters {
 public:
  // `head` must outlive this.
  explicit CudaParameters(CudaHead* head) : head_(*head) {}

  // As spec.weight_init says; the weight is zeros before.
  absl::Status InitialiseWeight();
  absl::Status ZeroWeight();
  absl::Status ZeroGradients();

  // REQUIRES: the head is trainable and has peers.
  absl::Status ReduceGradients();

  absl::StatusOr<double> GradSquaredNorm();

  // The update_number-th update, 1-based. REQUIRES: the head has an optimizer.
  absl::Status Update(const OptimizerUpdate& update, int64_t update_number);

  // Of the arguments that CheckGradRows() has passed.
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows);

  // The rows [row_start, row_start + rows) of a tensor in device memory. FAILED_PRECONDITION for a
  // tensor that the head does not have.
  absl::StatusOr<MatrixView> Rows(TensorKind kind, int64_t row_start, int64_t rows,
                                  int64_t cols) const;

  // Into and out of `tensor`, which Rows() gave.
  absl::Status CopyIn(TensorKind kind, int64_t row_start, ConstMatrixView rows, MatrixView tensor);
  absl::Status CopyOut(MatrixView tensor, MatrixView rows);

 private:
  // Rows of a tensor that are here, and their ids.
  struct Tensor {
    MatrixView rows;
    VocabRange range;
  };
  absl::StatusOr<Tensor> FindTensor(TensorKind kind) const;
  Tensor Twin(TensorKind kind) const;
  absl::Status ReduceOne(float* grad, int64_t cols);
  absl::Status BroadcastWeight();
  absl::Status UpdateOne(const CudaParameter& state, float* parameter, int64_t count, void* rounded,
                         double weight_decay, const OptimizerUpdate& update, int64_t update_number);
  absl::Status AddGradBlock(std::span<const int32_t> local_ids, const float* rows,
                            std::span<const int64_t> from);
  absl::Status Synchronize();

  CudaHead& head_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_PARAMETERS_H_
