// Files that are on the disk when a call says so.

#ifndef LMHEAD_SERVER_CHECKPOINT_DURABLE_FILES_H_
#define LMHEAD_SERVER_CHECKPOINT_DURABLE_FILES_H_

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

// "opening /a/b: No such file or directory", with the code that fits: NOT_FOUND, ALREADY_EXISTS,
// PERMISSION_DENIED, RESOURCE_EXHAUSTED (a full disk), else DATA_LOSS.
absl::Status FileError(std::string_view what, std::string_view path, int error_number);

// Writes all bytes, however many calls it takes.
absl::Status WriteFully(int fd, std::span<const std::byte> bytes, std::string_view path);

// Creates `path`, which must not exist, with `text` in it, and syncs it.
absl::Status WriteFileDurably(const std::string& path, std::string_view text);

// The whole file. NOT_FOUND when there is none.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// After this the names in `path` survive a crash.
absl::Status SyncDirectory(const std::string& path);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CHECKPOINT_DURABLE_FILES_H_
