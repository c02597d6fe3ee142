#include "tests/util/temporary_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "proto/types/check.h"

namespace lmhead {

TemporaryFolder::TemporaryFolder()
    : path_(std::filesystem::temp_directory_path() / "lmhead-test-XXXXXX") {
  LMHEAD_CHECK(mkdtemp(path_.data()) != nullptr, path_ + ": " + std::strerror(errno));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;  // What a test took the rights from may stay.
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace lmhead
