#include "bench/service_report.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lmhead::bench {
namespace {

using Figure = std::optional<double>;
using FigureOf = std::function<Figure(const ServiceRepeat&)>;

// The middle of the repeats' figures, the lower one of two; nothing when one has none.
Figure Median(const ServiceCase& measured, const FigureOf& figure_of) {
  std::vector<double> values;
  for (const ServiceRepeat& repeat : measured.repeats) {
    const Figure figure = figure_of(repeat);
    if (!figure.has_value()) return std::nullopt;
    values.push_back(*figure);
  }
  const auto middle = values.begin() + (values.size() - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double Tokens(const ServiceRepeat& repeat) { return static_cast<double>(repeat.step.num_tokens); }

Figure TokensPerSecond(const ServiceRepeat& repeat) {
  return Tokens(repeat) / repeat.step.stream_seconds;
}

const char* LossName(const Traffic& traffic) {
  return traffic.distil ? "forward KL to a teacher" : "cross entropy";
}

// Hidden states one way, their gradients the other.
double PayloadBytes(const Traffic& traffic) {
  return static_cast<double>(traffic.tokens * traffic.head.hidden_size *
                             BytesPerElement(traffic.hidden_dtype));
}

Figure BusyTokensPerSecond(const ServiceRepeat& repeat) {
  if (!repeat.step.counters.has_value()) return std::nullopt;
  return Tokens(repeat) / repeat.step.counters->busy_seconds;
}

// Both the executor's utilisation and the service's speed over that of its backend.
Figure BusyRatio(const ServiceRepeat& repeat) {
  if (!repeat.step.counters.has_value()) return std::nullopt;
  return repeat.step.counters->busy_seconds / repeat.step.stream_seconds;
}

Figure RowsPerBatch(const ServiceRepeat& repeat) {
  if (!repeat.step.counters.has_value()) return std::nullopt;
  return repeat.step.counters->tokens / repeat.step.counters->batches;
}

Figure InProcessTokensPerSecond(const ServiceRepeat& repeat) {
  if (!repeat.inprocess_seconds.has_value()) return std::nullopt;
  return Tokens(repeat) / *repeat.inprocess_seconds;
}

// Of the pair that was measured one after the other.
Figure InProcessRatio(const ServiceRepeat& repeat) {
  if (!repeat.inprocess_seconds.has_value()) return std::nullopt;
  return *repeat.inprocess_seconds / repeat.step.stream_seconds;
}

std::string Cell(const ServiceCase& measured, const FigureOf& figure_of, int width, int precision,
                 double scale = 1.0) {
  const Figure figure = Median(measured, figure_of);
  if (!figure.has_value()) return absl::StrFormat(" %*s", width, "-");
  return absl::StrFormat(" %*.*f", width, precision, *figure * scale);
}

FigureOf Stage(double StageTimings::*stage) {
  return
      [stage](const ServiceRepeat& repeat) -> Figure { return repeat.step.chunk_timings.*stage; };
}

nlohmann::ordered_json Json(const Figure& figure) {
  return figure.has_value() ? nlohmann::ordered_json(*figure) : nlohmann::ordered_json();
}

nlohmann::ordered_json RepeatJson(const ServiceRepeat& repeat) {
  const StepMeasurement& step = repeat.step;
  nlohmann::ordered_json json = {{"num_tokens", step.num_tokens},
                                 {"num_chunks", step.num_chunks},
                                 {"step_seconds", step.step_seconds},
                                 {"stream_seconds", step.stream_seconds},
                                 {"inprocess_seconds", Json(repeat.inprocess_seconds)}};
  const auto counter = [&](const char* name, double ServiceCounters::*member) {
    json[name] =
        step.counters.has_value() ? Json(*step.counters.*member) : nlohmann::ordered_json();
  };
  counter("busy_seconds", &ServiceCounters::busy_seconds);
  counter("message_bytes_received", &ServiceCounters::bytes_received);
  counter("message_bytes_sent", &ServiceCounters::bytes_sent);
  counter("num_batches", &ServiceCounters::batches);
  json["chunk_queue_seconds"] = step.chunk_timings.queue_seconds;
  json["chunk_upload_seconds"] = step.chunk_timings.upload_seconds;
  json["chunk_compute_seconds"] = step.chunk_timings.compute_seconds;
  json["chunk_download_seconds"] = step.chunk_timings.download_seconds;
  return json;
}

nlohmann::ordered_json CaseJson(const ServiceCase& measured) {
  const Traffic& traffic = measured.traffic;
  const Figure tokens_per_second = Median(measured, TokensPerSecond);
  nlohmann::ordered_json json = {
      {"schedule", ScheduleName(traffic.head.schedule)},
      {"workers", traffic.workers},
      {"connections", traffic.connections},
      {"inflight", traffic.inflight},
      {"tokens", traffic.tokens},
      {"chunk_tokens", traffic.chunk_tokens},
      {"tokens_per_second", Json(tokens_per_second)},
      {"bytes_per_second_each_way",
       *tokens_per_second * PayloadBytes(traffic) / static_cast<double>(traffic.tokens)},
      {"busy_tokens_per_second", Json(Median(measured, BusyTokensPerSecond))},
      {"busy_ratio", Json(Median(measured, BusyRatio))},
      {"rows_per_batch", Json(Median(measured, RowsPerBatch))},
      {"inprocess_tokens_per_second", Json(Median(measured, InProcessTokensPerSecond))},
      {"inprocess_ratio", Json(Median(measured, InProcessRatio))}};
  nlohmann::ordered_json repeats = nlohmann::ordered_json::array();
  for (const ServiceRepeat& repeat : measured.repeats) repeats.push_back(RepeatJson(repeat));
  json["repeats"] = std::move(repeats);
  return json;
}

}  // namespace

std::string RenderServiceHeader(const ServiceFacts& facts, const Traffic& traffic, int repeats) {
  const HeadSpec& head = traffic.head;
  return absl::StrFormat(
      "%s, %s (%s)\n"
      "head %d x %d %s, %s, batches of at most %d rows; %d workers, %d tokens a step in chunks of "
      "at most %d;\nmedians of %d\n\n"
      "%-9s %5s %8s %10s %9s %10s %6s %10s %6s %10s %9s %9s %10s %11s\n",
      facts.address, facts.backend, facts.device, head.vocab_size, head.hidden_size,
      std::string(DTypeName(head.weight_dtype)), LossName(traffic), head.batch_tokens,
      traffic.workers, traffic.tokens, traffic.chunk_tokens, repeats, "schedule", "conns",
      "inflight", "tokens/s", "MB/s each", "busy tok/s", "ratio", "in-process", "ratio",
      "rows/batch", "queue ms", "upload ms", "compute ms", "download ms");
}

std::string RenderServiceCase(const ServiceCase& measured) {
  const Traffic& traffic = measured.traffic;
  const double megabytes_a_token =
      PayloadBytes(traffic) / static_cast<double>(traffic.tokens) / 1e6;
  return absl::StrCat(
      absl::StrFormat("%-9s %5d %8d", std::string(ScheduleName(traffic.head.schedule)),
                      traffic.connections, traffic.inflight),
      Cell(measured, TokensPerSecond, 10, 0),
      Cell(measured, TokensPerSecond, 9, 1, megabytes_a_token),
      Cell(measured, BusyTokensPerSecond, 10, 0), Cell(measured, BusyRatio, 6, 3),
      Cell(measured, InProcessTokensPerSecond, 10, 0), Cell(measured, InProcessRatio, 6, 3),
      Cell(measured, RowsPerBatch, 10, 0),
      Cell(measured, Stage(&StageTimings::queue_seconds), 9, 2, 1e3),
      Cell(measured, Stage(&StageTimings::upload_seconds), 9, 2, 1e3),
      Cell(measured, Stage(&StageTimings::compute_seconds), 10, 2, 1e3),
      Cell(measured, Stage(&StageTimings::download_seconds), 11, 2, 1e3), "\n");
}

std::string RenderServiceLegend() {
  return "\n"
         "conns, inflight: connections of each worker, chunks without a result on each of them.\n"
         "tokens/s: from the first row sent to the last result. MB/s each: hidden states one way,\n"
         "as much for their gradients the other way, in 10^6 bytes; a teacher's come on top.\n"
         "busy tok/s: tokens over the time in which the service's executor had a batch under way,\n"
         "copies included: what its backend made of the batches it got. The ratio to it is also "
         "the\n"
         "executor's utilisation. rows/batch: of those batches.\n"
         "in-process: the same head and as many rows in this process, in full batches; the ratio "
         "is\n"
         "that of pairs measured one after the other (--compare_inprocess).\n"
         "queue, upload, compute, download: means over the chunks; the last three are those of a\n"
         "chunk's whole batch.\n";
}

std::string RenderServiceJson(const ServiceFacts& facts, const std::vector<ServiceCase>& cases) {
  const HeadSpec& head = cases.front().traffic.head;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ServiceCase& measured : cases) list.push_back(CaseJson(measured));
  const nlohmann::ordered_json json = {{"service",
                                        {{"address", facts.address},
                                         {"backend", facts.backend},
                                         {"device", facts.device},
                                         {"vocab_size", head.vocab_size},
                                         {"hidden_size", head.hidden_size},
                                         {"dtype", DTypeName(head.weight_dtype)},
                                         {"loss", LossName(cases.front().traffic)},
                                         {"batch_tokens", head.batch_tokens},
                                         {"cases", list}}}};
  return json.dump() + "\n";
}

}  // namespace lmhead::bench
