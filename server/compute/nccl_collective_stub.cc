// server/compute/nccl_collective.h of a build without CUDA or without NCCL's header.

#include "server/compute/nccl_collective.h"

namespace lmhead {
namespace {

constexpr char kNoNccl[] = "this binary was built without NCCL; use --collective=gloo";

}  // namespace

bool NcclAvailable(std::string* why_not) {
  *why_not = kNoNccl;
  return false;
}

absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(int32_t rank, int32_t size,
                                                                 const NcclOptions& options) {
  return absl::UnimplementedError(kNoNccl);
}

}  // namespace lmhead
