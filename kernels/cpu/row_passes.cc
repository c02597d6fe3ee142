#include "kernels/cpu/row_passes.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/divergence.h"
#include "kernels/cpu/row_statistics.h"

// The vectors never cross a function boundary that is not inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace lmhead::cpu {
namespace {

bool ContainsNan(const float* values, int64_t count) {
  return std::any_of(values, values + count, [](float value) { return std::isnan(value); });
}

namespace sse2 {
#define LMHEAD_VECTOR_BYTES 16
#include "kernels/cpu/all_passes.inc"
#undef LMHEAD_VECTOR_BYTES
}  // namespace sse2

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LMHEAD_VECTOR_BYTES 32
#include "kernels/cpu/all_passes.inc"
#undef LMHEAD_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#define LMHEAD_VECTOR_BYTES 64
#include "kernels/cpu/all_passes.inc"
#undef LMHEAD_VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#endif

// From the plainest to the best; the processor has a prefix of them.
constexpr std::array kAllPasses = {
    sse2::Passes("sse2"),
#ifdef __x86_64__
    avx2::Passes("avx2"),
    avx512::Passes("avx512"),
#endif
};

size_t CountSupported() {
#ifdef __x86_64__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? 3 : 2;
#else
  return 1;
#endif
}

}  // namespace

std::span<const RowPasses> SupportedRowPasses() {
  static const size_t num_supported = CountSupported();
  return std::span(kAllPasses).first(num_supported);
}

const RowPasses& BestRowPasses() { return SupportedRowPasses().back(); }

}  // namespace lmhead::cpu
