// Some of a tensor's rows, and which tensors of a head there are: what backends and the shard group
// share of reading and writing rows.

#ifndef LMHEAD_SERVER_COMPUTE_TENSOR_ROWS_H_
#define LMHEAD_SERVER_COMPUTE_TENSOR_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "proto/types/tensor_view.h"
#include "proto/types/vocab_range.h"
#include "server/compute/backend.h"

namespace lmhead {

// Only added to and read, never written.
inline bool IsGradient(TensorKind kind) {
  return kind == TensorKind::kGradWeight || kind == TensorKind::kGradBias;
}

// The optimizer's state: kept by the owner of a row alone, and by nobody else in any form.
inline bool IsMoment(TensorKind kind) {
  return kind == TensorKind::kWeightExpAvg || kind == TensorKind::kWeightExpAvgSq ||
         kind == TensorKind::kBiasExpAvg || kind == TensorKind::kBiasExpAvgSq;
}

inline bool IsOfBias(TensorKind kind) {
  return kind == TensorKind::kBias || kind == TensorKind::kGradBias ||
         kind == TensorKind::kBiasExpAvg || kind == TensorKind::kBiasExpAvgSq;
}

// Rows [first, first + count) of `rows`.
// REQUIRES: they lie inside it.
inline MatrixView PartOf(MatrixView rows, int64_t first, int64_t count) {
  const int64_t skipped = first * rows.cols * BytesPerElement(rows.dtype);
  return {static_cast<std::byte*>(rows.data) + skipped, count, rows.cols, rows.dtype};
}
inline ConstMatrixView PartOf(ConstMatrixView rows, int64_t first, int64_t count) {
  const int64_t skipped = first * rows.cols * BytesPerElement(rows.dtype);
  return {static_cast<const std::byte*>(rows.data) + skipped, count, rows.cols, rows.dtype};
}

// Those of `rows`, which start at row *row_start, that are in `range`; their start becomes
// *row_start.
inline ConstMatrixView ClipRows(ConstMatrixView rows, VocabRange range, int64_t* row_start) {
  const VocabRange both = Intersection({*row_start, *row_start + rows.rows}, range);
  const int64_t first = both.start - *row_start;
  *row_start = both.start;
  if (both.size() == 0) return {nullptr, 0, rows.cols, rows.dtype};
  return PartOf(rows, first, both.size());
}

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_TENSOR_ROWS_H_
