#include "tests/util/paths.h"

#include <cstdlib>
#include <filesystem>

namespace lmhead {

std::string PathBesideTest(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}

std::string GoldenFolder() {
  const std::string beside = PathBesideTest("golden");
  return std::filesystem::exists(beside) ? beside : LMHEAD_GOLDEN_FOLDER;
}

std::string TestBackend() {
  const char* backend = std::getenv("LMHEAD_TEST_BACKEND");
  return backend == nullptr ? "cpu" : backend;
}

int TestGpus() {
  const char* gpus = std::getenv("LMHEAD_TEST_GPUS");
  return gpus == nullptr ? 1 : std::atoi(gpus);
}

}  // namespace lmhead
