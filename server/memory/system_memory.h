// What the operating system says about memory: of the machine or container, and of this process.

#ifndef LMHEAD_SERVER_MEMORY_SYSTEM_MEMORY_H_
#define LMHEAD_SERVER_MEMORY_SYSTEM_MEMORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace lmhead {

// Memory this process may use: the machine's, or the smallest limit of the control groups (version
// 2 or 1) it lives in. `root` is where /proc and /sys are found.
absl::StatusOr<int64_t> ReadSystemMemoryBytes(const std::string& root = "/");

// The limit that heads are admitted against when none is given: four fifths of it. The rest is for
// the staging slots, gRPC and the libraries.
constexpr int64_t DefaultMemoryLimitBytes(int64_t system_memory_bytes) {
  return system_memory_bytes / 5 * 4;
}

// Resident set of this process.
struct ProcessMemory {
  int64_t resident_bytes = 0;
  int64_t peak_resident_bytes = 0;
};
absl::StatusOr<ProcessMemory> ReadProcessMemory(const std::string& root = "/");

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_SYSTEM_MEMORY_H_
