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
#include "server/compute/replica_exchange.h"
#include "server/compute/tensor_rows.h"
#include "server/optimizer/optimizer.h"

namespace lmhead {

CpuParameters::CpuParameters(const HeadSpec& spec, const MemoryPlan& plan,
                             const RankContext& context, HostArena* arena)
    : spec_(spec),
      range_(ShardRange(spec, context.num_ranks, context.rank)),
      owned_(OwnedRange(range_, context.num_replicas, context.replica)),
      peers_(context.peers) {
  weight_ = Carve(plan, spec.hidden_size, spec.weight_dtype, arena);
  if (spec.has_bias) bias_ = Carve(plan, 1, DType::kFloat32, arena);
}

// Every rank takes the memory of the largest shard, as the plan has it.
CpuParameters::Parameter CpuParameters::Carve(const MemoryPlan& plan, int64_t cols, DType dtype,
                                              HostArena* arena) {
  Parameter parameter{.cols = cols, .dtype = dtype};
  const int64_t elements = plan.shard_size * cols;
  const auto carve_owned = [&](MemoryCategory category) {
    return arena->CarveArray<float>(category, plan.owned_rows * cols);
  };
  parameter.data = arena->Carve(MemoryCategory::kWeight, elements * BytesPerElement(dtype));
  if (dtype == DType::kFloat32) {
    parameter.master = static_cast<float*>(parameter.data) + (owned_.start - range_.start) * cols;
  }
  if (!spec_.trainable) return parameter;
  if (dtype != DType::kFloat32) parameter.master = carve_owned(MemoryCategory::kMasterWeight);
  parameter.grad = arena->CarveArray<float>(MemoryCategory::kGradWeight, elements);
  const int32_t num_state_arrays = NumStateArrays(spec_.optimizer);
  if (num_state_arrays >= 1) parameter.exp_avg = carve_owned(MemoryCategory::kOptimizerState);
  if (num_state_arrays >= 2) parameter.exp_avg_sq = carve_owned(MemoryCategory::kOptimizerState);
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
  const ConstMatrixView all{weight_.data, range_.size(), weight_.cols, weight_.dtype};
  return PartOf(all, start - range_.start, rows);
}

// --- Gradients ---------------------------------------------------------------------------------

absl::Status CpuParameters::ReduceGradients() {
  if (!spec_.trainable || peers_ == nullptr) return absl::OkStatus();
  for (const Parameter* parameter : {&weight_, &bias_}) {
    if (parameter->grad == nullptr) continue;
    const int64_t cols = parameter->cols;
    absl::Status status = ReduceToOwners(peers_, range_, parameter->grad, cols, nullptr);
    if (!status.ok()) return status;
    ForEachNotOwned(range_, owned_, [&](VocabRange rows) {
      std::fill_n(parameter->grad + (rows.start - range_.start) * cols, rows.size() * cols, 0.0f);
    });
  }
  return absl::OkStatus();
}

double CpuParameters::GradSquaredNorm() const {
  if (!spec_.trainable) return 0.0;
  double sum = cpu::SquaredNorm(OwnedGrad(weight_), owned_.size() * weight_.cols);
  if (spec_.has_bias) sum += cpu::SquaredNorm(OwnedGrad(bias_), owned_.size());
  return sum;
}

void CpuParameters::DiscardGradients() {
  if (!spec_.trainable) return;
  std::fill_n(weight_.grad, range_.size() * weight_.cols, 0.0f);
  if (spec_.has_bias) std::fill_n(bias_.grad, range_.size(), 0.0f);
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
  Update(weight_, spec_.optimizer.weight_decay, update);
  if (spec_.has_bias) {
    Update(bias_, spec_.optimizer.decay_bias ? spec_.optimizer.weight_decay : 0.0, update);
  }
  if (peers_ == nullptr) return absl::OkStatus();
  for (const Parameter* parameter : {&weight_, &bias_}) {
    if (parameter->data == nullptr) continue;
    absl::Status status =
        BroadcastFromOwners(peers_, range_, parameter->data,
                            parameter->cols * BytesPerElement(parameter->dtype), nullptr);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Of the owned rows, whose gradient becomes zero; that of the others is zero already.
void CpuParameters::Update(const Parameter& parameter, double weight_decay,
                           const OptimizerUpdate& update) {
  auto* const rounded =
      parameter.dtype == DType::kBFloat16
          ? static_cast<uint16_t*>(parameter.data) + (owned_.start - range_.start) * parameter.cols
          : nullptr;
  ApplyOptimizer(spec_.optimizer,
                 {.learning_rate = update.learning_rate,
                  .grad_multiplier = update.grad_multiplier,
                  .weight_decay = weight_decay,
                  .update_number = num_updates_},
                 {.count = owned_.size() * parameter.cols,
                  .parameter = parameter.master,
                  .grad = OwnedGrad(parameter),
                  .exp_avg = parameter.exp_avg,
                  .exp_avg_sq = parameter.exp_avg_sq,
                  .bfloat16_parameter = rounded});
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

absl::StatusOr<CpuParameters::Tensor> CpuParameters::FindTensor(TensorKind kind) const {
  const bool of_bias = IsOfBias(kind);
  if (of_bias && !spec_.has_bias) {
    return absl::FailedPreconditionError(absl::StrCat("head ", spec_.name, " has no bias"));
  }
  const Parameter& parameter = of_bias ? bias_ : weight_;
  const MatrixView view{parameter.data, range_.size(), parameter.cols, parameter.dtype};
  if (kind == TensorKind::kWeight || kind == TensorKind::kBias) return Tensor{view, range_};
  if (!spec_.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec_.name, " is not trainable: it has neither gradients nor a ",
                     "master weight nor an optimizer's state"));
  }
  if (IsGradient(kind)) {
    return Tensor{{parameter.grad, range_.size(), parameter.cols, DType::kFloat32}, range_};
  }
  const bool first = kind == TensorKind::kWeightExpAvg || kind == TensorKind::kBiasExpAvg;
  float* const moment = first ? parameter.exp_avg : parameter.exp_avg_sq;
  float* const data = kind == TensorKind::kMasterWeight ? parameter.master : moment;
  if (data != nullptr) {
    return Tensor{{data, owned_.size(), parameter.cols, DType::kFloat32}, owned_};
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "head ", spec_.name, ": its optimizer keeps no ", first ? "exp_avg" : "exp_avg_sq"));
}

absl::StatusOr<MatrixView> CpuParameters::TensorRows(TensorKind kind, int64_t row_start,
                                                     int64_t rows, int64_t cols) const {
  absl::StatusOr<Tensor> tensor = FindTensor(kind);
  if (!tensor.ok()) return tensor.status();
  const VocabRange range = tensor->range;
  absl::Status status = CheckTensorRows(spec_, range, tensor->rows.cols, row_start, rows, cols);
  if (!status.ok()) return status;
  return PartOf(tensor->rows, row_start - range.start, rows);
}

absl::Status CpuParameters::WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) {
  if (IsGradient(kind)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head ", spec_.name, ": a gradient cannot be written"));
  }
  // Weight and master weight go together, and the master weight of a float32 head is its weight.
  const bool of_weight = kind == TensorKind::kWeight || kind == TensorKind::kMasterWeight;
  if (absl::Status status = FindTensor(kind).status(); !status.ok()) return status;
  const auto tensor =
      TensorRows(of_weight ? TensorKind::kWeight : kind, row_start, rows.rows, rows.cols);
  if (!tensor.ok()) return tensor.status();
  cpu::ConvertMatrix(rows, *tensor);
  if (!of_weight || !has_master()) return absl::OkStatus();
  const ConstMatrixView owned = ClipRows(rows, owned_, &row_start);
  if (owned.rows == 0) return absl::OkStatus();
  cpu::ConvertMatrix(owned,
                     *TensorRows(TensorKind::kMasterWeight, row_start, owned.rows, owned.cols));
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
