#include "tests/util/golden_paths.h"

#include "bench/golden_case.h"
#include "proto/types/check.h"
#include "tests/util/paths.h"

namespace lmhead {

std::vector<std::string> CrossEntropyGoldenPaths() {
  absl::StatusOr<std::vector<std::string>> paths = bench::ListGoldenCases(GoldenFolder());
  LMHEAD_CHECK(paths.ok(), paths.status().ToString());
  std::erase_if(*paths, [](const std::string& path) {
    const absl::StatusOr<bench::GoldenCase> golden = bench::LoadGoldenCase(path);
    LMHEAD_CHECK(golden.ok(), golden.status().ToString());
    return !golden->unknown_fields.empty();
  });
  return *std::move(paths);
}

}  // namespace lmhead
