#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "server/compute/cuda_backend.h"
#include "server/compute/gloo_collective.h"
#include "server/compute/nccl_collective.h"
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

absl::StatusOr<std::unique_ptr<Collective>> CreateGlooEnd(int32_t rank, int32_t size,
                                                          int32_t /*number_of_all*/) {
  return CreateGlooCollective(rank, size, GlooOptions());
}

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateOnOwnDevice(const HeadSpec& spec,
                                                                  const MemoryPlan& plan,
                                                                  MemoryAccount* account,
                                                                  const RankContext& context) {
  const int device = context.replica * context.num_ranks + context.rank;
  return CreateCudaBackend(spec, plan, account, device, context);
}

absl::StatusOr<std::unique_ptr<Collective>> CreateNcclEnd(int32_t rank, int32_t size,
                                                          int32_t number_of_all) {
  return CreateNcclCollective(rank, size, {.device = number_of_all});
}

int NumCudaDevices() {
  std::string why_not;
  int count = 0;
  return CudaAvailable(&why_not) && cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Of a replica, and how many of those.
struct Layout {
  int32_t num_ranks = 1;
  int32_t num_replicas = 1;
};
using Layouts = std::vector<Layout>;

// Ranks share the first device, through host memory.
BackendUnderTest OnFirstDevice(const Layout& layout) {
  return {.name = "cuda",
          .kind = BackendKind::kCuda,
          .num_ranks = layout.num_ranks,
          .num_replicas = layout.num_replicas,
          .create = CreateOnFirstDevice,
          .create_collective = CreateGlooEnd};
}

// Each rank has a device of its own.
BackendUnderTest OverNccl(const Layout& layout) {
  BackendUnderTest backend = OnFirstDevice(layout);
  backend.name = "nccl";
  backend.create = CreateOnOwnDevice;
  backend.create_collective = CreateNcclEnd;
  return backend;
}

// No layout without a GPU.
Layouts IfGpu(const Layouts& layouts) { return NumCudaDevices() > 0 ? layouts : Layouts(); }

// Every way to use the GPUs there are, two or more.
Layouts NcclLayouts() {
  Layouts layouts;
  const int num_devices = NumCudaDevices();
  for (int32_t ranks = num_devices; ranks > 0 && num_devices > 1; --ranks) {
    if (num_devices % ranks == 0) layouts.push_back({ranks, num_devices / ranks});
  }
  return layouts;
}

template <typename Case>
std::vector<Case> OnLayouts(std::vector<Case> (*cases)(const BackendUnderTest&, DType),
                            BackendUnderTest (*backend)(const Layout&), const Layouts& layouts) {
  std::vector<Case> all;
  for (const Layout& layout : layouts) {
    const std::vector<Case> some = cases(backend(layout), DType::kBFloat16);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

template <typename Case>
auto OnOneDevice(std::vector<Case> (*cases)(const BackendUnderTest&, DType),
                 const Layouts& layouts) {
  return testing::ValuesIn(OnLayouts(cases, OnFirstDevice, IfGpu(layouts)));
}

template <typename Case>
auto OnAllDevices(std::vector<Case> (*cases)(const BackendUnderTest&, DType)) {
  return testing::ValuesIn(OnLayouts(cases, OverNccl, NcclLayouts()));
}

INSTANTIATE_TEST_SUITE_P(Cuda, BackendConformance, OnOneDevice(CasesOf, {{1}, {2}}), CaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, TrainingConformance, OnOneDevice(TrainingCasesOf, {{1}, {2}}),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Cuda, GoldenConformance, OnOneDevice(GoldenCasesOf, {{1}, {2}, {3}}),
                         GoldenCaseName);

INSTANTIATE_TEST_SUITE_P(CudaReplicas, BackendConformance, OnOneDevice(CasesOf, {{1, 2}, {2, 2}}),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(CudaReplicas, TrainingConformance,
                         OnOneDevice(TrainingCasesOf, {{1, 2}, {2, 2}, {1, 3}}), CaseName);
INSTANTIATE_TEST_SUITE_P(CudaReplicas, GoldenConformance, OnOneDevice(GoldenCasesOf, {{2, 2}}),
                         GoldenCaseName);

INSTANTIATE_TEST_SUITE_P(Nccl, BackendConformance, OnAllDevices(CasesOf), CaseName);
INSTANTIATE_TEST_SUITE_P(Nccl, TrainingConformance, OnAllDevices(TrainingCasesOf), CaseName);
INSTANTIATE_TEST_SUITE_P(Nccl, GoldenConformance, OnAllDevices(GoldenCasesOf), GoldenCaseName);

std::vector<PropertyCase> PropertyCases() {
  if (NumCudaDevices() == 0) return {};
  return PropertyCasesOf({OnFirstDevice({1}), OnFirstDevice({2}), OnFirstDevice({3})},
                         DType::kBFloat16);
}
INSTANTIATE_TEST_SUITE_P(Cuda, PropertyConformance, testing::ValuesIn(PropertyCases()),
                         PropertyName);

TEST(CudaConformance, HasAGpu) {
  std::string why_not;
  if (!CudaAvailable(&why_not)) GTEST_SKIP() << why_not;
}

}  // namespace
}  // namespace lmhead
