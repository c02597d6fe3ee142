#include "server/compute/cuda_transfers.h"

#include <cstddef>
#include <nvtx3/nvtx3.hpp>

#include "server/compute/cuda_status.h"

namespace lmhead {
namespace {

using kernels::RowInput;
using kernels::RowPolicy;

float ValueOr(std::span<const float> values, int64_t row, float otherwise) {
  return values.empty() ? otherwise : values[row];
}

RowInput RowInputOf(const ChunkRows& chunk, int64_t row, const LossRecipe& recipe) {
  const bool ignored = chunk.targets[row] == recipe.ignore_index;
  const float temperature = ValueOr(chunk.token_temperature, row, recipe.temperature);
  return {.target = ignored ? -1 : chunk.targets[row],
          .grad_coefficient = ValueOr(chunk.token_weights, row, 1.0f) * chunk.grad_scale,
          .inverse_temperature = 1.0f / temperature};
}

RowPolicy RowPolicyOf(const ChunkRows& chunk, int64_t row) {
  return {.logprob_grad = ValueOr(chunk.logprob_grad, row, 0.0f),
          .entropy_grad = ValueOr(chunk.entropy_grad, row, 0.0f),
          .old_logprob = ValueOr(chunk.old_logprob, row, 0.0f),
          .advantage = ValueOr(chunk.advantage, row, 0.0f),
          .reference_logprob = ValueOr(chunk.reference_logprob, row, 0.0f)};
}

absl::Status CopyUp(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream),
      "upload");
}

absl::Status CopyMatrixUp(ConstMatrixView from, void* to, cudaStream_t stream) {
  return from.size_bytes() == 0 ? absl::OkStatus()
                                : CopyUp(to, from.data, from.size_bytes(), stream);
}

absl::Status CopyDown(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream),
      "download");
}

}  // namespace

// --- Up ----------------------------------------------------------------------------------------

absl::Status CudaTransfers::Upload(CudaPass* pass) {
  const nvtx3::scoped_range range("lmhead.upload");
  cudaStream_t const stream = head_.streams.upload;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(pass->batch.upload_start, stream));
  LMHEAD_RETURN_IF_ERROR(UploadHiddenStates(*pass));
  LMHEAD_RETURN_IF_ERROR(UploadRowInputs(*pass));
  LMHEAD_RETURN_IF_ERROR(UploadRowPolicies(pass));
  LMHEAD_RETURN_IF_ERROR(UploadTopkTeacher(*pass));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(pass->batch.upload_done, stream));
  LMHEAD_RETURN_IF_CUDA_ERROR(
      cudaStreamWaitEvent(head_.streams.compute, pass->batch.upload_done, 0));
  return UploadClassWeights(pass);
}

// From where they lie, in the dtype of the wire; the rows' numbers are gathered into pinned memory.
absl::Status CudaTransfers::UploadHiddenStates(const CudaPass& pass) {
  const bool broadcast = pass.input.broadcast_hidden_states && head_.collective != nullptr;
  const bool has_rows = !broadcast || head_.ranks.rank == 0;
  cudaStream_t const stream = head_.streams.upload;
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : pass.batch.chunks) {
    if (has_rows)
      LMHEAD_RETURN_IF_ERROR(CopyMatrixUp(chunk.hidden_states, pass.StagedRow(batch_row), stream));
    if (has_rows && pass.teacher != nullptr) {
      LMHEAD_RETURN_IF_ERROR(
          CopyMatrixUp(chunk.teacher_hidden_states, pass.StagedTeacherRow(batch_row), stream));
    }
    batch_row += chunk.hidden_states.rows;
  }
  return broadcast ? BroadcastHiddenStates(pass) : absl::OkStatus();
}

// All chunks by one call: each waits for its turn on a GPU that is busy with products.
absl::Status CudaTransfers::BroadcastHiddenStates(const CudaPass& pass) {
  cudaStream_t const stream = head_.streams.upload;
  LMHEAD_RETURN_IF_ERROR(head_.collective->Broadcast(
      pass.StagedRow(0), pass.StagedBytes(pass.num_rows), /*root=*/0, stream));
  if (pass.teacher == nullptr) return absl::OkStatus();
  return head_.collective->Broadcast(pass.StagedTeacherRow(0),
                                     pass.StagedTeacherBytes(pass.num_rows), /*root=*/0, stream);
}

absl::Status CudaTransfers::UploadRowInputs(const CudaPass& pass) {
  CudaBatch& batch = pass.batch;
  RowInput* to = batch.row_inputs;
  for (const ChunkRows& chunk : batch.chunks) {
    for (int64_t row = 0; row < chunk.hidden_states.rows; ++row) {
      *to++ = RowInputOf(chunk, row, *pass.input.recipe);
    }
  }
  return CopyUp(batch.device.row_inputs, batch.row_inputs, pass.num_rows * kRowInputBytes,
                head_.streams.upload);
}

absl::Status CudaTransfers::UploadRowPolicies(CudaPass* pass) {
  const std::optional<PolicySpec>& policy = pass->input.recipe->policy;
  if (!policy.has_value()) return absl::OkStatus();
  CudaBatch& batch = pass->batch;
  pass->policy_entropy =
      policy->kind == PolicyKind::kClipped && policy->entropy_coefficient != 0.0f;
  RowPolicy* to = batch.row_policies;
  for (const ChunkRows& chunk : batch.chunks) {
    for (int64_t row = 0; row < chunk.hidden_states.rows; ++row) {
      *to = RowPolicyOf(chunk, row);
      pass->policy_entropy |= to->entropy_grad != 0.0f;
      ++to;
    }
  }
  return CopyUp(batch.device.row_policies, batch.row_policies, pass->num_rows * kRowPolicyBytes,
                head_.streams.upload);
}

absl::Status CudaTransfers::UploadTopkTeacher(const CudaPass& pass) {
  int64_t entry = 0;
  for (const ChunkRows& chunk : pass.batch.chunks) {
    const auto count = static_cast<int64_t>(chunk.teacher_topk_ids.size());
    if (count == 0) continue;
    const CudaBatchBuffers& device = pass.batch.device;
    LMHEAD_RETURN_IF_ERROR(CopyUp(device.teacher_topk_ids + entry, chunk.teacher_topk_ids.data(),
                                  count * sizeof(int32_t), head_.streams.upload));
    LMHEAD_RETURN_IF_ERROR(CopyUp(device.teacher_topk_logprobs + entry,
                                  chunk.teacher_topk_logprobs.data(), count * sizeof(float),
                                  head_.streams.upload));
    entry += count;
  }
  return absl::OkStatus();
}

// Class weights go up when they change, which waits for the computation of the batches before.
absl::Status CudaTransfers::UploadClassWeights(CudaPass* pass) {
  const std::vector<float>& wanted = pass->input.recipe->class_weights;
  if (wanted.empty()) return absl::OkStatus();
  pass->class_weights = head_.buffers.class_weights;
  if (wanted == class_weights_) return absl::OkStatus();
  cudaStream_t const stream = head_.streams.compute;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  class_weights_ = wanted;
  LMHEAD_RETURN_IF_ERROR(CopyUp(head_.buffers.class_weights, class_weights_.data(),
                                static_cast<int64_t>(wanted.size() * sizeof(float)), stream));
  return CudaStatus(cudaStreamSynchronize(stream), "class weights");
}

// --- Down --------------------------------------------------------------------------------------

absl::Status CudaTransfers::Download(const CudaPass& pass) {
  const nvtx3::scoped_range range("lmhead.download");
  const CudaBatch& batch = pass.batch;
  cudaStream_t const stream = head_.streams.download;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream, batch.grads_ready, 0));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(batch.download_start, stream));
  LMHEAD_RETURN_IF_ERROR(
      CopyDown(batch.row_losses, batch.device.row_losses, pass.num_rows * kRowLossBytes, stream));
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : batch.chunks) {
    const MatrixView& to = chunk.grad_hidden_states;
    if (to.data != nullptr && pass.wants_grad_hidden()) {
      LMHEAD_RETURN_IF_ERROR(CopyDown(to.data, pass.StagedRow(batch_row), to.size_bytes(), stream));
    }
    batch_row += chunk.hidden_states.rows;
  }
  LMHEAD_RETURN_IF_ERROR(DownloadTopk(pass));
  return CudaStatus(cudaEventRecord(batch.download_done, stream), "download_done");
}

absl::Status CudaTransfers::DownloadTopk(const CudaPass& pass) {
  const int32_t top_k = pass.input.outputs.top_k;
  const CudaBatchBuffers& device = pass.batch.device;
  int64_t entry = 0;
  for (const ChunkRows& chunk : pass.batch.chunks) {
    const int64_t count = chunk.hidden_states.rows * top_k;
    if (count > 0 && chunk.topk_ids != nullptr) {
      LMHEAD_RETURN_IF_ERROR(CopyDown(chunk.topk_ids, device.topk_ids + entry,
                                      count * sizeof(int32_t), head_.streams.download));
    }
    if (count > 0 && chunk.topk_logprobs != nullptr) {
      LMHEAD_RETURN_IF_ERROR(CopyDown(chunk.topk_logprobs, device.topk_logprobs + entry,
                                      count * sizeof(float), head_.streams.download));
    }
    entry += count;
  }
  return absl::OkStatus();
}

}  // namespace lmhead
