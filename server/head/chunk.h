// What a ComputeLoss stream is opened with, and a chunk on its way through the head: plain values.

#ifndef LMHEAD_SERVER_HEAD_CHUNK_H_
#define LMHEAD_SERVER_HEAD_CHUNK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "proto/types/dtype.h"
#include "proto/types/loss_recipe.h"

namespace lmhead {

// What of its chunks a stream carries: all, or one side of a paired stream.
enum class StreamSide : uint8_t { kWhole, kStudent, kTeacher };

// What a stream is opened with (lmhead.v1.StreamOpen).
struct StreamSpec {
  uint64_t step = 0;  // 0: evaluation.
  std::string worker;
  uint64_t incarnation = 0;
  uint32_t stream_index = 0;
  DType hidden_dtype = DType::kFloat32;  // On the teacher's side that of the student's.
  LossRecipe recipe;
  OutputSpec outputs;
  bool teacher_side = false;

  StreamSide side() const {
    if (!recipe.distillation.has_value() || !recipe.distillation->paired_stream) {
      return StreamSide::kWhole;
    }
    return teacher_side ? StreamSide::kTeacher : StreamSide::kStudent;
  }
};

// A chunk that has arrived in a staging slot, not validated yet. Everything lies in the slot and is
// borrowed until the chunk's `done` has run, or Submit has refused it. An empty span is an absent
// field.
struct ArrivedChunk {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  float grad_scale = 1.0f;
  uint64_t checksum = 0;               // Of its contents, for the ledger.
  std::span<std::byte> hidden_states;  // Overwritten with grad_hidden_states when that is wanted.
  std::span<const int32_t> targets;
  std::span<const float> token_weights;
  std::span<const float> token_temperature;
  std::span<const float> logprob_grad;
  std::span<const float> entropy_grad;
  std::span<const float> old_logprob;
  std::span<const float> advantage;
  std::span<const float> reference_logprob;
  std::span<const int32_t> teacher_topk_ids;
  std::span<const float> teacher_topk_logprobs;
  std::span<const std::byte> teacher_hidden_states;
  std::span<std::byte> output_space;  // Per-token outputs go here; see OutputBytes.
};

// The answer; its spans lie in the chunk's slot.
struct ComputedChunk {
  uint64_t chunk_index = 0;
  int64_t num_tokens = 0;
  bool duplicate = false;
  LossSums sums;
  StageTimings timings;
  std::span<const float> token_loss;
  std::span<const float> logprob;
  std::span<const float> lse;
  std::span<const float> entropy;
  std::span<const int32_t> argmax;
  std::span<const int32_t> topk_ids;
  std::span<const float> topk_logprobs;
  std::span<const std::byte> grad_hidden_states;
};

// Takes a chunk's answer. Called once, on any thread; must not block.
using ChunkDone = std::function<void(absl::StatusOr<ComputedChunk>)>;

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_CHUNK_H_
