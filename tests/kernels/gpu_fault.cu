#include "tests/kernels/gpu_fault.h"

namespace lmhead {
namespace {

__global__ void Fault() { __trap(); }

}  // namespace

void LaunchFaultingKernel() { Fault<<<1, 1>>>(); }

}  // namespace lmhead
