#include "server/cli/estimate_report.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/limits.h"

namespace lmhead {
namespace {

// What stands in for the dense logits: everything but the weight and its training state, which a
// trainer holds in any case.
int64_t WorkingBytes(const MemoryPlan& plan) {
  return plan[MemoryCategory::kLogitsScratch] + plan[MemoryCategory::kDeviceStaging] +
         plan[MemoryCategory::kCollective] + plan[MemoryCategory::kLibraryWorkspace];
}

const char* BackendName(const Estimate& estimate) {
  return estimate.options.backend == BackendKind::kCuda ? "cuda" : "cpu";
}

std::string InGib(int64_t bytes) {
  return absl::StrFormat("%.3f GiB", static_cast<double>(bytes) / (1024.0 * kMiB));
}

// How many times the service's bytes on all its ranks the dense logits are.
double Ratio(const Estimate& estimate, int64_t bytes_a_rank) {
  return static_cast<double>(estimate.dense.TotalBytes()) /
         (static_cast<double>(bytes_a_rank) * estimate.all_ranks());
}

std::string RenderDense(const Estimate& estimate) {
  const DenseLogits& dense = estimate.dense;
  const std::string dtype(DTypeName(estimate.spec.weight_dtype));
  const auto line = [](const std::string& what, int64_t bytes) {
    return absl::StrFormat("  %-36s%16s\n", what, InGib(bytes));
  };
  std::string text = "dense logits in the trainer\n";
  absl::StrAppend(&text, line(absl::StrCat("logits, ", dtype), dense.logits_bytes));
  if (dense.float32_logits_bytes > 0) {
    absl::StrAppend(&text, line("logits, float32 copy", dense.float32_logits_bytes));
  }
  absl::StrAppend(&text, line("log_softmax, float32", dense.log_softmax_bytes),
                  line(absl::StrCat("gradient of the logits, ", dtype), dense.grad_logits_bytes),
                  line("total", dense.TotalBytes()));
  return text;
}

std::string RenderPlans(const Estimate& estimate) {
  const auto line = [&](std::string_view title, auto&& cell) {
    std::string text = absl::StrFormat("  %-20s", std::string(title));
    for (const MemoryPlan& plan : estimate.plans) absl::StrAppendFormat(&text, "%16s", cell(plan));
    return text + "\n";
  };
  const int32_t replicas = estimate.options.num_replicas;
  std::string text = absl::StrCat(
      "lmhead", estimate.address.empty() ? "" : absl::StrCat(" at ", estimate.address),
      " with the ", BackendName(estimate), " backend, ", estimate.all_ranks(),
      estimate.all_ranks() == 1 ? " rank" : " ranks",
      replicas == 1 ? "" : absl::StrCat(" in ", replicas, " replicas"), ", bytes of each\n");
  absl::StrAppend(&text, line("schedule", [](const MemoryPlan& plan) {
    return std::string(ScheduleName(plan.schedule));
  }));
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    absl::StrAppend(&text, line(MemoryCategoryName(category), [category](const MemoryPlan& plan) {
      return InGib(plan[category]);
    }));
  }
  absl::StrAppend(
      &text, line("total", [](const MemoryPlan& plan) { return InGib(plan.TotalBytes()); }),
      line("of it for logits", [](const MemoryPlan& plan) { return InGib(WorkingBytes(plan)); }),
      line("batch_tokens", [](const MemoryPlan& plan) { return absl::StrCat(plan.batch_tokens); }),
      line("vocab_tile", [](const MemoryPlan& plan) { return absl::StrCat(plan.vocab_tile); }));
  return text;
}

std::string RenderChoice(const Estimate& estimate) {
  if (!estimate.chosen.has_value() && !estimate.address.empty()) {
    return absl::StrFormat(
        "none fits the %d bytes (%s) that are free on each rank: delete a head, lower "
        "--batch_tokens or use more --ranks\n",
        estimate.options.budget_bytes, InGib(estimate.options.budget_bytes));
  }
  if (!estimate.chosen.has_value()) {
    return absl::StrFormat(
        "none fits --memory_limit_bytes=%d (%s): lower --batch_tokens or use more --ranks\n",
        estimate.options.budget_bytes, InGib(estimate.options.budget_bytes));
  }
  const MemoryPlan& plan = *estimate.chosen;
  const double ratio = Ratio(estimate, WorkingBytes(plan));
  return absl::StrFormat(
      "chosen: %s, %s a rank; dense logits take %.2f times what all ranks hold.\n"
      "Weight and training state are held either way: beside them the service needs %s a rank,\n"
      "however many tokens there are, where dense logits take %s for these: %.2f times as "
      "much.\n%s",
      std::string(ScheduleName(plan.schedule)), InGib(plan.TotalBytes()),
      Ratio(estimate, plan.TotalBytes()), InGib(WorkingBytes(plan)),
      InGib(estimate.dense.TotalBytes()), ratio,
      ratio < 1.0 ? "So few tokens need no service.\n" : "");
}

nlohmann::ordered_json PlanJson(const MemoryPlan& plan) {
  nlohmann::ordered_json categories;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    categories[std::string(MemoryCategoryName(category))] = plan[category];
  }
  return {{"schedule", ScheduleName(plan.schedule)}, {"categories", std::move(categories)},
          {"total_bytes", plan.TotalBytes()},        {"logits_working_bytes", WorkingBytes(plan)},
          {"batch_tokens", plan.batch_tokens},       {"vocab_tile", plan.vocab_tile}};
}

}  // namespace

std::string RenderText(const Estimate& estimate) {
  const HeadSpec& spec = estimate.spec;
  return absl::StrFormat("%d x %d tokens, vocabulary %d, hidden size %d, %s, %s\n\n%s\n%s\n%s",
                         estimate.num_sequences, estimate.sequence_length, spec.vocab_size,
                         spec.hidden_size, std::string(DTypeName(spec.weight_dtype)),
                         spec.trainable ? estimate.optimizer : "not trained", RenderDense(estimate),
                         RenderPlans(estimate), RenderChoice(estimate));
}

std::string RenderJson(const Estimate& estimate) {
  const DenseLogits& dense = estimate.dense;
  nlohmann::ordered_json json = {{"backend", BackendName(estimate)},
                                 {"num_ranks", estimate.all_ranks()},
                                 {"num_replicas", estimate.options.num_replicas},
                                 {"num_tokens", estimate.num_tokens()},
                                 {"dense",
                                  {{"logits_bytes", dense.logits_bytes},
                                   {"float32_logits_bytes", dense.float32_logits_bytes},
                                   {"log_softmax_bytes", dense.log_softmax_bytes},
                                   {"grad_logits_bytes", dense.grad_logits_bytes},
                                   {"total_bytes", dense.TotalBytes()}}}};
  if (!estimate.address.empty()) {
    json["address"] = estimate.address;
    json["available_bytes"] = estimate.options.budget_bytes;
  }
  for (const MemoryPlan& plan : estimate.plans) json["plans"].push_back(PlanJson(plan));
  if (estimate.chosen.has_value()) {
    json["chosen"] = ScheduleName(estimate.chosen->schedule);
    json["ratio"] = Ratio(estimate, estimate.chosen->TotalBytes());
  } else {
    json["chosen"] = nullptr;
  }
  return json.dump() + "\n";
}

}  // namespace lmhead
