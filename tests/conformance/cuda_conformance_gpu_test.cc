#include "server/compute/cuda_backend.h"
#include "tests/conformance/backend_conformance.h"

namespace lmhead {

// Without a GPU there is nothing to instantiate.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TrainingConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenConformance);

namespace {

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateOnFirstDevice(const HeadSpec& spec,
                                                                    const MemoryPlan& plan,
                                                                    MemoryAccount* account) {
  return CreateCudaBackend(spec, plan, account, /*device=*/0);
}

const BackendUnderTest kCuda = {"cuda", BackendKind::kCuda, CreateOnFirstDevice};

// The cases, or none without a GPU.
template <typename Case>
std::vector<Case> WithGpu(std::vector<Case> (*cases)(const BackendUnderTest&, DType)) {
  std::string why_not;
  if (!CudaAvailable(&why_not)) return {};
  return cases(kCuda, DType::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(Cuda, BackendConformance, testing::ValuesIn(WithGpu(CasesOf)), CaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, TrainingConformance, testing::ValuesIn(WithGpu(TrainingCasesOf)),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, GoldenConformance, testing::ValuesIn(WithGpu(GoldenCasesOf)),
                         GoldenCaseName);

TEST(CudaConformance, HasAGpu) {
  std::string why_not;
  if (!CudaAvailable(&why_not)) GTEST_SKIP() << why_not;
}

}  // namespace
}  // namespace lmhead
