#include "bench/golden_run.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/step_writer.h"
#include "proto/wire/convert.h"

namespace lmhead::bench {
namespace {

using reference::Outputs;

constexpr uint64_t kStep = 1;
constexpr char kWorker[] = "bench";

// Small, so that a case is several chunks and the last one is shorter.
constexpr int64_t kRowsPerChunk = 3;

bool Trains(Schedule schedule) {
  return schedule == Schedule::kRetain || schedule == Schedule::kRecompute;
}

// A tensor in the dtype it is sent in.
class Encoded {
 public:
  Encoded(const std::vector<float>& values, int64_t rows, int64_t cols, DType dtype)
      : floats_(values), rows_(rows), cols_(cols), dtype_(dtype) {
    if (dtype == DType::kFloat32) return;
    halves_.reserve(values.size());
    for (const float value : values) halves_.push_back(FloatToBFloat16(value));
  }

  MatrixView view() {
    void* const data = dtype_ == DType::kFloat32 ? static_cast<void*>(floats_.data())
                                                 : static_cast<void*>(halves_.data());
    return {data, rows_, cols_, dtype_};
  }

  std::vector<double> Values() const {
    if (dtype_ == DType::kFloat32) return {floats_.begin(), floats_.end()};
    std::vector<double> values;
    values.reserve(halves_.size());
    for (const uint16_t bits : halves_) values.push_back(BFloat16ToFloat(bits));
    return values;
  }

 private:
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
  int64_t rows_;
  int64_t cols_;
  DType dtype_;
};

// Deletes the head, whatever became of the case.
class ScopedHead {
 public:
  ScopedHead(Client& client, std::string name) : client_(client), name_(std::move(name)) {}
  ~ScopedHead() { client_.DeleteHead(name_, /*force=*/true).IgnoreError(); }
  ScopedHead(const ScopedHead&) = delete;
  ScopedHead& operator=(const ScopedHead&) = delete;

 private:
  Client& client_;
  const std::string name_;
};

// A head that holds the teacher's weight and is only read.
v1::HeadSpec TeacherSpecOf(const reference::Head& teacher, DType dtype, const std::string& head) {
  v1::HeadSpec spec;
  spec.set_name(head);
  spec.set_vocab_size(teacher.vocab_size);
  spec.set_hidden_size(teacher.hidden_size);
  spec.set_weight_dtype(DTypeToProto(dtype));
  spec.set_has_bias(!teacher.bias.empty());
  spec.set_logit_scale(static_cast<float>(teacher.logit_scale));
  spec.set_softcap(static_cast<float>(teacher.softcap));
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
  spec.set_schedule(v1::SCHEDULE_FROZEN);
  return spec;
}

v1::HeadSpec SpecOf(const GoldenCase& golden, Schedule schedule, DType dtype,
                    const std::string& head) {
  v1::HeadSpec spec;
  spec.set_name(head);
  spec.set_vocab_size(golden.head.vocab_size);
  spec.set_hidden_size(golden.head.hidden_size);
  spec.set_weight_dtype(DTypeToProto(dtype));
  spec.set_has_bias(!golden.head.bias.empty());
  spec.set_logit_scale(static_cast<float>(golden.head.logit_scale));
  spec.set_softcap(static_cast<float>(golden.head.softcap));
  spec.set_trainable(Trains(schedule));
  spec.mutable_optimizer()->set_kind(Trains(schedule) ? v1::OPTIMIZER_KIND_SGD
                                                      : v1::OPTIMIZER_KIND_NONE);
  spec.set_schedule(Trains(schedule) ? ScheduleToProto(schedule) : v1::SCHEDULE_FROZEN);
  if (golden.teacher.has_value()) spec.set_teacher_hidden_size(golden.teacher->hidden_size);
  if (golden.recipe.distillation.has_value()) {
    spec.set_top_k_max(golden.recipe.distillation->top_k);
  }
  return spec;
}

absl::Status LoadHead(Client& client, const reference::Head& tensors, DType dtype,
                      const std::string& head) {
  Encoded weight(ToFloat(tensors.weight), tensors.vocab_size, tensors.hidden_size, dtype);
  absl::Status status = client.LoadWeights(head, v1::TENSOR_KIND_WEIGHT, 0, weight.view());
  if (!status.ok() || tensors.bias.empty()) return status;
  Encoded bias(ToFloat(tensors.bias), tensors.vocab_size, 1, DType::kFloat32);
  return client.LoadWeights(head, v1::TENSOR_KIND_BIAS, 0, bias.view());
}

v1::LossRecipe ProtoRecipeOf(const GoldenCase& golden, const std::string& teacher_head,
                             DType dtype) {
  v1::LossRecipe recipe = LossRecipeToProto(RecipeOf(golden, teacher_head, dtype));
  const auto& distillation = golden.recipe.distillation;
  if (distillation.has_value() && distillation->divergence == Divergence::kJsd) {
    // As a trainer asks for it, also where it is one of the KLs.
    recipe.mutable_distillation()->set_divergence(v1::DistillationSpec::DIVERGENCE_JSD);
    recipe.mutable_distillation()->set_jsd_beta(static_cast<float>(distillation->jsd_beta));
  }
  return recipe;
}

// The per-token inputs as they are sent.
struct TokenInputs {
  explicit TokenInputs(const reference::Tokens& tokens)
      : token_weights(ToFloat(tokens.token_weights)),
        token_temperature(ToFloat(tokens.token_temperature)),
        logprob_grad(ToFloat(tokens.logprob_grad)),
        entropy_grad(ToFloat(tokens.entropy_grad)),
        teacher_topk_logprobs(ToFloat(tokens.teacher_topk_logprobs)) {}

  const std::vector<float> token_weights, token_temperature, logprob_grad, entropy_grad,
      teacher_topk_logprobs;
};

// Every output a stream can have, before they become doubles.
struct TokenOutputs {
  explicit TokenOutputs(size_t num_tokens)
      : token_loss(num_tokens),
        logprob(num_tokens),
        lse(num_tokens),
        entropy(num_tokens),
        argmax(num_tokens) {}

  std::vector<float> token_loss, logprob, lse, entropy;
  std::vector<int32_t> argmax;
};

WriterSpec WriterSpecOf(const GoldenCase& golden, Schedule schedule, DType dtype,
                        const std::string& head, const std::string& teacher_head,
                        uint64_t incarnation) {
  WriterSpec spec;
  spec.head = head;
  spec.step = Trains(schedule) ? kStep : 0;
  spec.worker = kWorker;
  spec.incarnation = incarnation;
  spec.hidden_dtype = dtype;
  spec.recipe = ProtoRecipeOf(golden, teacher_head, dtype);
  spec.outputs.set_grad_hidden_states(schedule != Schedule::kEval);
  spec.outputs.set_token_loss(true);
  spec.outputs.set_logprob(true);
  spec.outputs.set_lse(true);
  spec.outputs.set_entropy(true);
  spec.outputs.set_argmax(true);
  spec.chunk_tokens = kRowsPerChunk;
  return spec;
}

// Streams all rows and collects what comes back.
absl::Status StreamRows(Client& client, const GoldenCase& golden, const WriterSpec& spec,
                        Outputs* outputs) {
  auto writer = client.OpenWriter(spec);
  if (!writer.ok()) return writer.status();
  Encoded hidden(ToFloat(golden.tokens.hidden_states), golden.tokens.num_tokens(),
                 golden.head.hidden_size, spec.hidden_dtype);
  Encoded grad_hidden(std::vector<float>(golden.tokens.hidden_states.size()),
                      golden.tokens.num_tokens(), golden.head.hidden_size, spec.hidden_dtype);
  const TokenInputs inputs(golden.tokens);
  const int64_t teacher_cols = golden.teacher.has_value() ? golden.teacher->hidden_size : 0;
  Encoded teacher_hidden(ToFloat(golden.tokens.teacher_hidden_states), golden.tokens.num_tokens(),
                         teacher_cols, spec.hidden_dtype);
  TokenOutputs tokens(static_cast<size_t>(golden.tokens.num_tokens()));
  LossRows rows;
  rows.hidden_states = hidden.view();
  rows.targets = golden.tokens.targets;
  rows.token_weights = inputs.token_weights;
  rows.token_temperature = inputs.token_temperature;
  rows.logprob_grad = inputs.logprob_grad;
  rows.entropy_grad = inputs.entropy_grad;
  rows.teacher_topk_ids = golden.tokens.teacher_topk_ids;
  rows.teacher_topk_logprobs = inputs.teacher_topk_logprobs;
  if (golden.teacher.has_value()) rows.teacher_hidden_states = teacher_hidden.view();
  if (spec.outputs.grad_hidden_states()) rows.grad_hidden_states = grad_hidden.view();
  rows.token_loss = tokens.token_loss.data();
  rows.logprob = tokens.logprob.data();
  rows.lse = tokens.lse.data();
  rows.entropy = tokens.entropy.data();
  rows.argmax = tokens.argmax.data();
  const absl::StatusOr<LossResult> result = (*writer)->Compute(rows);
  if (!result.ok()) return result.status();
  const absl::StatusOr<uint64_t> finished = (*writer)->Finish();
  if (!finished.ok()) return finished.status();
  (*outputs)["token_loss"].assign(tokens.token_loss.begin(), tokens.token_loss.end());
  (*outputs)["logprob"].assign(tokens.logprob.begin(), tokens.logprob.end());
  (*outputs)["lse"].assign(tokens.lse.begin(), tokens.lse.end());
  (*outputs)["entropy"].assign(tokens.entropy.begin(), tokens.entropy.end());
  (*outputs)["argmax"].assign(tokens.argmax.begin(), tokens.argmax.end());
  (*outputs)["loss_sum"] = {result->sums.loss_sum};
  (*outputs)["num_valid_tokens"] = {static_cast<double>(result->sums.num_valid_tokens)};
  if (spec.outputs.grad_hidden_states()) (*outputs)["grad_hidden_states"] = grad_hidden.Values();
  return absl::OkStatus();
}

absl::Status ReadGradient(Client& client, const std::string& head, v1::TensorKind tensor,
                          int64_t rows, int64_t cols, std::vector<double>* values) {
  Encoded gradient(std::vector<float>(static_cast<size_t>(rows * cols)), rows, cols,
                   DType::kFloat32);
  absl::Status status = client.ReadWeights(head, tensor, 0, gradient.view());
  if (status.ok()) *values = gradient.Values();
  return status;
}

// Waits for the step's sums, which stand for the stream's from here on, and reads what the step has
// accumulated.
absl::Status ReadGradients(Client& client, const GoldenCase& golden, const std::string& head,
                           uint64_t incarnation, Outputs* outputs) {
  v1::PrepareStepRequest request;
  request.set_head(head);
  request.set_step(kStep);
  request.set_incarnation(incarnation);
  const auto prepared = client.PrepareStep(request);
  if (!prepared.ok()) return prepared.status();
  (*outputs)["loss_sum"] = {prepared->sums().loss_sum()};
  (*outputs)["num_valid_tokens"] = {static_cast<double>(prepared->sums().num_valid_tokens())};
  absl::Status status =
      ReadGradient(client, head, v1::TENSOR_KIND_GRAD_WEIGHT, golden.head.vocab_size,
                   golden.head.hidden_size, &(*outputs)["grad_weight"]);
  if (!status.ok() || golden.head.bias.empty()) return status;
  return ReadGradient(client, head, v1::TENSOR_KIND_GRAD_BIAS, golden.head.vocab_size, 1,
                      &(*outputs)["grad_bias"]);
}

absl::StatusOr<uint64_t> BeginStep(Client& client, const std::string& head) {
  v1::BeginStepRequest request;
  request.set_head(head);
  request.set_step(kStep);
  request.add_workers(kWorker);
  const auto begun = client.BeginStep(request);
  if (!begun.ok()) return begun.status();
  return begun->incarnation();
}

}  // namespace

absl::StatusOr<reference::Outputs> RunGoldenCase(Client& client, const GoldenCase& golden,
                                                 Schedule schedule, DType dtype,
                                                 const std::string& head) {
  const std::string teacher_head = absl::StrCat(head, "-teacher");
  std::optional<ScopedHead> scoped_teacher;
  if (golden.teacher.has_value()) {
    const auto created = client.CreateHead(TeacherSpecOf(*golden.teacher, dtype, teacher_head));
    if (!created.ok()) return created.status();
    scoped_teacher.emplace(client, teacher_head);
    const absl::Status loaded = LoadHead(client, *golden.teacher, dtype, teacher_head);
    if (!loaded.ok()) return loaded;
  }
  const auto created = client.CreateHead(SpecOf(golden, schedule, dtype, head));
  if (!created.ok()) return created.status();
  const ScopedHead scoped(client, head);
  absl::Status status = LoadHead(client, golden.head, dtype, head);
  if (!status.ok()) return status;
  uint64_t incarnation = 0;
  if (Trains(schedule)) {
    const absl::StatusOr<uint64_t> begun = BeginStep(client, head);
    if (!begun.ok()) return begun.status();
    incarnation = *begun;
  }
  Outputs outputs;
  status =
      StreamRows(client, golden,
                 WriterSpecOf(golden, schedule, dtype, head, teacher_head, incarnation), &outputs);
  if (status.ok() && Trains(schedule)) {
    status = ReadGradients(client, golden, head, incarnation, &outputs);
  }
  if (!status.ok()) return status;
  return outputs;
}

}  // namespace lmhead::bench
