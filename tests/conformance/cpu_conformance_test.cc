#include <initializer_list>
#include <utility>
#include <vector>

#include "server/compute/cpu_backend.h"
#include "server/compute/gloo_collective.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/conformance/property_conformance.h"

namespace lmhead {
namespace {

absl::StatusOr<std::unique_ptr<Collective>> CreateCollective(int32_t rank, int32_t size,
                                                             int32_t /*number_of_all*/) {
  return CreateGlooCollective(rank, size, GlooOptions());
}

BackendUnderTest CpuOf(int32_t num_ranks, int32_t num_replicas = 1) {
  return {.name = "cpu",
          .kind = BackendKind::kCpu,
          .num_ranks = num_ranks,
          .num_replicas = num_replicas,
          .create = CreateCpuBackend,
          .create_collective = CreateCollective};
}

// Cases of several numbers of ranks. Nine of them do not all get rows of the smallest vocabularies.
template <typename Case>
std::vector<Case> OnRanks(std::vector<Case> (*cases)(const BackendUnderTest&, DType),
                          std::initializer_list<int32_t> nums_ranks) {
  std::vector<Case> all;
  for (const int32_t num_ranks : nums_ranks) {
    const std::vector<Case> some = cases(CpuOf(num_ranks), DType::kFloat32);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

// Cases of several numbers of ranks a replica, and of replicas. Batches go to one after another.
template <typename Case>
std::vector<Case> OnReplicas(std::vector<Case> (*cases)(const BackendUnderTest&, DType),
                             std::initializer_list<std::pair<int32_t, int32_t>> layouts) {
  std::vector<Case> all;
  for (const auto& [num_ranks, num_replicas] : layouts) {
    const std::vector<Case> some = cases(CpuOf(num_ranks, num_replicas), DType::kFloat32);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(CpuReplicas, BackendConformance,
                         testing::ValuesIn(OnReplicas(CasesOf, {{1, 2}, {2, 2}, {1, 3}})),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(CpuReplicas, TrainingConformance,
                         testing::ValuesIn(OnReplicas(TrainingCasesOf, {{1, 2}, {2, 2}, {1, 3}})),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(CpuReplicas, GoldenConformance,
                         testing::ValuesIn(OnReplicas(GoldenCasesOf, {{2, 2}})), GoldenCaseName);
INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, testing::ValuesIn(OnRanks(CasesOf, {1, 3})),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Cpu, TrainingConformance,
                         testing::ValuesIn(OnRanks(TrainingCasesOf, {1, 3})), CaseName);
INSTANTIATE_TEST_SUITE_P(Cpu, GoldenConformance,
                         testing::ValuesIn(OnRanks(GoldenCasesOf, {1, 2, 3, 9})), GoldenCaseName);
INSTANTIATE_TEST_SUITE_P(Cpu, PropertyConformance,
                         testing::ValuesIn(PropertyCasesOf({CpuOf(1), CpuOf(2), CpuOf(3)})),
                         PropertyName);

}  // namespace
}  // namespace lmhead
