#include "server/checkpoint/durable_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

// Closes a file descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

absl::StatusCode CodeOf(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kDataLoss;
  }
}

}  // namespace

absl::Status FileError(std::string_view what, std::string_view path, int error_number) {
  return absl::Status(CodeOf(error_number),
                      absl::StrCat(std::string(what), " ", std::string(path), ": ",
                                   std::generic_category().message(error_number)));
}

absl::Status WriteFully(int fd, std::span<const std::byte> bytes, std::string_view path) {
  while (!bytes.empty()) {
    const ssize_t count = write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError("writing", path, errno);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

absl::Status WriteFileDurably(const std::string& path, std::string_view text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file.get() < 0) return FileError("creating", path, errno);
  absl::Status status =
      WriteFully(file.get(), std::as_bytes(std::span(text.data(), text.size())), path);
  if (!status.ok()) return status;
  if (fsync(file.get()) != 0) return FileError("syncing", path, errno);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return FileError("opening", path, errno);
  std::string text;
  std::array<char, 65536> block;
  for (;;) {
    const ssize_t count = read(file.get(), block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError("reading", path, errno);
    if (count == 0) return text;
    text.append(block.data(), static_cast<size_t>(count));
  }
}

absl::Status SyncDirectory(const std::string& path) {
  const Descriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0) return FileError("opening", path, errno);
  if (fsync(directory.get()) != 0) return FileError("syncing", path, errno);
  return absl::OkStatus();
}

}  // namespace lmhead
