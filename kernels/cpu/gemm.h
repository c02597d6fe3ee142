// The three matrix products of a vocabulary tile, in float32 on oneDNN.
//
// oneDNN works in the scratch given here and allocates nothing of size per call. Products are
// prepared at their first use and kept by shape; callers keep the number of shapes small by
// rounding the number of rows with PaddedRows.

#ifndef LMHEAD_KERNELS_CPU_GEMM_H_
#define LMHEAD_KERNELS_CPU_GEMM_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace lmhead::cpu {

// Rows to compute for `rows` rows of a batch of at most `max_rows`: at most a quarter more, and at
// most 4 values between a power of two and the next. POSTCONDITION: rows <= result <= max_rows.
int64_t PaddedRows(int64_t rows, int64_t max_rows);

// Thread-compatible. All matrices are dense and row-major. INTERNAL when oneDNN fails.
class Gemm {
 public:
  // `scratch` is borrowed. A product uses as many of the OpenMP threads as it serves.
  Gemm(std::byte* scratch, int64_t scratch_bytes);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  struct Shape {
    int64_t rows = 0;  // Of the batch.
    int64_t cols = 0;  // Of the vocabulary tile.
    int64_t hidden_size = 0;
  };

  // logits [rows, cols] = hidden [rows, hidden_size] weight [cols, hidden_size]^T
  absl::Status Logits(const Shape& shape, const float* hidden, const float* weight, float* logits);

  // grad_hidden [rows, hidden_size] += grad_logits [rows, cols] weight [cols, hidden_size]
  absl::Status AddGradHidden(const Shape& shape, const float* grad_logits, const float* weight,
                             float* grad_hidden);

  // grad_weight [cols, hidden_size] += grad_logits [rows, cols]^T hidden [rows, hidden_size]
  absl::Status AddGradWeight(const Shape& shape, const float* grad_logits, const float* hidden,
                             float* grad_weight);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_GEMM_H_
