#include "server/compute/batch_check.h"

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

// A per-token array of a chunk, whose absence is as much a part of the recipe as its presence.
struct TokenArray {
  absl::string_view name;
  size_t size = 0;
  int64_t width = 1;  // Entries a token.
  bool wanted = false;
};

// Those that belong to the objective.
std::vector<TokenArray> ObjectiveArrays(const ChunkRows& chunk, const LossRecipe& recipe) {
  const bool coefficients =
      recipe.policy.has_value() && recipe.policy->kind == PolicyKind::kCoefficients;
  const bool clipped = recipe.policy.has_value() && recipe.policy->kind == PolicyKind::kClipped;
  const bool reference = clipped && recipe.policy->reference_kl_coefficient != 0.0f;
  const int64_t top_k = recipe.teacher_top_k();
  return {{"logprob_grad", chunk.logprob_grad.size(), 1, coefficients},
          {"entropy_grad", chunk.entropy_grad.size(), 1, coefficients},
          {"old_logprob", chunk.old_logprob.size(), 1, clipped},
          {"advantage", chunk.advantage.size(), 1, clipped},
          {"reference_logprob", chunk.reference_logprob.size(), 1, reference},
          {"teacher_topk_ids", chunk.teacher_topk_ids.size(), top_k, top_k > 0},
          {"teacher_topk_logprobs", chunk.teacher_topk_logprobs.size(), top_k, top_k > 0}};
}

std::string Name(int64_t chunk) { return absl::StrCat("chunk ", chunk, " of the batch: "); }

absl::Status CheckArrays(const ChunkRows& chunk, int64_t index, const LossRecipe& recipe) {
  const int64_t rows = chunk.hidden_states.rows;
  std::vector<TokenArray> arrays = ObjectiveArrays(chunk, recipe);
  arrays.push_back({"targets", chunk.targets.size(), 1, true});
  arrays.push_back({"token_weights", chunk.token_weights.size(), 1, !chunk.token_weights.empty()});
  arrays.push_back(
      {"token_temperature", chunk.token_temperature.size(), 1, !chunk.token_temperature.empty()});
  for (const TokenArray& array : arrays) {
    const int64_t wanted = array.wanted ? rows * array.width : 0;
    if (static_cast<int64_t>(array.size) == wanted) continue;
    return absl::InvalidArgumentError(absl::StrCat(Name(index), array.size, " ", array.name,
                                                   " for ", rows, " rows, the recipe wants ",
                                                   wanted));
  }
  return absl::OkStatus();
}

// Never read out of bounds, whatever came through.
absl::Status CheckIds(const HeadSpec& spec, const ChunkRows& chunk, int64_t index,
                      const LossRecipe& recipe) {
  for (size_t row = 0; row < chunk.targets.size(); ++row) {
    const int32_t target = chunk.targets[row];
    if (target == recipe.ignore_index || (0 <= target && target < spec.vocab_size)) continue;
    return absl::InvalidArgumentError(absl::StrCat(Name(index), "target ", target, " in row ", row,
                                                   " is neither ignore_index ", recipe.ignore_index,
                                                   " nor in [0, ", spec.vocab_size, ")"));
  }
  for (size_t i = 0; i < chunk.teacher_topk_ids.size(); ++i) {
    const int32_t id = chunk.teacher_topk_ids[i];
    if (0 <= id && id < spec.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(Name(index), "teacher_topk_ids has ", id,
                                                   " in row ", i / recipe.teacher_top_k(),
                                                   ", which is not in [0, ", spec.vocab_size, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckChunk(const HeadSpec& spec, const ChunkRows& chunk, int64_t index,
                        const BatchInput& input) {
  const LossRecipe& recipe = *input.recipe;
  const ConstMatrixView& hidden = chunk.hidden_states;
  if (hidden.cols != spec.hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat(Name(index), "hidden_states has ", hidden.cols,
                                                   " columns, head ", spec.name, " expects ",
                                                   spec.hidden_size));
  }
  if (absl::Status status = CheckArrays(chunk, index, recipe); !status.ok()) return status;
  const int64_t teacher_rows = recipe.has_teacher_head() ? hidden.rows : 0;
  if (chunk.teacher_hidden_states.rows != teacher_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(index), chunk.teacher_hidden_states.rows,
                     " rows of teacher_hidden_states, the recipe wants ", teacher_rows));
  }
  return CheckIds(spec, chunk, index, recipe);
}

absl::Status CheckTopK(const HeadSpec& spec, int32_t top_k, absl::string_view what) {
  if (0 <= top_k && top_k <= spec.top_k_max && top_k <= spec.vocab_size) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " of ", top_k, " entries a token: head ", spec.name, " has vocab_size ",
                   spec.vocab_size, " and was created with top_k_max ", spec.top_k_max));
}

// What the recipe and the outputs need of the head.
absl::Status CheckNeeds(const HeadSpec& spec, const BatchInput& input) {
  const LossRecipe& recipe = *input.recipe;
  const auto num_classes = static_cast<int64_t>(recipe.class_weights.size());
  if (num_classes != 0 && num_classes != spec.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("recipe has ", num_classes,
                                                   " class_weights, head ", spec.name, " expects ",
                                                   spec.vocab_size));
  }
  if (recipe.has_teacher_head() != (input.teacher != nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec.name, ": the batch has ", input.teacher != nullptr ? "a" : "no",
                     " teacher, its recipe has ", recipe.has_teacher_head() ? "one" : "none"));
  }
  absl::Status status = CheckTopK(spec, recipe.teacher_top_k(), "a top-k teacher");
  if (status.ok()) status = CheckTopK(spec, input.outputs.top_k, "top-k outputs");
  return status;
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
  if (absl::Status status = CheckNeeds(spec, input); !status.ok()) return status;
  int64_t num_rows = 0;
  for (size_t i = 0; i < input.chunks.size(); ++i) {
    const ChunkRows& chunk = input.chunks[i];
    absl::Status status = CheckChunk(spec, chunk, static_cast<int64_t>(i), input);
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

absl::Status CheckTeacher(const HeadSpec& spec, VocabRange range, const HeadSpec& teacher,
                          VocabRange teacher_range, const BatchInput& input) {
  if (teacher.hidden_size > spec.teacher_hidden_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", spec.name, " was created with teacher_hidden_size ", spec.teacher_hidden_size,
        ", its teacher ", teacher.name, " has hidden_size ", teacher.hidden_size));
  }
  const bool equal = input.recipe->distillation->vocabulary == TeacherVocabulary::kEqual;
  if (equal && teacher.vocab_size != spec.vocab_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", spec.name, " has vocab_size ", spec.vocab_size, ", its teacher ", teacher.name,
        " has ", teacher.vocab_size, ", and the recipe says that they are equal"));
  }
  if (range.size() > 0 && teacher_range.size() > 0 && range.start != teacher_range.start) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", spec.name, " is split at vocabulary id ", range.start, ", its teacher ",
        teacher.name, " at ", teacher_range.start, "; create both with one partition_vocab_size"));
  }
  for (size_t i = 0; i < input.chunks.size(); ++i) {
    const int64_t cols = input.chunks[i].teacher_hidden_states.cols;
    if (cols == teacher.hidden_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(Name(static_cast<int64_t>(i)), "teacher_hidden_states has ", cols,
                     " columns, teacher ", teacher.name, " expects ", teacher.hidden_size));
  }
  return absl::OkStatus();
}

absl::Status CheckTensorRows(const HeadSpec& spec, VocabRange range, int64_t tensor_cols,
                             int64_t row_start, int64_t rows, int64_t cols) {
  if (cols == tensor_cols && rows >= 0 && row_start >= range.start &&
      row_start <= range.stop - rows) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("head ", spec.name, ": rows [", row_start, ", ", row_start + rows, ") of ", cols,
                   " columns do not lie inside rows [", range.start, ", ", range.stop, ") of ",
                   tensor_cols, " columns"));
}

absl::Status CheckGradRows(const HeadSpec& spec, std::span<const int32_t> row_ids,
                           int64_t row_start, ConstMatrixView rows) {
  if (!spec.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec.name, " is not trainable: it has no gradient to add to"));
  }
  if (rows.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat("head ", spec.name, ": gradient rows are ",
                                                   std::string(DTypeName(rows.dtype)),
                                                   ", wanted float32"));
  }
  if (row_ids.empty()) {
    return CheckTensorRows(spec, {0, spec.vocab_size}, spec.hidden_size, row_start, rows.rows,
                           rows.cols);
  }
  if (rows.cols != spec.hidden_size || static_cast<int64_t>(row_ids.size()) != rows.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec.name, ": ", row_ids.size(), " row ids for ", rows.rows,
                     " rows of ", rows.cols, " columns, wanted as many of ", spec.hidden_size));
  }
  for (const int32_t id : row_ids) {
    if (0 <= id && id < spec.vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec.name, ": row id ", id, " is not in [0, ", spec.vocab_size, ")"));
  }
  return absl::OkStatus();
}

}  // namespace lmhead
