// What a process computes on, and what it says of itself.

#ifndef LMHEAD_SERVER_SHARD_HARDWARE_H_
#define LMHEAD_SERVER_SHARD_HARDWARE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/config/server_config.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

struct Hardware {
  struct Device {
    int number = 0;  // CUDA's; 0 for the processor.
    std::string name;
    int64_t total_bytes = 0;
  };
  BackendKind kind = BackendKind::kCpu;
  std::string backend = "cpu";
  std::vector<Device> devices;  // Of this process's ranks, in their order; some may be the same.

  // Most of these ranks that share one device's memory.
  int32_t MostRanksOnADevice() const;
};

// Why heads cannot compute on a GPU here, and what to do; empty when they can. Slow at the first
// call (it starts CUDA).
std::string WhyNoGpu();

// The devices of `num_ranks` ranks of this process: the processor, or the GPUs `devices` in turn,
// device 0 when none are named. UNAVAILABLE for a backend or a device that is not there: with kAuto
// the processor takes the place of GPUs, but not of those that are named.
absl::StatusOr<Hardware> ChooseHardware(BackendChoice choice, const std::vector<int>& devices,
                                        int32_t num_ranks);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SHARD_HARDWARE_H_
