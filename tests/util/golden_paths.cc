#include "tests/util/golden_paths.h"

#include <algorithm>
#include <filesystem>

#include "bench/golden_case.h"
#include "proto/types/check.h"
#include "tests/util/paths.h"

namespace lmhead {

std::vector<std::string> GoldenPaths() {
  absl::StatusOr<std::vector<std::string>> paths = bench::ListGoldenCases(GoldenFolder());
  LMHEAD_CHECK(paths.ok(), paths.status().ToString());
  return *std::move(paths);
}

std::string GoldenTestName(const std::string& path) {
  std::string name = std::filesystem::path(path).stem().string();
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

}  // namespace lmhead
