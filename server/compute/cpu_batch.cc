#include "server/compute/cpu_batch.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/cpu/gemm.h"
#include "server/compute/batch_check.h"
#include "server/compute/cpu_merge.h"
#include "server/compute/cpu_outputs.h"
#include "server/compute/cpu_upload.h"

namespace lmhead {
namespace {

static_assert(sizeof(cpu::RowState) == kCpuRowStateBytes);
static_assert(sizeof(cpu::DivergenceState) == kCpuDivergenceStateBytes);
static_assert(sizeof(cpu::TeacherEntry) == kCpuTeacherEntryBytes);

// Seconds since the last call.
class Stopwatch {
 public:
  double Lap() {
    const Clock::time_point now = Clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

cpu::DivergenceConfig ConfigOf(const DistillationSpec& spec, int64_t vocab_size) {
  const double temperature = spec.kl_temperature;
  return {.divergence = spec.divergence,
          .topk_mass = spec.topk_mass,
          .vocabulary = spec.vocabulary,
          .whole_vocabulary = spec.top_k >= vocab_size,
          .kl_temperature = spec.kl_temperature,
          .jsd_beta = spec.jsd_beta,
          .weight = spec.divergence_weight *
                    (spec.scale_by_temperature_squared ? temperature * temperature : 1.0)};
}

bool NeedsEntropy(const std::optional<PolicySpec>& policy) {
  return policy.has_value() &&
         (policy->kind == PolicyKind::kCoefficients || policy->entropy_coefficient != 0.0f);
}

}  // namespace

CpuBatch::CpuBatch(const MemoryPlan& plan, const RankContext& context, CpuProducts* products,
                   HostArena* arena)
    : plan_(plan),
      context_(context),
      products_(products),
      num_tiles_((products->range().size() + plan.vocab_tile - 1) / plan.vocab_tile),
      keeps_logits_(plan.schedule == Schedule::kRetain || plan.schedule == Schedule::kFrozen),
      passes_(cpu::BestRowPasses()) {
  const CpuScratch scratch = PlanCpuScratch(products->spec(), plan);
  const auto carve = [&]<typename T>(MemoryCategory category, int64_t bytes, T** to) {
    *to = static_cast<T*>(arena->Carve(category, bytes));
  };
  using enum MemoryCategory;
  carve(kLogitsScratch, scratch.logits_bytes, &state_.logits);
  carve(kLogitsScratch, scratch.teacher_logits_bytes, &state_.teacher_logits);
  carve(kDeviceStaging, scratch.hidden_bytes, &state_.hidden);
  carve(kDeviceStaging, scratch.grad_hidden_bytes, &state_.grad_hidden);
  carve(kDeviceStaging, scratch.row_state_bytes, &state_.rows);
  carve(kDeviceStaging, scratch.teacher_hidden_bytes, &state_.teacher_hidden);
  carve(kDeviceStaging, scratch.divergence_bytes, &state_.divergences);
  carve(kDeviceStaging, scratch.teacher_entries_bytes, &state_.entries);
  carve(kDeviceStaging, scratch.top_k_bytes, &state_.top_k_entries);
  carve(kCollective, scratch.collective_bytes, &state_.exchange);
}

absl::StatusOr<BatchOutput> CpuBatch::Compute(const BatchInput& input, CpuProducts* teacher) {
  const HeadSpec& spec = products_->spec();
  if (absl::Status status = CheckBatch(spec, plan_, input); !status.ok()) return status;
  if (teacher != nullptr) {
    absl::Status status =
        CheckTeacher(spec, products_->range(), teacher->spec(), teacher->range(), input);
    if (!status.ok()) return status;
  }
  BatchOutput output;
  Stopwatch stopwatch;
  Begin(input, teacher);
  if (absl::Status status = UploadBatch(context_, &state_); !status.ok()) return status;
  output.timings.upload_seconds = stopwatch.Lap();

  absl::Status status = Forward();
  if (status.ok()) status = MergeRows(spec, context_, &state_);
  if (status.ok() && state_.is_jsd()) status = SweepMixtures();
  if (status.ok()) status = MergeTopK(spec, context_, &state_);
  if (!status.ok()) return status;
  output.sums = FinishRows(&state_);
  WriteTopK(state_);
  if (input.mode != BackwardMode::kNone) status = Backward(input.mode);
  if (!status.ok()) return status;
  output.timings.compute_seconds = stopwatch.Lap();

  if (input.mode != BackwardMode::kNone) WriteGradHidden(state_);
  output.timings.download_seconds = stopwatch.Lap();
  return output;
}

void CpuBatch::Begin(const BatchInput& input, CpuProducts* teacher) {
  const LossRecipe& recipe = *input.recipe;
  const int64_t vocab_size = products_->spec().vocab_size;
  state_.input = &input;
  state_.num_rows = 0;
  for (const ChunkRows& chunk : input.chunks) state_.num_rows += chunk.hidden_states.rows;
  state_.padded_rows = cpu::PaddedRows(state_.num_rows, plan_.batch_tokens);
  state_.teacher_top_k = recipe.teacher_top_k();
  state_.top_k = input.outputs.top_k;

  state_.config = products_->MakeRowConfig();
  if (!recipe.class_weights.empty()) state_.config.class_weights = recipe.class_weights.data();
  state_.config.label_smoothing = recipe.label_smoothing;
  state_.config.z_loss = recipe.z_loss;
  state_.config.entropy = input.outputs.entropy || NeedsEntropy(recipe.policy);
  if (recipe.policy.has_value()) state_.config.policy = &*recipe.policy;
  state_.divergence.reset();
  if (recipe.distillation.has_value()) {
    state_.config.cross_entropy_weight = recipe.distillation->cross_entropy_weight;
    state_.divergence = ConfigOf(*recipe.distillation, vocab_size);
  }
  teacher_ = teacher;
  if (has_teacher()) {
    teacher_config_ = teacher->MakeRowConfig();
    teacher_row_.temperature = recipe.distillation->kl_temperature;
  }
  tile_in_scratch_ = -1;
}

// --- Tiles -------------------------------------------------------------------------------------

void CpuBatch::ForEachRow(absl::FunctionRef<void(int64_t row)> body) const {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < state_.num_rows; ++row) body(row);
}

cpu::VocabTile CpuBatch::TileAt(int64_t tile) const {
  const VocabRange range = products_->range();
  const int64_t start = range.start + tile * plan_.vocab_tile;
  return {.start = start, .cols = std::min(plan_.vocab_tile, range.stop - start)};
}

// Those of a tile's columns that the teacher has, too: its first ones.
cpu::VocabTile CpuBatch::TeacherColumns(cpu::VocabTile columns) const {
  const VocabRange range = teacher_->range();
  if (!range.Contains(columns.start)) return {columns.start, 0};
  return {columns.start, std::min(columns.cols, range.stop - columns.start)};
}

cpu::JointTile CpuBatch::JointOf(cpu::VocabTile columns, int64_t tile, int64_t row) const {
  if (!has_teacher()) return {.cols = columns.cols};
  const int64_t teacher_cols = TeacherColumns(columns).cols;
  const bool padded = state_.divergence->vocabulary == TeacherVocabulary::kPad;
  return {.teacher_logits = TeacherLogitsOf(tile) + row * teacher_cols,
          .teacher_cols = teacher_cols,
          .cols = padded ? columns.cols : teacher_cols};
}

// The teacher's logits at kl_temperature.
absl::Status CpuBatch::ComputeTeacherTile(cpu::VocabTile columns, float* logits) {
  if (columns.cols == 0) return absl::OkStatus();
  absl::Status status =
      teacher_->Logits(columns, state_.padded_rows, state_.teacher_hidden, logits);
  if (!status.ok()) return status;
  ForEachRow([&](int64_t row) {
    passes_.transform(teacher_config_, columns, teacher_row_, logits + row * columns.cols);
  });
  return absl::OkStatus();
}

// Final logits of one tile, and the teacher's; in the forward pass they are folded into the
// statistics as well, while they are in the cache.
absl::Status CpuBatch::ComputeTile(int64_t tile, Sweep sweep) {
  const cpu::VocabTile columns = TileAt(tile);
  float* const logits = LogitsOf(tile);
  tile_in_scratch_ = tile;
  if (has_teacher()) {
    absl::Status status = ComputeTeacherTile(TeacherColumns(columns), TeacherLogitsOf(tile));
    if (!status.ok()) return status;
  }
  absl::Status status = products_->Logits(columns, state_.padded_rows, state_.hidden, logits);
  if (!status.ok()) return status;
  ForEachRow([&](int64_t row) {
    passes_.transform(state_.config, columns, state_.rows[row], logits + row * columns.cols);
    if (sweep == Sweep::kStatistics) AccumulateRow(columns, tile, row);
  });
  return absl::OkStatus();
}

absl::Status CpuBatch::EnsureTile(int64_t tile) {
  if (keeps_logits_ || tile == tile_in_scratch_) return absl::OkStatus();
  return ComputeTile(tile, Sweep::kNothing);
}

void CpuBatch::AccumulateRow(cpu::VocabTile columns, int64_t tile, int64_t row) {
  cpu::RowState& row_state = state_.rows[row];
  float* const logits = LogitsOf(tile) + row * columns.cols;
  passes_.accumulate(state_.config, columns, logits, &row_state);
  if (state_.top_k > 0) {
    auto num_entries = static_cast<int32_t>(
        std::min<int64_t>(state_.top_k, columns.start - products_->range().start));
    cpu::AccumulateTopK(passes_, columns, logits, state_.TopKOf(row), &num_entries);
  }
  if (!state_.divergence.has_value() || !row_state.valid) return;
  if (has_lists()) {
    cpu::AccumulateOutside(passes_, columns, state_.ScaleOf(row), state_.EntriesOf(row), logits,
                           &state_.divergences[row]);
  } else {
    passes_.accumulate_divergence(*state_.divergence, JointOf(columns, tile, row),
                                  state_.ScaleOf(row), logits, &state_.divergences[row].stats);
  }
}

// --- Forward -----------------------------------------------------------------------------------

absl::Status CpuBatch::Forward() {
  if (has_teacher()) {
    if (absl::Status status = SweepBeyond(); !status.ok()) return status;
  }
  for (int64_t tile = 0; tile < num_tiles_; ++tile) {
    if (absl::Status status = ComputeTile(tile, Sweep::kStatistics); !status.ok()) return status;
  }
  if (has_lists()) AccumulateLists();
  return absl::OkStatus();
}

// The teacher's ids that the student does not have, through the place of its first tile.
absl::Status CpuBatch::SweepBeyond() {
  const VocabRange range = teacher_->range();
  const int64_t cols_max = std::min(plan_.vocab_tile, teacher_->max_cols());
  int64_t start = std::max(range.start, products_->spec().vocab_size);
  for (; start < range.stop; start += cols_max) {
    const cpu::VocabTile columns = {start, std::min(cols_max, range.stop - start)};
    float* const logits = TeacherLogitsOf(0);
    if (absl::Status status = ComputeTeacherTile(columns, logits); !status.ok()) return status;
    ForEachRow([&](int64_t row) {
      cpu::DivergenceStatistics& stats = state_.divergences[row].stats;
      passes_.accumulate_exp(logits + row * columns.cols, columns.cols, 1.0f, &stats.beyond_max,
                             &stats.beyond_sum_exp);
    });
  }
  return absl::OkStatus();
}

void CpuBatch::AccumulateLists() {
  const VocabRange range = products_->range();
  ForEachRow([&](int64_t row) {
    if (!state_.rows[row].valid) return;
    cpu::AccumulateListed({range.start, range.size()}, state_.ScaleOf(row), state_.EntriesOf(row),
                          &state_.divergences[row].stats);
  });
}

// A JSD's second sweep over the vocabulary, when the normalisers are known.
absl::Status CpuBatch::SweepMixtures() {
  ForEachRow([&](int64_t row) {
    if (!state_.rows[row].valid) return;
    cpu::PrepareMixture(*state_.divergence, &state_.divergences[row]);
  });
  // Backwards, because the last tile is still there; then the first one is, for the backward pass.
  for (int64_t tile = num_tiles_ - 1; tile >= 0; --tile) {
    if (absl::Status status = EnsureTile(tile); !status.ok()) return status;
    const cpu::VocabTile columns = TileAt(tile);
    ForEachRow([&](int64_t row) {
      cpu::DivergenceState& divergence = state_.divergences[row];
      if (!state_.rows[row].valid || !divergence.has_gradient) return;
      passes_.accumulate_mixture(*state_.divergence, JointOf(columns, tile, row),
                                 state_.ScaleOf(row), LogitsOf(tile) + row * columns.cols,
                                 divergence, &divergence.mixture);
    });
  }
  return MergeMixtures(context_, &state_);
}

// --- Backward ----------------------------------------------------------------------------------

absl::Status CpuBatch::Backward(BackwardMode mode) {
  const int64_t hidden_size = products_->spec().hidden_size;
  std::fill(state_.grad_hidden, state_.grad_hidden + state_.padded_rows * hidden_size, 0.0f);
  // From the end that the last sweep left in the scratch.
  const bool rising = tile_in_scratch_ == 0;
  for (int64_t i = 0; i < num_tiles_; ++i) {
    const int64_t tile = rising ? i : num_tiles_ - 1 - i;
    absl::Status status = EnsureTile(tile);
    if (status.ok()) status = BackwardTile(tile, mode);
    if (!status.ok()) return status;
  }
  if (context_.num_ranks == 1) return absl::OkStatus();
  return context_.collective->Reduce(state_.grad_hidden, state_.num_rows * hidden_size, 0, nullptr);
}

absl::Status CpuBatch::BackwardTile(int64_t tile, BackwardMode mode) {
  const cpu::VocabTile columns = TileAt(tile);
  float* const logits = LogitsOf(tile);
  ForEachRow([&](int64_t row) {
    float* const row_logits = logits + row * columns.cols;
    const cpu::RowState& row_state = state_.rows[row];
    if (!state_.divergence.has_value()) {
      passes_.grad(state_.config, columns, row_state, row_logits);
      return;
    }
    passes_.grad_divergence(state_.config, *state_.divergence, columns, JointOf(columns, tile, row),
                            row_state, state_.divergences[row], row_logits);
    if (!has_lists() || !row_state.valid) return;
    cpu::SetListedGrad(state_.config, *state_.divergence, columns, row_state,
                       state_.divergences[row], state_.EntriesOf(row), row_logits);
  });
  tile_in_scratch_ = -1;
  std::fill(logits + state_.num_rows * columns.cols, logits + state_.padded_rows * columns.cols,
            0.0f);
  absl::Status status =
      products_->AddGradHidden(columns, state_.padded_rows, logits, state_.grad_hidden);
  if (!status.ok() || mode != BackwardMode::kHiddenAndWeight) return status;
  return products_->AddGradWeight(columns, state_.padded_rows, logits, state_.hidden);
}

}  // namespace lmhead
