#include "server/cli/demo/oracle_check.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "kernels/reference/reference.h"

namespace lmhead::demo {
namespace {

// float32: sums of up to 16384 terms with unit roundoff 6e-8. bfloat16: two roundings (the gradient
// of the logits and the result) of relative error 2^-9 at most, and logits kept in bfloat16.
constexpr double kLossBoundFloat32 = 1e-5;
constexpr double kGradBoundFloat32 = 1e-5;
constexpr double kLossBoundBFloat16 = 1e-3;
constexpr double kGradBoundBFloat16 = 1e-2;

// What the service holds for the open step.
struct HeadTensors {
  reference::Head head;
  std::vector<double> grad_weight, grad_bias;
};

absl::StatusOr<std::vector<double>> ReadTensor(Trainer* trainer, v1::TensorKind kind, int64_t cols,
                                               DType dtype) {
  const int64_t rows = trainer->corpus().vocabulary.size();
  std::vector<std::byte> data(rows * cols * BytesPerElement(dtype));
  const MatrixView view{data.data(), rows, cols, dtype};
  absl::Status read = trainer->client()->ReadWeights(trainer->options().head, kind, 0, view);
  if (!read.ok()) return read;
  return reference::Upcast(view);
}

absl::StatusOr<HeadTensors> ReadHead(Trainer* trainer) {
  const int64_t hidden_size = trainer->options().hidden_size;
  HeadTensors tensors;
  tensors.head.vocab_size = trainer->corpus().vocabulary.size();
  tensors.head.hidden_size = hidden_size;
  const struct {
    v1::TensorKind kind;
    int64_t cols;
    DType dtype;
    std::vector<double>* out;
  } reads[] = {
      {v1::TENSOR_KIND_WEIGHT, hidden_size, trainer->options().dtype, &tensors.head.weight},
      {v1::TENSOR_KIND_BIAS, 1, DType::kFloat32, &tensors.head.bias},
      {v1::TENSOR_KIND_GRAD_WEIGHT, hidden_size, DType::kFloat32, &tensors.grad_weight},
      {v1::TENSOR_KIND_GRAD_BIAS, 1, DType::kFloat32, &tensors.grad_bias},
  };
  for (const auto& read : reads) {
    auto tensor = ReadTensor(trainer, read.kind, read.cols, read.dtype);
    if (!tensor.ok()) return tensor.status();
    *read.out = *std::move(tensor);
  }
  return tensors;
}

double RelativeError(std::span<const double> got, std::span<const double> want) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<double> Widen(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

CheckReport Compare(const OpenStep& step, const HeadTensors& tensors,
                    const reference::Result& oracle, DType dtype) {
  const bool narrow = dtype == DType::kBFloat16;
  CheckReport report;
  report.num_tokens = step.sums.num_valid_tokens;
  report.loss = oracle.sums.loss_sum / static_cast<double>(oracle.sums.num_valid_tokens);
  report.loss_error =
      std::abs(step.sums.loss_sum - oracle.sums.loss_sum) / std::abs(oracle.sums.loss_sum);
  report.grad_hidden_states_error =
      RelativeError(Widen(step.grad_hidden_states), oracle.grad_hidden_states);
  report.grad_weight_error = RelativeError(tensors.grad_weight, oracle.grad_weight);
  report.grad_bias_error = RelativeError(tensors.grad_bias, oracle.grad_bias);
  report.loss_bound = narrow ? kLossBoundBFloat16 : kLossBoundFloat32;
  report.grad_bound = narrow ? kGradBoundBFloat16 : kGradBoundFloat32;
  return report;
}

}  // namespace

double CheckReport::WorstGradError() const {
  double worst = 0.0;
  for (double error : {grad_hidden_states_error, grad_weight_error, grad_bias_error}) {
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

bool CheckReport::Passed() const {
  return loss_error <= loss_bound && grad_hidden_states_error <= grad_bound &&
         grad_weight_error <= grad_bound && grad_bias_error <= grad_bound;
}

absl::StatusOr<CheckReport> CheckAgainstOracle(Trainer* trainer, int64_t num_tokens) {
  // Rows from all over the text.
  const std::vector<int32_t>& all = trainer->corpus().training_positions;
  const size_t count = std::min<size_t>(num_tokens, all.size());
  std::vector<int32_t> positions;
  for (size_t i = 0; i < count; ++i) positions.push_back(all[i * all.size() / count]);

  auto step = trainer->ComputeStep(positions);
  if (!step.ok()) return step.status();
  auto tensors = ReadHead(trainer);
  if (!tensors.ok()) return tensors.status();
  absl::Status aborted = trainer->AbortStep(*step, "the demo's check only reads its gradients");
  if (!aborted.ok()) return aborted;

  reference::Tokens tokens;
  tokens.hidden_states = Widen(step->hidden_states);
  for (int32_t position : positions) {
    tokens.targets.push_back(trainer->corpus().ids[position]);
  }
  const reference::Result oracle =
      reference::ComputeLoss(tensors->head, reference::Recipe(), tokens);
  return Compare(*step, *tensors, oracle, trainer->options().dtype);
}

}  // namespace lmhead::demo
