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
#include "server/compute/replica_exchange.h"
#include "server/compute/tensor_rows.h"

namespace lmhead {
namespace {

static_assert(kernels::kSquaredNormBlocks == kNormPartials,
              "The memory plan counts the partial sums of the norm");

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

absl::Status CudaParameters::ReduceGradients() {
  LMHEAD_RETURN_IF_ERROR(ReduceOne(head_.buffers.weight_state.grad, head_.spec.hidden_size));
  if (head_.spec.has_bias) LMHEAD_RETURN_IF_ERROR(ReduceOne(head_.buffers.bias_state.grad, 1));
  LMHEAD_RETURN_IF_ERROR(Synchronize());
  return head_.peers->Check();
}

absl::Status CudaParameters::ReduceOne(float* grad, int64_t cols) {
  LMHEAD_RETURN_IF_ERROR(
      ReduceToOwners(head_.peers, head_.range, grad, cols, head_.streams.compute));
  absl::Status status;
  ForEachNotOwned(head_.range, head_.owned, [&](VocabRange rows) {
    status.Update(
        CudaStatus(cudaMemsetAsync(grad + (rows.start - head_.range.start) * cols, 0,
                                   static_cast<size_t>(rows.size() * cols) * sizeof(float),
                                   head_.streams.compute),
                   "zeroing gradients"));
  });
  return status;
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
  const int64_t offset = head_.owned_offset();
  const int64_t hidden_size = head_.spec.hidden_size;
  LMHEAD_RETURN_IF_ERROR(add(buffers.weight_state.grad + offset * hidden_size,
                             head_.owned.size() * hidden_size, /*to_sum=*/false));
  if (head_.spec.has_bias) {
    LMHEAD_RETURN_IF_ERROR(
        add(buffers.bias_state.grad + offset, head_.owned.size(), /*to_sum=*/true));
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
  const int64_t hidden_size = head_.spec.hidden_size;
  const int64_t offset = head_.owned_offset();
  const int64_t count = head_.owned.size();
  void* const weight = head_.WeightAt(head_.owned.start);
  CudaParameter state = buffers.weight_state;
  state.grad += offset * hidden_size;
  LMHEAD_RETURN_IF_ERROR(UpdateOne(
      state, rounded ? buffers.master_weight : static_cast<float*>(weight), count * hidden_size,
      rounded ? weight : nullptr, optimizer.weight_decay, update, update_number));
  if (head_.spec.has_bias) {
    const double decay = optimizer.decay_bias ? optimizer.weight_decay : 0.0;
    state = buffers.bias_state;
    state.grad += offset;
    auto* const rounded_bias = static_cast<uint16_t*>(buffers.rounded_bias);
    LMHEAD_RETURN_IF_ERROR(UpdateOne(state, buffers.bias + offset, count,
                                     rounded_bias == nullptr ? nullptr : rounded_bias + offset,
                                     decay, update, update_number));
  }
  if (head_.peers != nullptr) LMHEAD_RETURN_IF_ERROR(BroadcastWeight());
  LMHEAD_RETURN_IF_ERROR(Synchronize());
  return head_.peers != nullptr ? head_.peers->Check() : absl::OkStatus();
}

absl::Status CudaParameters::BroadcastWeight() {
  const CudaBuffers& buffers = head_.buffers;
  const int64_t weight_bytes = BytesPerElement(head_.spec.weight_dtype);
  const auto broadcast = [this](void* data, int64_t row_bytes) {
    return BroadcastFromOwners(head_.peers, head_.range, data, row_bytes, head_.streams.compute);
  };
  LMHEAD_RETURN_IF_ERROR(broadcast(buffers.weight, head_.spec.hidden_size * weight_bytes));
  if (!head_.spec.has_bias) return absl::OkStatus();
  LMHEAD_RETURN_IF_ERROR(broadcast(buffers.bias, sizeof(float)));
  return buffers.rounded_bias == nullptr ? absl::OkStatus()
                                         : broadcast(buffers.rounded_bias, weight_bytes);
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

absl::StatusOr<CudaParameters::Tensor> CudaParameters::FindTensor(TensorKind kind) const {
  const HeadSpec& spec = head_.spec;
  const CudaBuffers& buffers = head_.buffers;
  const bool of_bias = IsOfBias(kind);
  if (of_bias && !spec.has_bias) {
    return absl::FailedPreconditionError(absl::StrCat("head ", spec.name, " has no bias"));
  }
  MatrixView whole{buffers.weight, head_.range.size(), spec.hidden_size, spec.weight_dtype};
  if (of_bias) whole = {buffers.bias, head_.range.size(), 1, DType::kFloat32};
  if (kind == TensorKind::kWeight || kind == TensorKind::kBias) return Tensor{whole, head_.range};
  if (!spec.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec.name,
                     " is not trainable: it has no gradients, master weight or optimizer state"));
  }
  const CudaParameter& state = of_bias ? buffers.bias_state : buffers.weight_state;
  if (IsGradient(kind)) {
    return Tensor{{state.grad, whole.rows, whole.cols, DType::kFloat32}, head_.range};
  }
  // The master weight of a float32 head is its weight.
  if (kind == TensorKind::kMasterWeight && buffers.master_weight == nullptr) {
    return Tensor{whole, head_.range};
  }
  const bool first = kind == TensorKind::kWeightExpAvg || kind == TensorKind::kBiasExpAvg;
  float* const moment = first ? state.exp_avg : state.exp_avg_sq;
  float* const data = kind == TensorKind::kMasterWeight ? buffers.master_weight : moment;
  if (data != nullptr || head_.range.size() == 0) {
    return Tensor{{data, head_.owned.size(), whole.cols, DType::kFloat32}, head_.owned};
  }
  return absl::FailedPreconditionError(
      absl::StrCat("head ", spec.name, ": its optimizer keeps no such state"));
}

absl::StatusOr<MatrixView> CudaParameters::Rows(TensorKind kind, int64_t row_start, int64_t rows,
                                                int64_t cols) const {
  absl::StatusOr<Tensor> tensor = FindTensor(kind);
  if (!tensor.ok()) return tensor.status();
  LMHEAD_RETURN_IF_ERROR(
      CheckTensorRows(head_.spec, tensor->range, tensor->rows.cols, row_start, rows, cols));
  return PartOf(tensor->rows, row_start - tensor->range.start, rows);
}

// The same rows in the other dtype, where the head has them: the master weight, the rounded bias.
CudaParameters::Tensor CudaParameters::Twin(TensorKind kind) const {
  const CudaBuffers& buffers = head_.buffers;
  if (kind == TensorKind::kWeight && buffers.master_weight != nullptr) {
    return {{buffers.master_weight, head_.owned.size(), head_.spec.hidden_size, DType::kFloat32},
            head_.owned};
  }
  if (kind == TensorKind::kBias && buffers.rounded_bias != nullptr) {
    return {{buffers.rounded_bias, head_.range.size(), 1, head_.spec.weight_dtype}, head_.range};
  }
  return {};
}

// Through the first batch's rows, which are free: as many rows at a time as go in there.
absl::Status CudaParameters::CopyIn(TensorKind kind, int64_t row_start, ConstMatrixView rows,
                                    MatrixView tensor) {
  void* const staging = head_.buffers.batches[0].rows;
  cudaStream_t const stream = head_.streams.compute;
  const Tensor twin = Twin(kind);
  const int64_t block_rows = head_.plan.batch_tokens;
  for (int64_t start = 0; start < rows.rows; start += block_rows) {
    const int64_t count = std::min(block_rows, rows.rows - start);
    const ConstMatrixView block = PartOf(rows, start, count);
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(staging, block.data,
                                                static_cast<size_t>(block.size_bytes()),
                                                cudaMemcpyHostToDevice, stream));
    const ConstMatrixView from = {staging, count, rows.cols, rows.dtype};
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvert(from, PartOf(tensor, start, count), stream));
    int64_t twin_start = row_start + start;
    const ConstMatrixView twin_from = ClipRows(from, twin.range, &twin_start);
    if (twin_from.rows == 0) continue;
    const MatrixView twin_rows = PartOf(twin.rows, twin_start - twin.range.start, twin_from.rows);
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvert(twin_from, twin_rows, stream));
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
