#include "server/checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"
#include "server/checkpoint/durable_files.h"

namespace lmhead {
namespace {

// The data starts at a multiple of this, so that a mapped file has aligned elements.
constexpr size_t kDataAlignment = 64;

int64_t SizeBytes(const SafetensorsWriter::Tensor& tensor) {
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) {
    LMHEAD_CHECK(size >= 0, tensor.name);
    elements *= size;
  }
  return elements * SafetensorsDTypeBytes(tensor.dtype);
}

// The size field and the padded header.
std::string MakeHeader(std::span<const SafetensorsWriter::Tensor> tensors,
                       const std::map<std::string, std::string>& metadata, int64_t* data_bytes) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  *data_bytes = 0;
  for (const SafetensorsWriter::Tensor& tensor : tensors) {
    LMHEAD_CHECK(!header.contains(tensor.name), tensor.name);
    const int64_t start = *data_bytes;
    *data_bytes += SizeBytes(tensor);
    header[tensor.name] = {{"dtype", std::string(SafetensorsDTypeName(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {start, *data_bytes}}};
  }
  std::string json = header.dump();
  const size_t unpadded = sizeof(uint64_t) + json.size();
  json.append((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment, ' ');
  const uint64_t size = json.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));  // Little-endian, like the reader's assertion.
  return bytes + json;
}

}  // namespace

class SafetensorsWriter::Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(state_); }
  ~Hash() { XXH3_freeState(state_); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;

  void Add(std::span<const std::byte> bytes) {
    XXH3_64bits_update(state_, bytes.data(), bytes.size());
  }
  uint64_t Value() const { return XXH3_64bits_digest(state_); }

 private:
  XXH3_state_t* const state_;
};

absl::StatusOr<FileDigest> DigestFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError("opening", path, errno);
  const auto close_fd = [](const int* fd) { close(*fd); };
  const std::unique_ptr<const int, decltype(close_fd)> closer(&fd, close_fd);
  XXH3_state_t* const state = XXH3_createState();
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> freer(state, &XXH3_freeState);
  XXH3_64bits_reset(state);
  FileDigest digest;
  std::vector<std::byte> block(size_t{4} << 20);
  for (;;) {
    const ssize_t count = read(fd, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError("reading", path, errno);
    if (count == 0) break;
    XXH3_64bits_update(state, block.data(), static_cast<size_t>(count));
    digest.size_bytes += count;
  }
  digest.xxh3 = XXH3_64bits_digest(state);
  return digest;
}

SafetensorsWriter::SafetensorsWriter(std::string path, int fd)
    : path_(std::move(path)), fd_(fd), hash_(std::make_unique<Hash>()) {}

SafetensorsWriter::~SafetensorsWriter() { close(fd_); }

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, std::span<const Tensor> tensors,
    const std::map<std::string, std::string>& metadata) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return FileError("creating", path, errno);
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(path, fd));
  int64_t data_bytes = 0;
  const std::string header = MakeHeader(tensors, metadata, &data_bytes);
  absl::Status status = writer->Write(std::as_bytes(std::span(header)));
  if (!status.ok()) return status;
  writer->num_bytes_left_ = data_bytes;
  return writer;
}

absl::Status SafetensorsWriter::Write(std::span<const std::byte> bytes) {
  hash_->Add(bytes);
  size_bytes_ += static_cast<int64_t>(bytes.size());
  return WriteFully(fd_, bytes, path_);
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size > num_bytes_left_) {
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": got ", size, " more bytes of tensors, ", num_bytes_left_, " are missing"));
  }
  num_bytes_left_ -= size;
  return Write(bytes);
}

absl::StatusOr<FileDigest> SafetensorsWriter::Finish() {
  if (num_bytes_left_ != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": ", num_bytes_left_, " bytes of its tensors were not written"));
  }
  if (fsync(fd_) != 0) return FileError("syncing", path_, errno);
  return FileDigest{.size_bytes = size_bytes_, .xxh3 = hash_->Value()};
}

}  // namespace lmhead
