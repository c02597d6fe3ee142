#include "server/memory/system_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lmhead {
namespace {

std::optional<std::string> ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) return std::nullopt;
  std::ostringstream contents;
  contents << in.rdbuf();
  return contents.str();
}

// The value of "Name:   123 kB" in a /proc file, in bytes.
std::optional<int64_t> FieldBytes(const std::string& contents, std::string_view name) {
  std::istringstream lines(contents);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string label;
    int64_t kilobytes = 0;
    if (words >> label >> kilobytes && label == name) return kilobytes * 1024;
  }
  return std::nullopt;
}

// A limit file holds a number or "max". Version 1 writes no limit as a number near 2^63, which the
// minimum with the machine's memory takes care of.
std::optional<int64_t> ReadLimit(const std::filesystem::path& path) {
  const std::optional<std::string> contents = ReadFile(path);
  int64_t bytes = 0;
  if (!contents.has_value() || !absl::SimpleAtoi(*contents, &bytes)) return std::nullopt;
  return bytes;
}

// The smallest limit from `group` up to the mount point. Inside a container the group's path may be
// the host's, of which only the mount point itself exists.
int64_t SmallestLimit(const std::filesystem::path& mount, std::filesystem::path group,
                      const char* file, int64_t smallest) {
  group = group.relative_path();
  while (true) {
    smallest = std::min(smallest, ReadLimit(mount / group / file).value_or(smallest));
    if (group.empty()) return smallest;
    group = group.parent_path();
  }
}

}  // namespace

absl::StatusOr<int64_t> ReadSystemMemoryBytes(const std::string& root) {
  const std::filesystem::path base(root);
  const std::optional<std::string> meminfo = ReadFile(base / "proc/meminfo");
  const std::optional<int64_t> total =
      meminfo.has_value() ? FieldBytes(*meminfo, "MemTotal:") : std::nullopt;
  if (!total.has_value()) {
    return absl::NotFoundError(
        "/proc/meminfo states no MemTotal; give the limit with --memory_limit_bytes");
  }
  int64_t bytes = *total;
  // Lines are "0::/path" for version 2 and "7:memory,cpu:/path" for version 1.
  std::istringstream lines(ReadFile(base / "proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (fields[0] == "0" && fields[1].empty()) {
      bytes = SmallestLimit(base / "sys/fs/cgroup", fields[2], "memory.max", bytes);
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      bytes =
          SmallestLimit(base / "sys/fs/cgroup/memory", fields[2], "memory.limit_in_bytes", bytes);
    }
  }
  return bytes;
}

absl::StatusOr<ProcessMemory> ReadProcessMemory(const std::string& root) {
  const std::optional<std::string> status =
      ReadFile(std::filesystem::path(root) / "proc/self/status");
  if (!status.has_value()) return absl::NotFoundError("/proc/self/status cannot be read");
  const std::optional<int64_t> resident = FieldBytes(*status, "VmRSS:");
  const std::optional<int64_t> peak = FieldBytes(*status, "VmHWM:");
  if (!resident.has_value() || !peak.has_value()) {
    return absl::NotFoundError("/proc/self/status states no VmRSS or VmHWM");
  }
  return ProcessMemory{*resident, *peak};
}

}  // namespace lmhead
