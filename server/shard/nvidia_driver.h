// NVIDIA's driver, as the management library that comes with it (NVML) tells it. The library is
// opened when it is asked: every build starts without it.

#ifndef LMHEAD_SERVER_SHARD_NVIDIA_DRIVER_H_
#define LMHEAD_SERVER_SHARD_NVIDIA_DRIVER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lmhead {

// What to do without a driver.
inline constexpr char kMendDriver[] =
    "install the driver on the host; in a container, use NVIDIA's runtime and ask for GPUs (docker "
    "run --gpus all, nvidia.com/gpu)";

struct NvidiaDriver {
  struct Device {
    bool answers = false;  // What follows is known only of a device that answers.
    std::string name;
    int64_t total_bytes = 0;
    int64_t used_bytes = 0;  // By all processes.
  };
  std::string version;       // "580.82.07"
  std::string cuda_version;  // "13.0", the newest that it serves.
  std::vector<Device> devices;
};

// NOT_FOUND when there is no driver, UNAVAILABLE when it does not start. The message is what is
// wrong; kMendDriver says what to do.
absl::StatusOr<NvidiaDriver> ReadNvidiaDriver();

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_NVIDIA_DRIVER_H_
