// What the demo prints. Every function renders text; demo.cc prints it.

#ifndef LMHEAD_SERVER_CLI_DEMO_REPORT_H_
#define LMHEAD_SERVER_CLI_DEMO_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/cli/demo/corpus.h"
#include "server/cli/demo/oracle_check.h"
#include "server/cli/demo/trainer.h"
#include "server/memory/memory_plan.h"

namespace lmhead::demo {

// The service the head lives in.
struct ServiceFacts {
  std::string address;
  std::string backend;
  int64_t child_pid = 0;  // 0 when the demo did not start it.
};

// Text, vocabulary, baseline, trunk and head, before training starts.
std::string RenderIntroduction(const Corpus& corpus, const std::string& source,
                               const Trainer& trainer, const ServiceFacts& service);

// One line of the progress table, and the line above the first.
struct Progress {
  int64_t step = 0;
  int64_t num_steps = 0;
  double loss = 0.0;  // Mean since the last line.
  double heldout_loss = 0.0;
  double tokens_per_second = 0.0;
};
std::string RenderProgressHeader();
std::string RenderProgress(const Progress& progress);

// A chart of `losses` (one a step) with a line at `baseline`.
std::string RenderLossCurve(const std::vector<double>& losses, double baseline);

// Guesses for held-out words: what stood before, what the model expects, what stood there.
struct Guess {
  int32_t position = 0;
  int32_t predicted = 0;
};
std::string RenderGuesses(const Corpus& corpus, const std::vector<Guess>& guesses);

// The service's peak beside what dense logits would have needed.
struct MemoryFacts {
  int64_t peak_bytes = 0;     // Of everything that computes; accounted, not sampled.
  int64_t staging_bytes = 0;  // Host buffers between the wire and the backend, fixed at start.
  std::string source;         // Where these were read.
  int64_t tokens_per_step = 0;
  int64_t vocab_size = 0;
  DType dtype = DType::kBFloat16;
};
std::string RenderMemory(const MemoryFacts& facts);
DenseLogits DenseLogitsOfStep(const MemoryFacts& facts);

// A table: each error, that of plain dense arithmetic, and the limit.
std::string RenderCheck(const CheckReport& check);

// "1.5 GiB"
std::string HumanBytes(int64_t bytes);

// "12,345"
std::string WithCommas(int64_t number);

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_REPORT_H_
