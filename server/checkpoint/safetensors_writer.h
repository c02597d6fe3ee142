// Writer of the safetensors file format; the reader's header describes the format.
//
// The tensors are declared first, then their bytes follow in the same order, piece by piece, so
// that a file of any size needs no memory of its own.

#ifndef LMHEAD_SERVER_CHECKPOINT_SAFETENSORS_WRITER_H_
#define LMHEAD_SERVER_CHECKPOINT_SAFETENSORS_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/safetensors.h"

namespace lmhead {

// What a file holds, for whoever wants to know later whether it still does.
struct FileDigest {
  int64_t size_bytes = 0;
  uint64_t xxh3 = 0;  // XXH3-64 of all its bytes.

  friend bool operator==(const FileDigest&, const FileDigest&) = default;
};

// Of a file that is there. NOT_FOUND, or DATA_LOSS when it cannot be read.
absl::StatusOr<FileDigest> DigestFile(const std::string& path);

// Thread-compatible.
class SafetensorsWriter {
 public:
  struct Tensor {
    std::string name;
    SafetensorsDType dtype = SafetensorsDType::kF32;
    std::vector<int64_t> shape;
  };

  // Creates `path`, which must not exist, and writes the header.
  // REQUIRES: names are distinct; sizes are not negative.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, std::span<const Tensor> tensors,
      const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();  // Closes; what is there stays there.
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes of the tensors. RESOURCE_EXHAUSTED when the disk is full; INVALID_ARGUMENT when
  // the tensors do not have that many.
  absl::Status Append(std::span<const std::byte> bytes);

  // Every byte is on the disk. FAILED_PRECONDITION when some have not been appended. Once.
  absl::StatusOr<FileDigest> Finish();

 private:
  class Hash;
  SafetensorsWriter(std::string path, int fd);

  absl::Status Write(std::span<const std::byte> bytes);

  const std::string path_;
  const int fd_;
  const std::unique_ptr<Hash> hash_;
  int64_t num_bytes_left_ = 0;
  int64_t size_bytes_ = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CHECKPOINT_SAFETENSORS_WRITER_H_
