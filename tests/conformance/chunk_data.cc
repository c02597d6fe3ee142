#include "tests/conformance/chunk_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

std::vector<double> ToDouble(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

reference::Tokens TokensOf(const ChunkData& chunk) {
  return {.hidden_states = ToDouble(chunk.hidden_states),
          .targets = chunk.targets,
          .token_weights = ToDouble(chunk.token_weights),
          .token_temperature = ToDouble(chunk.token_temperature),
          .grad_scale = chunk.grad_scale,
          .logprob_grad = ToDouble(chunk.logprob_grad),
          .entropy_grad = ToDouble(chunk.entropy_grad),
          .old_logprob = ToDouble(chunk.old_logprob),
          .advantage = ToDouble(chunk.advantage),
          .reference_logprob = ToDouble(chunk.reference_logprob),
          .teacher_topk_ids = chunk.teacher_topk_ids,
          .teacher_topk_logprobs = ToDouble(chunk.teacher_topk_logprobs),
          .teacher_hidden_states = ToDouble(chunk.teacher_hidden_states)};
}

std::vector<std::byte> Pack(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * BytesPerElement(dtype));
  if (dtype == DType::kFloat32) {
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  auto* halves = reinterpret_cast<uint16_t*>(bytes.data());
  for (size_t i = 0; i < values.size(); ++i) {
    halves[i] = dtype == DType::kBFloat16 ? FloatToBFloat16(values[i]) : FloatToFloat16(values[i]);
  }
  return bytes;
}

std::vector<float> Unpack(const std::vector<std::byte>& bytes, DType dtype) {
  const auto rows = static_cast<int64_t>(bytes.size()) / BytesPerElement(dtype);
  const std::vector<double> values = reference::Upcast({bytes.data(), rows, 1, dtype});
  return {values.begin(), values.end()};
}

std::vector<float> RoundedTo(DType dtype, const std::vector<float>& values) {
  return Unpack(Pack(values, dtype), dtype);
}

bool IsFiniteRow(const ChunkData& chunk, int64_t row) {
  for (const std::vector<float>* values : {&chunk.hidden_states, &chunk.teacher_hidden_states}) {
    const int64_t cols = static_cast<int64_t>(values->size()) / chunk.num_tokens();
    const auto start = values->begin() + row * cols;
    if (!std::all_of(start, start + cols, [](float value) { return std::isfinite(value); })) {
      return false;
    }
  }
  return true;
}

std::vector<double> AtIds(const std::vector<double>& all, const ChunkData& chunk,
                          const std::vector<int32_t>& ids) {
  const int64_t vocab_size = static_cast<int64_t>(all.size()) / chunk.num_tokens();
  const int64_t ids_a_row = static_cast<int64_t>(ids.size()) / chunk.num_tokens();
  std::vector<double> values(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    LMHEAD_CHECK(0 <= ids[i] && ids[i] < vocab_size, absl::StrCat("id ", ids[i]));
    const int64_t row = static_cast<int64_t>(i) / ids_a_row;
    if (IsFiniteRow(chunk, row)) values[i] = all[row * vocab_size + ids[i]];
  }
  return values;
}

}  // namespace lmhead
