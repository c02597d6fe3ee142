#include "server/memory/device_arena.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "server/memory/cuda_layout.h"

namespace lmhead {
namespace {

absl::Status NoRoom(const MemoryPlan& plan, int device, cudaError_t error) {
  cudaGetLastError();  // An allocation that failed is reported here, not by a later launch.
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  const std::string text = absl::StrCat(
      "CUDA device ", device, " gave no ", plan.TotalBytes(), " bytes (", cudaGetErrorString(error),
      "; ", free_bytes, " of ", total_bytes, " are free). Wanted:\n", plan.Breakdown());
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text)
                                            : absl::UnavailableError(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceArena>> DeviceArena::Create(const MemoryPlan& plan,
                                                                 MemoryAccount* account,
                                                                 int device) {
  const auto bytes = static_cast<size_t>(plan.TotalBytes());
  LMHEAD_CHECK(bytes > 0, "an empty plan");
  void* base = nullptr;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMalloc(&base, bytes);
  if (error != cudaSuccess) return NoRoom(plan, device, error);
  error = cudaMemset(base, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    cudaFree(base);
    return absl::UnavailableError(absl::StrCat("CUDA device ", device, ": zeroing ", bytes,
                                               " bytes: ", cudaGetErrorString(error)));
  }
  return std::unique_ptr<DeviceArena>(
      new DeviceArena(plan, account, device, static_cast<std::byte*>(base)));
}

DeviceArena::~DeviceArena() {
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    account_->Subtract(static_cast<MemoryCategory>(i), carved_[i]);
  }
  cudaSetDevice(device_);
  cudaFree(base_);
}

void* DeviceArena::Carve(MemoryCategory category, int64_t bytes) {
  if (bytes == 0) return nullptr;
  int64_t& carved = carved_[static_cast<size_t>(category)];
  const int64_t rounded = (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
  LMHEAD_CHECK(
      !sealed_ && bytes > 0 && rounded <= plan_[category] - carved,
      absl::StrCat("carving ", bytes, " bytes of ", std::string(MemoryCategoryName(category)), ": ",
                   carved, " of the plan's ", plan_[category], " are carved, sealed ", sealed_));
  void* const piece = base_ + offset_;
  carved += rounded;
  offset_ += rounded;
  account_->Add(category, rounded);
  return piece;
}

}  // namespace lmhead
