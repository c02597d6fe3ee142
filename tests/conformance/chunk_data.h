// The inputs of a chunk as plain vectors, and as the oracle takes them.

#ifndef LMHEAD_TESTS_CONFORMANCE_CHUNK_DATA_H_
#define LMHEAD_TESTS_CONFORMANCE_CHUNK_DATA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/reference/reference.h"
#include "proto/types/dtype.h"

namespace lmhead {

// `values` as elements of `dtype`, and back. Values that the dtype cannot hold are rounded.
std::vector<std::byte> Pack(const std::vector<float>& values, DType dtype);
std::vector<float> Unpack(const std::vector<std::byte>& bytes, DType dtype);
std::vector<float> RoundedTo(DType dtype, const std::vector<float>& values);

// The inputs of one chunk.
struct ChunkData {
  std::vector<float> hidden_states;  // [num_tokens, hidden_size], values of the hidden dtype.
  std::vector<int32_t> targets;      // [num_tokens]
  std::vector<float> token_weights;  // Empty, or [num_tokens], like the next.
  std::vector<float> token_temperature;
  float grad_scale = 1.0f;
  // As the recipe asks, [num_tokens] each, or empty.
  std::vector<float> logprob_grad;
  std::vector<float> entropy_grad;
  std::vector<float> old_logprob;
  std::vector<float> advantage;
  std::vector<float> reference_logprob;
  std::vector<int32_t> teacher_topk_ids;  // [num_tokens, recipe.teacher_top_k()], like the next.
  std::vector<float> teacher_topk_logprobs;
  std::vector<float> teacher_hidden_states;  // [num_tokens, teacher's hidden_size], values of the
                                             // recipe's dtype for them.

  int64_t num_tokens() const { return static_cast<int64_t>(targets.size()); }
};

// The same as the oracle takes it.
reference::Tokens TokensOf(const ChunkData& chunk);

// Whether the row has neither a NaN nor an infinity in its hidden states and its teacher's.
bool IsFiniteRow(const ChunkData& chunk, int64_t row);

// Entries of `all`, [num_tokens, vocab_size], at ids, as many a row; 0 for rows that are not
// finite. Ends the process when an id is not in the vocabulary.
std::vector<double> AtIds(const std::vector<double>& all, const ChunkData& chunk,
                          const std::vector<int32_t>& ids);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_CHUNK_DATA_H_
