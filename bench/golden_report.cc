#include "bench/golden_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lmhead::bench {
namespace {

struct Column {
  const char* output;
  const char* title;
};

constexpr Column kColumns[] = {{"token_loss", "token_loss"},
                               {"loss_sum", "loss_sum"},
                               {"lse", "lse"},
                               {"logprob", "logprob"},
                               {"entropy", "entropy"},
                               {"argmax", "argmax"},
                               {"num_valid_tokens", "num_valid"},
                               {"grad_hidden_states", "grad_hidden"},
                               {"grad_weight", "grad_weight"},
                               {"grad_bias", "grad_bias"}};

// Of the line below a case's.
constexpr std::string_view kPlainTitle = "  plain dense";

const char* StatusName(CaseStatus status) {
  switch (status) {
    case CaseStatus::kPassed:
      return "passed";
    case CaseStatus::kFailed:
      return "failed";
    case CaseStatus::kNotYet:
      return "not_yet";
  }
  return "";
}

int64_t Count(const std::vector<CaseReport>& reports, CaseStatus status) {
  return std::count_if(reports.begin(), reports.end(),
                       [status](const CaseReport& report) { return report.status == status; });
}

std::string Cell(const CaseReport& report, const Column& column) {
  const auto found = report.outputs.find(column.output);
  if (found == report.outputs.end()) return "-";
  // The mark tells which of a failed case's outputs it was.
  return absl::StrFormat("%.1e%s", found->second.rel, found->second.Passed() ? "" : "!");
}

// The same output's error in plain dense arithmetic.
std::string PlainCell(const CaseReport& report, const Column& column) {
  const auto found = report.outputs.find(column.output);
  return found == report.outputs.end() ? "-" : absl::StrFormat("%.1e", found->second.plain_rel);
}

// "token_loss 1.0e-07 (ce_plain; plain dense 2.0e-07), absolute 2.1e-06 (ce_huge)"
std::string WorstOf(const std::vector<CaseReport>& reports, const Column& column) {
  const CaseReport* worst_rel = nullptr;
  const CaseReport* worst_abs = nullptr;
  const auto error = [&](const CaseReport* report) { return report->outputs.at(column.output); };
  for (const CaseReport& report : reports) {
    if (!report.outputs.contains(column.output)) continue;
    if (worst_rel == nullptr || reference::IsWorse(error(&report).rel, error(worst_rel).rel)) {
      worst_rel = &report;
    }
    if (worst_abs == nullptr ||
        reference::IsWorse(error(&report).max_abs, error(worst_abs).max_abs)) {
      worst_abs = &report;
    }
  }
  if (worst_rel == nullptr) return "";
  return absl::StrFormat("  %-19s %.1e (%s; plain dense %.1e), absolute %.1e (%s)\n", column.output,
                         error(worst_rel).rel, worst_rel->name, error(worst_rel).plain_rel,
                         error(worst_abs).max_abs, worst_abs->name);
}

}  // namespace

std::string RenderTable(const std::vector<CaseReport>& reports) {
  size_t name_width = kPlainTitle.size();
  for (const CaseReport& report : reports) name_width = std::max(name_width, report.name.size());
  std::string text = absl::StrFormat("%-*s", static_cast<int>(name_width), "case");
  for (const Column& column : kColumns) absl::StrAppendFormat(&text, " %11s", column.title);
  absl::StrAppend(&text, "\n");
  for (const CaseReport& report : reports) {
    if (report.status == CaseStatus::kNotYet) continue;
    absl::StrAppendFormat(&text, "%-*s", static_cast<int>(name_width), report.name);
    for (const Column& column : kColumns) {
      absl::StrAppendFormat(&text, " %11s", Cell(report, column));
    }
    absl::StrAppend(&text, report.status == CaseStatus::kPassed ? "  PASS\n" : "  FAIL\n");
    absl::StrAppendFormat(&text, "%-*s", static_cast<int>(name_width), kPlainTitle);
    for (const Column& column : kColumns) {
      absl::StrAppendFormat(&text, " %11s", PlainCell(report, column));
    }
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppend(&text, "\nworst relative error of each output, and largest absolute one\n");
  for (const Column& column : kColumns) absl::StrAppend(&text, WorstOf(reports, column));
  for (const CaseReport& report : reports) {
    if (report.status == CaseStatus::kPassed) continue;
    absl::StrAppendFormat(&text, "%-*s  %s: %s\n", static_cast<int>(name_width), report.name,
                          report.status == CaseStatus::kFailed ? "FAIL" : "not yet", report.detail);
  }
  absl::StrAppendFormat(&text, "\n%d passed, %d failed, %d not yet\n",
                        Count(reports, CaseStatus::kPassed), Count(reports, CaseStatus::kFailed),
                        Count(reports, CaseStatus::kNotYet));
  return text;
}

std::string RenderJson(const std::vector<CaseReport>& reports) {
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  for (const CaseReport& report : reports) {
    nlohmann::ordered_json outputs = nlohmann::ordered_json::object();
    for (const auto& [name, error] : report.outputs) {
      // An error that is not a number becomes null.
      outputs[name] = {{"rel", error.rel},
                       {"max_abs", error.max_abs},
                       {"plain_rel", error.plain_rel},
                       {"rel_limit", error.rel_limit},
                       {"max_abs_limit", error.max_abs_limit}};
    }
    nlohmann::ordered_json entry = {{"name", report.name}, {"status", StatusName(report.status)}};
    if (!report.detail.empty()) entry["detail"] = report.detail;
    entry["outputs"] = std::move(outputs);
    cases.push_back(std::move(entry));
  }
  const nlohmann::ordered_json json = {{"cases", std::move(cases)},
                                       {"passed", Count(reports, CaseStatus::kPassed)},
                                       {"failed", Count(reports, CaseStatus::kFailed)},
                                       {"not_yet", Count(reports, CaseStatus::kNotYet)}};
  return absl::StrCat(json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace),
                      "\n");
}

}  // namespace lmhead::bench
