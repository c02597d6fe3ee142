#include "server/compute/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <nvtx3/nvtx3.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/column_sums.h"
#include "kernels/convert.h"
#include "kernels/cpu/weight_init.h"
#include "kernels/fill_noise.h"
#include "kernels/grad_logits.h"
#include "kernels/hidden_rows.h"
#include "kernels/optimizer_update.h"
#include "kernels/shard_stats.h"
#include "kernels/squared_norm.h"
#include "kernels/token_loss.h"
#include "server/compute/batch_check.h"
#include "server/compute/cublaslt_gemm.h"
#include "server/compute/cuda_batch_ring.h"
#include "server/compute/cuda_status.h"
#include "server/memory/device_arena.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

using kernels::RowGrad;
using kernels::RowInput;
using kernels::RowLoss;
using kernels::RowStats;
using kernels::VocabTile;

static_assert(sizeof(RowInput) == kRowInputBytes && sizeof(RowLoss) == kRowLossBytes &&
                  sizeof(RowStats) == kRowStatsBytes && sizeof(RowGrad) == kRowGradBytes,
              "The memory plan counts the records of the row kernels");
static_assert(kernels::kSquaredNormBlocks == kNormPartials,
              "The memory plan counts the partial sums of the norm");

// Products below it take less time than a trial is worth: cuBLASLt's first choice does.
constexpr double kTunedFlopsMin = 1e11;

// The least compute capability that the kernels are built for.
constexpr int kComputeCapabilityMin = 8;

// What the launches of one batch share.
struct Pass {
  const LossRecipe& recipe;
  BackwardMode mode;
  CudaBatch& batch;
  int64_t num_rows = 0;
  bool entropy = false;      // Some chunk wants it.
  bool grad_hidden = false;  // Likewise.
  const float* class_weights = nullptr;
};

// Rows [start, start + count) of `matrix`.
MatrixView PartOf(const MatrixView& matrix, int64_t start, int64_t count) {
  const int64_t offset = start * matrix.cols * BytesPerElement(matrix.dtype);
  return {static_cast<std::byte*>(matrix.data) + offset, count, matrix.cols, matrix.dtype};
}

class CudaBackend final : public ComputeBackend {
 public:
  CudaBackend(const HeadSpec& spec, const MemoryPlan& plan, int device)
      : spec_(spec), plan_(plan), device_(device), first_error_(spec.name) {}
  ~CudaBackend() override { cudaSetDevice(device_); }

  // Everything that may fail; called once.
  absl::Status Init(MemoryAccount* account);

  void ComputeBatch(const BatchInput& input, BatchDone done) override;
  absl::StatusOr<double> GradSquaredNorm() override;
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override;
  absl::Status DiscardGradients() override;
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows) override;
  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) override;
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) override;
  int64_t num_updates() const override { return num_updates_; }
  void set_num_updates(int64_t num_updates) override { num_updates_ = num_updates; }

 private:
  absl::Status TuneProducts();
  absl::Status TuneAt(int64_t rows, int64_t cols);
  absl::Status ZeroState();
  absl::Status InitialiseWeight();

  absl::Status Launch(const BatchInput& input, CudaBatch* batch);
  absl::Status LaunchPass(Pass& pass);
  absl::Status UploadRows(Pass& pass);
  absl::Status UploadClassWeights(Pass& pass);
  absl::Status LoadHiddenRows(const Pass& pass);
  absl::Status Forward(const Pass& pass);
  absl::Status TokenLosses(const Pass& pass);
  absl::Status Backward(const Pass& pass);
  absl::Status Logits(const Pass& pass, VocabTile tile);
  absl::Status Statistics(const Pass& pass, VocabTile tile);
  absl::Status GradLogits(const Pass& pass, VocabTile tile);
  absl::Status GradHidden(const Pass& pass, VocabTile tile, bool first);
  absl::Status ConvertGradHidden(const Pass& pass);
  absl::Status GradWeight(const Pass& pass, VocabTile tile);
  absl::Status Download(const Pass& pass);

  absl::Status WaitForBatches();
  absl::Status SynchronizeCompute();
  absl::Status SquaredNorm(double* result);
  absl::Status UpdateParameter(const CudaParameter& state, float* parameter, int64_t count,
                               void* rounded, double weight_decay, const OptimizerUpdate& update);
  absl::Status CopyRowsIn(ConstMatrixView rows, MatrixView to, MatrixView twin);
  MatrixView Twin(TensorKind kind, int64_t row_start) const;
  absl::StatusOr<MatrixView> Tensor(TensorKind kind) const;
  absl::StatusOr<MatrixView> TensorRows(TensorKind kind, int64_t row_start, int64_t rows,
                                        int64_t cols) const;

  int64_t num_tiles() const { return (plan_.shard_size + plan_.vocab_tile - 1) / plan_.vocab_tile; }
  VocabTile TileAt(int64_t index) const {
    const int64_t start = index * plan_.vocab_tile;
    return {start, std::min(plan_.vocab_tile, plan_.shard_size - start)};
  }
  MatrixView LogitsView(const Pass& pass) const {
    return {buffers_.logits, pass.num_rows, CudaLogitsStride(plan_), spec_.weight_dtype};
  }
  void* WeightAt(int64_t row) const {
    return static_cast<std::byte*>(buffers_.weight) +
           row * spec_.hidden_size * BytesPerElement(spec_.weight_dtype);
  }
  // What the products add to the logits from `start` on: the bias in the head's dtype, or null.
  const void* BiasAt(int64_t start) const {
    if (!spec_.has_bias) return nullptr;
    if (buffers_.rounded_bias == nullptr) return buffers_.bias + start;
    return static_cast<const uint16_t*>(buffers_.rounded_bias) + start;
  }
  // Where a batch's row lies in CudaBatchBuffers::rows, whatever the dtype of its chunk.
  void* StagedRow(const CudaBatch& batch, int64_t row) const {
    return static_cast<std::byte*>(batch.device.rows) +
           row * spec_.hidden_size * BytesPerElement(DType::kFloat32);
  }
  int64_t weight_count() const { return plan_.shard_size * spec_.hidden_size; }
  kernels::LogitTransform Transform() const { return {spec_.logit_scale, spec_.softcap}; }

  const HeadSpec spec_;
  const MemoryPlan plan_;
  const int device_;
  FirstError first_error_;
  std::unique_ptr<DeviceArena> arena_;
  CudaBuffers buffers_;
  CudaStreams streams_;
  std::unique_ptr<HeadGemm> gemm_;
  std::unique_ptr<CudaBatchRing> ring_;  // After what its thread and its batches use.
  std::vector<float> class_weights_;     // What buffers_.class_weights holds.
  int64_t num_updates_ = 0;
};

// --- Construction ------------------------------------------------------------------------------

absl::Status CudaBackend::Init(MemoryAccount* account) {
  auto arena = DeviceArena::Create(plan_, account, device_);
  if (!arena.ok()) return arena.status();
  arena_ = *std::move(arena);
  buffers_ = LayOutCuda(spec_, plan_, [this](MemoryCategory category, int64_t bytes) {
    return arena_->Carve(category, bytes);
  });
  arena_->Seal();
  LMHEAD_RETURN_IF_ERROR(streams_.Create());
  auto gemm = HeadGemm::Create({.dtype = spec_.weight_dtype,
                                .hidden_size = spec_.hidden_size,
                                .logits_stride = CudaLogitsStride(plan_),
                                .workspace = buffers_.workspace,
                                .workspace_bytes = kCudaWorkspaceBytes});
  if (!gemm.ok()) return gemm.status();
  gemm_ = *std::move(gemm);
  auto ring =
      CudaBatchRing::Create(buffers_, plan_.batch_tokens, device_, &streams_, &first_error_);
  if (!ring.ok()) return ring.status();
  ring_ = *std::move(ring);
  LMHEAD_RETURN_IF_ERROR(TuneProducts());
  return InitialiseWeight();
}

// Full batches first, then halves of them, as long as it pays.
absl::Status CudaBackend::TuneProducts() {
  const nvtx3::scoped_range range("lmhead.tune");
  const auto flops = [this](int64_t rows) {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(plan_.vocab_tile) *
           static_cast<double>(spec_.hidden_size);
  };
  if (flops(plan_.batch_tokens) < kTunedFlopsMin) return absl::OkStatus();
  const MatrixView noisy[] = {
      {buffers_.weight, plan_.shard_size, spec_.hidden_size, spec_.weight_dtype},
      {buffers_.hidden, plan_.batch_tokens, spec_.hidden_size, spec_.weight_dtype},
      {buffers_.logits, plan_.batch_tokens, CudaLogitsStride(plan_), spec_.weight_dtype}};
  for (uint32_t i = 0; i < std::size(noisy); ++i) {
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchFillNoise(noisy[i], 0.05f, i, streams_.compute));
  }
  const int64_t last_cols = TileAt(num_tiles() - 1).cols;
  for (int64_t rows = plan_.batch_tokens; flops(rows) >= kTunedFlopsMin;
       rows = HeadGemm::Bucket(rows) / 2) {
    LMHEAD_RETURN_IF_ERROR(TuneAt(rows, plan_.vocab_tile));
    if (last_cols != plan_.vocab_tile) LMHEAD_RETURN_IF_ERROR(TuneAt(rows, last_cols));
  }
  return ZeroState();
}

absl::Status CudaBackend::TuneAt(int64_t rows, int64_t cols) {
  HeadProductCall call = {.rows = rows,
                          .cols = cols,
                          .hidden = buffers_.hidden,
                          .weight = buffers_.weight,
                          .logits = buffers_.logits};
  const auto tune = [&](HeadProduct product, float* grad, float beta) -> absl::Status {
    call.product = product;
    call.grad = grad;
    call.beta = beta;
    const absl::StatusOr<std::string> chosen = gemm_->Tune(call, streams_.compute);
    if (!chosen.ok()) return chosen.status();
    spdlog::info("head {}: {}", spec_.name, *chosen);
    return absl::OkStatus();
  };
  call.bias = BiasAt(0);
  LMHEAD_RETURN_IF_ERROR(tune(HeadProduct::kLogits, nullptr, 0.0f));
  call.bias = nullptr;
  if (buffers_.grad_hidden != nullptr) {
    const float beta = num_tiles() > 1 ? 1.0f : 0.0f;
    LMHEAD_RETURN_IF_ERROR(tune(HeadProduct::kGradHidden, buffers_.grad_hidden, beta));
  }
  if (!spec_.trainable) return absl::OkStatus();
  return tune(HeadProduct::kGradWeight, buffers_.weight_state.grad, 1.0f);
}

// Undoes what the trials wrote.
absl::Status CudaBackend::ZeroState() {
  const auto weight_bytes =
      static_cast<size_t>(weight_count() * BytesPerElement(spec_.weight_dtype));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(buffers_.weight, 0, weight_bytes, streams_.compute));
  return DiscardGradients();
}

absl::Status CudaBackend::InitialiseWeight() {
  if (spec_.weight_init.kind != WeightInitKind::kNormal) return absl::OkStatus();  // Zeros.
  std::vector<float> block(static_cast<size_t>(plan_.batch_tokens * spec_.hidden_size));
  for (int64_t start = 0; start < spec_.vocab_size; start += plan_.batch_tokens) {
    const int64_t rows = std::min(plan_.batch_tokens, spec_.vocab_size - start);
    cpu::FillNormal(spec_.weight_init.seed, spec_.weight_init.std, start, rows, spec_.hidden_size,
                    block.data());
    LMHEAD_RETURN_IF_ERROR(WriteRows(TensorKind::kWeight, start,
                                     {block.data(), rows, spec_.hidden_size, DType::kFloat32}));
  }
  return absl::OkStatus();
}

// --- One batch ---------------------------------------------------------------------------------

void CudaBackend::ComputeBatch(const BatchInput& input, BatchDone done) {
  const nvtx3::scoped_range range("lmhead.batch");
  CudaBatch* const batch = ring_->Begin(input, std::move(done));
  batch->status = Launch(input, batch);
  ring_->Finish(batch);
}

absl::Status CudaBackend::Launch(const BatchInput& input, CudaBatch* batch) {
  LMHEAD_RETURN_IF_ERROR(first_error_.Get());
  LMHEAD_RETURN_IF_ERROR(CheckBatch(spec_, plan_, input));
  Pass pass = {.recipe = *input.recipe, .mode = input.mode, .batch = *batch};
  for (const ChunkRows& chunk : input.chunks) {
    pass.num_rows += chunk.hidden_states.rows;
    pass.entropy |= chunk.entropy != nullptr;
    pass.grad_hidden |= chunk.grad_hidden_states.data != nullptr;
  }
  return first_error_.Check(LaunchPass(pass));
}

absl::Status CudaBackend::LaunchPass(Pass& pass) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
  LMHEAD_RETURN_IF_ERROR(UploadRows(pass));
  LMHEAD_RETURN_IF_ERROR(UploadClassWeights(pass));
  LMHEAD_RETURN_IF_ERROR(LoadHiddenRows(pass));
  LMHEAD_RETURN_IF_ERROR(Forward(pass));
  LMHEAD_RETURN_IF_ERROR(TokenLosses(pass));
  LMHEAD_RETURN_IF_ERROR(Backward(pass));
  return Download(pass);
}

// The rows' numbers are gathered into pinned memory, hidden states go up from where they lie.
absl::Status CudaBackend::UploadRows(Pass& pass) {
  const nvtx3::scoped_range range("lmhead.upload");
  CudaBatch& batch = pass.batch;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(batch.upload_start, streams_.upload));
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : batch.chunks) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(StagedRow(batch, batch_row), chunk.hidden_states.data,
                        static_cast<size_t>(chunk.hidden_states.size_bytes()),
                        cudaMemcpyHostToDevice, streams_.upload));
    for (int64_t row = 0; row < chunk.hidden_states.rows; ++row, ++batch_row) {
      const bool ignored = chunk.targets[row] == pass.recipe.ignore_index;
      const float weight = chunk.token_weights.empty() ? 1.0f : chunk.token_weights[row];
      const float temperature =
          chunk.token_temperature.empty() ? pass.recipe.temperature : chunk.token_temperature[row];
      batch.row_inputs[batch_row] = {.target = ignored ? -1 : chunk.targets[row],
                                     .grad_coefficient = weight * chunk.grad_scale,
                                     .inverse_temperature = 1.0f / temperature};
    }
  }
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(batch.device.row_inputs, batch.row_inputs,
                                              static_cast<size_t>(pass.num_rows * kRowInputBytes),
                                              cudaMemcpyHostToDevice, streams_.upload));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(batch.upload_done, streams_.upload));
  return CudaStatus(cudaStreamWaitEvent(streams_.compute, batch.upload_done, 0), "upload");
}

// Class weights go up when they change, which waits for the computation of the batches before.
absl::Status CudaBackend::UploadClassWeights(Pass& pass) {
  const std::vector<float>& wanted = pass.recipe.class_weights;
  if (wanted.empty()) return absl::OkStatus();
  pass.class_weights = buffers_.class_weights;
  if (wanted == class_weights_) return absl::OkStatus();
  LMHEAD_RETURN_IF_ERROR(SynchronizeCompute());
  class_weights_ = wanted;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(buffers_.class_weights, class_weights_.data(),
                                              wanted.size() * sizeof(float), cudaMemcpyHostToDevice,
                                              streams_.compute));
  return SynchronizeCompute();
}

absl::Status CudaBackend::LoadHiddenRows(const Pass& pass) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(pass.batch.compute_start, streams_.compute));
  const int64_t row_bytes = spec_.hidden_size * BytesPerElement(spec_.weight_dtype);
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : pass.batch.chunks) {
    ConstMatrixView from = chunk.hidden_states;
    if (from.rows == 0) continue;
    from.data = StagedRow(pass.batch, batch_row);
    const MatrixView to = {static_cast<std::byte*>(buffers_.hidden) + batch_row * row_bytes,
                           from.rows, from.cols, spec_.weight_dtype};
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchLoadHiddenRows(from, to, buffers_.nonfinite + batch_row, streams_.compute));
    batch_row += from.rows;
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Forward(const Pass& pass) {
  const nvtx3::scoped_range range("lmhead.forward");
  for (int64_t i = 0; i < num_tiles(); ++i) {
    LMHEAD_RETURN_IF_ERROR(Logits(pass, TileAt(i)));
    LMHEAD_RETURN_IF_ERROR(Statistics(pass, TileAt(i)));
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::TokenLosses(const Pass& pass) {
  const bool has_grads = pass.mode != BackwardMode::kNone;
  return CudaStatus(
      kernels::LaunchTokenLoss(
          pass.num_rows, static_cast<const RowInput*>(pass.batch.device.row_inputs),
          static_cast<const RowStats*>(buffers_.row_stats), buffers_.nonfinite,
          {.label_smoothing = pass.recipe.label_smoothing,
           .z_loss = pass.recipe.z_loss,
           .class_weights = pass.class_weights,
           .vocab_size = spec_.vocab_size,
           .logit_scale = spec_.logit_scale,
           .softcap = spec_.softcap,
           .entropy = pass.entropy},
          static_cast<RowLoss*>(pass.batch.device.row_losses),
          has_grads ? static_cast<RowGrad*>(buffers_.row_grads) : nullptr, streams_.compute),
      "token_loss");
}

// Tiles backwards, because the logits of the last one are still there; under retain and frozen it
// is the only one. What goes down is ready before the last grad_weight, which hides the copy.
absl::Status CudaBackend::Backward(const Pass& pass) {
  const nvtx3::scoped_range range("lmhead.backward");
  if (pass.mode == BackwardMode::kNone) {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(pass.batch.grads_ready, streams_.compute));
    return CudaStatus(cudaEventRecord(pass.batch.compute_done, streams_.compute), "compute_done");
  }
  const int64_t last = num_tiles() - 1;
  for (int64_t i = last; i >= 0; --i) {
    const VocabTile tile = TileAt(i);
    if (i != last) LMHEAD_RETURN_IF_ERROR(Logits(pass, tile));
    LMHEAD_RETURN_IF_ERROR(GradLogits(pass, tile));
    if (pass.grad_hidden) LMHEAD_RETURN_IF_ERROR(GradHidden(pass, tile, i == last));
    if (i == 0) LMHEAD_RETURN_IF_ERROR(ConvertGradHidden(pass));
    if (pass.mode == BackwardMode::kHiddenAndWeight) LMHEAD_RETURN_IF_ERROR(GradWeight(pass, tile));
  }
  return CudaStatus(cudaEventRecord(pass.batch.compute_done, streams_.compute), "compute_done");
}

absl::Status CudaBackend::Logits(const Pass& pass, VocabTile tile) {
  return gemm_->Run({.product = HeadProduct::kLogits,
                     .rows = pass.num_rows,
                     .cols = tile.cols,
                     .hidden = buffers_.hidden,
                     .weight = WeightAt(tile.start),
                     .logits = buffers_.logits,
                     .bias = BiasAt(tile.start)},
                    streams_.compute);
}

absl::Status CudaBackend::Statistics(const Pass& pass, VocabTile tile) {
  return CudaStatus(
      kernels::LaunchShardStats(LogitsView(pass), tile,
                                static_cast<const RowInput*>(pass.batch.device.row_inputs),
                                {.transform = Transform(),
                                 .class_weights = pass.class_weights,
                                 .entropy = pass.entropy,
                                 .smoothing = pass.recipe.label_smoothing != 0.0f,
                                 .merge = tile.start != 0},
                                static_cast<RowStats*>(buffers_.row_stats), streams_.compute),
      "shard_stats");
}

absl::Status CudaBackend::GradLogits(const Pass& pass, VocabTile tile) {
  const bool smoothing = pass.recipe.label_smoothing != 0.0f;
  return CudaStatus(kernels::LaunchGradLogits(
                        LogitsView(pass), tile, static_cast<const RowGrad*>(buffers_.row_grads),
                        Transform(), smoothing ? pass.class_weights : nullptr, streams_.compute),
                    "grad_logits");
}

absl::Status CudaBackend::GradHidden(const Pass& pass, VocabTile tile, bool first) {
  return gemm_->Run({.product = HeadProduct::kGradHidden,
                     .rows = pass.num_rows,
                     .cols = tile.cols,
                     .weight = WeightAt(tile.start),
                     .logits = buffers_.logits,
                     .grad = buffers_.grad_hidden,
                     .beta = first ? 0.0f : 1.0f},
                    streams_.compute);
}

// The float32 sums, rounded once to what each chunk wants, over the rows that came up.
absl::Status CudaBackend::ConvertGradHidden(const Pass& pass) {
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : pass.batch.chunks) {
    MatrixView to = chunk.grad_hidden_states;
    if (to.data != nullptr) {
      to.data = StagedRow(pass.batch, batch_row);
      const ConstMatrixView from = {buffers_.grad_hidden + batch_row * spec_.hidden_size, to.rows,
                                    to.cols, DType::kFloat32};
      LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchConvert(from, to, streams_.compute));
    }
    batch_row += chunk.hidden_states.rows;
  }
  return CudaStatus(cudaEventRecord(pass.batch.grads_ready, streams_.compute), "grads_ready");
}

absl::Status CudaBackend::GradWeight(const Pass& pass, VocabTile tile) {
  if (spec_.has_bias) {
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchAddColumnSums(
        LogitsView(pass), tile.cols, buffers_.bias_state.grad + tile.start, streams_.compute));
  }
  return gemm_->Run({.product = HeadProduct::kGradWeight,
                     .rows = pass.num_rows,
                     .cols = tile.cols,
                     .hidden = buffers_.hidden,
                     .logits = buffers_.logits,
                     .grad = buffers_.weight_state.grad + tile.start * spec_.hidden_size,
                     .beta = 1.0f},
                    streams_.compute);
}

absl::Status CudaBackend::Download(const Pass& pass) {
  const nvtx3::scoped_range range("lmhead.download");
  const CudaBatch& batch = pass.batch;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(streams_.download, batch.grads_ready, 0));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(batch.download_start, streams_.download));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(batch.row_losses, batch.device.row_losses,
                                              static_cast<size_t>(pass.num_rows * kRowLossBytes),
                                              cudaMemcpyDeviceToHost, streams_.download));
  int64_t batch_row = 0;
  for (const ChunkRows& chunk : batch.chunks) {
    const MatrixView& to = chunk.grad_hidden_states;
    if (to.data != nullptr && pass.mode != BackwardMode::kNone) {
      LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to.data, StagedRow(batch, batch_row),
                                                  static_cast<size_t>(to.size_bytes()),
                                                  cudaMemcpyDeviceToHost, streams_.download));
    }
    batch_row += chunk.hidden_states.rows;
  }
  return CudaStatus(cudaEventRecord(batch.download_done, streams_.download), "download_done");
}

// --- Gradients and updates ---------------------------------------------------------------------

// What every call but ComputeBatch starts with.
absl::Status CudaBackend::WaitForBatches() {
  ring_->Drain();
  LMHEAD_RETURN_IF_ERROR(first_error_.Get());
  return first_error_.Check(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
}

absl::Status CudaBackend::SynchronizeCompute() {
  return CudaStatus(cudaStreamSynchronize(streams_.compute), "cudaStreamSynchronize");
}

absl::StatusOr<double> CudaBackend::GradSquaredNorm() {
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  double norm = 0.0;
  if (!spec_.trainable) return norm;
  LMHEAD_RETURN_IF_ERROR(first_error_.Check(SquaredNorm(&norm)));
  return norm;
}

absl::Status CudaBackend::SquaredNorm(double* result) {
  LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchSquaredNorm(buffers_.weight_state.grad, weight_count(),
                                                         /*add=*/false, buffers_.norm_partials,
                                                         buffers_.norm, streams_.compute));
  if (spec_.has_bias) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchSquaredNorm(buffers_.bias_state.grad, plan_.shard_size, /*add=*/true,
                                   buffers_.norm_partials, buffers_.norm, streams_.compute));
  }
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(result, buffers_.norm, sizeof(double),
                                              cudaMemcpyDeviceToHost, streams_.compute));
  return SynchronizeCompute();
}

absl::Status CudaBackend::ApplyUpdate(const OptimizerUpdate& update) {
  const nvtx3::scoped_range range("lmhead.update");
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  if (!std::isfinite(update.learning_rate) || !std::isfinite(update.grad_multiplier)) {
    return absl::InvalidArgumentError(absl::StrCat("head ", spec_.name, ": learning_rate ",
                                                   update.learning_rate, " and grad_multiplier ",
                                                   update.grad_multiplier, " must be finite"));
  }
  if (!spec_.trainable || spec_.optimizer.kind == OptimizerKind::kNone) return DiscardGradients();
  ++num_updates_;
  const bool rounded = buffers_.master_weight != nullptr;
  float* const weight = rounded ? buffers_.master_weight : static_cast<float*>(buffers_.weight);
  LMHEAD_RETURN_IF_ERROR(first_error_.Check(
      UpdateParameter(buffers_.weight_state, weight, weight_count(),
                      rounded ? buffers_.weight : nullptr, spec_.optimizer.weight_decay, update)));
  if (spec_.has_bias) {
    const double decay = spec_.optimizer.decay_bias ? spec_.optimizer.weight_decay : 0.0;
    LMHEAD_RETURN_IF_ERROR(
        first_error_.Check(UpdateParameter(buffers_.bias_state, buffers_.bias, plan_.shard_size,
                                           buffers_.rounded_bias, decay, update)));
  }
  return first_error_.Check(SynchronizeCompute());
}

absl::Status CudaBackend::UpdateParameter(const CudaParameter& state, float* parameter,
                                          int64_t count, void* rounded, double weight_decay,
                                          const OptimizerUpdate& update) {
  return CudaStatus(kernels::LaunchOptimizerUpdate(spec_.optimizer,
                                                   {.learning_rate = update.learning_rate,
                                                    .grad_multiplier = update.grad_multiplier,
                                                    .weight_decay = weight_decay,
                                                    .update_number = num_updates_},
                                                   {.count = count,
                                                    .parameter = parameter,
                                                    .grad = state.grad,
                                                    .exp_avg = state.exp_avg,
                                                    .exp_avg_sq = state.exp_avg_sq,
                                                    .bfloat16_parameter = rounded},
                                                   streams_.compute),
                    "optimizer_update");
}

absl::Status CudaBackend::DiscardGradients() {
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  if (!spec_.trainable) return absl::OkStatus();
  const auto zero = [this](float* grad, int64_t count) {
    const cudaError_t error =
        cudaMemsetAsync(grad, 0, static_cast<size_t>(count) * sizeof(float), streams_.compute);
    return first_error_.Check(CudaStatus(error, "zeroing gradients"));
  };
  LMHEAD_RETURN_IF_ERROR(zero(buffers_.weight_state.grad, weight_count()));
  if (spec_.has_bias) LMHEAD_RETURN_IF_ERROR(zero(buffers_.bias_state.grad, plan_.shard_size));
  return first_error_.Check(SynchronizeCompute());
}

// --- Tensors -----------------------------------------------------------------------------------

absl::Status CudaBackend::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                      ConstMatrixView rows) {
  return absl::UnimplementedError("AddGradRows");
}

absl::StatusOr<MatrixView> CudaBackend::Tensor(TensorKind kind) const {
  const bool of_bias = kind == TensorKind::kBias || kind == TensorKind::kGradBias;
  if (of_bias && !spec_.has_bias) {
    return absl::FailedPreconditionError(absl::StrCat("head ", spec_.name, " has no bias"));
  }
  MatrixView view{buffers_.weight, plan_.shard_size, spec_.hidden_size, spec_.weight_dtype};
  if (of_bias) view = {buffers_.bias, plan_.shard_size, 1, DType::kFloat32};
  if (kind == TensorKind::kWeight || kind == TensorKind::kBias) return view;
  if (!spec_.trainable) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", spec_.name, " is not trainable: it has neither gradients nor a master weight"));
  }
  if (kind == TensorKind::kGradWeight) view.data = buffers_.weight_state.grad;
  if (kind == TensorKind::kGradBias) view.data = buffers_.bias_state.grad;
  if (kind == TensorKind::kMasterWeight && buffers_.master_weight != nullptr) {
    view.data = buffers_.master_weight;
  }
  view.dtype = DType::kFloat32;
  return view;
}

absl::StatusOr<MatrixView> CudaBackend::TensorRows(TensorKind kind, int64_t row_start, int64_t rows,
                                                   int64_t cols) const {
  absl::StatusOr<MatrixView> tensor = Tensor(kind);
  if (!tensor.ok()) return tensor;
  if (cols != tensor->cols || rows < 0 || row_start < 0 || row_start > tensor->rows - rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": rows [", row_start, ", ", row_start + rows, ") of ",
                     cols, " columns do not lie inside the tensor of ", tensor->rows, " rows and ",
                     tensor->cols, " columns"));
  }
  return PartOf(*tensor, row_start, rows);
}

absl::Status CudaBackend::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  if (kind != TensorKind::kWeight && kind != TensorKind::kBias) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": only the weight and the bias can be written"));
  }
  const auto tensor = TensorRows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  return first_error_.Check(CopyRowsIn(rows, *tensor, Twin(kind, row_start)));
}

// The same rows in the other dtype, where the head has them: the master weight, the rounded bias.
MatrixView CudaBackend::Twin(TensorKind kind, int64_t row_start) const {
  if (kind == TensorKind::kWeight && buffers_.master_weight != nullptr) {
    return {buffers_.master_weight + row_start * spec_.hidden_size, 0, spec_.hidden_size,
            DType::kFloat32};
  }
  if (kind == TensorKind::kBias && buffers_.rounded_bias != nullptr) {
    return {static_cast<uint16_t*>(buffers_.rounded_bias) + row_start, 0, 1, spec_.weight_dtype};
  }
  return {};
}

// Through the first batch's rows, which are free: as many rows at a time as go in there.
absl::Status CudaBackend::CopyRowsIn(ConstMatrixView rows, MatrixView to, MatrixView twin) {
  void* const staging = buffers_.batches[0].rows;
  const int64_t from_row_bytes = rows.cols * BytesPerElement(rows.dtype);
  for (int64_t start = 0; start < rows.rows; start += plan_.batch_tokens) {
    const int64_t count = std::min(plan_.batch_tokens, rows.rows - start);
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
        staging, static_cast<const std::byte*>(rows.data) + start * from_row_bytes,
        static_cast<size_t>(count * from_row_bytes), cudaMemcpyHostToDevice, streams_.compute));
    const ConstMatrixView from = {staging, count, rows.cols, rows.dtype};
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchConvert(from, PartOf(to, start, count), streams_.compute));
    if (twin.data == nullptr) continue;
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchConvert(from, PartOf(twin, start, count), streams_.compute));
  }
  return SynchronizeCompute();
}

absl::Status CudaBackend::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  const auto tensor = TensorRows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  if (rows.dtype != tensor->dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": the tensor is ", std::string(DTypeName(tensor->dtype)),
                     ", the rows to read into are ", std::string(DTypeName(rows.dtype))));
  }
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  const cudaError_t error =
      cudaMemcpyAsync(rows.data, tensor->data, static_cast<size_t>(rows.size_bytes()),
                      cudaMemcpyDeviceToHost, streams_.compute);
  LMHEAD_RETURN_IF_ERROR(first_error_.Check(CudaStatus(error, "reading rows")));
  return first_error_.Check(SynchronizeCompute());
}

// Empty when a head can live on the device, else why not.
std::string WhyNotAvailable(int device) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && device >= count) error = cudaErrorNoDevice;
  cudaDeviceProp properties{};
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return absl::StrCat("no CUDA device: ", cudaGetErrorString(error), "; use --backend=cpu");
  }
  if (properties.major < kComputeCapabilityMin) {
    return absl::StrCat("CUDA device ", device, " (", properties.name, ") has compute capability ",
                        properties.major, ".", properties.minor, ", ", kComputeCapabilityMin,
                        ".0 or later is needed; use --backend=cpu");
  }
  const auto library = CublasLtLibrary::Get();
  if (library.ok()) return {};
  return absl::StrCat(std::string(library.status().message()), "; or use --backend=cpu");
}

}  // namespace

bool CudaAvailable(std::string* why_not) {
  *why_not = WhyNotAvailable(0);
  return why_not->empty();
}

absl::StatusOr<CudaDevice> DescribeCudaDevice(int device) {
  cudaDeviceProp properties{};
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) error = cudaMemGetInfo(&free_bytes, &total_bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return absl::UnavailableError(
        absl::StrCat("CUDA device ", device, ": ", cudaGetErrorString(error)));
  }
  return CudaDevice{.name = properties.name,
                    .total_bytes = static_cast<int64_t>(total_bytes),
                    .used_bytes = static_cast<int64_t>(total_bytes - free_bytes)};
}

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateCudaBackend(const HeadSpec& spec,
                                                                  const MemoryPlan& plan,
                                                                  MemoryAccount* account,
                                                                  int device) {
  if (std::string why_not = WhyNotAvailable(device); !why_not.empty()) {
    return absl::UnavailableError(why_not);
  }
  auto backend = std::make_unique<CudaBackend>(spec, plan, device);
  LMHEAD_RETURN_IF_ERROR(backend->Init(account));
  return backend;
}

}  // namespace lmhead
