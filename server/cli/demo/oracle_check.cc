#include "server/cli/demo/oracle_check.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/reference.h"

namespace lmhead::demo {
namespace {

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

std::vector<double> Widen(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// What plain dense arithmetic gives for the same inputs: with a head of `dtype`, whose bias is of
// that dtype as well.
reference::Outputs PlainOf(reference::Head head, const reference::Tokens& tokens, DType dtype) {
  head.bias = reference::RoundedTo(dtype, head.bias);
  return reference::PlainOutputs(head, reference::Recipe(), tokens, dtype);
}

CheckReport Compare(const OpenStep& step, const HeadTensors& tensors,
                    const reference::Tokens& tokens, DType dtype) {
  const reference::Result oracle =
      reference::ComputeLoss(tensors.head, reference::Recipe(), tokens);
  const reference::Outputs exact = reference::OutputsOf(oracle);
  const reference::Outputs plain = PlainOf(tensors.head, tokens, dtype);
  const auto compare = [&](const std::string& name, const std::vector<double>& got) {
    return reference::CompareOutput(name, got, exact.at(name), plain.at(name), dtype);
  };
  CheckReport report;
  report.num_tokens = step.sums.num_valid_tokens;
  report.loss = oracle.sums.loss_sum / static_cast<double>(oracle.sums.num_valid_tokens);
  report.loss_sum = compare("loss_sum", {step.sums.loss_sum});
  report.grad_hidden_states = compare("grad_hidden_states", Widen(step.grad_hidden_states));
  report.grad_weight = compare("grad_weight", tensors.grad_weight);
  report.grad_bias = compare("grad_bias", tensors.grad_bias);
  return report;
}

}  // namespace

double CheckReport::WorstGradError() const {
  double worst = 0.0;
  for (const auto* error : {&grad_hidden_states, &grad_weight, &grad_bias}) {
    if (reference::IsWorse(error->rel, worst)) worst = error->rel;
  }
  return worst;
}

bool CheckReport::Passed() const {
  return loss_sum.Passed() && grad_hidden_states.Passed() && grad_weight.Passed() &&
         grad_bias.Passed();
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
  return Compare(*step, *tensors, tokens, trainer->options().dtype);
}

}  // namespace lmhead::demo
