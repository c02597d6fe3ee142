// lmhead demo: trains a small language model on real text, with its head in a real service.

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/local_server.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/cli/demo/corpus.h"
#include "server/cli/demo/metrics_client.h"
#include "server/cli/demo/oracle_check.h"
#include "server/cli/demo/report.h"
#include "server/cli/demo/trainer.h"

ABSL_FLAG(std::string, text, "",
          "Text to train on: a file or a folder; further ones may follow as plain arguments. "
          "Default: the licences in /usr/share/common-licenses, else the project's own docs.");
ABSL_FLAG(int32_t, steps, 200, "Optimizer steps to train for.");
ABSL_FLAG(uint64_t, seed, 1, "Seed of the initial parameters and of the order of the words.");

namespace lmhead {
namespace {

using demo::Corpus;
using demo::Trainer;

constexpr int kProgressLines = 12;
constexpr int64_t kCheckTokens = 64;
constexpr int64_t kHiddenSizeDefault = 128;
constexpr int64_t kHiddenSizeMax = 4096;
constexpr int64_t kNumGuesses = 4;
constexpr int kStagingSlots = 8;
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitInterrupted = 130;  // As a shell reports SIGINT.

std::atomic<bool> interrupted = false;

// Ctrl-C ends training after the current step, so that the service is stopped in order; a second
// one ends the process at once.
void StopOnInterrupt() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

void Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

std::string OwnBinary() {
  std::error_code error;
  return std::filesystem::canonical("/proc/self/exe", error).string();
}

absl::StatusOr<demo::TrainerOptions> OptionsFromFlags() {
  demo::TrainerOptions options;
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype == "float32" || dtype == "fp32") {
    options.dtype = DType::kFloat32;
  } else if (!dtype.empty() && dtype != "bfloat16" && dtype != "bf16") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype is ", dtype, "; the demo wants bf16 or fp32"));
  }
  options.num_steps = absl::GetFlag(FLAGS_steps);
  if (options.num_steps < 1) return absl::InvalidArgumentError("--steps wants at least 1");
  options.hidden_size =
      absl::GetFlag(FLAGS_hidden) == 0 ? kHiddenSizeDefault : absl::GetFlag(FLAGS_hidden);
  if (options.hidden_size < 1 || options.hidden_size > kHiddenSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--hidden is ", options.hidden_size, "; wanted 1 to ", kHiddenSizeMax));
  }
  options.seed = absl::GetFlag(FLAGS_seed);
  options.head = absl::StrCat("demo-", getpid());
  return options;
}

struct NamedCorpus {
  std::string source;
  bool is_default = false;  // Not named by --text.
  Corpus corpus;
};

absl::StatusOr<NamedCorpus> LoadCorpus(absl::Span<char* const> positional) {
  const std::string first = absl::GetFlag(FLAGS_text);
  if (first.empty() && !positional.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("demo does not know what to do with '",
                                                   positional[0],
                                                   "'; name texts with --text=", positional[0]));
  }
  std::vector<std::string> paths = {first};
  paths.insert(paths.end(), positional.begin(), positional.end());
  auto files = first.empty() ? demo::ReadDefaultTexts(OwnBinary()) : demo::ReadTexts(paths);
  if (!files.ok()) return files.status();
  auto corpus = demo::BuildCorpus(*files);
  if (!corpus.ok()) return corpus.status();
  std::string source = first.empty()
                           ? std::filesystem::path((*files)[0].path).parent_path().string()
                           : absl::StrCat(first, paths.size() > 1 ? " and more" : "");
  return NamedCorpus{std::move(source), first.empty(), *std::move(corpus)};
}

// Room for what two workers and an evaluation have under way; the defaults are for large models.
std::vector<std::string> ServerFlags() {
  return {absl::StrCat("--backend=", absl::GetFlag(FLAGS_backend)),
          absl::StrCat("--staging_slots=", kStagingSlots),
          absl::StrCat("--chunk_bytes_max=", demo::kChunkBytes), "--drain_timeout_seconds=5"};
}

// The service: a child of ours, or the one at --address.
struct Service {
  std::unique_ptr<LocalServer> child;  // Null with --address.
  std::unique_ptr<Client> client;
  demo::ServiceFacts facts;
};

absl::StatusOr<Service> ReachService() {
  Service service;
  service.facts.address = absl::GetFlag(FLAGS_address);
  if (service.facts.address.empty()) {
    auto child = LocalServer::Start(OwnBinary(), ServerFlags());
    if (!child.ok()) return child.status();
    service.child = *std::move(child);
    service.facts.address = service.child->address();
    service.facts.child_pid = service.child->pid();
  }
  ClientOptions patience = service.child == nullptr ? ClientOptionsFromFlags() : ClientOptions();
  if (service.child != nullptr) {
    // A child of ours that is gone, as after Ctrl-C, does not come back.
    patience.connect_timeout = absl::Seconds(1);
    patience.max_attempts = 2;
  }
  auto client = Client::Connect(service.facts.address, patience);
  if (!client.ok()) return client.status();
  service.client = *std::move(client);
  auto info = service.client->GetServerInfo();
  if (!info.ok()) return info.status();
  service.facts.backend = info->backend();
  return service;
}

// The service's memory as GetServerInfo answers it, for a service whose metrics the demo cannot
// know.
absl::Status AskMemory(Client* client, demo::MemoryFacts* facts) {
  auto info = client->GetServerInfo();
  if (!info.ok()) return info.status();
  for (const auto& rank : info->memory()) {
    facts->peak_bytes += rank.peak_process_bytes();
    facts->staging_bytes = rank.staging_bytes();
  }
  facts->source = "GetServerInfo; with every head of that service";
  return absl::OkStatus();
}

// The service's memory from its Prometheus endpoint.
absl::Status ScrapeMemory(const std::string& address, demo::MemoryFacts* facts) {
  auto metrics = demo::ScrapeMetrics(address);
  if (!metrics.ok()) return metrics.status();
  auto peak = demo::MetricValue(*metrics, "lmhead_memory_total_peak_bytes", {"scope=\"process\""});
  if (!peak.ok()) return peak.status();
  auto staging = demo::MetricValue(*metrics, "lmhead_staging_bytes", {});
  if (!staging.ok()) return staging.status();
  facts->peak_bytes = static_cast<int64_t>(*peak);
  facts->staging_bytes = static_cast<int64_t>(*staging);
  facts->source = absl::StrCat("http://", address, "/metrics");
  return absl::OkStatus();
}

absl::StatusOr<demo::MemoryFacts> ReadMemory(const Service& service, const Trainer& trainer) {
  demo::MemoryFacts facts{.tokens_per_step = trainer.tokens_per_step(),
                          .vocab_size = trainer.corpus().vocabulary.size(),
                          .dtype = trainer.options().dtype};
  absl::Status read = service.child == nullptr
                          ? AskMemory(service.client.get(), &facts)
                          : ScrapeMemory(service.child->metrics_address(), &facts);
  if (!read.ok()) return read;
  return facts;
}

struct TrainingResult {
  std::vector<double> losses;  // Mean of each step.
  double heldout_loss = 0.0;
  double heldout_accuracy = 0.0;
  double tokens_per_second = 0.0;  // Of the training steps alone.
};

absl::Status EvaluateHeldout(Trainer* trainer, TrainingResult* result) {
  auto sums = trainer->EvaluateHeldout();
  if (!sums.ok()) return sums.status();
  const double count = static_cast<double>(sums->num_valid_tokens);
  result->heldout_loss = sums->loss_sum / count;
  result->heldout_accuracy = static_cast<double>(sums->num_correct) / count;
  return absl::OkStatus();
}

double MeanOfLast(const std::vector<double>& values, size_t count) {
  double sum = 0.0;
  for (size_t i = values.size() - count; i < values.size(); ++i) sum += values[i];
  return sum / static_cast<double>(count);
}

// Trains, printing a progress line now and then.
absl::StatusOr<TrainingResult> Train(Trainer* trainer) {
  const int64_t num_steps = trainer->options().num_steps;
  const int64_t steps_a_line = std::max<int64_t>(1, num_steps / kProgressLines);
  TrainingResult result;
  double seconds = 0.0;
  int64_t num_tokens = 0, last_line = 0;
  for (int64_t step = 1; step <= num_steps && !interrupted; ++step) {
    const auto start = std::chrono::steady_clock::now();
    auto report = trainer->TrainStep();
    if (!report.ok()) return report.status();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    num_tokens += report->sums.num_tokens;
    result.tokens_per_second = static_cast<double>(num_tokens) / seconds;
    result.losses.push_back(report->sums.loss_sum /
                            static_cast<double>(report->sums.num_valid_tokens));
    if (!std::isfinite(result.losses.back())) {
      return absl::InternalError(absl::StrCat("the loss of step ", step, " is not a number"));
    }
    if (step != 1 && step % steps_a_line != 0 && step != num_steps) continue;
    if (auto status = EvaluateHeldout(trainer, &result); !status.ok()) return status;
    Print(demo::RenderProgress({step, num_steps, MeanOfLast(result.losses, step - last_line),
                                result.heldout_loss, result.tokens_per_second}));
    last_line = step;
  }
  if (interrupted) return absl::CancelledError("interrupted");
  return result;
}

absl::Status PrintGuesses(Trainer* trainer) {
  const std::vector<int32_t>& heldout = trainer->corpus().heldout_positions;
  const int64_t available = static_cast<int64_t>(heldout.size());
  std::vector<int32_t> positions;
  for (int64_t i = 0; i < std::min(kNumGuesses, available); ++i) {
    positions.push_back(heldout[(2 * i + 1) * available / (2 * kNumGuesses)]);
  }
  auto predicted = trainer->Predict(positions);
  if (!predicted.ok()) return predicted.status();
  std::vector<demo::Guess> guesses;
  for (size_t i = 0; i < positions.size(); ++i) guesses.push_back({positions[i], (*predicted)[i]});
  Print(demo::RenderGuesses(trainer->corpus(), guesses));
  return absl::OkStatus();
}

std::string Summary(const TrainingResult& result, const NamedCorpus& text) {
  return absl::StrFormat(
      "  Training  loss %.3f, from %.3f at the first step; unigram entropy %.3f\n"
      "  Held out  loss %.3f, unigram %.3f; the next word is right %.1f%% of the time\n%s",
      result.losses.back(), result.losses.front(), text.corpus.unigram_entropy, result.heldout_loss,
      text.corpus.heldout_unigram_loss, 100.0 * result.heldout_accuracy,
      text.is_default
          ? "            (these texts quote one another: what is held out is not all new)\n"
          : "");
}

std::string ResultJson(const TrainingResult& result, const Corpus& corpus,
                       const demo::MemoryFacts& memory, const demo::CheckReport& check) {
  const nlohmann::ordered_json json = {
      {"first_loss", result.losses.front()},
      {"final_loss", result.losses.back()},
      {"heldout_loss", result.heldout_loss},
      {"unigram_entropy", corpus.unigram_entropy},
      {"heldout_unigram_loss", corpus.heldout_unigram_loss},
      {"tokens_per_second", result.tokens_per_second},
      {"peak_bytes", memory.peak_bytes},
      {"staging_bytes", memory.staging_bytes},
      {"dense_logits_bytes", demo::DenseLogitsOfStep(memory).TotalBytes()},
      {"check_loss_error", check.loss_sum.rel},
      {"check_grad_error", check.WorstGradError()},
      {"check_passed", check.Passed()},
  };
  return json.dump() + "\n";
}

// Everything after the service is reached. True when the oracle agrees.
absl::StatusOr<bool> TrainAndReport(Service* service, const NamedCorpus& text,
                                    const demo::TrainerOptions& options) {
  auto created = Trainer::Create(service->client.get(), &text.corpus, options);
  if (!created.ok()) return created.status();
  Trainer* trainer = created->get();
  Print(demo::RenderIntroduction(text.corpus, text.source, *trainer, service->facts));

  Print(absl::StrCat("\nTraining\n", demo::RenderProgressHeader()));
  auto result = Train(trainer);
  if (!result.ok()) return result.status();
  Print(absl::StrCat("\nLoss of each step, nats a word\n",
                     demo::RenderLossCurve(result->losses, text.corpus.unigram_entropy), "\n",
                     Summary(*result, text), "\nHeld-out text, next word guessed\n"));
  if (auto status = PrintGuesses(trainer); !status.ok()) return status;

  auto memory = ReadMemory(*service, *trainer);
  if (!memory.ok()) return memory.status();
  Print(absl::StrCat("\nMemory\n", demo::RenderMemory(*memory)));

  auto check = demo::CheckAgainstOracle(trainer, kCheckTokens);
  if (!check.ok()) return check.status();
  Print(absl::StrFormat("\nOne more step of %d words against the double-precision definition\n%s",
                        check->num_tokens, demo::RenderCheck(*check)));
  if (absl::Status deleted = trainer->DeleteHead(); !deleted.ok()) return deleted;
  if (absl::GetFlag(FLAGS_json)) Print(ResultJson(*result, text.corpus, *memory, *check));
  return check->Passed();
}

absl::StatusOr<bool> Demo(absl::Span<char* const> positional) {
  auto options = OptionsFromFlags();
  if (!options.ok()) return options.status();
  auto text = LoadCorpus(positional);
  if (!text.ok()) return text.status();
  StopOnInterrupt();
  Print("lmhead demo: a language model whose head lives in a service\n\n");
  auto service = ReachService();
  if (!service.ok()) return service.status();
  auto passed = TrainAndReport(&*service, *text, *options);
  if (service->child != nullptr) {
    if (auto stopped = service->child->Stop(); passed.ok() && !stopped.ok()) {
      return stopped.status();
    }
  } else if (!passed.ok()) {
    (void)service->client->DeleteHead(options->head, /*force=*/true);  // Best effort: it is ours.
  }
  return passed;
}

}  // namespace

int RunDemo(absl::Span<char* const> positional) {
  auto passed = Demo(positional);
  if (interrupted) {
    Print("\nInterrupted; the service was stopped.\n");
    return kExitInterrupted;
  }
  if (!passed.ok()) {
    std::fprintf(stderr, "lmhead demo: %s\n", std::string(passed.status().message()).c_str());
    return passed.status().code() == absl::StatusCode::kInvalidArgument ? kExitUsage : kExitFailed;
  }
  if (!*passed) {
    std::fprintf(stderr, "lmhead demo: the service does not agree with the oracle\n");
    return kExitFailed;
  }
  return 0;
}

}  // namespace lmhead
