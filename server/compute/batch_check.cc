#include "server/compute/batch_check.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

// Validated at the edge already; asserted again before anything accumulates.
absl::Status CheckChunk(const HeadSpec& spec, const ChunkRows& chunk, int64_t index,
                        const LossRecipe& recipe) {
  const ConstMatrixView& hidden = chunk.hidden_states;
  const auto wrong = [&](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index, " of the batch: ", parts...));
  };
  if (hidden.cols != spec.hidden_size) {
    return wrong("hidden_states has ", hidden.cols, " columns, head ", spec.name, " expects ",
                 spec.hidden_size);
  }
  const auto fits = [&](size_t size) { return static_cast<int64_t>(size) == hidden.rows; };
  if (!fits(chunk.targets.size())) {
    return wrong(chunk.targets.size(), " targets for ", hidden.rows, " rows");
  }
  if (!chunk.token_weights.empty() && !fits(chunk.token_weights.size())) {
    return wrong(chunk.token_weights.size(), " token_weights for ", hidden.rows, " rows");
  }
  if (!chunk.token_temperature.empty() && !fits(chunk.token_temperature.size())) {
    return wrong(chunk.token_temperature.size(), " token_temperature for ", hidden.rows, " rows");
  }
  for (size_t row = 0; row < chunk.targets.size(); ++row) {
    const int32_t target = chunk.targets[row];
    if (target == recipe.ignore_index || (0 <= target && target < spec.vocab_size)) continue;
    return wrong("target ", target, " in row ", row, " is neither ignore_index ",
                 recipe.ignore_index, " nor in [0, ", spec.vocab_size, ")");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBatch(const HeadSpec& spec, const MemoryPlan& plan, const BatchInput& input) {
  LMHEAD_CHECK(input.recipe != nullptr, spec.name);
  if (input.mode != BackwardMode::kNone && plan.schedule == Schedule::kEval) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec.name, " has schedule eval, which computes no gradient; create ",
                     "it with schedule frozen"));
  }
  if (input.mode == BackwardMode::kHiddenAndWeight && !spec.trainable) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", spec.name, " is not trainable, so it accumulates no weight gradient"));
  }
  const auto num_classes = static_cast<int64_t>(input.recipe->class_weights.size());
  if (num_classes != 0 && num_classes != spec.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("recipe has ", num_classes,
                                                   " class_weights, head ", spec.name, " expects ",
                                                   spec.vocab_size));
  }
  int64_t num_rows = 0;
  for (size_t i = 0; i < input.chunks.size(); ++i) {
    const ChunkRows& chunk = input.chunks[i];
    absl::Status status = CheckChunk(spec, chunk, static_cast<int64_t>(i), *input.recipe);
    if (!status.ok()) return status;
    num_rows += chunk.hidden_states.rows;
  }
  if (num_rows < 1 || num_rows > plan.batch_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", num_rows, " rows; head ",
                                                   spec.name, " computes 1 to ", plan.batch_tokens,
                                                   " at once"));
  }
  return absl::OkStatus();
}

}  // namespace lmhead
