#include "server/compute/staged_collective.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "server/compute/cuda_status.h"
#include "server/memory/host_block.h"

namespace lmhead {
namespace {

class StagedCollective final : public Collective {
 public:
  StagedCollective(Collective* host, std::unique_ptr<HostBlock> staging, int64_t staging_bytes)
      : host_(host), staging_(std::move(staging)), staging_bytes_(staging_bytes) {}

  int32_t rank() const override { return host_->rank(); }
  int32_t size() const override { return host_->size(); }
  Memory memory() const override { return Memory::kDevice; }
  absl::Status Connect(RendezvousStore* store) override { return host_->Connect(store); }
  absl::Status Check() override { return host_->Check(); }
  void Abort(const absl::Status& reason) override { host_->Abort(reason); }

  absl::Status AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                         DeviceStream stream) override;
  absl::Status Reduce(float* data, int64_t count, int32_t root, DeviceStream stream) override {
    return InPieces(
        data, count * sizeof(float), rank() == root, stream, [&](void* piece, int64_t bytes) {
          return host_->Reduce(static_cast<float*>(piece), bytes / sizeof(float), root, nullptr);
        });
  }
  absl::Status AllReduce(float* data, int64_t count, DeviceStream stream) override {
    return AllReduceElements(data, count, stream);
  }
  absl::Status AllReduce(double* data, int64_t count, DeviceStream stream) override {
    return AllReduceElements(data, count, stream);
  }
  absl::Status Broadcast(void* data, int64_t num_bytes, int32_t root,
                         DeviceStream stream) override {
    return InPieces(data, num_bytes, rank() != root, stream, [&](void* piece, int64_t bytes) {
      return host_->Broadcast(piece, bytes, root, nullptr);
    });
  }

 private:
  template <typename T>
  absl::Status AllReduceElements(T* data, int64_t count, DeviceStream stream) {
    return InPieces(data, count * sizeof(T), /*comes_back=*/true, stream,
                    [&](void* piece, int64_t bytes) {
                      return host_->AllReduce(static_cast<T*>(piece), bytes / sizeof(T), nullptr);
                    });
  }

  absl::Status InPieces(void* data, int64_t num_bytes, bool comes_back, DeviceStream stream,
                        absl::FunctionRef<absl::Status(void*, int64_t)> call);
  absl::Status Down(const void* from, int64_t num_bytes, cudaStream_t stream);
  absl::Status Up(void* to, int64_t num_bytes, cudaStream_t stream);

  Collective* const host_;
  const std::unique_ptr<HostBlock> staging_;
  const int64_t staging_bytes_;
};

absl::Status StagedCollective::Down(const void* from, int64_t num_bytes, cudaStream_t stream) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
      staging_->data(), from, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToHost, stream));
  return CudaStatus(cudaStreamSynchronize(stream), "staging for a collective");
}

// Waits: the next call may be on another stream and uses the same staging memory.
absl::Status StagedCollective::Up(void* to, int64_t num_bytes, cudaStream_t stream) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, staging_->data(), static_cast<size_t>(num_bytes),
                                              cudaMemcpyHostToDevice, stream));
  return CudaStatus(cudaStreamSynchronize(stream), "staging for a collective");
}

absl::Status StagedCollective::InPieces(void* data, int64_t num_bytes, bool comes_back,
                                        DeviceStream stream,
                                        absl::FunctionRef<absl::Status(void*, int64_t)> call) {
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  for (int64_t start = 0; start < num_bytes; start += staging_bytes_) {
    const int64_t bytes = std::min(staging_bytes_, num_bytes - start);
    auto* const piece = static_cast<std::byte*>(data) + start;
    LMHEAD_RETURN_IF_ERROR(Down(piece, bytes, cuda_stream));
    LMHEAD_RETURN_IF_ERROR(call(staging_->data(), bytes));
    if (comes_back) LMHEAD_RETURN_IF_ERROR(Up(piece, bytes, cuda_stream));
  }
  return absl::OkStatus();
}

// What is sent lies behind what is received.
absl::Status StagedCollective::AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                                         DeviceStream stream) {
  const int64_t received = bytes_per_rank * size();
  LMHEAD_CHECK(received + bytes_per_rank <= staging_bytes_,
               absl::StrCat(received + bytes_per_rank, " bytes, room for ", staging_bytes_));
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  auto* const sent = staging_->data() + received;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(sent, send, static_cast<size_t>(bytes_per_rank),
                                              cudaMemcpyDeviceToHost, cuda_stream));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(cuda_stream));
  LMHEAD_RETURN_IF_ERROR(host_->AllGather(sent, staging_->data(), bytes_per_rank, nullptr));
  return Up(receive, received, cuda_stream);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> StageOnHost(Collective* host, int64_t staging_bytes,
                                                        int device) {
  LMHEAD_CHECK(host->memory() == Collective::Memory::kHost, "the collective is in device memory");
  constexpr int64_t kMultiple = 256;  // Whole elements of every type in a piece.
  const int64_t bytes = (staging_bytes + kMultiple - 1) / kMultiple * kMultiple;
  auto staging = HostBlock::Map(bytes);
  if (!staging.ok()) return staging.status();
  LMHEAD_RETURN_IF_ERROR((*staging)->Pin(device));
  return std::make_unique<StagedCollective>(host, *std::move(staging), bytes);
}

}  // namespace lmhead
