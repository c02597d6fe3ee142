#include "kernels/device/token_loss.cuh"
#include "kernels/launch.h"
#include "kernels/token_loss.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 128;

}  // namespace

cudaError_t LaunchTokenLoss(int64_t num_rows, const RowInput* rows, const RowStats* stats,
                            const uint8_t* nonfinite, const TokenLossOptions& options,
                            RowLoss* losses, RowGrad* grads, cudaStream_t stream) {
  device::
      TokenLossKernel<<<static_cast<unsigned>(CeilDiv(num_rows, kThreads)), kThreads, 0, stream>>>(
          num_rows, rows, stats, nonfinite, options, losses, grads);
  return cudaGetLastError();
}

}  // namespace lmhead::kernels
