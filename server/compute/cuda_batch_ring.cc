#include "server/compute/cuda_batch_ring.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/compute/cuda_status.h"

namespace lmhead {
namespace {

constexpr double kSecondsPerMillisecond = 1e-3;

double SecondsBetween(cudaEvent_t start, cudaEvent_t stop) {
  float milliseconds = 0.0f;
  if (cudaEventElapsedTime(&milliseconds, start, stop) != cudaSuccess) return 0.0;
  return milliseconds * kSecondsPerMillisecond;
}

double TokenLoss(const kernels::RowLoss& loss) {
  return static_cast<double>(loss.cross_entropy) + loss.z_loss + loss.divergence + loss.policy;
}

// Writes the outputs of one row that the chunk wants.
void WriteOutputs(const kernels::RowLoss& loss, int64_t row, const ChunkRows& chunk) {
  if (chunk.token_loss != nullptr) chunk.token_loss[row] = static_cast<float>(TokenLoss(loss));
  if (chunk.logprob != nullptr) chunk.logprob[row] = loss.logprob;
  if (chunk.lse != nullptr) chunk.lse[row] = loss.lse;
  if (chunk.entropy != nullptr) chunk.entropy[row] = loss.entropy;
  if (chunk.argmax != nullptr) chunk.argmax[row] = loss.argmax;
}

// Adds one row to the sums of its chunk.
void AddToSums(const kernels::RowLoss& loss, int32_t target, double weight, LossSums* sums) {
  ++sums->num_tokens;
  if (loss.state == kernels::RowLoss::kNonfinite) ++sums->num_nonfinite_rows;
  if (loss.state != kernels::RowLoss::kValid) return;
  ++sums->num_valid_tokens;
  if (loss.argmax == target) ++sums->num_correct;
  sums->weight_sum += weight * loss.class_weight;
  sums->entropy_sum += loss.entropy;
  sums->dropped_teacher_mass_sum += loss.dropped_teacher_mass;
  sums->num_clipped += loss.clipped;
  sums->old_policy_kl_sum += loss.old_policy_kl;
  if (weight == 0.0) return;  // A weight of 0 removes even an infinite loss.
  sums->loss_sum += weight * TokenLoss(loss);
  sums->cross_entropy_sum += weight * loss.cross_entropy;
  sums->z_loss_sum += weight * loss.z_loss;
  sums->divergence_sum += weight * loss.divergence;
  sums->policy_sum += weight * loss.policy;
}

std::vector<LossSums> SumUp(const CudaBatch& batch) {
  std::vector<LossSums> sums(batch.chunks.size());
  const kernels::RowLoss* loss = batch.row_losses;
  for (size_t i = 0; i < batch.chunks.size(); ++i) {
    const ChunkRows& chunk = batch.chunks[i];
    for (int64_t row = 0; row < chunk.hidden_states.rows; ++row, ++loss) {
      WriteOutputs(*loss, row, chunk);
      const float weight = chunk.token_weights.empty() ? 1.0f : chunk.token_weights[row];
      AddToSums(*loss, chunk.targets[row], weight, &sums[i]);
    }
  }
  return sums;
}

}  // namespace

absl::Status FirstError::Get() const {
  absl::MutexLock lock(&mu_);
  return first_;
}

absl::Status FirstError::Check(const absl::Status& status) {
  if (status.ok()) return status;
  absl::MutexLock lock(&mu_);
  if (first_.ok()) {
    first_ = absl::AbortedError(absl::StrCat(
        "head ", head_, " is poisoned by a GPU error: ", std::string(status.message()),
        "; its gradients are lost. Delete it and create it again; restart the server when that "
        "fails too"));
  }
  return first_;
}

CudaStreams::~CudaStreams() {
  for (cudaStream_t stream : {upload, compute, exchange, download}) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
}

absl::Status CudaStreams::Create() {
  for (cudaStream_t* stream : {&upload, &compute, &exchange, &download}) {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  }
  return absl::OkStatus();
}

absl::Status CudaStreams::Synchronize() const {
  for (cudaStream_t stream : {upload, compute, exchange, download}) {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  }
  return absl::OkStatus();
}

CudaBatch::~CudaBatch() {
  for (cudaEvent_t event : {upload_start, upload_done, compute_start, grad_hidden_done, grads_ready,
                            compute_done, download_start, download_done}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::Status CudaBatch::CreateEvents() {
  for (cudaEvent_t* event : {&upload_start, &upload_done, &compute_start, &grad_hidden_done,
                             &grads_ready, &compute_done, &download_start, &download_done}) {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(event, cudaEventBlockingSync));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaBatchRing>> CudaBatchRing::Create(
    const CudaBuffers& buffers, int64_t batch_tokens, int device, const CudaStreams* streams,
    Collective* collective, FirstError* first_error) {
  auto ring =
      std::unique_ptr<CudaBatchRing>(new CudaBatchRing(device, streams, collective, first_error));
  const int64_t batch_bytes = batch_tokens * (kRowInputBytes + kRowPolicyBytes + kRowLossBytes);
  auto pinned = HostBlock::Map(kCudaBatchesInFlight * batch_bytes);
  if (!pinned.ok()) return pinned.status();
  LMHEAD_RETURN_IF_ERROR((*pinned)->Pin(device));
  ring->pinned_ = *std::move(pinned);
  std::byte* next = ring->pinned_->data();
  const auto take = [&](int64_t row_bytes) {
    return std::exchange(next, next + batch_tokens * row_bytes);
  };
  for (int i = 0; i < kCudaBatchesInFlight; ++i) {
    CudaBatch& batch = ring->batches_[i];
    batch.device = buffers.batches[i];
    batch.row_losses = reinterpret_cast<kernels::RowLoss*>(take(kRowLossBytes));
    batch.row_policies = reinterpret_cast<kernels::RowPolicy*>(take(kRowPolicyBytes));
    batch.row_inputs = reinterpret_cast<kernels::RowInput*>(take(kRowInputBytes));
    LMHEAD_RETURN_IF_ERROR(batch.CreateEvents());
  }
  ring->thread_ = std::thread([ring = ring.get()] { ring->CompleteAll(); });
  return ring;
}

CudaBatchRing::~CudaBatchRing() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

CudaBatch* CudaBatchRing::Begin(const BatchInput& input, ComputeBackend::BatchDone done) {
  {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &CudaBatchRing::HasFree));
    ++num_under_way_;
  }
  CudaBatch* const batch = &batches_[next_];  // They are freed in the order they were lent.
  next_ = (next_ + 1) % kCudaBatchesInFlight;
  batch->chunks.assign(input.chunks.begin(), input.chunks.end());
  batch->done = std::move(done);
  batch->status = absl::OkStatus();
  return batch;
}

void CudaBatchRing::Finish(CudaBatch* batch) {
  absl::MutexLock lock(&mu_);
  finished_.push_back(batch);
}

void CudaBatchRing::Drain() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &CudaBatchRing::IsIdle));
}

void CudaBatchRing::CompleteAll() {
  cudaSetDevice(device_);
  while (true) {
    CudaBatch* batch = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &CudaBatchRing::HasWork));
      if (finished_.empty()) return;
      batch = finished_.front();
      finished_.pop_front();
    }
    absl::StatusOr<BatchOutput> output = Complete(batch);
    ComputeBackend::BatchDone done = std::exchange(batch->done, nullptr);
    done(std::move(output));
    absl::MutexLock lock(&mu_);
    --num_under_way_;
  }
}

absl::StatusOr<BatchOutput> CudaBatchRing::Complete(CudaBatch* batch) {
  if (!batch->status.ok()) {
    // Copies launched before the failure may still touch the chunks' memory.
    first_error_->Check(streams_->Synchronize()).IgnoreError();
    return batch->status;
  }
  absl::Status finished = CudaStatus(cudaEventSynchronize(batch->download_done), "download");
  if (finished.ok()) finished = CudaStatus(cudaEventSynchronize(batch->compute_done), "compute");
  if (finished = first_error_->Check(finished); !finished.ok()) return finished;
  // What an ended group left on the streams ran, and gave anything.
  if (collective_ != nullptr) LMHEAD_RETURN_IF_ERROR(collective_->Check());
  BatchOutput output;
  output.sums = SumUp(*batch);
  output.timings.upload_seconds = SecondsBetween(batch->upload_start, batch->upload_done);
  output.timings.compute_seconds = SecondsBetween(batch->compute_start, batch->compute_done);
  output.timings.download_seconds = SecondsBetween(batch->download_start, batch->download_done);
  return output;
}

}  // namespace lmhead
