#include "kernels/cpu/convert.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace lmhead::cpu {
namespace {

// Elements one thread converts at a time; the float32 detour stays in its first-level cache.
constexpr int64_t kBlock = 2048;

void Upcast(DType dtype, const void* from, int64_t count, float* to) {
  const auto* halves = static_cast<const uint16_t*>(from);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) to[i] = BFloat16ToFloat(halves[i]);
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) to[i] = Float16ToFloat(halves[i]);
      return;
  }
}

void Downcast(const float* from, int64_t count, DType dtype, void* to) {
  auto* halves = static_cast<uint16_t*>(to);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) halves[i] = FloatToBFloat16(from[i]);
      return;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) halves[i] = FloatToFloat16(from[i]);
      return;
  }
}

}  // namespace

void ConvertMatrix(ConstMatrixView from, MatrixView to) {
  const int64_t count = from.rows * from.cols;
  const auto* source = static_cast<const std::byte*>(from.data);
  auto* destination = static_cast<std::byte*>(to.data);
  const int64_t from_bytes = BytesPerElement(from.dtype);
  const int64_t to_bytes = BytesPerElement(to.dtype);
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t size = std::min(kBlock, count - start);
    if (to.dtype == DType::kFloat32) {
      Upcast(from.dtype, source + start * from_bytes, size,
             reinterpret_cast<float*>(destination) + start);
    } else if (from.dtype == DType::kFloat32) {
      Downcast(reinterpret_cast<const float*>(source) + start, size, to.dtype,
               destination + start * to_bytes);
    } else {
      float block[kBlock];
      Upcast(from.dtype, source + start * from_bytes, size, block);
      Downcast(block, size, to.dtype, destination + start * to_bytes);
    }
  }
}

bool UpcastRow(DType dtype, const void* from, int64_t count, float* to) {
  Upcast(dtype, from, count, to);
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t num_nonfinite = 0;
  for (int64_t i = 0; i < count; ++i) {
    num_nonfinite += (std::bit_cast<uint32_t>(to[i]) & kExponent) == kExponent ? 1 : 0;
  }
  return num_nonfinite == 0;
}

}  // namespace lmhead::cpu
