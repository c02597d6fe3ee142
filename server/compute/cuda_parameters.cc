#include "server/compute/cuda_parameters.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/add_rows.h"
#include "kernels/convert.h"
#include "kernels/cpu/weight_init.h"
#include "kernels/optimizer_update.h"
#include "kernels/squared_norm.h"
#include "server/compute/batch_check.h"
#include "server/compute/cuda_status.h"

namespace lmhead {
namespace {

static_assert(kernels::kSquaredNormBlocks == kNormPartials,
              "The memory plan counts the partial sums of the norm");

// Rows [start, start + count) of `matrix`.
MatrixView PartOf(const MatrixView& matrix, int64_t start, int64_t count) {
  const int64_t offset = start * matrix.cols * BytesPerElement(matrix.dtype);
  return {static_cast<std::byte*>(matrix.data) + offset, count, matrix.cols, matrix.dtype};
}

bool IsOfBias(TensorKind kind) {
  return kind == TensorKind::kBias || kind == TensorKind::kGradBias ||
         kind == TensorKind::kBiasExpAvg || kind == TensorKind::kBiasExpAvgSq;
}

}  // namespace

absl::Status CudaParameters::Synchronize() {
  return CudaStatus(cudaStreamSynchronize(head_.streams.compute), "cudaStreamSynchronize");
}

absl::Status CudaParameters::InitialiseWeight() {
  const HeadSpec& spec = head_.spec;
  if (spec.weight_init.kind != WeightInitKind::kNormal) return absl::OkStatus();  // Zeros.
  const int64_t block_rows = head_.plan.batch_tokens;
  std::vector<float> block(static_cast<size_t>(block_rows * spec.hidden_size));
  for (int64_t start = head_.range.start; start < head_.range.stop; start += block_rows) {
    const int64_t rows = std::min(block_rows, head_.range.stop - start);
    cpu::FillNormal(spec.weight_init.seed, spec.weight_init.std, start, rows, spec.hidden_size,
                    block.data());
    const auto tensor = Rows(TensorKind::kWeight, start, rows, spec.hidden_size);
    if (!tensor.ok()) return tensor.status();
    LMHEAD_RETURN_IF_ERROR(CopyIn(TensorKind::kWeight, start,
                                  {block.data(), rows, spec.hidden_size, DType::kFloat32},
                                  *tensor));
  }
  return absl::OkStatus();
}

absl::Status CudaParameters::ZeroWeight() {
  const int64_t bytes = head_.weight_count() * BytesPerElement(head_.spec.weight_dtype);
  LMHEAD_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(head_.buffers.weight, 0, static_cast<size_t>(bytes), head_.streams.compute));
  return Synchronize();
}

// --- Gradients and updates ---------------------------------------------------------------------

absl::Status CudaParameters::ZeroGradients() {
  if (!head_.spec.trainable) return absl::OkStatus();
  const auto zero = [this](float* grad, int64_t count) {
    return CudaStatus(
        cudaMemsetAsync(grad, 0, static_cast<size_t>(count) * sizeof(float), head_.streams.compute),
        "zeroing gradients");
  };
  LMHEAD_RETURN_IF_ERROR(zero(head_.buffers.weight_state.grad, head_.weight_count()));
  if (head_.spec.has_bias) {
    LMHEAD_RETURN_IF_ERROR(zero(head_.buffers.bias_state.grad, head_.range.size()));
  }
  return Synchronize();
}

absl::StatusOr<double> CudaParameters::GradSquaredNorm() {
  double norm = 0.0;
  if (!head_.spec.trainable) return norm;
  const CudaBuffers& buffers = head_.buffers;
  const auto add = [&](const float* grad, int64_t count, bool to_sum) {
    return CudaStatus(kernels::LaunchSquaredNorm(grad, count, to_sum, buffers.norm_partials,
                                                 buffers.norm, head_.streams.compute),
                      "squared_norm");
  };
  LMHEAD_RETURN_IF_ERROR(add(buffers.weight_state.grad, head_.weight_count(), /*to_sum=*/false));
  if (head_.spec.has_bias) {
    LMHEAD_RETURN_IF_ERROR(add(buffers.bias_state.grad, head_.range.size(), /*to_sum=*/true));
  }
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(&norm, buffers.norm, sizeof(double),
                                              cudaMemcpyDeviceToHost, head_.streams.compute));
  LMHEAD_RETURN_IF_ERROR(Synchronize());
  return norm;
}

absl::Status CudaParameters::Update(const OptimizerUpdate& update, int64_t update_number) {
  const CudaBuffers& buffers = head_.buffers;
  const OptimizerSpec& optimizer = head_.spec.optimizer;
  const bool rounded = buffers.master_weight != nullptr;
  float* const weight = rounded ? buffers.master_weight : static_cast<float*>(buffers.weight);
  LMHEAD_RETURN_IF_ERROR(UpdateOne(buffers.weight_state, weight, head_.weight_count(),
                                   rounded ? buffers.weight : nullptr, optimizer.weight_decay,
                                   update, update_number));
  if (head_.spec.has_bias) {
    const double decay = optimizer.decay_bias ? optimizer.weight_decay : 0.0;
    LMHEAD_RETURN_IF_ERROR(UpdateOne(buffers.bias_state, buffers.bias, head_.range.size(),
                                     buffers.rounded_bias, decay, update, update_number));
  }
  return Synchronize();
}

absl::Status CudaParameters::UpdateOne(const CudaParameter& state, float* parameter, int64_t count,
                                       void* rounded, double weight_decay,
                                       const OptimizerUpdate& update, int64_t update_number) {
  return CudaStatus(kernels::LaunchOptimizerUpdate(head_.spec.optimizer,
                                                   {.learning_rate = update.learning_rate,
                                                    .grad_multiplier = update.grad_multiplier,
                                                    .weight_decay = weight_decay,
                                                    .update_number = update_number},
                                                   {.count = count,
                                                    .parameter = parameter,
                                                    .grad = state.grad,
                                                    .exp_avg = state.exp_avg,
                                                    .exp_avg_sq = state.exp_avg_sq,
                                                    .bfloat16_parameter = rounded},
                                                   head_.streams.compute),
                    "optimizer_update");
}

// As many of this rank's rows at a time as go into the first batch's buffers, which are free.
absl::Status CudaParameters::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                         ConstMatrixView rows) {
  const auto* const data = static_cast<const float*>(rows.data);
  std::vector<int32_t> local_ids;
  std::vector<int64_t> from;
  for (int64_t i = 0; i < rows.rows; ++i) {
    const int64_t id = row_ids.empty() ? row_start + i : row_ids[i];
    if (!head_.range.Contains(id)) continue;
    local_ids.push_back(static_cast<int32_t>(id - head_.range.start));
    from.push_back(i);
    if (static_cast<int64_t>(from.size()) < head_.plan.batch_tokens) continue;
    LMHEAD_RETURN_IF_ERROR(AddGradBlock(local_ids, data, from));
    local_ids.clear();
    from.clear();
  }
  return AddGradBlock(local_ids, data, from);
}

absl::Status CudaParameters::AddGradBlock(std::span<const int32_t> local_ids, const float* rows,
                                          std::span<const int64_t> from) {
  const int64_t cols = head_.spec.hidden_size;
  const auto row_bytes = static_cast<size_t>(cols) * sizeof(float);
  const CudaBatchBuffers& staging = head_.buffers.batches[0];
  auto* const staged_rows = static_cast<float*>(staging.rows);
  auto* const staged_ids = static_cast<int32_t*>(staging.row_inputs);
  for (size_t i = 0; i < from.size();) {  // Adjacent rows in one copy.
    size_t stop = i + 1;
    while (stop < from.size() && from[stop] == from[stop - 1] + 1) ++stop;
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(staged_rows + static_cast<int64_t>(i) * cols,
                                                rows + from[i] * cols, (stop - i) * row_bytes,
                                                cudaMemcpyHostToDevice, head_.streams.compute));
    i = stop;
  }
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(staged_ids, local_ids.data(), local_ids.size_bytes(),
                                              cudaMemcpyHostToDevice, head_.streams.compute));
  LMHEAD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchAddRows(staged_rows, staged_ids, static_cast<int64_t>(from.size()), cols,
                             head_.buffers.weight_state.grad, head_.streams.compute));
  return Synchronize();
}

// --- Tensors -----------------------------------------------------------------------------------

absl::StatusOr<MatrixView> CudaParameters::Tensor(TensorKind kind) const {
  const HeadSpec& spec = head_.spec;
  const CudaBuffers& buffers = head_.buffers;
  if (IsOfBias(kind) && !spec.has_bias) {
    return absl::FailedPreconditionError(absl::StrCat("head ", spec.name, " has no bias"));
  }
  MatrixView view{buffers.weight, head_.range.size(), spec.hidden_size, spec.weight_dtype};
  if (IsOfBias(kind)) view = {buffers.bias, head_.range.size(), 1, DType::kFloat32};
  if (kind == TensorKind::kWeight || kind == TensorKind::kBias) return view;
  if (!spec.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec.name,
                     " is not trainable: it has no gradients, master weight or optimizer state"));
  }
  view.dtype = DType::kFloat32;
  const CudaParameter& state = IsOfBias(kind) ? buffers.bias_state : buffers.weight_state;
  switch (kind) {
    case TensorKind::kGradWeight:
    case TensorKind::kGradBias:
      view.data = state.grad;
      break;
    case TensorKind::kMasterWeight:
      if (buffers.master_weight != nullptr) view.data = buffers.master_weight;
      break;
    case TensorKind::kWeightExpAvg:
    case TensorKind::kBiasExpAvg:
      view.data = state.exp_avg;
      break;
    default:
      view.data = state.exp_avg_sq;
  }
  if (view.data != nullptr || head_.range.size() == 0) return view;
  return absl::FailedPreconditionError(
      absl::StrCat("head ", spec.name, ": its optimizer keeps no such state"));
}

absl::StatusOr<MatrixView> CudaParameters::Rows(TensorKind kind, int64_t row_start, int64_t rows,
                                                int64_t cols) const {
  absl::StatusOr<MatrixView> tensor = Tensor(kind);
  if (!tensor.ok()) return tensor;
  LMHEAD_RETURN_IF_ERROR(
      CheckTensorRows(head_.spec, head_.range, tensor->cols, row_start, rows, cols));
  return PartOf(*tensor, row_start - head_.range.start, rows);
}

// The same rows in the other dtype, where the head has them: the master weight, the rounded bias.
MatrixView CudaParameters::Twin(TensorKind kind, int64_t row_start) const {
  const int64_t local = row_start - head_.range.start;
  if (kind == TensorKind::kWeight && head_.buffers.master_weight != nullptr) {
    return {head_.buffers.master_weight + local * head_.spec.hidden_size, 0, head_.spec.hidden_size,
            DType::kFloat32};
  }
  if (kind == TensorKind::kBias && head_.buffers.rounded_bias != nullptr) {
    return {static_cast<uint16_t*>(head_.buffers.rounded_bias) + local, 0, 1,
            head_.spec.weight_dtype};
  }
  return {};
}

// Through the first batch's rows, which are free: as many rows at a time as go in there.
absl::Status CudaParameters::CopyIn(TensorKind kind, int64_t row_start, ConstMatrixView rows,
                                    MatrixView tensor) {
  void* const staging = head_.buffers.batches[0].rows;
  cudaStream_t const stream = head_.streams.compute;
  const MatrixView twin = Twin(kind, row_start);
  const int64_t block_rows = head_.plan.batch_tokens;
  const int64_t from_row_bytes = rows.cols * BytesPerElement(rows.dtype);
  for (int64_t start = 0; start < rows.rows; start += block_rows) {
    const int64_t count = std::min(block_rows, rows.rows - start);
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
        staging, static_cast<const std::byte*>(rows.data) + start * from_row_bytes,
        static_cast<size_t>(count * from_row_bytes), cudaMemcpyHostToDevice, stream));
    const ConstMatrixView from = {staging, count, rows.cols, rows.dtype};
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvert(from, PartOf(tensor, start, count), stream));
    if (twin.data == nullptr) continue;
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvert(from, PartOf(twin, start, count), stream));
  }
  return Synchronize();
}

absl::Status CudaParameters::CopyOut(MatrixView tensor, MatrixView rows) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(rows.data, tensor.data,
                                              static_cast<size_t>(rows.size_bytes()),
                                              cudaMemcpyDeviceToHost, head_.streams.compute));
  return Synchronize();
}

}  // namespace lmhead
