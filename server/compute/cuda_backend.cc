#include "server/compute/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <nvtx3/nvtx3.hpp>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/fill_noise.h"
#include "server/compute/batch_check.h"
#include "server/compute/cuda_head.h"
#include "server/compute/cuda_parameters.h"
#include "server/compute/cuda_pass.h"
#include "server/compute/cuda_status.h"
#include "server/compute/cuda_transfers.h"
#include "server/compute/staged_collective.h"
#include "server/compute/tensor_rows.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

// Products below it take less time than a trial is worth: cuBLASLt's first choice does.
constexpr double kTunedFlopsMin = 1e11;

// The least compute capability that the kernels are built for.
constexpr int kComputeCapabilityMin = 8;

// Host memory of a collective that is staged: arrays longer than that go in pieces.
constexpr int64_t kStagingBytesMin = int64_t{16} << 20;

// `given` in device memory, by way of `staged` where it is in host memory; null for a group of one.
absl::Status OnDevice(Collective* given, int64_t staging_bytes, int device,
                      std::unique_ptr<Collective>* staged, Collective** on_device) {
  *on_device = given;
  if (given == nullptr || given->memory() == Collective::Memory::kDevice) return absl::OkStatus();
  auto made = StageOnHost(given, staging_bytes, device);
  if (!made.ok()) return made.status();
  *staged = *std::move(made);
  *on_device = staged->get();
  return absl::OkStatus();
}

class CudaBackend final : public ComputeBackend {
 public:
  CudaBackend(const HeadSpec& spec, const MemoryPlan& plan, int device, const RankContext& context)
      : head_(spec, plan, device, context),
        first_error_(spec.name),
        parameters_(&head_),
        transfers_(&head_) {}
  ~CudaBackend() override { cudaSetDevice(head_.device); }

  // Everything that may fail; called once.
  absl::Status Init(MemoryAccount* account);

  void ComputeBatch(const BatchInput& input, BatchDone done) override;
  absl::Status ReduceGradients() override;
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
  absl::Status InitExchange();
  absl::Status TuneProducts();
  absl::Status TuneAt(int64_t rows, int64_t cols);
  absl::Status TuneTeacher(int64_t rows, int64_t cols);
  absl::Status Tune(const HeadProductCall& call);

  absl::Status Launch(const BatchInput& input, CudaBatch* batch);
  absl::Status LaunchPass(CudaPass* pass);
  absl::Status CheckOutcome(const absl::Status& status);
  absl::Status WaitForBatches();

  CudaHead head_;
  FirstError first_error_;
  CudaParameters parameters_;
  CudaTransfers transfers_;
  std::unique_ptr<CudaBatchRing> ring_;  // After what its thread and its batches use.
  int64_t num_updates_ = 0;
};

// --- Construction ------------------------------------------------------------------------------

absl::Status CudaBackend::Init(MemoryAccount* account) {
  auto arena = DeviceArena::Create(head_.plan, account, head_.device);
  if (!arena.ok()) return arena.status();
  head_.arena = *std::move(arena);
  head_.buffers =
      LayOutCuda(head_.spec, head_.plan, [this](MemoryCategory category, int64_t bytes) {
        return head_.arena->Carve(category, bytes);
      });
  head_.arena->Seal();
  LMHEAD_RETURN_IF_ERROR(head_.streams.Create());
  auto gemm = HeadGemm::Create({.dtype = head_.spec.weight_dtype,
                                .hidden_size = head_.spec.hidden_size,
                                .logits_stride = CudaLogitsStride(head_.plan),
                                .workspace = head_.buffers.workspace,
                                .workspace_bytes = kCudaWorkspaceBytes});
  if (!gemm.ok()) return gemm.status();
  head_.gemm = *std::move(gemm);
  LMHEAD_RETURN_IF_ERROR(InitExchange());
  auto ring = CudaBatchRing::Create(head_.buffers, head_.plan.batch_tokens, head_.device,
                                    &head_.streams, head_.ranks.collective, &first_error_);
  if (!ring.ok()) return ring.status();
  ring_ = *std::move(ring);
  LMHEAD_RETURN_IF_ERROR(TuneProducts());
  return parameters_.InitialiseWeight();
}

absl::Status CudaBackend::InitExchange() {
  LMHEAD_RETURN_IF_CUDA_ERROR(
      cudaEventCreateWithFlags(&head_.grad_hidden_free, cudaEventDisableTiming));
  const int64_t gathered = (head_.ranks.num_ranks + 1) * CudaExchangedBytes(head_.spec, head_.plan);
  LMHEAD_RETURN_IF_ERROR(OnDevice(head_.ranks.collective, std::max(gathered, kStagingBytesMin),
                                  head_.device, &head_.staged, &head_.collective));
  return OnDevice(head_.ranks.peers, kStagingBytesMin, head_.device, &head_.staged_peers,
                  &head_.peers);
}

// Full batches first, then halves of them, as long as it pays.
absl::Status CudaBackend::TuneProducts() {
  const nvtx3::scoped_range range("lmhead.tune");
  const int64_t hidden_size = head_.spec.hidden_size;
  const int64_t batch_tokens = head_.plan.batch_tokens;
  const int64_t cols = head_.TileAt(0).cols;
  const auto flops = [&](int64_t rows) {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(cols) *
           static_cast<double>(hidden_size);
  };
  if (flops(batch_tokens) < kTunedFlopsMin) return absl::OkStatus();
  const DType dtype = head_.spec.weight_dtype;
  const MatrixView noisy[] = {
      {head_.buffers.weight, head_.range.size(), hidden_size, dtype},
      {head_.buffers.hidden, batch_tokens, hidden_size, dtype},
      {head_.buffers.logits, batch_tokens, CudaLogitsStride(head_.plan), dtype}};
  for (uint32_t i = 0; i < std::size(noisy); ++i) {
    LMHEAD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchFillNoise(noisy[i], 0.05f, i, head_.streams.compute));
  }
  const int64_t last_cols = head_.TileAt(head_.num_tiles() - 1).cols;
  for (int64_t rows = batch_tokens; flops(rows) >= kTunedFlopsMin;
       rows = HeadGemm::Bucket(rows) / 2) {
    LMHEAD_RETURN_IF_ERROR(TuneAt(rows, cols));
    if (last_cols != cols) LMHEAD_RETURN_IF_ERROR(TuneAt(rows, last_cols));
  }
  LMHEAD_RETURN_IF_ERROR(parameters_.ZeroWeight());  // Undoes what the trials wrote.
  return parameters_.ZeroGradients();
}

absl::Status CudaBackend::TuneAt(int64_t rows, int64_t cols) {
  const CudaBuffers& buffers = head_.buffers;
  HeadProductCall call = {.rows = rows,
                          .cols = cols,
                          .hidden = buffers.hidden,
                          .weight = buffers.weight,
                          .logits = buffers.logits};
  call.bias = head_.BiasAt(head_.range.start, head_.spec.weight_dtype);
  LMHEAD_RETURN_IF_ERROR(Tune(call));
  call.bias = nullptr;
  LMHEAD_RETURN_IF_ERROR(TuneTeacher(rows, cols));
  if (buffers.grad_hidden != nullptr) {
    call.product = HeadProduct::kGradHidden;
    call.grad = buffers.grad_hidden;
    call.beta = head_.num_tiles() > 1 ? 1.0f : 0.0f;
    LMHEAD_RETURN_IF_ERROR(Tune(call));
  }
  if (!head_.spec.trainable) return absl::OkStatus();
  call.product = HeadProduct::kGradWeight;
  call.grad = buffers.weight_state.grad;
  call.beta = 1.0f;
  return Tune(call);
}

// Of the widest teacher, if it is of the head's dtype. The head's weight stands for a teacher's
// that is not wider; the product of any other takes cuBLASLt's first choice.
absl::Status CudaBackend::TuneTeacher(int64_t rows, int64_t cols) {
  const int64_t width = head_.spec.teacher_hidden_size;
  if (width == 0 || width > head_.spec.hidden_size) return absl::OkStatus();
  return Tune({.product = HeadProduct::kTeacherLogits,
               .rows = rows,
               .cols = cols,
               .hidden = head_.buffers.hidden,
               .weight = head_.buffers.weight,
               .logits = head_.buffers.teacher_logits,
               .teacher = {.hidden_size = width,
                           .dtype = head_.spec.weight_dtype,
                           .logits_dtype = head_.spec.weight_dtype,
                           .logits_stride = CudaLogitsStride(head_.plan)}});
}

absl::Status CudaBackend::Tune(const HeadProductCall& call) {
  const absl::StatusOr<std::string> chosen = head_.gemm->Tune(call, head_.streams.compute);
  if (!chosen.ok()) return chosen.status();
  spdlog::info("head {}: {}", head_.spec.name, *chosen);
  return absl::OkStatus();
}

// --- Batches -----------------------------------------------------------------------------------

void CudaBackend::ComputeBatch(const BatchInput& input, BatchDone done) {
  const nvtx3::scoped_range range("lmhead.batch");
  CudaBatch* const batch = ring_->Begin(input, std::move(done));
  batch->status = Launch(input, batch);
  ring_->Finish(batch);
}

absl::Status CudaBackend::Launch(const BatchInput& input, CudaBatch* batch) {
  LMHEAD_RETURN_IF_ERROR(first_error_.Get());
  LMHEAD_RETURN_IF_ERROR(CheckBatch(head_.spec, head_.plan, input));
  CudaPass pass = {.head = head_, .input = input, .batch = *batch};
  if (input.teacher != nullptr) {
    pass.teacher = &static_cast<CudaBackend*>(input.teacher)->head_;
    LMHEAD_RETURN_IF_ERROR(
        CheckTeacher(head_.spec, head_.range, pass.teacher->spec, pass.teacher->range, input));
  }
  for (const ChunkRows& chunk : input.chunks) {
    pass.num_rows += chunk.hidden_states.rows;
    pass.staged_element_bytes =
        std::max(pass.staged_element_bytes, BytesPerElement(chunk.hidden_states.dtype));
    pass.staged_teacher_element_bytes = std::max(
        pass.staged_teacher_element_bytes, BytesPerElement(chunk.teacher_hidden_states.dtype));
  }
  return CheckOutcome(LaunchPass(&pass));
}

absl::Status CudaBackend::LaunchPass(CudaPass* pass) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaSetDevice(head_.device));
  LMHEAD_RETURN_IF_ERROR(transfers_.Upload(pass));
  LMHEAD_RETURN_IF_ERROR(PassRunner(&head_, pass).Run());
  return transfers_.Download(*pass);
}

// A failure is fatal, unless it is that of the group of ranks: that one can be connected anew.
absl::Status CudaBackend::CheckOutcome(const absl::Status& status) {
  for (Collective* const collective : {head_.collective, head_.peers}) {
    if (!status.ok() && collective != nullptr && !collective->Check().ok()) return status;
  }
  return first_error_.Check(status);
}

// What every call but ComputeBatch starts with.
absl::Status CudaBackend::WaitForBatches() {
  ring_->Drain();
  LMHEAD_RETURN_IF_ERROR(first_error_.Get());
  return first_error_.Check(CudaStatus(cudaSetDevice(head_.device), "cudaSetDevice"));
}

// --- Parameters --------------------------------------------------------------------------------

absl::Status CudaBackend::ReduceGradients() {
  if (!head_.spec.trainable || head_.peers == nullptr) return absl::OkStatus();
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  return CheckOutcome(parameters_.ReduceGradients());
}

absl::StatusOr<double> CudaBackend::GradSquaredNorm() {
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  absl::StatusOr<double> norm = parameters_.GradSquaredNorm();
  LMHEAD_RETURN_IF_ERROR(first_error_.Check(norm.status()));
  return norm;
}

absl::Status CudaBackend::ApplyUpdate(const OptimizerUpdate& update) {
  const nvtx3::scoped_range range("lmhead.update");
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  if (!std::isfinite(update.learning_rate) || !std::isfinite(update.grad_multiplier)) {
    return absl::InvalidArgumentError(absl::StrCat("head ", head_.spec.name, ": learning_rate ",
                                                   update.learning_rate, " and grad_multiplier ",
                                                   update.grad_multiplier, " must be finite"));
  }
  if (!head_.spec.trainable || head_.spec.optimizer.kind == OptimizerKind::kNone) {
    return DiscardGradients();
  }
  return first_error_.Check(parameters_.Update(update, ++num_updates_));
}

absl::Status CudaBackend::DiscardGradients() {
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  return first_error_.Check(parameters_.ZeroGradients());
}

absl::Status CudaBackend::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                      ConstMatrixView rows) {
  LMHEAD_RETURN_IF_ERROR(CheckGradRows(head_.spec, row_ids, row_start, rows));
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  return first_error_.Check(parameters_.AddGradRows(row_ids, row_start, rows));
}

absl::Status CudaBackend::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  if (IsGradient(kind)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", head_.spec.name, ": gradients are added to, not written"));
  }
  if (kind == TensorKind::kMasterWeight && head_.buffers.master_weight != nullptr) {
    rows = ClipRows(rows, head_.owned, &row_start);
    if (rows.rows == 0) return absl::OkStatus();
  }
  const auto tensor = parameters_.Rows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  return first_error_.Check(parameters_.CopyIn(kind, row_start, rows, *tensor));
}

absl::Status CudaBackend::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  const auto tensor = parameters_.Rows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  if (rows.dtype != tensor->dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        "head ", head_.spec.name, ": the tensor is ", std::string(DTypeName(tensor->dtype)),
        ", the rows to read into are ", std::string(DTypeName(rows.dtype))));
  }
  LMHEAD_RETURN_IF_ERROR(WaitForBatches());
  return first_error_.Check(parameters_.CopyOut(*tensor, rows));
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
                                                                  int device,
                                                                  const RankContext& context) {
  if (std::string why_not = WhyNotAvailable(device); !why_not.empty()) {
    return absl::UnavailableError(why_not);
  }
  auto backend = std::make_unique<CudaBackend>(spec, plan, device, context);
  LMHEAD_RETURN_IF_ERROR(backend->Init(account));
  return backend;
}

}  // namespace lmhead
