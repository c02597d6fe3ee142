#include "server/compute/cpu_backend.h"
#include "tests/conformance/backend_conformance.h"

namespace lmhead {
namespace {

const BackendUnderTest kCpu = {"cpu", BackendKind::kCpu, CreateCpuBackend};

INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, testing::ValuesIn(CasesOf(kCpu)), CaseName);
INSTANTIATE_TEST_SUITE_P(Cpu, TrainingConformance, testing::ValuesIn(TrainingCasesOf(kCpu)),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Cpu, GoldenConformance, testing::ValuesIn(GoldenCasesOf(kCpu)),
                         GoldenCaseName);

}  // namespace
}  // namespace lmhead
