#include "bench/service_run.h"

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/step_writer.h"
#include "proto/wire/convert.h"
#include "server/cli/demo/metrics_client.h"

namespace lmhead::bench {
namespace {

// Submits of a worker that are under way at once. Two fill its window, so that it stays full while
// the worker waits for the oldest.
constexpr int64_t kPiecesUnderWay = 4;
constexpr int64_t kPiecesOfWindow = 2;

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

ServiceCounters Difference(const ServiceCounters& after, const ServiceCounters& before) {
  return {.busy_seconds = after.busy_seconds - before.busy_seconds,
          .bytes_received = after.bytes_received - before.bytes_received,
          .bytes_sent = after.bytes_sent - before.bytes_sent,
          .tokens = after.tokens - before.tokens,
          .batches = after.batches - before.batches};
}

StageTimings Mean(const StageTimings& sum, int64_t count) {
  const double n = static_cast<double>(count);
  return {.queue_seconds = sum.queue_seconds / n,
          .upload_seconds = sum.upload_seconds / n,
          .compute_seconds = sum.compute_seconds / n,
          .download_seconds = sum.download_seconds / n};
}

void Add(const StageTimings& timings, StageTimings* sum) {
  sum->queue_seconds += timings.queue_seconds;
  sum->upload_seconds += timings.upload_seconds;
  sum->compute_seconds += timings.compute_seconds;
  sum->download_seconds += timings.download_seconds;
}

}  // namespace

// One worker of a step: used by one thread while it streams.
struct ServiceRun::Worker {
  std::string name;
  int64_t tokens = 0;                         // Its share of the step.
  std::vector<std::byte> grad_hidden_states;  // Of kPiecesUnderWay pieces.
  std::unique_ptr<StepWriter> writer;
  int64_t num_tokens = 0;  // As its results say, like the next two.
  int64_t num_chunks = 0;
  StageTimings timings;  // Sums over the chunks.

  absl::Status Collect(uint64_t ticket) {
    const absl::StatusOr<LossResult> result = writer->Wait(ticket);
    if (!result.ok()) return result.status();
    num_tokens += result->sums.num_valid_tokens;
    num_chunks += result->num_chunks;
    Add(result->timings, &timings);
    return absl::OkStatus();
  }
};

ServiceRun::ServiceRun(Client* client, const std::string& metrics_address, const std::string& head)
    : client_(client), metrics_address_(metrics_address), head_(head) {}

absl::StatusOr<std::unique_ptr<ServiceRun>> ServiceRun::Create(Client* client,
                                                               const std::string& metrics_address,
                                                               const HeadSpec& head, bool distil) {
  HeadSpec student = head;
  if (distil) student.teacher_hidden_size = head.hidden_size;
  const auto created = client->CreateHead(HeadSpecToProto(student));
  if (!created.ok()) return created.status();
  std::unique_ptr<ServiceRun> run(new ServiceRun(client, metrics_address, head.name));
  if (!distil) return run;
  HeadSpec teacher = head;
  teacher.name = absl::StrCat(head.name, "-teacher");
  teacher.trainable = false;
  teacher.optimizer.kind = OptimizerKind::kNone;
  teacher.schedule = Schedule::kFrozen;
  teacher.weight_init.seed = head.weight_init.seed + 1;
  const auto created_teacher = client->CreateHead(HeadSpecToProto(teacher));
  if (!created_teacher.ok()) return created_teacher.status();
  run->teacher_ = teacher.name;
  return run;
}

ServiceRun::~ServiceRun() {
  workers_.clear();  // Their streams end first.
  client_->DeleteHead(head_, /*force=*/true).IgnoreError();
  if (!teacher_.empty()) client_->DeleteHead(teacher_, /*force=*/true).IgnoreError();
}

void ServiceRun::SetTraffic(const Traffic& traffic) {
  traffic_ = traffic;
  const int64_t window = int64_t{traffic.connections} * traffic.inflight;
  const int64_t share =
      CeilDivide(CeilDivide(traffic.tokens, traffic.workers), traffic.chunk_tokens);
  piece_tokens_ = traffic.chunk_tokens * std::min(share, CeilDivide(window, kPiecesOfWindow));
  const HeadSpec& head = traffic.head;
  rows_ = std::make_unique<RandomRows>(piece_tokens_, head.hidden_size, traffic.hidden_dtype,
                                       head.vocab_size);
  workers_.clear();
  for (int32_t i = 0; i < traffic.workers; ++i) {
    auto worker = std::make_unique<Worker>();
    worker->name = absl::StrCat("worker-", i);
    worker->tokens = traffic.tokens / traffic.workers + (i < traffic.tokens % traffic.workers);
    worker->grad_hidden_states.resize(static_cast<size_t>(kPiecesUnderWay * rows_->size_bytes()));
    workers_.push_back(std::move(worker));
  }
}

absl::Status ServiceRun::OpenWriters(uint64_t incarnation) {
  WriterSpec spec{.head = head_,
                  .step = step_,
                  .incarnation = incarnation,
                  .hidden_dtype = traffic_.hidden_dtype,
                  .num_connections = traffic_.connections,
                  .max_inflight_chunks = traffic_.inflight,
                  .chunk_bytes = traffic_.chunk_bytes};
  spec.outputs.set_grad_hidden_states(true);
  if (!teacher_.empty()) {
    spec.recipe = LossRecipeToProto(
        {.distillation = DistillationSpec{.divergence = Divergence::kForwardKl,
                                          .teacher_head = teacher_,
                                          .teacher_hidden_dtype = traffic_.hidden_dtype}});
  }
  for (const auto& worker : workers_) {
    *worker = Worker{.name = std::move(worker->name),
                     .tokens = worker->tokens,
                     .grad_hidden_states = std::move(worker->grad_hidden_states)};
    spec.worker = worker->name;
    auto writer = client_->OpenWriter(spec);
    if (!writer.ok()) return writer.status();
    worker->writer = *std::move(writer);
  }
  return absl::OkStatus();
}

absl::Status ServiceRun::Stream(Worker& worker) {
  const int64_t cols = traffic_.head.hidden_size;
  std::deque<uint64_t> tickets;
  for (int64_t start = 0, piece = 0; start < worker.tokens; start += piece_tokens_, ++piece) {
    if (piece >= kPiecesUnderWay) {
      if (absl::Status status = worker.Collect(tickets.front()); !status.ok()) return status;
      tickets.pop_front();
    }
    const int64_t num_rows = std::min(piece_tokens_, worker.tokens - start);
    LossRows rows;
    rows.hidden_states = rows_->hidden_states(num_rows);
    rows.targets = rows_->targets(num_rows);
    if (!teacher_.empty()) rows.teacher_hidden_states = rows.hidden_states;
    std::byte* const grad =
        worker.grad_hidden_states.data() + piece % kPiecesUnderWay * rows_->size_bytes();
    rows.grad_hidden_states = {grad, num_rows, cols, traffic_.hidden_dtype};
    const absl::StatusOr<uint64_t> ticket = worker.writer->Submit(rows);
    if (!ticket.ok()) return ticket.status();
    tickets.push_back(*ticket);
  }
  for (const uint64_t ticket : tickets) {
    if (absl::Status status = worker.Collect(ticket); !status.ok()) return status;
  }
  const absl::StatusOr<uint64_t> finished = worker.writer->Finish();
  if (!finished.ok()) return finished.status();
  if (*finished == static_cast<uint64_t>(worker.num_chunks)) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("%s sent %d chunks and got %d results", worker.name,
                                             *finished, worker.num_chunks));
}

absl::Status ServiceRun::StreamAll() {
  std::vector<absl::Status> statuses(workers_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers_.size(); ++i) {
    threads.emplace_back([&, i] { statuses[i] = Stream(*workers_[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<ServiceCounters>> ServiceRun::ReadCounters() const {
  if (metrics_address_.empty()) return std::optional<ServiceCounters>();
  const absl::StatusOr<std::string> text = demo::ScrapeMetrics(metrics_address_);
  if (!text.ok()) return text.status();
  absl::Status failure;
  const auto read = [&](const char* name, const std::vector<std::string>& labels = {}) {
    const absl::StatusOr<double> value = demo::MetricValue(*text, name, labels);
    failure.Update(value.status());
    return value.value_or(0.0);
  };
  const ServiceCounters counters = {
      .busy_seconds = read("lmhead_executor_busy_seconds_total"),
      .bytes_received = read("lmhead_rpc_bytes_total", {"direction=\"received\""}),
      .bytes_sent = read("lmhead_rpc_bytes_total", {"direction=\"sent\""}),
      .tokens = read("lmhead_batch_tokens_sum"),
      .batches = read("lmhead_batch_tokens_count")};
  if (!failure.ok()) return failure;
  return std::optional<ServiceCounters>(counters);
}

absl::Status ServiceRun::CheckAndAbort(uint64_t incarnation, StepMeasurement* measurement) {
  v1::PrepareStepRequest prepare;
  prepare.set_head(head_);
  prepare.set_step(step_);
  prepare.set_incarnation(incarnation);
  const auto prepared = client_->PrepareStep(prepare);
  if (!prepared.ok()) return prepared.status();
  v1::AbortStepRequest abort;
  abort.set_head(head_);
  abort.set_step(step_);
  abort.set_incarnation(incarnation);
  abort.set_reason("the benchmark trains nothing");
  if (const auto aborted = client_->AbortStep(abort); !aborted.ok()) return aborted.status();

  measurement->num_tokens = prepared->sums().num_valid_tokens();
  measurement->num_chunks = static_cast<int64_t>(prepared->num_chunks());
  int64_t wanted_tokens = 0, answered_tokens = 0, wanted_chunks = 0;
  StageTimings timings;
  for (const auto& worker : workers_) {
    wanted_tokens += worker->tokens;
    answered_tokens += worker->num_tokens;
    wanted_chunks += worker->num_chunks;
    Add(worker->timings, &timings);
  }
  measurement->chunk_timings = Mean(timings, wanted_chunks);
  if (measurement->num_tokens == wanted_tokens && answered_tokens == wanted_tokens &&
      measurement->num_chunks == wanted_chunks) {
    return absl::OkStatus();
  }
  return absl::InternalError(
      absl::StrFormat("step %d: the service counted %d tokens in %d chunks and answered %d tokens; "
                      "%d tokens in %d chunks were sent",
                      step_, measurement->num_tokens, measurement->num_chunks, answered_tokens,
                      wanted_tokens, wanted_chunks));
}

absl::StatusOr<StepMeasurement> ServiceRun::MeasureStep() {
  ++step_;
  StepMeasurement measurement;
  const absl::Time step_start = absl::Now();
  v1::BeginStepRequest begin;
  begin.set_head(head_);
  begin.set_step(step_);
  for (const auto& worker : workers_) begin.add_workers(worker->name);
  const auto begun = client_->BeginStep(begin);
  if (!begun.ok()) return begun.status();
  absl::Status status = OpenWriters(begun->incarnation());
  if (!status.ok()) return status;

  const auto before = ReadCounters();
  if (!before.ok()) return before.status();
  const absl::Time stream_start = absl::Now();
  status = StreamAll();
  measurement.stream_seconds = SecondsSince(stream_start);
  if (!status.ok()) return status;
  const auto after = ReadCounters();
  if (!after.ok()) return after.status();
  if (after->has_value()) measurement.counters = Difference(**after, **before);

  status = CheckAndAbort(begun->incarnation(), &measurement);
  measurement.step_seconds = SecondsSince(step_start);
  if (!status.ok()) return status;
  return measurement;
}

}  // namespace lmhead::bench
