#include "kernels/device/jsd_sums.cuh"
#include "kernels/jsd_sums.h"
#include "kernels/launch.h"
#include "kernels/pair_launch.h"

namespace lmhead::kernels {

cudaError_t LaunchJsdSums(const LogitsPair& pair, const PairStats* stats, float beta,
                          bool with_tail, bool add, float* sums, cudaStream_t stream) {
  if (!IsValid(pair)) return cudaErrorInvalidValue;
  return DispatchLogitsDType(pair.student.dtype, [&](auto zero) {
    device::JsdSumsKernel<decltype(zero)>
        <<<static_cast<unsigned>(pair.student.rows), device::kJsdThreads, 0, stream>>>(
            StudentSide(pair), TeacherSide(pair), pair.student.cols, pair.inverse_temperature,
            stats, beta, with_tail, add, sums);
    return cudaGetLastError();
  });
}

}  // namespace lmhead::kernels
