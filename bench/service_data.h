// Random rows that a benchmark sends over and over.

#ifndef LMHEAD_BENCH_SERVICE_DATA_H_
#define LMHEAD_BENCH_SERVICE_DATA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/tensor_view.h"
#include "server/memory/host_block.h"

namespace lmhead::bench {

// Standard normal hidden states, and targets below vocab_size; the same each time. Immutable, so
// that any number of threads may send them.
class RandomRows {
 public:
  RandomRows(int64_t num_rows, int64_t hidden_size, DType dtype, int64_t vocab_size);

  ConstMatrixView hidden_states(int64_t num_rows) const {
    return {hidden_->data(), num_rows, hidden_size_, dtype_};
  }
  std::span<const int32_t> targets(int64_t num_rows) const {
    return {targets_.data(), static_cast<size_t>(num_rows)};
  }

  // The hidden states, as HostBlock::Pin().
  absl::Status Pin(int device) { return hidden_->Pin(device); }
  int64_t size_bytes() const { return hidden_->size_bytes(); }

 private:
  const int64_t hidden_size_;
  const DType dtype_;
  const std::unique_ptr<HostBlock> hidden_;
  std::vector<int32_t> targets_;
};

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_SERVICE_DATA_H_
