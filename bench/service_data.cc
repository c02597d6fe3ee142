#include "bench/service_data.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace lmhead::bench {
namespace {

// A prime, so that rows differ although the values repeat.
constexpr int64_t kNoiseElements = 1'000'003;

std::vector<std::byte> Noise(int64_t num_elements, DType dtype) {
  std::minstd_rand random(1);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(static_cast<size_t>(num_elements * BytesPerElement(dtype)));
  for (std::byte* out = bytes.data(); out < bytes.data() + bytes.size();) {
    const float value = normal(random);
    const uint16_t narrow = FloatToBFloat16(value);
    const bool wide = dtype == DType::kFloat32;
    std::memcpy(out, wide ? static_cast<const void*>(&value) : &narrow, BytesPerElement(dtype));
    out += BytesPerElement(dtype);
  }
  return bytes;
}

}  // namespace

RandomRows::RandomRows(int64_t num_rows, int64_t hidden_size, DType dtype, int64_t vocab_size)
    : hidden_size_(hidden_size),
      dtype_(dtype),
      hidden_(HostBlock::Map(num_rows * hidden_size * BytesPerElement(dtype)).value()),
      targets_(static_cast<size_t>(num_rows)) {
  const std::vector<std::byte> noise =
      Noise(std::min(num_rows * hidden_size, kNoiseElements), dtype);
  const auto num_bytes = static_cast<size_t>(hidden_->size_bytes());
  for (size_t start = 0; start < num_bytes; start += noise.size()) {
    std::memcpy(hidden_->data() + start, noise.data(), std::min(noise.size(), num_bytes - start));
  }
  std::minstd_rand random(2);
  for (int32_t& target : targets_) {
    target = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size));
  }
}

}  // namespace lmhead::bench
