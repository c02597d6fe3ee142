// lmhead-bench kernel of a build without CUDA.

#include <cstdio>
#include <string>

#include "bench/commands.h"
#include "server/compute/cuda_backend.h"

namespace lmhead::bench {

int RunKernel(absl::Span<char* const> positional) {
  constexpr int kExitNotRun = 2;
  std::string why_not;
  CudaAvailable(&why_not);
  std::fprintf(stderr, "lmhead-bench kernel: %s\n", why_not.c_str());
  return kExitNotRun;
}

}  // namespace lmhead::bench
