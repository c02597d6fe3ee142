#include "server/cli/demo/trainer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lmhead::demo {
namespace {

// Rows a worker sends before it goes on with the trunk: the head computes them meanwhile.
constexpr int64_t kMicroBatchTokens = 512;
constexpr int64_t kWarmupSteps = 10;
constexpr double kFinalLearningRate = 0.1;  // Of the maximum.
constexpr double kHeadInitStd = 0.02;

v1::DType ProtoDType(DType dtype) { return static_cast<v1::DType>(dtype); }

void ToWire(std::span<const float> values, DType dtype, std::byte* out) {
  if (dtype == DType::kFloat32) {
    std::copy(values.begin(), values.end(), reinterpret_cast<float*>(out));
    return;
  }
  auto* narrow = reinterpret_cast<uint16_t*>(out);
  std::transform(values.begin(), values.end(), narrow, FloatToBFloat16);
}

void FromWire(const std::byte* data, DType dtype, std::span<float> values) {
  if (dtype == DType::kFloat32) {
    std::copy_n(reinterpret_cast<const float*>(data), values.size(), values.begin());
    return;
  }
  std::transform(reinterpret_cast<const uint16_t*>(data),
                 reinterpret_cast<const uint16_t*>(data) + values.size(), values.begin(),
                 BFloat16ToFloat);
}

// At most `count` of the positions, evenly spaced.
std::vector<int32_t> Spread(const std::vector<int32_t>& positions, int64_t count) {
  const int64_t available = static_cast<int64_t>(positions.size());
  if (available <= count) return positions;
  std::vector<int32_t> spread;
  for (int64_t i = 0; i < count; ++i) spread.push_back(positions[i * available / count]);
  return spread;
}

}  // namespace

// What one trunk process would hold: its rows' buffers and its share of the trunk's gradient.
class Worker {
 public:
  Worker(std::string name, const Corpus* corpus, const Trunk* trunk, DType dtype)
      : name_(std::move(name)),
        corpus_(corpus),
        trunk_(trunk),
        dtype_(dtype),
        gradient_(corpus->vocabulary.size(), trunk->hidden_size()) {}

  // Sends the rows at `positions`; with spec.outputs.grad_hidden_states also adds the trunk's
  // gradients to gradient(). `argmax` has a place for each row, or is null.
  absl::StatusOr<LossSums> Feed(Client* client, WriterSpec spec, std::span<const int32_t> positions,
                                int32_t* argmax) {
    Prepare(positions);
    spec.hidden_dtype = dtype_;
    spec.chunk_bytes = kChunkBytes;
    auto writer = client->OpenWriter(spec);
    if (!writer.ok()) return writer.status();
    const bool wants_grad = spec.outputs.grad_hidden_states();
    std::vector<uint64_t> tickets;
    for (int64_t row = 0; row < num_rows(); row += kMicroBatchTokens) {
      auto ticket = (*writer)->Submit(Forward(positions, row, wants_grad, argmax));
      if (!ticket.ok()) return ticket.status();
      tickets.push_back(*ticket);
    }
    LossSums sums;
    for (size_t i = 0; i < tickets.size(); ++i) {
      auto result = (*writer)->Wait(tickets[i]);
      if (!result.ok()) return result.status();
      sums += result->sums;
      if (wants_grad) Backward(positions, static_cast<int64_t>(i) * kMicroBatchTokens);
    }
    if (auto count = (*writer)->Finish(); !count.ok()) return count.status();
    return sums;
  }

  const std::string& name() const { return name_; }
  TrunkGradient& gradient() { return gradient_; }

  // The rows of the last Feed, widened from what travelled.
  void AppendRows(std::vector<float>* hidden, std::vector<float>* grad_hidden) const {
    const size_t old_size = hidden->size(), size = targets_.size() * trunk_->hidden_size();
    hidden->resize(old_size + size);
    grad_hidden->resize(old_size + size);
    FromWire(sent_.data(), dtype_, {hidden->data() + old_size, size});
    FromWire(received_.data(), dtype_, {grad_hidden->data() + old_size, size});
  }

 private:
  int64_t num_rows() const { return static_cast<int64_t>(targets_.size()); }
  int64_t row_bytes() const { return trunk_->hidden_size() * BytesPerElement(dtype_); }

  void Prepare(std::span<const int32_t> positions) {
    targets_.resize(positions.size());
    std::transform(positions.begin(), positions.end(), targets_.begin(),
                   [&](int32_t position) { return corpus_->ids[position]; });
    sent_.resize(positions.size() * row_bytes());
    received_.resize(positions.size() * row_bytes());
    widened_.resize(kMicroBatchTokens * trunk_->hidden_size());
  }

  // The trunk's forward pass for the micro-batch at `row`; returns it as the writer wants it.
  LossRows Forward(std::span<const int32_t> positions, int64_t row, bool wants_grad,
                   int32_t* argmax) {
    const int64_t rows = std::min(kMicroBatchTokens, num_rows() - row);
    const int64_t hidden_size = trunk_->hidden_size();
    trunk_->Forward(corpus_->ids, positions.subspan(row, rows), widened_.data());
    std::byte* sent = sent_.data() + row * row_bytes();
    ToWire({widened_.data(), static_cast<size_t>(rows * hidden_size)}, dtype_, sent);

    LossRows out;
    out.hidden_states = {sent, rows, hidden_size, dtype_};
    out.targets = {targets_.data() + row, static_cast<size_t>(rows)};
    if (wants_grad) {
      out.grad_hidden_states = {received_.data() + row * row_bytes(), rows, hidden_size, dtype_};
    }
    if (argmax != nullptr) out.argmax = argmax + row;
    return out;
  }

  // The trunk's backward pass for the micro-batch at `row`, whose gradient has arrived.
  void Backward(std::span<const int32_t> positions, int64_t row) {
    const int64_t rows = std::min(kMicroBatchTokens, num_rows() - row);
    const std::span<float> grad(widened_.data(), rows * trunk_->hidden_size());
    FromWire(received_.data() + row * row_bytes(), dtype_, grad);
    trunk_->Backward(corpus_->ids, positions.subspan(row, rows), grad.data(), &gradient_);
  }

  const std::string name_;
  const Corpus* const corpus_;
  const Trunk* const trunk_;
  const DType dtype_;
  TrunkGradient gradient_;
  std::vector<int32_t> targets_;
  std::vector<std::byte> sent_, received_;  // [rows, hidden_size] of dtype_.
  std::vector<float> widened_;              // [kMicroBatchTokens, hidden_size]
};

Trainer::Trainer(Client* client, const Corpus* corpus, const TrainerOptions& options)
    : client_(client),
      corpus_(corpus),
      options_(options),
      tokens_per_step_(std::min<int64_t>(options.tokens_per_step,
                                         static_cast<int64_t>(corpus->training_positions.size()))),
      trunk_(corpus->vocabulary.size(), options.hidden_size, options.seed),
      gradient_(corpus->vocabulary.size(), options.hidden_size),
      generator_(options.seed),
      evaluated_(Spread(corpus->heldout_positions, kHeldoutTokensMax)),
      shuffled_(corpus->training_positions),
      next_(shuffled_.size()) {
  for (int i = 0; i < kNumWorkers; ++i) {
    workers_.push_back(
        std::make_unique<Worker>(absl::StrCat("worker-", i), corpus, &trunk_, options.dtype));
  }
}

Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(Client* client, const Corpus* corpus,
                                                         const TrainerOptions& options) {
  std::unique_ptr<Trainer> trainer(new Trainer(client, corpus, options));
  if (absl::Status status = trainer->CreateHead(); !status.ok()) return status;
  return trainer;
}

absl::Status Trainer::CreateHead() {
  v1::HeadSpec spec;
  spec.set_name(options_.head);
  spec.set_vocab_size(corpus_->vocabulary.size());
  spec.set_hidden_size(options_.hidden_size);
  spec.set_weight_dtype(ProtoDType(options_.dtype));
  spec.set_has_bias(true);
  spec.set_trainable(true);
  spec.set_batch_tokens(kMicroBatchTokens);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  spec.mutable_optimizer()->set_beta2(0.99);
  spec.mutable_optimizer()->set_weight_decay(0.01);
  spec.mutable_weight_init()->set_kind(v1::WeightInit::KIND_NORMAL);
  spec.mutable_weight_init()->set_std(kHeadInitStd);
  spec.mutable_weight_init()->set_seed(options_.seed);
  auto info = client_->CreateHead(spec);
  if (!info.ok()) return info.status();
  head_info_ = *std::move(info);
  return absl::OkStatus();
}

absl::Status Trainer::DeleteHead() { return client_->DeleteHead(options_.head, /*force=*/true); }

std::vector<int32_t> Trainer::NextPositions() {
  std::vector<int32_t> positions;
  while (static_cast<int64_t>(positions.size()) < tokens_per_step_) {
    if (next_ == shuffled_.size()) {
      std::shuffle(shuffled_.begin(), shuffled_.end(), generator_);
      next_ = 0;
    }
    positions.push_back(shuffled_[next_++]);
  }
  return positions;
}

double Trainer::LearningRate() const {
  const double step = static_cast<double>(last_committed_step_);
  const double warmup = std::min(1.0, (step + 1.0) / kWarmupSteps);
  const double progress = std::min(1.0, step / static_cast<double>(options_.num_steps));
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options_.learning_rate_max * warmup *
         (kFinalLearningRate + (1.0 - kFinalLearningRate) * cosine);
}

absl::StatusOr<OpenStep> Trainer::ComputeStep(std::span<const int32_t> positions) {
  v1::BeginStepRequest begin;
  begin.set_head(options_.head);
  begin.set_step(last_committed_step_ + 1);
  for (const auto& worker : workers_) begin.add_workers(worker->name());
  auto begun = client_->BeginStep(begin);
  if (!begun.ok()) return begun.status();
  if (absl::Status fed = FeedStep(begin.step(), begun->incarnation(), positions); !fed.ok()) {
    return fed;
  }

  v1::PrepareStepRequest prepare;
  prepare.set_head(options_.head);
  prepare.set_step(begin.step());
  prepare.set_incarnation(begun->incarnation());
  auto prepared = client_->PrepareStep(prepare);
  if (!prepared.ok()) return prepared.status();

  OpenStep step{.step = begin.step(),
                .incarnation = begun->incarnation(),
                .head_grad_squared_norm = prepared->grad_squared_norm(),
                .num_chunks = prepared->num_chunks()};
  step.sums.loss_sum = prepared->sums().loss_sum();
  step.sums.num_tokens = prepared->sums().num_tokens();
  step.sums.num_valid_tokens = prepared->sums().num_valid_tokens();
  for (const auto& worker : workers_) {
    worker->AppendRows(&step.hidden_states, &step.grad_hidden_states);
  }
  return step;
}

absl::Status Trainer::FeedStep(uint64_t step, uint64_t incarnation,
                               std::span<const int32_t> positions) {
  const size_t share = (positions.size() + kNumWorkers - 1) / kNumWorkers;
  std::vector<absl::Status> statuses(kNumWorkers);
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumWorkers; ++i) {
    threads.emplace_back([&, i] {
      WriterSpec spec{.head = options_.head,
                      .step = step,
                      .worker = workers_[i]->name(),
                      .incarnation = incarnation};
      spec.outputs.set_grad_hidden_states(true);
      const size_t start = std::min(i * share, positions.size());
      const auto rows = positions.subspan(start, std::min(share, positions.size() - start));
      workers_[i]->gradient().Clear();
      statuses[i] = workers_[i]->Feed(client_, spec, rows, nullptr).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Trainer::TrainStep() {
  const std::vector<int32_t> positions = NextPositions();
  auto step = ComputeStep(positions);
  if (!step.ok()) return step.status();

  gradient_.Clear();
  for (const auto& worker : workers_) gradient_.Add(worker->gradient());
  StepReport report{.sums = step->sums, .learning_rate = LearningRate()};
  report.grad_norm = std::sqrt(step->head_grad_squared_norm + gradient_.SquaredNorm()) /
                     static_cast<double>(step->sums.num_valid_tokens);
  report.clip = std::min(1.0, options_.max_grad_norm / report.grad_norm);
  if (absl::Status status = Commit(*step, report); !status.ok()) return status;
  return report;
}

absl::Status Trainer::Commit(const OpenStep& step, const StepReport& report) {
  const double grad_multiplier = report.clip / static_cast<double>(step.sums.num_valid_tokens);
  v1::CommitStepRequest commit;
  commit.set_head(options_.head);
  commit.set_step(step.step);
  commit.set_incarnation(step.incarnation);
  commit.set_learning_rate(report.learning_rate);
  commit.set_grad_multiplier(grad_multiplier);
  if (auto committed = client_->CommitStep(commit); !committed.ok()) return committed.status();
  trunk_.ApplyUpdate(gradient_, report.learning_rate, grad_multiplier);
  last_committed_step_ = step.step;
  return absl::OkStatus();
}

absl::Status Trainer::AbortStep(const OpenStep& step, std::string_view reason) {
  v1::AbortStepRequest abort;
  abort.set_head(options_.head);
  abort.set_step(step.step);
  abort.set_incarnation(step.incarnation);
  abort.set_reason(std::string(reason));
  return client_->AbortStep(abort).status();
}

absl::StatusOr<LossSums> Trainer::EvaluateHeldout() {
  return workers_[0]->Feed(client_, WriterSpec{.head = options_.head}, evaluated_, nullptr);
}

absl::StatusOr<std::vector<int32_t>> Trainer::Predict(std::span<const int32_t> positions) {
  WriterSpec spec{.head = options_.head};
  spec.outputs.set_argmax(true);
  std::vector<int32_t> argmax(positions.size());
  if (auto sums = workers_[0]->Feed(client_, spec, positions, argmax.data()); !sums.ok()) {
    return sums.status();
  }
  return argmax;
}

}  // namespace lmhead::demo
