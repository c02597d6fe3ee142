#include "server/shard/hardware.h"

#include <algorithm>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/compute/cuda_backend.h"
#include "server/memory/system_memory.h"
#include "server/shard/nvidia_driver.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

#ifdef LMHEAD_HAVE_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

std::string ProcessorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "cpu";
}

absl::StatusOr<Hardware> DescribeCpu(int32_t num_ranks) {
  absl::StatusOr<int64_t> bytes = ReadSystemMemoryBytes();
  if (!bytes.ok()) return bytes.status();
  const Hardware::Device processor = {.name = ProcessorModel(), .total_bytes = *bytes};
  return Hardware{.devices = std::vector<Hardware::Device>(num_ranks, processor)};
}

}  // namespace

int32_t Hardware::MostRanksOnADevice() const {
  std::map<int, int32_t> ranks_on;
  int32_t most = 1;
  for (const Device& device : devices) most = std::max(most, ++ranks_on[device.number]);
  return most;
}

std::string WhyNoGpu() {
  std::string why_not;
  if (CudaAvailable(&why_not)) return "";
  if (!kBuiltWithCuda) return why_not;
  // CUDA itself calls a driver that is not there one that is too old.
  const absl::StatusOr<NvidiaDriver> driver = ReadNvidiaDriver();
  if (!driver.ok()) {
    return absl::StrCat(driver.status().message(), ": ", kMendDriver, "; or use --backend=cpu");
  }
  return absl::StrCat("NVIDIA driver ", driver->version, ", CUDA ", driver->cuda_version, ", ",
                      driver->devices.size(), " GPUs: ", why_not);
}

absl::StatusOr<Hardware> ChooseHardware(BackendChoice choice, const std::vector<int>& devices,
                                        int32_t num_ranks) {
  if (choice == BackendChoice::kCpu) return DescribeCpu(num_ranks);
  if (const std::string why_not = WhyNoGpu(); !why_not.empty()) {
    if (choice == BackendChoice::kCuda) {
      return absl::UnavailableError(absl::StrCat("--backend=cuda: ", why_not));
    }
    if (!devices.empty()) {
      return absl::UnavailableError(
          absl::StrCat("--devices=", absl::StrJoin(devices, ","), ": ", why_not));
    }
    spdlog::info("computing on the CPU: {}", why_not);
    return DescribeCpu(num_ranks);
  }
  Hardware hardware = {.kind = BackendKind::kCuda, .backend = "cuda"};
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const int number = devices.empty() ? 0 : devices[rank % devices.size()];
    absl::StatusOr<CudaDevice> device = DescribeCudaDevice(number);
    if (!device.ok()) {
      return absl::Status(device.status().code(),
                          absl::StrCat("--devices: GPU ", number, ": ", device.status().message()));
    }
    hardware.devices.push_back(
        {.number = number, .name = device->name, .total_bytes = device->total_bytes});
  }
  return hardware;
}

}  // namespace lmhead
