// Non-owning, typed views of dense row-major matrices in host or device memory.
//
// A view never frees. The producer keeps the storage alive until the consumer's completion runs.
// Thread-compatible: const methods may run concurrently.

#ifndef LMHEAD_PROTO_TYPES_TENSOR_VIEW_H_
#define LMHEAD_PROTO_TYPES_TENSOR_VIEW_H_

#include <cstdint>

#include "proto/types/dtype.h"

namespace lmhead {

// Read-only view of [rows, cols] elements, rows adjacent.
struct ConstMatrixView {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;

  int64_t size_bytes() const { return rows * cols * BytesPerElement(dtype); }
};

// Writable view of [rows, cols] elements, rows adjacent. A null `data` means "not wanted".
struct MatrixView {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;

  int64_t size_bytes() const { return rows * cols * BytesPerElement(dtype); }
  operator ConstMatrixView() const { return {data, rows, cols, dtype}; }
};

}  // namespace lmhead

#endif  // LMHEAD_PROTO_TYPES_TENSOR_VIEW_H_
