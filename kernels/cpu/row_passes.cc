#include "kernels/cpu/row_passes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

// The vectors never cross a function boundary that is not inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace lmhead::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Makes the sums relative to `new_max`, which is above the present maximum.
void RaiseMax(float new_max, RowState* row) {
  if (row->logits_max > -kInfinity) {  // Else the sums are those of no logit.
    const double shift = static_cast<double>(row->logits_max) - new_max;
    const double scale = std::exp(shift);
    row->sum_exp_logit = scale * (row->sum_exp_logit + row->sum_exp * shift);
    row->sum_exp *= scale;
    row->sum_weighted_logit += row->sum_class_weight * shift;
  }
  row->logits_max = new_max;
}

bool ContainsNan(const float* values, int64_t count) {
  return std::any_of(values, values + count, [](float value) { return std::isnan(value); });
}

// weight * value, where a weight of 0 leaves even an infinite value out.
double Weighted(double weight, double value) { return weight == 0.0 ? 0.0 : weight * value; }

namespace sse2 {
#define LMHEAD_VECTOR_BYTES 16
#include "kernels/cpu/row_passes.inc"
#undef LMHEAD_VECTOR_BYTES
}  // namespace sse2

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LMHEAD_VECTOR_BYTES 32
#include "kernels/cpu/row_passes.inc"
#undef LMHEAD_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#define LMHEAD_VECTOR_BYTES 64
#include "kernels/cpu/row_passes.inc"
#undef LMHEAD_VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#endif

// From the plainest to the best; the processor has a prefix of them.
constexpr std::array kAllPasses = {
    RowPasses{"sse2", sse2::Transform, sse2::Accumulate, sse2::Grad},
#ifdef __x86_64__
    RowPasses{"avx2", avx2::Transform, avx2::Accumulate, avx2::Grad},
    RowPasses{"avx512", avx512::Transform, avx512::Accumulate, avx512::Grad},
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

void BeginRow(RowState* row) {
  row->logits_max = -kInfinity;
  row->argmax = 0;
  row->target_logit = 0.0f;
  row->sum_exp = 0.0;
  row->sum_exp_logit = 0.0;
  row->sum_class_weight = 0.0;
  row->sum_weighted_logit = 0.0;
}

RowOutputs FinishRow(const RowConfig& config, RowState* row) {
  RowOutputs outputs;
  if (!row->finite) return outputs;
  const bool all_masked = row->logits_max == -kInfinity && row->sum_exp == 0.0;
  const double log_sum = all_masked ? 0.0 : std::log(row->sum_exp);
  outputs.lse = row->logits_max + log_sum;
  if (!all_masked && config.entropy) {
    const double entropy = log_sum - row->sum_exp_logit / row->sum_exp;
    outputs.entropy = entropy < 0.0 ? 0.0 : entropy;
  }
  if (!row->valid) return outputs;

  const double smoothing = config.label_smoothing;
  const double target_weight =
      config.class_weights != nullptr ? config.class_weights[row->target] : 1.0;
  const double target_mass = (1.0 - smoothing) * target_weight;
  const double smoothing_share = smoothing / static_cast<double>(config.vocab_size);
  const double mass = target_mass + smoothing_share * row->sum_class_weight;

  const double logprob = static_cast<double>(row->target_logit) - row->logits_max - log_sum;
  outputs.logprob = all_masked ? -kInfinity : logprob > 0.0 ? 0.0 : logprob;
  outputs.cross_entropy =
      Weighted(target_mass, -outputs.logprob) +
      smoothing_share * (row->sum_class_weight * log_sum - row->sum_weighted_logit);
  outputs.z_loss = Weighted(config.z_loss, outputs.lse * outputs.lse);

  row->target_mass = static_cast<float>(target_mass);
  row->probability_factor =
      all_masked ? 0.0f
                 : static_cast<float>((mass + 2.0 * config.z_loss * outputs.lse) / row->sum_exp);
  return outputs;
}

std::span<const RowPasses> SupportedRowPasses() {
  static const size_t num_supported = CountSupported();
  return std::span(kAllPasses).first(num_supported);
}

const RowPasses& BestRowPasses() { return SupportedRowPasses().back(); }

}  // namespace lmhead::cpu
