#include "server/compute/cpu_backend.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/row_passes.h"
#include "kernels/cpu/weight_init.h"
#include "proto/types/check.h"
#include "server/compute/batch_check.h"
#include "server/optimizer/optimizer.h"

namespace lmhead {
namespace {

using cpu::Gemm;
using cpu::RowConfig;
using cpu::RowOutputs;
using cpu::RowPasses;
using cpu::RowState;
using cpu::VocabTile;

static_assert(sizeof(RowState) <= kRowStatisticsWords * sizeof(float),
              "The memory plan counts kRowStatisticsWords words for the state of a row");

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

// A parameter tensor [vocab_size, cols] and what training keeps of it. The weight itself is `data`,
// in `dtype`; `master` is the float32 array that the optimizer updates: `data` for a float32
// tensor.
struct Parameter {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;
  void* data = nullptr;
  float* master = nullptr;  // Null when the head is not trainable and dtype is not float32.
  float* grad = nullptr;    // Null when the head is not trainable.
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;

  int64_t count() const { return rows * cols; }
  bool exists() const { return data != nullptr; }
};

class CpuBackend final : public ComputeBackend {
 public:
  CpuBackend(const HeadSpec& spec, const MemoryPlan& plan, std::unique_ptr<HostArena> arena);

  void ComputeBatch(const BatchInput& input, BatchDone done) override;
  absl::StatusOr<double> GradSquaredNorm() override;
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override;
  absl::Status DiscardGradients() override;
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows) override;
  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) override;
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) override;
  int64_t num_updates() const override { return num_updates_; }
  void set_num_updates(int64_t num_updates) override { num_updates_ = num_updates; }

 private:
  Parameter CarveParameter(int64_t cols, DType dtype);
  void InitialiseWeight();

  RowConfig ConfigOf(const BatchInput& input) const;

  absl::StatusOr<BatchOutput> Compute(const BatchInput& input);
  void Upload(const BatchInput& input);
  void UploadRow(const LossRecipe& recipe, const ChunkRows& chunk, int64_t row, int64_t batch_row);
  absl::Status Forward(const RowConfig& config);
  absl::Status ComputeTile(const RowConfig& config, int64_t tile, bool accumulate);
  absl::Status Backward(const RowConfig& config, BackwardMode mode);
  absl::Status BackwardTile(const RowConfig& config, int64_t tile, BackwardMode mode);
  std::vector<LossSums> Finish(const RowConfig& config, const BatchInput& input);
  void Download(const BatchInput& input);

  VocabTile TileAt(int64_t tile) const;
  float* LogitsOf(int64_t tile);
  const float* WeightOf(VocabTile tile);
  Gemm::Shape ShapeOf(VocabTile tile) const;
  absl::StatusOr<MatrixView> TensorRows(TensorKind kind, int64_t row_start, int64_t rows,
                                        int64_t cols) const;
  absl::StatusOr<MatrixView> Tensor(TensorKind kind) const;

  const HeadSpec spec_;
  const MemoryPlan plan_;
  const std::unique_ptr<HostArena> arena_;
  const int64_t num_tiles_;
  const bool keeps_logits_;  // Every tile of a batch has its place; else all share one.
  const RowPasses& passes_;

  Parameter weight_;
  Parameter bias_;
  float* logits_ = nullptr;       // Tile after tile, each [padded_rows_, its columns].
  float* hidden_ = nullptr;       // [padded_rows_, hidden_size]
  float* grad_hidden_ = nullptr;  // Likewise; null under schedule eval.
  float* weight_tile_ = nullptr;  // [vocab_tile, hidden_size]; null for a float32 weight.
  RowState* rows_ = nullptr;      // [num_rows_]
  std::unique_ptr<Gemm> gemm_;

  // The batch being computed.
  int64_t num_rows_ = 0;
  int64_t padded_rows_ = 0;  // Rows of the products; those beyond num_rows_ are zero.
  int64_t num_updates_ = 0;
};

CpuBackend::CpuBackend(const HeadSpec& spec, const MemoryPlan& plan,
                       std::unique_ptr<HostArena> arena)
    : spec_(spec),
      plan_(plan),
      arena_(std::move(arena)),
      num_tiles_((plan.shard_size + plan.vocab_tile - 1) / plan.vocab_tile),
      keeps_logits_(plan.schedule == Schedule::kRetain || plan.schedule == Schedule::kFrozen),
      passes_(cpu::BestRowPasses()) {
  weight_ = CarveParameter(spec.hidden_size, spec.weight_dtype);
  if (spec.has_bias) bias_ = CarveParameter(1, DType::kFloat32);

  const CpuScratch scratch = PlanCpuScratch(spec, plan);
  const auto carve = [&](MemoryCategory category, int64_t bytes) {
    return static_cast<float*>(arena_->Carve(category, bytes));
  };
  logits_ = carve(MemoryCategory::kLogitsScratch, scratch.logits_bytes);
  hidden_ = carve(MemoryCategory::kDeviceStaging, scratch.hidden_bytes);
  grad_hidden_ = carve(MemoryCategory::kDeviceStaging, scratch.grad_hidden_bytes);
  rows_ = static_cast<RowState*>(
      arena_->Carve(MemoryCategory::kDeviceStaging, scratch.row_statistics_bytes));
  weight_tile_ = carve(MemoryCategory::kLibraryWorkspace, scratch.weight_tile_bytes);
  gemm_ =
      std::make_unique<Gemm>(static_cast<std::byte*>(arena_->Carve(
                                 MemoryCategory::kLibraryWorkspace, scratch.gemm_scratch_bytes)),
                             scratch.gemm_scratch_bytes);
  arena_->Seal();
  InitialiseWeight();
}

Parameter CpuBackend::CarveParameter(int64_t cols, DType dtype) {
  Parameter parameter{.rows = spec_.vocab_size, .cols = cols, .dtype = dtype};
  const int64_t count = parameter.count();
  const auto carve = [&](MemoryCategory category) {
    return arena_->CarveArray<float>(category, count);
  };
  parameter.data = arena_->Carve(MemoryCategory::kWeight, count * BytesPerElement(dtype));
  if (dtype == DType::kFloat32) parameter.master = static_cast<float*>(parameter.data);
  if (!spec_.trainable) return parameter;
  if (dtype != DType::kFloat32) parameter.master = carve(MemoryCategory::kMasterWeight);
  parameter.grad = carve(MemoryCategory::kGradWeight);
  const int32_t num_state_arrays = NumStateArrays(spec_.optimizer);
  if (num_state_arrays >= 1) parameter.exp_avg = carve(MemoryCategory::kOptimizerState);
  if (num_state_arrays >= 2) parameter.exp_avg_sq = carve(MemoryCategory::kOptimizerState);
  return parameter;
}

void CpuBackend::InitialiseWeight() {
  if (spec_.weight_init.kind != WeightInitKind::kNormal) return;  // The arena is zeroed.
  // By blocks of rows through the hidden-state scratch, which has room for at least one.
  for (int64_t start = 0; start < spec_.vocab_size; start += plan_.batch_tokens) {
    const int64_t rows = std::min(plan_.batch_tokens, spec_.vocab_size - start);
    cpu::FillNormal(spec_.weight_init.seed, spec_.weight_init.std, start, rows, spec_.hidden_size,
                    hidden_);
    const absl::Status status = CpuBackend::WriteRows(
        TensorKind::kWeight, start, {hidden_, rows, spec_.hidden_size, DType::kFloat32});
    LMHEAD_CHECK(status.ok(), std::string(status.message()));
  }
}

// --- One batch ---------------------------------------------------------------------------------

void CpuBackend::ComputeBatch(const BatchInput& input, BatchDone done) { done(Compute(input)); }

absl::StatusOr<BatchOutput> CpuBackend::Compute(const BatchInput& input) {
  if (absl::Status status = CheckBatch(spec_, plan_, input); !status.ok()) return status;
  BatchOutput output;
  Stopwatch stopwatch;
  Upload(input);
  output.timings.upload_seconds = stopwatch.Lap();

  const RowConfig config = ConfigOf(input);
  if (absl::Status status = Forward(config); !status.ok()) return status;
  output.sums = Finish(config, input);
  if (input.mode != BackwardMode::kNone) {
    if (absl::Status status = Backward(config, input.mode); !status.ok()) return status;
  }
  output.timings.compute_seconds = stopwatch.Lap();

  if (input.mode != BackwardMode::kNone) Download(input);
  output.timings.download_seconds = stopwatch.Lap();
  return output;
}

RowConfig CpuBackend::ConfigOf(const BatchInput& input) const {
  const LossRecipe& recipe = *input.recipe;
  return {.vocab_size = spec_.vocab_size,
          .bias = static_cast<const float*>(bias_.data),
          .class_weights = recipe.class_weights.empty() ? nullptr : recipe.class_weights.data(),
          .logit_scale = spec_.logit_scale,
          .softcap = spec_.softcap,
          .label_smoothing = recipe.label_smoothing,
          .z_loss = recipe.z_loss,
          .entropy = std::any_of(input.chunks.begin(), input.chunks.end(),
                                 [](const ChunkRows& chunk) { return chunk.entropy != nullptr; })};
}

void CpuBackend::Upload(const BatchInput& input) {
  int64_t first_row = 0;
  for (const ChunkRows& chunk : input.chunks) {
    const int64_t rows = chunk.hidden_states.rows;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      UploadRow(*input.recipe, chunk, row, first_row + row);
    }
    first_row += rows;
  }
  num_rows_ = first_row;
  padded_rows_ = cpu::PaddedRows(num_rows_, plan_.batch_tokens);
  std::fill(hidden_ + num_rows_ * spec_.hidden_size, hidden_ + padded_rows_ * spec_.hidden_size,
            0.0f);
}

// A row that is not finite becomes a row of zeros, so that it contributes nothing to any product.
void CpuBackend::UploadRow(const LossRecipe& recipe, const ChunkRows& chunk, int64_t row,
                           int64_t batch_row) {
  const ConstMatrixView& from = chunk.hidden_states;
  const int64_t row_bytes = from.cols * BytesPerElement(from.dtype);
  float* const to = hidden_ + batch_row * from.cols;
  RowState& state = rows_[batch_row];
  state.finite = cpu::UpcastRow(
      from.dtype, static_cast<const std::byte*>(from.data) + row * row_bytes, from.cols, to);
  if (!state.finite) std::fill(to, to + from.cols, 0.0f);
  state.target = chunk.targets[row];
  state.valid = state.finite && state.target != recipe.ignore_index;
  state.temperature =
      chunk.token_temperature.empty() ? recipe.temperature : chunk.token_temperature[row];
  const float weight = chunk.token_weights.empty() ? 1.0f : chunk.token_weights[row];
  state.coefficient = state.valid ? weight * chunk.grad_scale : 0.0f;
  cpu::BeginRow(&state);
}

VocabTile CpuBackend::TileAt(int64_t tile) const {
  const int64_t start = tile * plan_.vocab_tile;
  return {.start = start, .cols = std::min(plan_.vocab_tile, spec_.vocab_size - start)};
}

float* CpuBackend::LogitsOf(int64_t tile) {
  return keeps_logits_ ? logits_ + tile * plan_.vocab_tile * padded_rows_ : logits_;
}

const float* CpuBackend::WeightOf(VocabTile tile) {
  const int64_t hidden_size = spec_.hidden_size;
  const int64_t first = tile.start * hidden_size;
  if (weight_.dtype == DType::kFloat32) return static_cast<const float*>(weight_.data) + first;
  cpu::ConvertMatrix(
      {static_cast<const uint16_t*>(weight_.data) + first, tile.cols, hidden_size, weight_.dtype},
      {weight_tile_, tile.cols, hidden_size, DType::kFloat32});
  return weight_tile_;
}

Gemm::Shape CpuBackend::ShapeOf(VocabTile tile) const {
  return {.rows = padded_rows_, .cols = tile.cols, .hidden_size = spec_.hidden_size};
}

absl::Status CpuBackend::Forward(const RowConfig& config) {
  for (int64_t tile = 0; tile < num_tiles_; ++tile) {
    absl::Status status = ComputeTile(config, tile, /*accumulate=*/true);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Final logits of one tile; in the forward pass they are folded into the statistics as well.
absl::Status CpuBackend::ComputeTile(const RowConfig& config, int64_t tile, bool accumulate) {
  const VocabTile columns = TileAt(tile);
  float* const logits = LogitsOf(tile);
  absl::Status status = gemm_->Logits(ShapeOf(columns), hidden_, WeightOf(columns), logits);
  if (!status.ok()) return status;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows_; ++row) {
    float* const row_logits = logits + row * columns.cols;
    passes_.transform(config, columns, rows_[row], row_logits);
    if (accumulate) passes_.accumulate(config, columns, row_logits, &rows_[row]);
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::Backward(const RowConfig& config, BackwardMode mode) {
  std::fill(grad_hidden_, grad_hidden_ + padded_rows_ * spec_.hidden_size, 0.0f);
  // Backwards, because the logits of the last tile are still there whatever the schedule.
  for (int64_t tile = num_tiles_ - 1; tile >= 0; --tile) {
    if (!keeps_logits_ && tile != num_tiles_ - 1) {
      absl::Status status = ComputeTile(config, tile, /*accumulate=*/false);
      if (!status.ok()) return status;
    }
    if (absl::Status status = BackwardTile(config, tile, mode); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::BackwardTile(const RowConfig& config, int64_t tile, BackwardMode mode) {
  const VocabTile columns = TileAt(tile);
  const Gemm::Shape shape = ShapeOf(columns);
  float* const logits = LogitsOf(tile);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows_; ++row) {
    passes_.grad(config, columns, rows_[row], logits + row * columns.cols);
  }
  std::fill(logits + num_rows_ * columns.cols, logits + padded_rows_ * columns.cols, 0.0f);
  absl::Status status = gemm_->AddGradHidden(shape, logits, WeightOf(columns), grad_hidden_);
  if (!status.ok() || mode != BackwardMode::kHiddenAndWeight) return status;
  if (bias_.exists()) {
    cpu::AddColumnSums(logits, num_rows_, columns.cols, bias_.grad + columns.start);
  }
  return gemm_->AddGradWeight(shape, logits, hidden_,
                              weight_.grad + columns.start * spec_.hidden_size);
}

// --- Results of a batch ------------------------------------------------------------------------

// Adds one row to the sums of its chunk.
void AddToSums(const RowState& row, const RowOutputs& outputs, float token_weight,
               const float* class_weights, LossSums* sums) {
  ++sums->num_tokens;
  if (!row.finite) ++sums->num_nonfinite_rows;
  if (!row.valid) return;
  ++sums->num_valid_tokens;
  if (row.argmax == row.target) ++sums->num_correct;
  const double weight = token_weight;
  const auto weighted = [weight](double value) { return weight == 0.0 ? 0.0 : weight * value; };
  sums->weight_sum += class_weights != nullptr ? weight * class_weights[row.target] : weight;
  sums->cross_entropy_sum += weighted(outputs.cross_entropy);
  sums->z_loss_sum += weighted(outputs.z_loss);
  sums->loss_sum += weighted(outputs.cross_entropy + outputs.z_loss);
  sums->entropy_sum += outputs.entropy;
}

// Writes the outputs of one row that the chunk wants.
void WriteOutputs(const RowState& state, const RowOutputs& outputs, int64_t row,
                  const ChunkRows& chunk) {
  if (chunk.token_loss != nullptr) {
    chunk.token_loss[row] = static_cast<float>(outputs.cross_entropy + outputs.z_loss);
  }
  if (chunk.logprob != nullptr) chunk.logprob[row] = static_cast<float>(outputs.logprob);
  if (chunk.lse != nullptr) chunk.lse[row] = static_cast<float>(outputs.lse);
  if (chunk.entropy != nullptr) chunk.entropy[row] = static_cast<float>(outputs.entropy);
  if (chunk.argmax != nullptr) chunk.argmax[row] = state.finite ? state.argmax : 0;
}

std::vector<LossSums> CpuBackend::Finish(const RowConfig& config, const BatchInput& input) {
  std::vector<LossSums> sums(input.chunks.size());
  RowState* state = rows_;
  for (size_t i = 0; i < input.chunks.size(); ++i) {
    const ChunkRows& chunk = input.chunks[i];
    for (int64_t row = 0; row < chunk.hidden_states.rows; ++row, ++state) {
      const RowOutputs outputs = cpu::FinishRow(config, state);
      WriteOutputs(*state, outputs, row, chunk);
      const float weight = chunk.token_weights.empty() ? 1.0f : chunk.token_weights[row];
      AddToSums(*state, outputs, weight, config.class_weights, &sums[i]);
    }
  }
  return sums;
}

// grad_hidden_states, rounded once to the dtype that the chunk wants.
void CpuBackend::Download(const BatchInput& input) {
  const float* from = grad_hidden_;
  for (const ChunkRows& chunk : input.chunks) {
    const int64_t rows = chunk.hidden_states.rows;
    if (chunk.grad_hidden_states.data != nullptr) {
      cpu::ConvertMatrix({from, rows, spec_.hidden_size, DType::kFloat32},
                         chunk.grad_hidden_states);
    }
    from += rows * spec_.hidden_size;
  }
}

// --- Gradients and tensors ---------------------------------------------------------------------

absl::StatusOr<double> CpuBackend::GradSquaredNorm() {
  if (!spec_.trainable) return 0.0;
  double sum = cpu::SquaredNorm(weight_.grad, weight_.count());
  if (bias_.exists()) sum += cpu::SquaredNorm(bias_.grad, bias_.count());
  return sum;
}

absl::Status CpuBackend::ApplyUpdate(const OptimizerUpdate& update) {
  if (!std::isfinite(update.learning_rate) || !std::isfinite(update.grad_multiplier)) {
    return absl::InvalidArgumentError(absl::StrCat("head ", spec_.name, ": learning_rate ",
                                                   update.learning_rate, " and grad_multiplier ",
                                                   update.grad_multiplier, " must be finite"));
  }
  if (!spec_.trainable || spec_.optimizer.kind == OptimizerKind::kNone) return DiscardGradients();
  ++num_updates_;
  const auto apply = [&](const Parameter& parameter, double weight_decay) {
    ApplyOptimizer(spec_.optimizer,
                   {.learning_rate = update.learning_rate,
                    .grad_multiplier = update.grad_multiplier,
                    .weight_decay = weight_decay,
                    .update_number = num_updates_},
                   {.count = parameter.count(),
                    .parameter = parameter.master,
                    .grad = parameter.grad,
                    .exp_avg = parameter.exp_avg,
                    .exp_avg_sq = parameter.exp_avg_sq,
                    .bfloat16_parameter = parameter.dtype == DType::kBFloat16
                                              ? static_cast<uint16_t*>(parameter.data)
                                              : nullptr});
  };
  apply(weight_, spec_.optimizer.weight_decay);
  if (bias_.exists()) apply(bias_, spec_.optimizer.decay_bias ? spec_.optimizer.weight_decay : 0.0);
  return absl::OkStatus();
}

absl::Status CpuBackend::DiscardGradients() {
  if (!spec_.trainable) return absl::OkStatus();
  std::fill(weight_.grad, weight_.grad + weight_.count(), 0.0f);
  if (bias_.exists()) std::fill(bias_.grad, bias_.grad + bias_.count(), 0.0f);
  return absl::OkStatus();
}

absl::Status CpuBackend::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                     ConstMatrixView rows) {
  return absl::UnimplementedError("AddGradRows");
}

absl::StatusOr<MatrixView> CpuBackend::Tensor(TensorKind kind) const {
  const bool of_bias = kind == TensorKind::kBias || kind == TensorKind::kGradBias;
  const Parameter& parameter = of_bias ? bias_ : weight_;
  if (!parameter.exists()) {
    return absl::FailedPreconditionError(absl::StrCat("head ", spec_.name, " has no bias"));
  }
  MatrixView view{parameter.data, parameter.rows, parameter.cols, parameter.dtype};
  if (kind == TensorKind::kWeight || kind == TensorKind::kBias) return view;
  if (!spec_.trainable) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", spec_.name, " is not trainable: it has neither gradients nor a master weight"));
  }
  view.data = kind == TensorKind::kMasterWeight ? parameter.master : parameter.grad;
  view.dtype = DType::kFloat32;
  return view;
}

absl::StatusOr<MatrixView> CpuBackend::TensorRows(TensorKind kind, int64_t row_start, int64_t rows,
                                                  int64_t cols) const {
  absl::StatusOr<MatrixView> tensor = Tensor(kind);
  if (!tensor.ok()) return tensor;
  if (cols != tensor->cols || rows < 0 || row_start < 0 || row_start > tensor->rows - rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": rows [", row_start, ", ", row_start + rows, ") of ",
                     cols, " columns do not lie inside the tensor of ", tensor->rows, " rows and ",
                     tensor->cols, " columns"));
  }
  auto* const first = static_cast<std::byte*>(tensor->data) +
                      row_start * tensor->cols * BytesPerElement(tensor->dtype);
  return MatrixView{first, rows, cols, tensor->dtype};
}

absl::Status CpuBackend::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  if (kind != TensorKind::kWeight && kind != TensorKind::kBias) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": only the weight and the bias can be written"));
  }
  const auto tensor = TensorRows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  cpu::ConvertMatrix(rows, *tensor);
  const Parameter& parameter = kind == TensorKind::kWeight ? weight_ : bias_;
  if (parameter.master != nullptr && parameter.dtype != DType::kFloat32) {
    float* const master = parameter.master + row_start * parameter.cols;
    cpu::ConvertMatrix(rows, {master, rows.rows, rows.cols, DType::kFloat32});
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) {
  const auto tensor = TensorRows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  if (rows.dtype != tensor->dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": the tensor is ", std::string(DTypeName(tensor->dtype)),
                     ", the rows to read into are ", std::string(DTypeName(rows.dtype))));
  }
  std::memcpy(rows.data, tensor->data, static_cast<size_t>(rows.size_bytes()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateCpuBackend(const HeadSpec& spec,
                                                                 const MemoryPlan& plan,
                                                                 MemoryAccount* account) {
  LMHEAD_CHECK(plan.shard_size == spec.vocab_size, "the CPU backend holds the whole head");
  absl::StatusOr<std::unique_ptr<HostArena>> arena = HostArena::Create(plan, account);
  if (!arena.ok()) return arena.status();
  return std::make_unique<CpuBackend>(spec, plan, *std::move(arena));
}

}  // namespace lmhead
