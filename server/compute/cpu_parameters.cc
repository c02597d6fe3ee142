#include "server/compute/cpu_parameters.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/weight_init.h"
#include "proto/types/check.h"
#include "server/compute/batch_check.h"
#include "server/optimizer/optimizer.h"

namespace lmhead {
namespace {

bool IsOfBias(TensorKind kind) {
  return kind == TensorKind::kBias || kind == TensorKind::kGradBias ||
         kind == TensorKind::kBiasExpAvg || kind == TensorKind::kBiasExpAvgSq;
}

bool IsGradient(TensorKind kind) {
  return kind == TensorKind::kGradWeight || kind == TensorKind::kGradBias;
}

// `rows` rows of a tensor from its row `first`.
MatrixView PartOf(const MatrixView& tensor, int64_t first, int64_t rows) {
  auto* const data =
      static_cast<std::byte*>(tensor.data) + first * tensor.cols * BytesPerElement(tensor.dtype);
  return {data, rows, tensor.cols, tensor.dtype};
}

}  // namespace

CpuParameters::CpuParameters(const HeadSpec& spec, const MemoryPlan& plan, VocabRange range,
                             HostArena* arena)
    : spec_(spec), range_(range) {
  weight_ = Carve(plan.shard_size, spec.hidden_size, spec.weight_dtype, arena);
  if (spec.has_bias) bias_ = Carve(plan.shard_size, 1, DType::kFloat32, arena);
}

// Every rank takes the memory of the largest shard, as the plan has it.
CpuParameters::Parameter CpuParameters::Carve(int64_t capacity, int64_t cols, DType dtype,
                                              HostArena* arena) {
  Parameter parameter{.count = range_.size() * cols, .cols = cols, .dtype = dtype};
  const int64_t elements = capacity * cols;
  const auto carve = [&](MemoryCategory category) {
    return arena->CarveArray<float>(category, elements);
  };
  parameter.data = arena->Carve(MemoryCategory::kWeight, elements * BytesPerElement(dtype));
  if (dtype == DType::kFloat32) parameter.master = static_cast<float*>(parameter.data);
  if (!spec_.trainable) return parameter;
  if (dtype != DType::kFloat32) parameter.master = carve(MemoryCategory::kMasterWeight);
  parameter.grad = carve(MemoryCategory::kGradWeight);
  const int32_t num_state_arrays = NumStateArrays(spec_.optimizer);
  if (num_state_arrays >= 1) parameter.exp_avg = carve(MemoryCategory::kOptimizerState);
  if (num_state_arrays >= 2) parameter.exp_avg_sq = carve(MemoryCategory::kOptimizerState);
  return parameter;
}

void CpuParameters::InitialiseWeight(float* scratch, int64_t scratch_rows) {
  if (spec_.weight_init.kind != WeightInitKind::kNormal) return;  // The arena is zeroed.
  for (int64_t start = range_.start; start < range_.stop; start += scratch_rows) {
    const int64_t rows = std::min(scratch_rows, range_.stop - start);
    cpu::FillNormal(spec_.weight_init.seed, spec_.weight_init.std, start, rows, spec_.hidden_size,
                    scratch);
    const absl::Status status =
        WriteRows(TensorKind::kWeight, start, {scratch, rows, spec_.hidden_size, DType::kFloat32});
    LMHEAD_CHECK(status.ok(), std::string(status.message()));
  }
}

ConstMatrixView CpuParameters::WeightRows(int64_t start, int64_t rows) const {
  return PartOf({weight_.data, range_.size(), weight_.cols, weight_.dtype}, start - range_.start,
                rows);
}

// --- Gradients ---------------------------------------------------------------------------------

double CpuParameters::GradSquaredNorm() const {
  if (!spec_.trainable) return 0.0;
  double sum = cpu::SquaredNorm(weight_.grad, weight_.count);
  if (spec_.has_bias) sum += cpu::SquaredNorm(bias_.grad, bias_.count);
  return sum;
}

void CpuParameters::DiscardGradients() {
  if (!spec_.trainable) return;
  std::fill(weight_.grad, weight_.grad + weight_.count, 0.0f);
  if (spec_.has_bias) std::fill(bias_.grad, bias_.grad + bias_.count, 0.0f);
}

absl::Status CpuParameters::ApplyUpdate(const OptimizerUpdate& update) {
  if (!std::isfinite(update.learning_rate) || !std::isfinite(update.grad_multiplier)) {
    return absl::InvalidArgumentError(absl::StrCat("head ", spec_.name, ": learning_rate ",
                                                   update.learning_rate, " and grad_multiplier ",
                                                   update.grad_multiplier, " must be finite"));
  }
  if (!spec_.trainable || spec_.optimizer.kind == OptimizerKind::kNone) {
    DiscardGradients();
    return absl::OkStatus();
  }
  ++num_updates_;
  const auto apply = [&](const Parameter& parameter, double weight_decay) {
    ApplyOptimizer(spec_.optimizer,
                   {.learning_rate = update.learning_rate,
                    .grad_multiplier = update.grad_multiplier,
                    .weight_decay = weight_decay,
                    .update_number = num_updates_},
                   {.count = parameter.count,
                    .parameter = parameter.master,
                    .grad = parameter.grad,
                    .exp_avg = parameter.exp_avg,
                    .exp_avg_sq = parameter.exp_avg_sq,
                    .bfloat16_parameter = parameter.dtype == DType::kBFloat16
                                              ? static_cast<uint16_t*>(parameter.data)
                                              : nullptr});
  };
  apply(weight_, spec_.optimizer.weight_decay);
  if (spec_.has_bias) apply(bias_, spec_.optimizer.decay_bias ? spec_.optimizer.weight_decay : 0.0);
  return absl::OkStatus();
}

absl::Status CpuParameters::AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                                        ConstMatrixView rows) {
  if (absl::Status status = CheckGradRows(spec_, row_ids, row_start, rows); !status.ok()) {
    return status;
  }
  const auto* const values = static_cast<const float*>(rows.data);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t id = row_ids.empty() ? row_start + row : row_ids[row];
    if (!range_.Contains(id)) continue;
    float* const grad = GradWeightAt(id);
    const float* const from = values + row * rows.cols;
    for (int64_t column = 0; column < rows.cols; ++column) grad[column] += from[column];
  }
  return absl::OkStatus();
}

// --- Tensors, row by row -----------------------------------------------------------------------

absl::StatusOr<MatrixView> CpuParameters::Tensor(TensorKind kind) const {
  const bool of_bias = IsOfBias(kind);
  if (of_bias && !spec_.has_bias) {
    return absl::FailedPreconditionError(absl::StrCat("head ", spec_.name, " has no bias"));
  }
  const Parameter& parameter = of_bias ? bias_ : weight_;
  MatrixView view{parameter.data, range_.size(), parameter.cols, parameter.dtype};
  if (kind == TensorKind::kWeight || kind == TensorKind::kBias) return view;
  if (!spec_.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec_.name, " is not trainable: it has neither gradients nor a ",
                     "master weight nor an optimizer's state"));
  }
  view.dtype = DType::kFloat32;
  if (IsGradient(kind)) {
    view.data = parameter.grad;
  } else if (kind == TensorKind::kMasterWeight) {
    view.data = parameter.master;
  } else {
    const bool first = kind == TensorKind::kWeightExpAvg || kind == TensorKind::kBiasExpAvg;
    view.data = first ? parameter.exp_avg : parameter.exp_avg_sq;
    if (view.data == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "head ", spec_.name, ": its optimizer keeps no ", first ? "exp_avg" : "exp_avg_sq"));
    }
  }
  return view;
}

absl::StatusOr<MatrixView> CpuParameters::TensorRows(TensorKind kind, int64_t row_start,
                                                     int64_t rows, int64_t cols) const {
  absl::StatusOr<MatrixView> tensor = Tensor(kind);
  if (!tensor.ok()) return tensor;
  absl::Status status = CheckTensorRows(spec_, range_, tensor->cols, row_start, rows, cols);
  if (!status.ok()) return status;
  return PartOf(*tensor, row_start - range_.start, rows);
}

absl::Status CpuParameters::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  if (IsGradient(kind)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": a gradient cannot be written"));
  }
  const auto tensor = TensorRows(kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  cpu::ConvertMatrix(rows, *tensor);
  // Weight and master weight go together.
  if (weight_.master == nullptr || weight_.dtype == DType::kFloat32) return absl::OkStatus();
  if (kind == TensorKind::kWeight) {
    cpu::ConvertMatrix(rows,
                       *TensorRows(TensorKind::kMasterWeight, row_start, rows.rows, rows.cols));
  } else if (kind == TensorKind::kMasterWeight) {
    cpu::ConvertMatrix(*tensor, *TensorRows(TensorKind::kWeight, row_start, rows.rows, rows.cols));
  }
  return absl::OkStatus();
}

absl::Status CpuParameters::ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) const {
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

}  // namespace lmhead
