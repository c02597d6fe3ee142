// A kernel that faults on purpose.

#ifndef LMHEAD_TESTS_KERNELS_GPU_FAULT_H_
#define LMHEAD_TESTS_KERNELS_GPU_FAULT_H_

namespace lmhead {

// Launches it: from then on every CUDA call of the process fails, as after any fault of a kernel.
void LaunchFaultingKernel();

}  // namespace lmhead

#endif  // LMHEAD_TESTS_KERNELS_GPU_FAULT_H_
