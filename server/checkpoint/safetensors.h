// Reader of the safetensors file format.
//
//   file   := header_size header data
//   header_size := uint64, little-endian, at most kSafetensorsHeaderBytesMax
//   header := JSON object {name: {"dtype": string, "shape": [sizes], "data_offsets": [start,
//   stop]}}
//             and optionally "__metadata__": {string: string}
//   data   := the tensors, row-major, little-endian, one after the other without holes
//
// The header is checked whole when the file is opened, so that whatever it describes lies inside
// the file. Tensors are read piece by piece into the caller's memory; nothing is mapped, so a file
// that shrinks meanwhile gives an error and not a signal.

#ifndef LMHEAD_SERVER_CHECKPOINT_SAFETENSORS_H_
#define LMHEAD_SERVER_CHECKPOINT_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

inline constexpr int64_t kSafetensorsHeaderBytesMax = 100 * 1000 * 1000;

// Element types of the format.
enum class SafetensorsDType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};

// "BOOL", "U8", ...: the words of the header.
std::string_view SafetensorsDTypeName(SafetensorsDType dtype);
int64_t SafetensorsDTypeBytes(SafetensorsDType dtype);

struct SafetensorsTensor {
  std::string name;
  SafetensorsDType dtype = SafetensorsDType::kF32;
  std::vector<int64_t> shape;
  int64_t offset_bytes = 0;  // From the start of the data.
  int64_t size_bytes = 0;

  int64_t num_elements() const;
};

// Thread-safe once opened.
class SafetensorsReader {
 public:
  // Opens and checks `path`. NOT_FOUND when there is no such file; INVALID_ARGUMENT naming the file
  // and the tensor when it is not a well-formed one.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::map<std::string, SafetensorsTensor, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

  // NOT_FOUND naming the file and the tensor.
  absl::StatusOr<const SafetensorsTensor*> Find(std::string_view name) const;

  // Fills `out` with the tensor's bytes from `start_bytes` on.
  // REQUIRES: start_bytes + out.size() <= tensor.size_bytes; `tensor` is one of tensors().
  absl::Status Read(const SafetensorsTensor& tensor, int64_t start_bytes,
                    std::span<std::byte> out) const;

  // All elements of a tensor. T is float (F32), double (F64), int32_t (I32), int64_t (I64) or
  // uint16_t (the bits of BF16 or F16). INVALID_ARGUMENT when the tensor's dtype is another.
  template <typename T>
  absl::StatusOr<std::vector<T>> ReadAll(std::string_view name) const;

 private:
  SafetensorsReader(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  absl::Status Load();
  absl::Status ParseHeader(std::string_view header, int64_t data_bytes);
  absl::Status CheckContiguous(int64_t data_bytes) const;

  const std::string path_;
  const int fd_;
  int64_t data_start_ = 0;  // Of the data in the file.
  std::map<std::string, SafetensorsTensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CHECKPOINT_SAFETENSORS_H_
