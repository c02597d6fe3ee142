#include "tests/e2e/service_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/reference/plain_dense.h"
#include "tests/util/paths.h"

namespace lmhead::e2e {
namespace {

constexpr double kWeightDecay = 0.05;
constexpr double kMomentum = 0.9;

[[noreturn]] void EndProgram(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

float RoundToBFloat16(double value) {
  return BFloat16ToFloat(FloatToBFloat16(static_cast<float>(value)));
}

std::vector<float> NormalValues(int64_t count, double std, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal(0.0, std);
  std::vector<float> values(count);
  for (float& value : values) value = RoundToBFloat16(normal(generator));
  return values;
}

// Rows of float on the wire's terms.
std::vector<std::byte> Encode(std::span<const float> values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * BytesPerElement(dtype));
  if (dtype == DType::kFloat32) {
    std::copy(values.begin(), values.end(), reinterpret_cast<float*>(bytes.data()));
  } else {
    std::transform(values.begin(), values.end(), reinterpret_cast<uint16_t*>(bytes.data()),
                   FloatToBFloat16);
  }
  return bytes;
}

std::vector<float> Decode(std::span<const std::byte> bytes, DType dtype) {
  std::vector<float> values(bytes.size() / BytesPerElement(dtype));
  if (dtype == DType::kFloat32) {
    std::copy_n(reinterpret_cast<const float*>(bytes.data()), values.size(), values.begin());
  } else {
    std::transform(reinterpret_cast<const uint16_t*>(bytes.data()),
                   reinterpret_cast<const uint16_t*>(bytes.data()) + values.size(), values.begin(),
                   BFloat16ToFloat);
  }
  return values;
}

template <typename Want>
double RelativeErrorOf(std::span<const float> got, std::span<const Want> want) {
  if (got.size() != want.size()) return HUGE_VAL;
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double delta = static_cast<double>(got[i]) - want[i];
    difference += delta * delta;
    norm += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(norm > 0.0 ? difference / norm : difference);
}

}  // namespace

std::string LmheadBinary() { return PathBesideTest("lmhead"); }

std::unique_ptr<LocalServer> StartServer(std::vector<std::string> extra_flags) {
  extra_flags.insert(extra_flags.begin(), absl::StrCat("--backend=", TestBackend()));
  auto server = LocalServer::Start(LmheadBinary(), extra_flags);
  if (!server.ok()) EndProgram(server.status());
  return *std::move(server);
}

std::unique_ptr<Client> ConnectTo(const std::string& address) {
  auto client = Client::Connect(address, {});
  if (!client.ok()) EndProgram(client.status());
  return *std::move(client);
}

v1::HeadSpec MakeSpec(const HeadShape& shape) {
  v1::HeadSpec spec;
  spec.set_name(shape.name);
  spec.set_vocab_size(shape.vocab_size);
  spec.set_hidden_size(shape.hidden_size);
  spec.set_weight_dtype(static_cast<v1::DType>(shape.dtype));
  spec.set_has_bias(shape.has_bias);
  spec.set_trainable(shape.optimizer != v1::OPTIMIZER_KIND_NONE);
  spec.set_schedule(shape.schedule);
  spec.mutable_optimizer()->set_kind(shape.optimizer);
  if (shape.optimizer == v1::OPTIMIZER_KIND_SGD) spec.mutable_optimizer()->set_momentum(kMomentum);
  if (shape.optimizer == v1::OPTIMIZER_KIND_ADAMW) {
    spec.mutable_optimizer()->set_weight_decay(kWeightDecay);
  }
  return spec;
}

bool HoldsBFloat16Logits(const HeadShape& shape) {
  return shape.dtype == DType::kBFloat16 && TestBackend() == "cuda";
}

std::vector<float> InitialWeight(const HeadShape& shape) {
  return NormalValues(shape.vocab_size * shape.hidden_size, 0.2, 17);
}

absl::Status CreateHead(Client* client, const HeadShape& shape) {
  if (auto created = client->CreateHead(MakeSpec(shape)); !created.ok()) return created.status();
  const std::vector<float> weight = InitialWeight(shape);
  return client->LoadWeights(shape.name, v1::TENSOR_KIND_WEIGHT, 0,
                             {weight.data(), shape.vocab_size, shape.hidden_size, DType::kFloat32});
}

Rows MakeRows(const HeadShape& shape, int64_t num_tokens, uint64_t step, int worker) {
  const uint64_t seed = 1000 * step + worker;
  std::mt19937_64 generator(seed);
  // Frequent and rare words, as text has them.
  std::geometric_distribution<int64_t> target(8.0 / static_cast<double>(shape.vocab_size));
  Rows rows{.hidden_size = shape.hidden_size,
            .hidden_states = NormalValues(num_tokens * shape.hidden_size, 1.0, seed)};
  for (int64_t i = 0; i < num_tokens; ++i) {
    rows.targets.push_back(i % 8 == 5 ? kDefaultIgnoreIndex
                                      : static_cast<int32_t>(target(generator) % shape.vocab_size));
  }
  return rows;
}

absl::StatusOr<LossResult> Feed(Client* client, const HeadShape& shape, uint64_t step,
                                uint64_t incarnation, const std::string& worker,
                                const FeedOptions& options, Rows* rows) {
  WriterSpec spec{
      .head = shape.name,
      .step = step,
      .worker = worker,
      .incarnation = incarnation,
      .hidden_dtype = shape.dtype,
      .num_connections = options.num_connections,
      .max_inflight_chunks = options.max_inflight_chunks,
      .chunk_bytes = options.chunk_tokens * shape.hidden_size * BytesPerElement(shape.dtype)};
  spec.outputs.set_grad_hidden_states(true);
  auto writer = client->OpenWriter(spec);
  if (!writer.ok()) return writer.status();

  const std::vector<std::byte> hidden = Encode(rows->hidden_states, shape.dtype);
  std::vector<std::byte> grad(hidden.size());
  LossRows loss_rows;
  loss_rows.hidden_states = {hidden.data(), rows->num_tokens(), shape.hidden_size, shape.dtype};
  loss_rows.targets = rows->targets;
  loss_rows.grad_hidden_states = {grad.data(), rows->num_tokens(), shape.hidden_size, shape.dtype};
  auto result = (*writer)->Compute(loss_rows);
  if (!result.ok()) return result.status();
  if (auto ended = (*writer)->Finish(); !ended.ok()) return ended.status();
  rows->grad_hidden_states = Decode(grad, shape.dtype);
  return result;
}

std::string WorkerName(int index) { return absl::StrCat("worker-", index); }

absl::StatusOr<uint64_t> BeginStep(Client* client, const HeadShape& shape, uint64_t step,
                                   int num_workers) {
  v1::BeginStepRequest request;
  request.set_head(shape.name);
  request.set_step(step);
  for (int i = 0; i < num_workers; ++i) request.add_workers(WorkerName(i));
  auto response = client->BeginStep(request);
  if (!response.ok()) return response.status();
  return response->incarnation();
}

absl::StatusOr<v1::PrepareStepResponse> PrepareStep(Client* client, const HeadShape& shape,
                                                    uint64_t step, uint64_t incarnation,
                                                    double wait_seconds) {
  v1::PrepareStepRequest request;
  request.set_head(shape.name);
  request.set_step(step);
  request.set_incarnation(incarnation);
  request.set_wait_seconds(wait_seconds);
  return client->PrepareStep(request);
}

absl::StatusOr<v1::CommitStepResponse> CommitStep(Client* client, const HeadShape& shape,
                                                  uint64_t step, uint64_t incarnation,
                                                  double learning_rate, double grad_multiplier) {
  v1::CommitStepRequest request;
  request.set_head(shape.name);
  request.set_step(step);
  request.set_incarnation(incarnation);
  request.set_learning_rate(learning_rate);
  request.set_grad_multiplier(grad_multiplier);
  return client->CommitStep(request);
}

absl::Status AbortStep(Client* client, const HeadShape& shape, uint64_t step,
                       uint64_t incarnation) {
  v1::AbortStepRequest request;
  request.set_head(shape.name);
  request.set_step(step);
  request.set_incarnation(incarnation);
  request.set_reason("a test said so");
  return client->AbortStep(request).status();
}

double LearningRate(uint64_t step) { return 0.02 / static_cast<double>(step + 1); }

absl::StatusOr<StepOutcome> RunStep(Client* control, std::span<Client* const> workers,
                                    const HeadShape& shape, uint64_t step,
                                    const FeedOptions& options, std::vector<Rows>* rows) {
  auto incarnation = BeginStep(control, shape, step, static_cast<int>(rows->size()));
  if (!incarnation.ok()) return incarnation.status();
  std::vector<absl::Status> statuses(rows->size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < rows->size(); ++i) {
    threads.emplace_back([&, i] {
      statuses[i] = Feed(workers[i], shape, step, *incarnation, WorkerName(static_cast<int>(i)),
                         options, &(*rows)[i])
                        .status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  auto prepared = PrepareStep(control, shape, step, *incarnation);
  if (!prepared.ok()) return prepared.status();
  auto committed = CommitStep(control, shape, step, *incarnation, LearningRate(step),
                              1.0 / static_cast<double>(prepared->sums().num_valid_tokens()));
  if (!committed.ok()) return committed.status();
  return StepOutcome{*std::move(prepared), *std::move(committed)};
}

absl::StatusOr<std::vector<float>> ReadTensor(Client* client, const HeadShape& shape,
                                              v1::TensorKind kind) {
  const bool is_bias = kind == v1::TENSOR_KIND_BIAS || kind == v1::TENSOR_KIND_GRAD_BIAS;
  const int64_t cols = is_bias ? 1 : shape.hidden_size;
  const DType dtype = kind == v1::TENSOR_KIND_WEIGHT ? shape.dtype : DType::kFloat32;
  std::vector<std::byte> bytes(shape.vocab_size * cols * BytesPerElement(dtype));
  absl::Status read =
      client->ReadWeights(shape.name, kind, 0, {bytes.data(), shape.vocab_size, cols, dtype});
  if (!read.ok()) return read;
  return Decode(bytes, dtype);
}

OracleTrainer::OracleTrainer(const HeadShape& shape, std::optional<DType> plain_logits)
    : shape_(shape), plain_logits_(plain_logits) {
  const std::vector<float> weight = InitialWeight(shape);
  master_weight_.assign(weight.begin(), weight.end());
  if (shape.has_bias) bias_.resize(shape.vocab_size);
  const bool is_adamw = shape.optimizer == v1::OPTIMIZER_KIND_ADAMW;
  optimizer_.kind = is_adamw ? OptimizerKind::kAdamW : OptimizerKind::kSgd;
  optimizer_.weight_decay = is_adamw ? kWeightDecay : 0.0;
  optimizer_.momentum = is_adamw ? 0.0 : kMomentum;
}

reference::Result OracleTrainer::Step(std::span<const Rows> rows, uint64_t step) {
  reference::Head head{.vocab_size = shape_.vocab_size,
                       .hidden_size = shape_.hidden_size,
                       .weight = master_weight_,
                       .bias = bias_};
  for (double& value : head.weight) {
    value = shape_.dtype == DType::kBFloat16 ? RoundToBFloat16(value) : static_cast<float>(value);
  }
  reference::Tokens tokens;
  for (const Rows& worker : rows) {
    tokens.hidden_states.insert(tokens.hidden_states.end(), worker.hidden_states.begin(),
                                worker.hidden_states.end());
    tokens.targets.insert(tokens.targets.end(), worker.targets.begin(), worker.targets.end());
  }
  const reference::Recipe recipe;
  const reference::Result result =
      plain_logits_.has_value() ? reference::ComputePlainDense(head, recipe, tokens, *plain_logits_)
                                : reference::ComputeLoss(head, recipe, tokens);
  const double multiplier = 1.0 / static_cast<double>(result.sums.num_valid_tokens);
  reference::ApplyUpdate(optimizer_, optimizer_.weight_decay, LearningRate(step), multiplier,
                         result.grad_weight, master_weight_, &weight_state_);
  if (shape_.has_bias) {
    reference::ApplyUpdate(optimizer_, 0.0, LearningRate(step), multiplier, result.grad_bias, bias_,
                           &bias_state_);
  }
  return result;
}

double RelativeError(std::span<const float> got, std::span<const double> want) {
  return RelativeErrorOf(got, want);
}

double RelativeError(std::span<const float> got, std::span<const float> want) {
  return RelativeErrorOf(got, want);
}

}  // namespace lmhead::e2e
