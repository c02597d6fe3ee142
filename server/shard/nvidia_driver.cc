#include "server/shard/nvidia_driver.h"

#include "absl/strings/str_cat.h"
#include "server/library/dynamic_library.h"

namespace lmhead {
namespace {

constexpr const char* kFileName = "libnvidia-ml.so.1";
constexpr unsigned int kTextBytes = 96;

// What is used of NVML, whose interface does not change.
struct NvmlMemory {
  unsigned long long total, free, used;
};

// -1 when NVML has no such function, else what it returns; 0 is success.
template <typename... Arguments>
int Call(DynamicLibrary* nvml, const char* name, Arguments... arguments) {
  int (*function)(Arguments...) = nullptr;
  nvml->Resolve(name, &function);
  return function == nullptr ? -1 : function(arguments...);
}

NvidiaDriver::Device ReadDevice(DynamicLibrary* nvml, unsigned int index) {
  void* device = nullptr;
  char name[kTextBytes] = "";
  NvmlMemory memory = {};
  if (Call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, &device) != 0 ||
      Call(nvml, "nvmlDeviceGetName", device, static_cast<char*>(name), kTextBytes) != 0 ||
      Call(nvml, "nvmlDeviceGetMemoryInfo", device, &memory) != 0) {
    return {};
  }
  return {.answers = true,
          .name = name,
          .total_bytes = static_cast<int64_t>(memory.total),
          .used_bytes = static_cast<int64_t>(memory.used)};
}

}  // namespace

absl::StatusOr<NvidiaDriver> ReadNvidiaDriver() {
  absl::StatusOr<DynamicLibrary> library = DynamicLibrary::Open("NVML", {kFileName});
  if (!library.ok()) {
    return absl::NotFoundError(
        absl::StrCat("there is no NVIDIA driver (", kFileName, " was not found)"));
  }
  DynamicLibrary* const nvml = &*library;
  if (const int error = Call(nvml, "nvmlInit_v2"); error != 0) {
    const absl::Status whole = nvml->Check();
    return absl::UnavailableError(absl::StrCat(
        "the NVIDIA driver does not start (",
        whole.ok() ? absl::StrCat("NVML error ", error) : std::string(whole.message()), ")"));
  }
  NvidiaDriver driver;
  char version[kTextBytes] = "unknown";
  Call(nvml, "nvmlSystemGetDriverVersion", static_cast<char*>(version), kTextBytes);
  driver.version = version;
  int cuda = 0;
  Call(nvml, "nvmlSystemGetCudaDriverVersion_v2", &cuda);
  driver.cuda_version = absl::StrCat(cuda / 1000, ".", cuda % 1000 / 10);
  unsigned int num_devices = 0;
  Call(nvml, "nvmlDeviceGetCount_v2", &num_devices);
  for (unsigned int i = 0; i < num_devices; ++i) driver.devices.push_back(ReadDevice(nvml, i));
  Call(nvml, "nvmlShutdown");
  return driver;
}

}  // namespace lmhead
