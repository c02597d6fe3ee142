#include "server/head/chunk_check.h"

#include <cmath>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

// Rounding that a teacher's log-probabilities, and the sum of its probabilities, may show.
constexpr double kProbabilitySlack = 1e-3;

absl::Status Wrong(const std::string& where, const auto&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", parts...));
}

absl::Status NotAskedFor(const std::string& where, const char* field) {
  return Wrong(where, "carries ", field, ", which the stream's recipe does not ask for");
}

// An array is there exactly when it is wanted, `per_token` elements a row.
absl::Status CheckLength(const std::string& where, const char* field, size_t size, bool wanted,
                         int64_t num_tokens, int64_t per_token = 1) {
  if (!wanted) return size == 0 ? absl::OkStatus() : NotAskedFor(where, field);
  if (static_cast<int64_t>(size) == num_tokens * per_token) return absl::OkStatus();
  return Wrong(where, field, " has ", size, " entries, the recipe wants ", per_token,
               " for each of ", num_tokens, " rows");
}

absl::Status CheckMatrix(const std::string& where, const char* field, size_t bytes,
                         int64_t num_tokens, int64_t columns, DType dtype) {
  const int64_t wanted = num_tokens * columns * BytesPerElement(dtype);
  if (static_cast<int64_t>(bytes) == wanted) return absl::OkStatus();
  return Wrong(where, field, " has ", bytes, " bytes, wanted ", wanted, ": ", num_tokens,
               " rows of ", columns, " ", std::string(DTypeName(dtype)), " elements");
}

// Every element is a finite number; with `targets`, those of rows that are not ignored.
absl::Status CheckFinite(const std::string& where, const char* field, std::span<const float> values,
                         std::span<const int32_t> targets, int32_t ignore_index) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i]) || (!targets.empty() && targets[i] == ignore_index)) continue;
    return Wrong(where, field, " of row ", i, " is ", values[i], ", wanted a finite number");
  }
  return absl::OkStatus();
}

absl::Status CheckTargets(const std::string& where, const ArrivedChunk& chunk, int64_t vocab_size,
                          int32_t ignore_index) {
  if (static_cast<int64_t>(chunk.targets.size()) != chunk.num_tokens) {
    return Wrong(where, "has ", chunk.targets.size(), " targets for ", chunk.num_tokens, " rows");
  }
  for (int64_t i = 0; i < chunk.num_tokens; ++i) {
    const int32_t target = chunk.targets[i];
    if (target == ignore_index || (target >= 0 && target < vocab_size)) continue;
    return Wrong(where, "target of row ", i, " is ", target, ", wanted 0 to ", vocab_size - 1,
                 " or ignore_index (", ignore_index, ")");
  }
  return absl::OkStatus();
}

// Tells ids of one row apart, in time that does not depend on the vocabulary.
class DistinctIds {
 public:
  explicit DistinctIds(size_t ids_per_row) {
    size_t size = 4;
    while (size < 2 * ids_per_row) size *= 2;
    places_.resize(size);
  }

  void NextRow() { ++row_; }

  // False when the row had this id already.
  bool Insert(int32_t id) {
    const size_t mask = places_.size() - 1;
    for (size_t at = static_cast<uint32_t>(id) * size_t{2654435761u} & mask;;
         at = (at + 1) & mask) {
      Place& place = places_[at];
      if (place.row != row_) {
        place = {row_, id};
        return true;
      }
      if (place.id == id) return false;
    }
  }

 private:
  struct Place {
    int64_t row = 0;
    int32_t id = 0;
  };
  std::vector<Place> places_;
  int64_t row_ = 0;
};

absl::Status CheckTopkIds(const std::string& where, std::span<const int32_t> ids, int64_t row,
                          int64_t vocab_size, DistinctIds& distinct) {
  distinct.NextRow();
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      return Wrong(where, "topk_ids of row ", row, " has ", id, ", wanted 0 to ", vocab_size - 1);
    }
    if (!distinct.Insert(id)) {
      return Wrong(where, "topk_ids of row ", row, " has ", id,
                   " twice, wanted distinct ids; give padding ids of their own, with "
                   "log-probability -inf");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTopkLogprobs(const std::string& where, std::span<const float> logprobs,
                               int64_t row, TopkMass mass) {
  double sum = 0.0;
  for (const float logprob : logprobs) {
    if (std::isnan(logprob) || logprob > kProbabilitySlack) {
      return Wrong(where, "topk_logprobs of row ", row, " has ", logprob, ", wanted at most 0");
    }
    sum += std::exp(static_cast<double>(logprob));
  }
  if (sum > 1.0 + kProbabilitySlack) {
    return Wrong(where, "the probabilities of topk_logprobs of row ", row, " sum to ", sum,
                 ", wanted at most 1");
  }
  if (sum == 0.0 && mass == TopkMass::kRenormalise) {
    return Wrong(where, "the probabilities of topk_logprobs of row ", row,
                 " are all 0, and cannot be scaled to sum to 1");
  }
  return absl::OkStatus();
}

absl::Status CheckTopk(const std::string& where, const StreamSpec& spec, const ChunkShape& shape,
                       const ArrivedChunk& chunk) {
  const int64_t k = spec.recipe.teacher_top_k();
  const int64_t n = chunk.num_tokens;
  for (const absl::Status& status :
       {CheckLength(where, "topk_ids", chunk.teacher_topk_ids.size(), k > 0, n, k),
        CheckLength(where, "topk_logprobs", chunk.teacher_topk_logprobs.size(), k > 0, n, k)}) {
    if (!status.ok()) return status;
  }
  if (k == 0) return absl::OkStatus();
  DistinctIds distinct(static_cast<size_t>(k));
  for (int64_t row = 0; row < n; ++row) {
    absl::Status status = CheckTopkIds(where, chunk.teacher_topk_ids.subspan(row * k, k), row,
                                       shape.vocab_size, distinct);
    if (!status.ok()) return status;
    status = CheckTopkLogprobs(where, chunk.teacher_topk_logprobs.subspan(row * k, k), row,
                               spec.recipe.distillation->topk_mass);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Arrays of the objectives of reinforcement learning. Values of ignored rows do not matter.
absl::Status CheckPolicy(const std::string& where, const StreamSpec& spec,
                         const ArrivedChunk& chunk) {
  const auto& policy = spec.recipe.policy;
  const bool coefficients = policy.has_value() && policy->kind == PolicyKind::kCoefficients;
  const bool clipped = policy.has_value() && policy->kind == PolicyKind::kClipped;
  const bool reference = clipped && policy->reference_kl_coefficient != 0.0f;
  struct Field {
    const char* name;
    std::span<const float> values;
    bool wanted;
  };
  for (const Field& field : {Field{"logprob_grad", chunk.logprob_grad, coefficients},
                             Field{"entropy_grad", chunk.entropy_grad, coefficients},
                             Field{"old_logprob", chunk.old_logprob, clipped},
                             Field{"advantage", chunk.advantage, clipped},
                             Field{"reference_logprob", chunk.reference_logprob, reference}}) {
    absl::Status status =
        CheckLength(where, field.name, field.values.size(), field.wanted, chunk.num_tokens);
    if (status.ok()) {
      status =
          CheckFinite(where, field.name, field.values, chunk.targets, spec.recipe.ignore_index);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckTokenOptions(const std::string& where, const LossRecipe& recipe,
                               const ArrivedChunk& chunk) {
  for (const absl::Status& status :
       {CheckLength(where, "token_weights", chunk.token_weights.size(), recipe.token_weights,
                    chunk.num_tokens),
        CheckFinite(where, "token_weights", chunk.token_weights, {}, 0),
        CheckLength(where, "token_temperature", chunk.token_temperature.size(),
                    recipe.per_token_temperature, chunk.num_tokens)}) {
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < chunk.token_temperature.size(); ++i) {
    if (IsTemperature(chunk.token_temperature[i])) continue;
    return Wrong(where, "token_temperature of row ", i, " is ", chunk.token_temperature[i],
                 ", wanted ", kTemperatureMin, " to ", kTemperatureMax);
  }
  return absl::OkStatus();
}

// The teacher's side of a paired stream carries teacher_hidden_states and nothing else.
absl::Status CheckTeacherSide(const std::string& where, const ArrivedChunk& chunk) {
  const std::pair<const char*, bool> fields[] = {
      {"grad_scale", chunk.grad_scale != 1.0f},
      {"targets", !chunk.targets.empty()},
      {"hidden_states", !chunk.hidden_states.empty()},
      {"token_weights", !chunk.token_weights.empty()},
      {"token_temperature", !chunk.token_temperature.empty()},
      {"logprob_grad", !chunk.logprob_grad.empty()},
      {"entropy_grad", !chunk.entropy_grad.empty()},
      {"old_logprob", !chunk.old_logprob.empty()},
      {"advantage", !chunk.advantage.empty()},
      {"reference_logprob", !chunk.reference_logprob.empty()},
      {"topk_ids", !chunk.teacher_topk_ids.empty()},
      {"topk_logprobs", !chunk.teacher_topk_logprobs.empty()}};
  for (const auto& [field, is_set] : fields) {
    if (is_set) {
      return Wrong(where, "carries ", field,
                   ", but the teacher's side of a paired stream carries teacher_hidden_states "
                   "alone");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTeacherHidden(const std::string& where, const StreamSpec& spec,
                                const ChunkShape& shape, const ArrivedChunk& chunk) {
  const size_t bytes = chunk.teacher_hidden_states.size();
  if (!spec.recipe.has_teacher_head()) {
    return bytes == 0 ? absl::OkStatus() : NotAskedFor(where, "teacher_hidden_states");
  }
  if (spec.side() == StreamSide::kStudent) {
    if (bytes == 0) return absl::OkStatus();
    return Wrong(where,
                 "carries teacher_hidden_states, which come on the teacher's side of a paired "
                 "stream");
  }
  return CheckMatrix(where, "teacher_hidden_states", bytes, chunk.num_tokens,
                     shape.teacher_hidden_size, spec.recipe.distillation->teacher_hidden_dtype);
}

}  // namespace

absl::Status CheckChunk(const std::string& where, const StreamSpec& spec, const ChunkShape& shape,
                        const ArrivedChunk& chunk) {
  if (chunk.num_tokens < 1 || chunk.num_tokens > shape.max_chunk_tokens) {
    return Wrong(where, "has ", chunk.num_tokens, " rows, wanted 1 to ", shape.max_chunk_tokens);
  }
  absl::Status status = CheckTeacherHidden(where, spec, shape, chunk);
  if (!status.ok()) return status;
  if (spec.side() == StreamSide::kTeacher) return CheckTeacherSide(where, chunk);
  if (!std::isfinite(chunk.grad_scale)) {
    return Wrong(where, "grad_scale is ", chunk.grad_scale, ", wanted a finite number");
  }
  status = CheckMatrix(where, "hidden_states", chunk.hidden_states.size(), chunk.num_tokens,
                       shape.hidden_size, spec.hidden_dtype);
  if (status.ok()) status = CheckTokenOptions(where, spec.recipe, chunk);
  if (status.ok()) {
    status = CheckTargets(where, chunk, shape.vocab_size, spec.recipe.ignore_index);
  }
  if (status.ok()) status = CheckPolicy(where, spec, chunk);
  if (status.ok()) status = CheckTopk(where, spec, shape, chunk);
  return status;
}

}  // namespace lmhead
