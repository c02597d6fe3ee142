// server/compute/cuda_backend.h of a build without CUDA.

#include "server/compute/cuda_backend.h"

namespace lmhead {
namespace {

constexpr char kNoCuda[] = "this binary was built without CUDA; use --backend=cpu";

}  // namespace

bool CudaAvailable(std::string* why_not) {
  *why_not = kNoCuda;
  return false;
}

absl::StatusOr<CudaDevice> DescribeCudaDevice(int device) {
  return absl::UnimplementedError(kNoCuda);
}

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateCudaBackend(const HeadSpec& spec,
                                                                  const MemoryPlan& plan,
                                                                  MemoryAccount* account,
                                                                  int device,
                                                                  const RankContext& context) {
  return absl::UnimplementedError(kNoCuda);
}

}  // namespace lmhead
