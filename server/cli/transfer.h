// What import and export share: blocks of rows, elements of another dtype, progress.

#ifndef LMHEAD_SERVER_CLI_TRANSFER_H_
#define LMHEAD_SERVER_CLI_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/flags/declare.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "proto/types/dtype.h"

ABSL_DECLARE_FLAG(std::string, head);
ABSL_DECLARE_FLAG(std::string, tensor);

namespace lmhead {

// Calls work(row, count) for blocks of rows [0, num_rows) of about 16 MiB.
absl::Status ForRowBlocks(int64_t num_rows, int64_t row_bytes,
                          absl::FunctionRef<absl::Status(int64_t row, int64_t count)> work);

// REQUIRES: both hold equally many elements.
void ConvertElements(std::span<const std::byte> from, DType dtype, std::span<float> to);
void ConvertElements(std::span<const float> from, DType dtype, std::span<std::byte> to);

// A line on a terminal that says how far a transfer is; nothing when stderr is no terminal.
class Progress {
 public:
  Progress(std::string what, int64_t num_rows);
  ~Progress();  // Ends the line.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(int64_t rows);

 private:
  const std::string what_;
  const int64_t num_rows_;
  const bool shown_;
  int64_t done_ = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_TRANSFER_H_
