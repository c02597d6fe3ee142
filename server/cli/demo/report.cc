#include "server/cli/demo/report.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lmhead::demo {
namespace {

constexpr int kBarWidth = 20;
constexpr int kChartWidth = 64;
constexpr int kChartHeight = 14;
constexpr int64_t kLongContextTokens = 131072;

// One column of the chart a group of steps.
std::vector<double> Columns(const std::vector<double>& losses) {
  const size_t width = std::min<size_t>(kChartWidth, losses.size());
  std::vector<double> columns;
  for (size_t i = 0; i < width; ++i) {
    const size_t begin = i * losses.size() / width, end = (i + 1) * losses.size() / width;
    double sum = 0.0;
    for (size_t step = begin; step < end; ++step) sum += losses[step];
    columns.push_back(sum / static_cast<double>(end - begin));
  }
  return columns;
}

std::string ErrorLine(std::string_view name, const reference::OutputError& error) {
  std::string line =
      absl::StrFormat("  %-20s %14.2e   %11.2e   %8.2e   %s", name, error.rel, error.plain_rel,
                      error.rel_limit, error.Passed() ? "within" : "OVER THE LIMIT");
  if (!(error.max_abs <= error.max_abs_limit)) {
    absl::StrAppendFormat(&line, " (largest single error %.2e, limit %.2e)", error.max_abs,
                          error.max_abs_limit);
  }
  return line + "\n";
}

std::string WordAt(const Corpus& corpus, int32_t id) {
  return id < corpus.vocabulary.num_words() ? corpus.vocabulary.Word(id) : "<reserved>";
}

}  // namespace

std::string HumanBytes(int64_t bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024.0 && unit < 4) {
    value /= 1024.0;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, value, units[unit]);
}

std::string WithCommas(int64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0) out.push_back(',');
    out.push_back(digits[i]);
  }
  return out;
}

std::string RenderIntroduction(const Corpus& corpus, const std::string& source,
                               const Trainer& trainer, const ServiceFacts& service) {
  const int64_t num_heldout = static_cast<int64_t>(corpus.heldout_positions.size());
  const int64_t num_training = static_cast<int64_t>(corpus.training_positions.size());
  const int64_t vocab_size = corpus.vocabulary.size(), hidden = trainer.options().hidden_size;
  std::string out;
  absl::StrAppendFormat(&out, "  Text        %s: %s files, %s, %s words\n", source,
                        WithCommas(corpus.num_files), HumanBytes(corpus.num_bytes),
                        WithCommas(num_heldout + num_training));
  absl::StrAppendFormat(&out, "  Held out    %s words, every tenth block of %d: never trained on\n",
                        WithCommas(num_heldout), corpus.block_words);
  absl::StrAppendFormat(&out, "  Vocabulary  %s words seen at least twice; the head has %s rows\n",
                        WithCommas(corpus.vocabulary.num_words()), WithCommas(vocab_size));
  absl::StrAppendFormat(&out,
                        "  Baseline    unigram entropy %.3f nats a word (%.3f on the held-out "
                        "words): all that word\n              frequencies can tell; a model that "
                        "uses the context must get well below\n",
                        corpus.unigram_entropy, corpus.heldout_unigram_loss);
  absl::StrAppendFormat(&out,
                        "  Trunk       in this process: log-bilinear over the %d preceding words, "
                        "%s parameters\n",
                        kContextWords, WithCommas(trainer.num_trunk_parameters()));
  absl::StrAppendFormat(&out,
                        "  Head        in the service: [%d, %d] %s with bias, AdamW, schedule %s\n",
                        vocab_size, hidden, DTypeName(trainer.options().dtype),
                        ScheduleName(static_cast<Schedule>(trainer.head_info().schedule())));
  absl::StrAppendFormat(&out, "  Service     %s at %s, backend %s\n",
                        service.child_pid > 0
                            ? absl::StrCat("lmhead serve (process ", service.child_pid, ")")
                            : "yours",
                        service.address, service.backend);
  absl::StrAppendFormat(&out, "  A step      %s words from %d workers that share it\n",
                        WithCommas(trainer.tokens_per_step()), kNumWorkers);
  return out;
}

std::string RenderProgressHeader() {
  return absl::StrFormat("  %9s %*s  %8s  %8s  %8s\n", "step", kBarWidth + 2, "", "loss",
                         "held out", "tokens/s");
}

std::string RenderProgress(const Progress& progress) {
  const int64_t filled = progress.step * kBarWidth / std::max<int64_t>(progress.num_steps, 1);
  const std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, '.');
  return absl::StrFormat("  %4d/%4d [%s]  %8.3f  %8.3f  %8.0f\n", progress.step, progress.num_steps,
                         bar, progress.loss, progress.heldout_loss, progress.tokens_per_second);
}

std::string RenderLossCurve(const std::vector<double>& losses, double baseline) {
  if (losses.empty()) return "";
  const std::vector<double> columns = Columns(losses);
  const auto [lowest, highest] = std::minmax_element(columns.begin(), columns.end());
  const double low = std::floor(std::min(*lowest, baseline));
  const double high = std::max(std::ceil(std::max(*highest, baseline)), low + 1.0);
  const auto row_of = [&](double loss) {
    return static_cast<int>(std::lround((high - loss) / (high - low) * (kChartHeight - 1)));
  };
  std::vector<std::string> rows(kChartHeight, std::string(kChartWidth, ' '));
  rows[row_of(baseline)].assign(kChartWidth, '-');
  for (size_t i = 0; i < columns.size(); ++i) rows[row_of(columns[i])][i] = '*';

  std::string out;
  for (int row = 0; row < kChartHeight; ++row) {
    const double value = high - (high - low) * row / (kChartHeight - 1);
    const bool is_baseline = row == row_of(baseline);
    std::string line = absl::StrFormat("  %5.2f |%s%s", is_baseline ? baseline : value, rows[row],
                                       is_baseline ? " unigram entropy" : "");
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&out, line, "\n");
  }
  absl::StrAppendFormat(&out, "        +%s\n         1%*d steps\n", std::string(kChartWidth, '-'),
                        kChartWidth - 1, static_cast<int>(losses.size()));
  return out;
}

std::string RenderGuesses(const Corpus& corpus, const std::vector<Guess>& guesses) {
  std::string out;
  for (const Guess& guess : guesses) {
    std::string context;
    for (int k = kContextWords; k >= 1; --k) {
      absl::StrAppend(&context, WordAt(corpus, corpus.ids[guess.position - k]), " ");
    }
    const std::string actual = WordAt(corpus, corpus.ids[guess.position]);
    const std::string predicted = WordAt(corpus, guess.predicted);
    absl::StrAppendFormat(
        &out, "  ... %s[%s]%s\n", context, predicted,
        predicted == actual ? "" : absl::StrCat("  (the text has: ", actual, ")"));
  }
  return out;
}

DenseLogits DenseLogitsOfStep(const MemoryFacts& facts) {
  return PlanDenseLogits(facts.tokens_per_step, facts.vocab_size, facts.dtype);
}

std::string RenderMemory(const MemoryFacts& facts) {
  const auto line = [](const std::string& what, int64_t bytes, const std::string& note) {
    return absl::StrFormat("  %-48s %10s   %s\n", what, HumanBytes(bytes), note);
  };
  const DenseLogits step = DenseLogitsOfStep(facts);
  const DenseLogits context = PlanDenseLogits(kLongContextTokens, facts.vocab_size, facts.dtype);
  return absl::StrCat(
      line("the service at its peak: weights to scratch", facts.peak_bytes,
           absl::StrCat("from ", facts.source)),
      line("its message buffers in host memory", facts.staging_bytes, "fixed at start"),
      line(absl::StrCat("dense logits of one step, ", WithCommas(facts.tokens_per_step), " words"),
           step.TotalBytes(),
           absl::StrCat("logits ", HumanBytes(step.logits_bytes),
                        ", and float32 copy, log-softmax, gradient")),
      line(absl::StrCat("dense logits of a context of ", WithCommas(kLongContextTokens), " words"),
           context.TotalBytes(), "where the service's peak stays as it is"));
}

std::string RenderCheck(const CheckReport& check) {
  return absl::StrCat(
      absl::StrFormat("  %-20s %14s   %11s   %8s\n", "", "relative error", "plain dense", "limit"),
      ErrorLine("loss", check.loss_sum), ErrorLine("grad_hidden_states", check.grad_hidden_states),
      ErrorLine("grad_weight", check.grad_weight), ErrorLine("grad_bias", check.grad_bias));
}

}  // namespace lmhead::demo
