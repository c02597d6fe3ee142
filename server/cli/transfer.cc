#include "server/cli/transfer.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/flags/flag.h"
#include "proto/types/check.h"

ABSL_FLAG(std::string, head, "lm", "import, export: name of the service's head.");
ABSL_FLAG(std::string, tensor, "",
          "import, export: name of the weight in the checkpoint. Empty: lm_head.weight, or the "
          "input embedding when it is tied.");

namespace lmhead {
namespace {

constexpr int64_t kBlockBytes = int64_t{16} << 20;

}  // namespace

absl::Status ForRowBlocks(int64_t num_rows, int64_t row_bytes,
                          absl::FunctionRef<absl::Status(int64_t, int64_t)> work) {
  const int64_t block_rows = std::max<int64_t>(1, kBlockBytes / row_bytes);
  for (int64_t row = 0; row < num_rows; row += block_rows) {
    absl::Status status = work(row, std::min(block_rows, num_rows - row));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void ConvertElements(std::span<const std::byte> from, DType dtype, std::span<float> to) {
  LMHEAD_CHECK(from.size() == to.size() * static_cast<size_t>(BytesPerElement(dtype)), "sizes");
  if (dtype == DType::kFloat32) {
    std::memcpy(to.data(), from.data(), from.size());
    return;
  }
  for (size_t i = 0; i < to.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, from.data() + i * sizeof(bits), sizeof(bits));
    to[i] = dtype == DType::kBFloat16 ? BFloat16ToFloat(bits) : Float16ToFloat(bits);
  }
}

void ConvertElements(std::span<const float> from, DType dtype, std::span<std::byte> to) {
  LMHEAD_CHECK(to.size() == from.size() * static_cast<size_t>(BytesPerElement(dtype)), "sizes");
  if (dtype == DType::kFloat32) {
    std::memcpy(to.data(), from.data(), to.size());
    return;
  }
  for (size_t i = 0; i < from.size(); ++i) {
    const uint16_t bits =
        dtype == DType::kBFloat16 ? FloatToBFloat16(from[i]) : FloatToFloat16(from[i]);
    std::memcpy(to.data() + i * sizeof(bits), &bits, sizeof(bits));
  }
}

Progress::Progress(std::string what, int64_t num_rows)
    : what_(std::move(what)), num_rows_(num_rows), shown_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_ && done_ > 0) std::fputc('\n', stderr);
}

void Progress::Add(int64_t rows) {
  done_ += rows;
  if (!shown_) return;
  std::fprintf(stderr, "\r%s: %lld of %lld rows", what_.c_str(), static_cast<long long>(done_),
               static_cast<long long>(num_rows_));
}

}  // namespace lmhead
