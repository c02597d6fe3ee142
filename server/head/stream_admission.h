// What opening a stream asks of its heads, and how wide its chunks are.

#ifndef LMHEAD_SERVER_HEAD_STREAM_ADMISSION_H_
#define LMHEAD_SERVER_HEAD_STREAM_ADMISSION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "proto/types/head_spec.h"
#include "server/head/chunk.h"

namespace lmhead {

// Whether `head` has room for what the stream wants, and the stream's sides make sense.
// INVALID_ARGUMENT naming the field, what was got and what is wanted.
absl::Status CheckStream(const HeadSpec& head, const StreamSpec& spec);

// Whether `teacher` can teach `head` with this recipe, on num_ranks ranks. INVALID_ARGUMENT: the
// head itself, or vocabularies between which the divergence is not defined. FAILED_PRECONDITION:
// the teacher is trainable, or wider than the head has memory for.
// REQUIRES: the recipe has a teacher head.
absl::Status CheckTeacher(const HeadSpec& head, const HeadSpec& teacher, const LossRecipe& recipe,
                          int32_t num_ranks);

// Bytes that a row of a chunk takes of its slot beside per-token fields: hidden states, teacher
// hidden states, top-k arrays and top-k outputs. Of a paired stream those of the wider side, the
// same asked on both, with room for as many top-k outputs as the head may have: the sides must cut
// their rows alike. `teacher` is null without a teacher head.
int64_t ChunkRowBytes(const HeadSpec& head, const HeadSpec* teacher, const StreamSpec& spec);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_STREAM_ADMISSION_H_
