// Whether a chunk is what its stream was opened for: asked before anything is touched.

#ifndef LMHEAD_SERVER_HEAD_CHUNK_CHECK_H_
#define LMHEAD_SERVER_HEAD_CHUNK_CHECK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "server/head/chunk.h"

namespace lmhead {

// What the stream's heads ask of a chunk.
struct ChunkShape {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t teacher_hidden_size = 0;  // Of the stream's teacher; 0 when it has none.
  int64_t max_chunk_tokens = 0;
};

// INVALID_ARGUMENT naming the chunk (`where`: "chunk 7 of worker w0 in step 12 of head lm"), the
// field, the row, what was got and what is wanted: arrays that are missing, surplus or of another
// length than the stream's recipe and side say, and values that no loss is defined for. Reads every
// per-token value, no hidden states.
absl::Status CheckChunk(const std::string& where, const StreamSpec& spec, const ChunkShape& shape,
                        const ArrivedChunk& chunk);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_CHUNK_CHECK_H_
