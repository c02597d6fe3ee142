#include "server/head/head_stream.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "server/head/head.h"

namespace lmhead {
namespace {

constexpr int64_t kOutputAlignment = 64;
constexpr int64_t kNumOutputs = 5;

int64_t OutputStride(int64_t num_tokens) {
  const int64_t bytes = num_tokens * static_cast<int64_t>(sizeof(float));
  return (bytes + kOutputAlignment - 1) / kOutputAlignment * kOutputAlignment;
}

// How far the backward pass of a chunk goes.
BackwardMode ModeOf(const OutputSpec& outputs, bool accumulate) {
  if (accumulate) return BackwardMode::kHiddenAndWeight;
  return outputs.grad_hidden_states ? BackwardMode::kHidden : BackwardMode::kNone;
}

// Checks an array that a recipe asks for: there exactly when it does, one finite number a row.
absl::Status ValidateTokenField(const std::string& where, const char* field,
                                std::span<const float> values, bool wanted, int64_t num_tokens) {
  const int64_t size = static_cast<int64_t>(values.size());
  if (!wanted && size == 0) return absl::OkStatus();
  if (!wanted) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": carries ", field, ", which the stream's recipe does not ask for"));
  }
  if (size != num_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", field, " has ", size,
                                                   " entries, the recipe wants one for each of ",
                                                   num_tokens, " rows"));
  }
  for (int64_t i = 0; i < size; ++i) {
    if (!std::isfinite(values[i])) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": ", field, " of row ", i, " is ",
                                                     values[i], ", wanted a finite number"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

int64_t OutputBytes(int64_t num_tokens) { return kNumOutputs * OutputStride(num_tokens); }

HeadStream::HeadStream(std::shared_ptr<Head> head, std::shared_ptr<Step> step, StreamSpec spec,
                       int64_t max_chunk_tokens)
    : head_(std::move(head)),
      step_(std::move(step)),
      spec_(std::move(spec)),
      recipe_(std::make_shared<const LossRecipe>(spec_.recipe)),
      max_chunk_tokens_(max_chunk_tokens),
      schedule_(step_ == nullptr && !spec_.outputs.grad_hidden_states ? Schedule::kEval
                                                                      : head_->plan().schedule),
      num_computed_(std::make_shared<std::atomic<uint64_t>>(0)),
      attached_(step_ != nullptr) {}

HeadStream::~HeadStream() { Detach(); }

void HeadStream::Detach() {
  if (attached_.exchange(false)) step_->DetachStream(spec_.worker, spec_.stream_index);
}

std::string HeadStream::Where(uint64_t chunk_index) const {
  if (step_ == nullptr)
    return absl::StrCat("chunk ", chunk_index, " for head ", head_->spec().name);
  return absl::StrCat("chunk ", chunk_index, " of worker ", spec_.worker, " in step ",
                      step_->number(), " of head ", head_->spec().name);
}

absl::Status HeadStream::Validate(const ArrivedChunk& chunk) const {
  const std::string where = Where(chunk.chunk_index);
  if (chunk.num_tokens < 1 || chunk.num_tokens > max_chunk_tokens_) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": has ", chunk.num_tokens, " rows, wanted 1 to ", max_chunk_tokens_));
  }
  const int64_t row_bytes = head_->spec().hidden_size * BytesPerElement(spec_.hidden_dtype);
  const int64_t wanted_bytes = chunk.num_tokens * row_bytes;
  if (static_cast<int64_t>(chunk.hidden_states.size()) != wanted_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": hidden_states has ", chunk.hidden_states.size(), " bytes, wanted ",
                     wanted_bytes, ": ", chunk.num_tokens, " rows of ", head_->spec().hidden_size,
                     " ", std::string(DTypeName(spec_.hidden_dtype)), " elements"));
  }
  if (!std::isfinite(chunk.grad_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": grad_scale is ", chunk.grad_scale, ", wanted a finite number"));
  }
  if (absl::Status status = ValidateTokenField(where, "token_weights", chunk.token_weights,
                                               recipe_->token_weights, chunk.num_tokens);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = ValidateTokenField(where, "token_temperature", chunk.token_temperature,
                                               recipe_->per_token_temperature, chunk.num_tokens);
      !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < chunk.token_temperature.size(); ++i) {
    if (chunk.token_temperature[i] <= 0.0f) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": token_temperature of row ", i,
                                                     " is ", chunk.token_temperature[i],
                                                     ", wanted more than 0"));
    }
  }
  return ValidateTargets(chunk);
}

absl::Status HeadStream::ValidateTargets(const ArrivedChunk& chunk) const {
  if (static_cast<int64_t>(chunk.targets.size()) != chunk.num_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(Where(chunk.chunk_index), ": has ",
                                                   chunk.targets.size(), " targets for ",
                                                   chunk.num_tokens, " rows"));
  }
  const int64_t vocab_size = head_->spec().vocab_size;
  for (int64_t i = 0; i < chunk.num_tokens; ++i) {
    const int32_t target = chunk.targets[i];
    if (target == recipe_->ignore_index || (target >= 0 && target < vocab_size)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        Where(chunk.chunk_index), ": target of row ", i, " is ", target, ", wanted 0 to ",
        vocab_size - 1, " or ignore_index (", recipe_->ignore_index, ")"));
  }
  return absl::OkStatus();
}

// Lays the wanted outputs out in the chunk's slot: the one place where the task that writes them
// and the answer that shows them agree.
ChunkTask HeadStream::MakeTask(const ArrivedChunk& chunk, ChunkVerdict verdict,
                               ComputedChunk* answer) const {
  const int64_t n = chunk.num_tokens;
  const OutputSpec& outputs = spec_.outputs;
  std::byte* next = chunk.output_space.data();
  const auto carve = [&](bool wanted) -> void* {
    if (!wanted) return nullptr;
    return std::exchange(next, next + OutputStride(n));
  };
  const auto span = [n](const auto* data) {
    return std::span(data, data == nullptr ? 0 : static_cast<size_t>(n));
  };
  ChunkTask task = {.recipe = recipe_, .outputs = outputs};
  task.mode =
      ModeOf(outputs, verdict == ChunkVerdict::kNew && step_ != nullptr && head_->spec().trainable);
  task.batch_tokens = head_->plan().batch_tokens;
  const MatrixView hidden = {chunk.hidden_states.data(), n, head_->spec().hidden_size,
                             spec_.hidden_dtype};
  task.rows = {.hidden_states = hidden,
               .targets = chunk.targets,
               .token_weights = chunk.token_weights,
               .token_temperature = chunk.token_temperature,
               .grad_scale = chunk.grad_scale,
               .token_loss = static_cast<float*>(carve(outputs.token_loss)),
               .logprob = static_cast<float*>(carve(outputs.logprob)),
               .lse = static_cast<float*>(carve(outputs.lse)),
               .entropy = static_cast<float*>(carve(outputs.entropy)),
               .argmax = static_cast<int32_t*>(carve(outputs.argmax))};
  if (outputs.grad_hidden_states) task.rows.grad_hidden_states = hidden;
  *answer = {.chunk_index = chunk.chunk_index,
             .num_tokens = n,
             .duplicate = verdict == ChunkVerdict::kDuplicate,
             .token_loss = span(static_cast<const float*>(task.rows.token_loss)),
             .logprob = span(static_cast<const float*>(task.rows.logprob)),
             .lse = span(static_cast<const float*>(task.rows.lse)),
             .entropy = span(static_cast<const float*>(task.rows.entropy)),
             .argmax = span(static_cast<const int32_t*>(task.rows.argmax))};
  if (outputs.grad_hidden_states) answer->grad_hidden_states = chunk.hidden_states;
  return task;
}

absl::Status HeadStream::Submit(const ArrivedChunk& chunk, ChunkDone done) {
  if (absl::Status status = Validate(chunk); !status.ok()) return status;
  if (absl::Status status = head_->CheckUsable(); !status.ok()) return status;
  ChunkVerdict verdict = ChunkVerdict::kNew;
  if (step_ != nullptr) {
    absl::StatusOr<ChunkVerdict> accepted =
        step_->AcceptChunk(spec_.worker, chunk.chunk_index, chunk.checksum);
    if (!accepted.ok()) return accepted.status();
    verdict = *accepted;
  }
  ComputedChunk answer;
  ChunkTask task = MakeTask(chunk, verdict, &answer);
  task.done = [head = head_, step = step_, worker = spec_.worker, num_computed = num_computed_,
               answer, where = Where(chunk.chunk_index),
               done = std::move(done)](absl::StatusOr<ChunkOutput> output) mutable {
    if (!output.ok()) {
      head->BookFailure(step.get(), worker, answer, output.status());
      done(absl::Status(output.status().code(),
                        absl::StrCat(where, ": ", output.status().message())));
      return;
    }
    answer.sums = output->sums;
    answer.timings = output->timings;
    head->BookResult(step.get(), worker, answer);
    num_computed->fetch_add(1, std::memory_order_relaxed);
    done(answer);
  };
  absl::Status status = head_->SubmitTask(std::move(task));
  if (!status.ok() && step_ != nullptr && verdict == ChunkVerdict::kNew) {
    step_->ChunkFailed(spec_.worker, chunk.chunk_index, status);
  }
  return status;
}

absl::Status HeadStream::End(uint64_t num_chunks) {
  if (absl::Status status = head_->CheckUsable(); !status.ok()) return status;
  if (step_ == nullptr) return absl::OkStatus();
  return step_->EndWorker(spec_.worker, num_chunks).status();
}

uint64_t HeadStream::NumChunksCounted() const {
  if (step_ == nullptr) return num_computed_->load(std::memory_order_relaxed);
  return step_->NumChunksCounted(spec_.worker);
}

}  // namespace lmhead
