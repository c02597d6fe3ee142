// What lmhead estimate prints, whoever planned: this program, or a service that was asked.

#ifndef LMHEAD_SERVER_CLI_ESTIMATE_REPORT_H_
#define LMHEAD_SERVER_CLI_ESTIMATE_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/types/head_spec.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

struct Estimate {
  HeadSpec spec;
  std::string optimizer;  // As it was asked for.
  std::string address;    // Of the service that planned; empty: this program did.
  // What the plans are for. budget_bytes: of a service the bytes that are free on each rank.
  PlanOptions options;
  int64_t num_sequences = 0;
  int64_t sequence_length = 0;
  DenseLogits dense;
  std::vector<MemoryPlan> plans;     // Fastest first.
  std::optional<MemoryPlan> chosen;  // None when none fits the budget.

  int64_t num_tokens() const { return num_sequences * sequence_length; }
  int32_t all_ranks() const { return options.num_ranks * options.num_replicas; }
};

// For a person to read.
std::string RenderText(const Estimate& estimate);

// One object on one line.
std::string RenderJson(const Estimate& estimate);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_ESTIMATE_REPORT_H_
