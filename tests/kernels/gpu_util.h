// What the tests of GPU kernels share: arrays in device memory, elements of a dtype as bytes,
// random numbers, and the error of a result.

#ifndef LMHEAD_TESTS_KERNELS_GPU_UTIL_H_
#define LMHEAD_TESTS_KERNELS_GPU_UTIL_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference/reference.h"
#include "proto/types/dtype.h"

namespace lmhead::kernels {

inline constexpr double kMasked = -std::numeric_limits<double>::infinity();

inline void Check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// An array in device memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(T)));
    Check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    Check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  const size_t count_;
  T* data_ = nullptr;
};

inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Elements of `dtype` as bytes, and back.
inline std::vector<std::byte> Encode(const std::vector<double>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * BytesPerElement(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = static_cast<float>(values[i]);
    const uint16_t narrow =
        dtype == DType::kFloat16 ? FloatToFloat16(value) : FloatToBFloat16(value);
    const void* const from = dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &narrow;
    std::memcpy(&bytes[i * BytesPerElement(dtype)], from, BytesPerElement(dtype));
  }
  return bytes;
}

inline std::vector<double> Decode(const std::vector<std::byte>& bytes, DType dtype) {
  const int64_t count = static_cast<int64_t>(bytes.size()) / BytesPerElement(dtype);
  return reference::Upcast({bytes.data(), 1, count, dtype});
}

inline std::vector<double> Normal(int64_t count, double std, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, std);
  std::vector<double> values(count);
  for (double& value : values) value = normal(random);
  return values;
}

inline double RelativeError(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return HUGE_VAL;
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(norm > 0.0 ? difference / norm : difference);
}

}  // namespace lmhead::kernels

#endif  // LMHEAD_TESTS_KERNELS_GPU_UTIL_H_
