#include "server/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

static_assert(std::endian::native == std::endian::little,
              "Tensors are read as they lie in the file, which is little-endian");

using Json = nlohmann::json;

constexpr int64_t kHeaderSizeBytes = 8;

struct DTypeInfo {
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DTypeInfo, 13> kDTypes = {{{"BOOL", 1},
                                                {"U8", 1},
                                                {"I8", 1},
                                                {"U16", 2},
                                                {"I16", 2},
                                                {"F16", 2},
                                                {"BF16", 2},
                                                {"U32", 4},
                                                {"I32", 4},
                                                {"F32", 4},
                                                {"U64", 8},
                                                {"I64", 8},
                                                {"F64", 8}}};

std::optional<SafetensorsDType> DTypeFromName(std::string_view name) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) return static_cast<SafetensorsDType>(i);
  }
  return std::nullopt;
}

// Reads exactly out.size() bytes at `offset`.
absl::Status ReadAt(int fd, const std::string& path, int64_t offset, std::span<std::byte> out) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = pread(fd, out.data() + done, out.size() - done,
                              static_cast<off_t>(offset + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::UnavailableError(
          absl::StrCat(path, ": reading at byte ", offset + done, ": ", std::strerror(errno)));
    }
    if (got == 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": truncated: the file ends at byte ",
                                                     offset + done, ", wanted ", out.size() - done,
                                                     " bytes more; write or copy it again"));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

// Parses the header's JSON; a name that occurs twice is an error, where the parser would silently
// keep the last.
absl::StatusOr<Json> ParseJson(std::string_view header) {
  std::set<std::string> names;
  std::string repeated;
  const auto on_event = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::key && depth == 1 &&
        !names.insert(parsed.get<std::string>()).second) {
      repeated = parsed.get<std::string>();
    }
    return true;
  };
  try {
    Json json = Json::parse(header.begin(), header.end(), on_event);
    if (!json.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the header is a JSON ", json.type_name(), ", wanted an object"));
    }
    if (!repeated.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("the header names '", repeated, "' twice"));
    }
    return json;
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the header is not JSON: ", error.what()));
  }
}

// An array of sizes: integers in [0, 2^63).
absl::StatusOr<std::vector<int64_t>> ParseSizes(const Json& entry, const char* field) {
  const auto found = entry.find(field);
  if (found == entry.end() || !found->is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is missing or not an array"));
  }
  std::vector<int64_t> sizes;
  for (const Json& value : *found) {
    if (!value.is_number_unsigned() ||
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " holds ", value.is_number() ? value.dump() : value.type_name(),
                       ", wanted sizes of at least 0"));
    }
    sizes.push_back(value.get<int64_t>());
  }
  return sizes;
}

// Bytes of a tensor of that shape; nullopt when they overflow.
std::optional<int64_t> ShapeBytes(std::span<const int64_t> shape, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

absl::StatusOr<SafetensorsTensor> ParseTensor(const std::string& name, const Json& entry) {
  if (!entry.is_object()) return absl::InvalidArgumentError("its entry is not an object");
  const auto dtype_name = entry.find("dtype");
  if (dtype_name == entry.end() || !dtype_name->is_string()) {
    return absl::InvalidArgumentError("dtype is missing or not a string");
  }
  const auto dtype = DTypeFromName(dtype_name->get_ref<const std::string&>());
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown dtype '", dtype_name->get_ref<const std::string&>(), "', known are ",
        absl::StrJoin(kDTypes, ", ",
                      [](std::string* out, const DTypeInfo& info) { out->append(info.name); })));
  }
  absl::StatusOr<std::vector<int64_t>> shape = ParseSizes(entry, "shape");
  if (!shape.ok()) return shape.status();
  const absl::StatusOr<std::vector<int64_t>> offsets = ParseSizes(entry, "data_offsets");
  if (!offsets.ok()) return offsets.status();
  if (offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data_offsets are [", absl::StrJoin(*offsets, ", "), "], wanted [start, stop]"));
  }
  const std::optional<int64_t> wanted_bytes = ShapeBytes(*shape, SafetensorsDTypeBytes(*dtype));
  const int64_t size_bytes = (*offsets)[1] - (*offsets)[0];
  if (wanted_bytes != size_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data_offsets span ", size_bytes, " bytes, but ", std::string(SafetensorsDTypeName(*dtype)),
        " [", absl::StrJoin(*shape, ", "), "] takes ",
        wanted_bytes.has_value() ? absl::StrCat(*wanted_bytes) : std::string("more than 2^63")));
  }
  return SafetensorsTensor{.name = name,
                           .dtype = *dtype,
                           .shape = *std::move(shape),
                           .offset_bytes = (*offsets)[0],
                           .size_bytes = size_bytes};
}

absl::StatusOr<std::map<std::string, std::string, std::less<>>> ParseMetadata(const Json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("__metadata__ is not an object");
  std::map<std::string, std::string, std::less<>> metadata;
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat("__metadata__ '", key, "' is a ", value.type_name(), ", wanted a string"));
    }
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

template <typename T>
bool Holds(SafetensorsDType dtype) {
  if constexpr (std::is_same_v<T, float>) return dtype == SafetensorsDType::kF32;
  if constexpr (std::is_same_v<T, double>) return dtype == SafetensorsDType::kF64;
  if constexpr (std::is_same_v<T, int32_t>) return dtype == SafetensorsDType::kI32;
  if constexpr (std::is_same_v<T, int64_t>) return dtype == SafetensorsDType::kI64;
  return dtype == SafetensorsDType::kBF16 || dtype == SafetensorsDType::kF16;
}

}  // namespace

int64_t SafetensorsDTypeBytes(SafetensorsDType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].bytes;
}

std::string_view SafetensorsDTypeName(SafetensorsDType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].name;
}

int64_t SafetensorsTensor::num_elements() const {
  return size_bytes / SafetensorsDTypeBytes(dtype);
}

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(
    const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const std::string message = absl::StrCat(path, ": cannot be opened: ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::UnavailableError(message);
  }
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader(path, fd));
  if (absl::Status status = reader->Load(); !status.ok()) return status;
  return reader;
}

SafetensorsReader::~SafetensorsReader() { close(fd_); }

absl::Status SafetensorsReader::Load() {
  struct stat info;
  if (fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": not a regular file"));
  }
  const int64_t file_bytes = info.st_size;
  if (file_bytes < kHeaderSizeBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": truncated: ", file_bytes,
                                                   " bytes, a safetensors file has at least 8"));
  }
  uint64_t header_bytes = 0;
  absl::Status status =
      ReadAt(fd_, path_, 0, std::as_writable_bytes(std::span<uint64_t>(&header_bytes, 1)));
  if (!status.ok()) return status;
  if (header_bytes > static_cast<uint64_t>(kSafetensorsHeaderBytesMax)) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": the header states ", header_bytes,
                                                   " bytes, at most ", kSafetensorsHeaderBytesMax,
                                                   " are read; is it a safetensors file?"));
  }
  data_start_ = kHeaderSizeBytes + static_cast<int64_t>(header_bytes);
  if (data_start_ > file_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": truncated: the header states ", header_bytes,
                     " bytes, the file has ", file_bytes - kHeaderSizeBytes, " after its size"));
  }
  std::string header(header_bytes, '\0');
  status = ReadAt(fd_, path_, kHeaderSizeBytes, std::as_writable_bytes(std::span<char>(header)));
  if (!status.ok()) return status;
  return ParseHeader(header, file_bytes - data_start_);
}

absl::Status SafetensorsReader::ParseHeader(std::string_view header, int64_t data_bytes) {
  const absl::StatusOr<Json> json = ParseJson(header);
  if (!json.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", json.status().message()));
  }
  for (const auto& [name, entry] : json->items()) {
    if (name == "__metadata__") {
      auto metadata = ParseMetadata(entry);
      if (!metadata.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(path_, ": ", metadata.status().message()));
      }
      metadata_ = *std::move(metadata);
      continue;
    }
    absl::StatusOr<SafetensorsTensor> tensor = ParseTensor(name, entry);
    if (!tensor.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": tensor '", name, "': ", tensor.status().message()));
    }
    tensors_.emplace(name, *std::move(tensor));
  }
  return CheckContiguous(data_bytes);
}

// In the order of their offsets the tensors must follow each other and end with the file: that
// rules out tensors beyond the end, overlaps and holes at once.
absl::Status SafetensorsReader::CheckContiguous(int64_t data_bytes) const {
  std::vector<const SafetensorsTensor*> order;
  for (const auto& [name, tensor] : tensors_) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->offset_bytes, a->size_bytes) < std::pair(b->offset_bytes, b->size_bytes);
  });
  int64_t end = 0;
  for (const SafetensorsTensor* tensor : order) {
    const int64_t stop = tensor->offset_bytes + tensor->size_bytes;
    if (stop > data_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": tensor '", tensor->name, "': data_offsets [", tensor->offset_bytes,
                       ", ", stop, "] reach beyond the ", data_bytes,
                       " bytes of data: the file is truncated or its header wrong"));
    }
    if (tensor->offset_bytes != end) {
      return absl::InvalidArgumentError(absl::StrCat(
          path_, ": tensor '", tensor->name, "': data_offsets start at ", tensor->offset_bytes,
          tensor->offset_bytes < end
              ? ", which overlaps the tensor before it, ending at "
              : ", which leaves a hole after the tensor before it, ending at ",
          end));
    }
    end = stop;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": ", data_bytes - end, " bytes after the last tensor belong to none"));
  }
  return absl::OkStatus();
}

absl::StatusOr<const SafetensorsTensor*> SafetensorsReader::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat(path_, ": no tensor '", std::string(name), "'"));
  }
  return &found->second;
}

absl::Status SafetensorsReader::Read(const SafetensorsTensor& tensor, int64_t start_bytes,
                                     std::span<std::byte> out) const {
  LMHEAD_CHECK(
      start_bytes >= 0 && start_bytes + static_cast<int64_t>(out.size()) <= tensor.size_bytes,
      absl::StrCat(tensor.name, ": ", out.size(), " bytes from ", start_bytes, " of ",
                   tensor.size_bytes));
  return ReadAt(fd_, path_, data_start_ + tensor.offset_bytes + start_bytes, out);
}

template <typename T>
absl::StatusOr<std::vector<T>> SafetensorsReader::ReadAll(std::string_view name) const {
  const absl::StatusOr<const SafetensorsTensor*> found = Find(name);
  if (!found.ok()) return found.status();
  const SafetensorsTensor& tensor = **found;
  if (!Holds<T>(tensor.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": tensor '", std::string(name), "' has dtype ",
                     std::string(SafetensorsDTypeName(tensor.dtype)), ", another was wanted"));
  }
  std::vector<T> values(static_cast<size_t>(tensor.num_elements()));
  absl::Status status = Read(tensor, 0, std::as_writable_bytes(std::span<T>(values)));
  if (!status.ok()) return status;
  return values;
}

template absl::StatusOr<std::vector<float>> SafetensorsReader::ReadAll(std::string_view) const;
template absl::StatusOr<std::vector<double>> SafetensorsReader::ReadAll(std::string_view) const;
template absl::StatusOr<std::vector<int32_t>> SafetensorsReader::ReadAll(std::string_view) const;
template absl::StatusOr<std::vector<int64_t>> SafetensorsReader::ReadAll(std::string_view) const;
template absl::StatusOr<std::vector<uint16_t>> SafetensorsReader::ReadAll(std::string_view) const;

}  // namespace lmhead
