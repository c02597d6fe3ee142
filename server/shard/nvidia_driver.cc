#include "server/shard/nvidia_driver.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

constexpr char kFileName[] = "libnvidia-ml.so.1";
constexpr unsigned int kTextBytes = 96;

// What is used of NVML, whose interface does not change.
struct NvmlMemory {
  unsigned long long total, free, used;
};

class Nvml {
 public:
  Nvml() : handle_(dlopen(kFileName, RTLD_NOW | RTLD_LOCAL)) {}
  ~Nvml() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  bool is_open() const { return handle_ != nullptr; }

  // -1 when the library has no such function, else what it returns; 0 is success.
  template <typename... Arguments>
  int Call(const char* name, Arguments... arguments) const {
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
    return function == nullptr ? -1 : function(arguments...);
  }

 private:
  void* const handle_;
};

NvidiaDriver::Device ReadDevice(const Nvml& nvml, unsigned int index) {
  void* device = nullptr;
  char name[kTextBytes] = "";
  NvmlMemory memory = {};
  if (nvml.Call("nvmlDeviceGetHandleByIndex_v2", index, &device) != 0 ||
      nvml.Call("nvmlDeviceGetName", device, static_cast<char*>(name), kTextBytes) != 0 ||
      nvml.Call("nvmlDeviceGetMemoryInfo", device, &memory) != 0) {
    return {};
  }
  return {.answers = true,
          .name = name,
          .total_bytes = static_cast<int64_t>(memory.total),
          .used_bytes = static_cast<int64_t>(memory.used)};
}

}  // namespace

absl::StatusOr<NvidiaDriver> ReadNvidiaDriver() {
  const Nvml nvml;
  if (!nvml.is_open()) {
    return absl::NotFoundError(
        absl::StrCat("there is no NVIDIA driver (", kFileName, " was not found)"));
  }
  if (const int error = nvml.Call("nvmlInit_v2"); error != 0) {
    return absl::UnavailableError(
        absl::StrCat("the NVIDIA driver does not start (NVML error ", error, ")"));
  }
  NvidiaDriver driver;
  char version[kTextBytes] = "unknown";
  nvml.Call("nvmlSystemGetDriverVersion", static_cast<char*>(version), kTextBytes);
  driver.version = version;
  int cuda = 0;
  nvml.Call("nvmlSystemGetCudaDriverVersion_v2", &cuda);
  driver.cuda_version = absl::StrCat(cuda / 1000, ".", cuda % 1000 / 10);
  unsigned int num_devices = 0;
  nvml.Call("nvmlDeviceGetCount_v2", &num_devices);
  for (unsigned int i = 0; i < num_devices; ++i) driver.devices.push_back(ReadDevice(nvml, i));
  nvml.Call("nvmlShutdown");
  return driver;
}

}  // namespace lmhead
