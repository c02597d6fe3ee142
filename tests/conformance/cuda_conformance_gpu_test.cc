#include "server/compute/cuda_backend.h"
#include "server/compute/gloo_collective.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/conformance/property_conformance.h"

namespace lmhead {

// Without a GPU there is nothing to instantiate.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TrainingConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PropertyConformance);

namespace {

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateOnFirstDevice(const HeadSpec& spec,
                                                                    const MemoryPlan& plan,
                                                                    MemoryAccount* account,
                                                                    const RankContext& context) {
  return CreateCudaBackend(spec, plan, account, /*device=*/0, context);
}

absl::StatusOr<std::unique_ptr<Collective>> CreateCollective(int32_t rank, int32_t size) {
  return CreateGlooCollective(rank, size, GlooOptions());
}

// Ranks share the device, through host memory.
BackendUnderTest CudaOf(int32_t num_ranks) {
  return {.name = "cuda",
          .kind = BackendKind::kCuda,
          .num_ranks = num_ranks,
          .create = CreateOnFirstDevice,
          .create_collective = CreateCollective};
}

bool HasGpu() {
  std::string why_not;
  return CudaAvailable(&why_not);
}

// Cases of several numbers of ranks, or none without a GPU.
template <typename Case>
std::vector<Case> OnRanks(std::vector<Case> (*cases)(const BackendUnderTest&, DType),
                          std::initializer_list<int32_t> nums_ranks) {
  std::vector<Case> all;
  if (!HasGpu()) return all;
  for (const int32_t num_ranks : nums_ranks) {
    const std::vector<Case> some = cases(CudaOf(num_ranks), DType::kBFloat16);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cuda, BackendConformance, testing::ValuesIn(OnRanks(CasesOf, {1, 2})),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, TrainingConformance,
                         testing::ValuesIn(OnRanks(TrainingCasesOf, {1, 2})), CaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, GoldenConformance,
                         testing::ValuesIn(OnRanks(GoldenCasesOf, {1, 2, 3})), GoldenCaseName);

std::vector<PropertyCase> PropertyCases() {
  if (!HasGpu()) return {};
  return PropertyCasesOf({CudaOf(1), CudaOf(2), CudaOf(3)}, DType::kBFloat16);
}
INSTANTIATE_TEST_SUITE_P(Cuda, PropertyConformance, testing::ValuesIn(PropertyCases()),
                         PropertyName);

TEST(CudaConformance, HasAGpu) {
  std::string why_not;
  if (!CudaAvailable(&why_not)) GTEST_SKIP() << why_not;
}

}  // namespace
}  // namespace lmhead
