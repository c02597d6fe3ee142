// What `lmhead-bench golden` prints.

#ifndef LMHEAD_BENCH_GOLDEN_REPORT_H_
#define LMHEAD_BENCH_GOLDEN_REPORT_H_

#include <map>
#include <string>
#include <vector>

#include "kernels/reference/compare.h"

namespace lmhead::bench {

enum class CaseStatus { kPassed, kFailed, kNotYet };

// One case over all schedules.
struct CaseReport {
  std::string name;
  CaseStatus status = CaseStatus::kPassed;
  std::string detail;  // Why it failed, or what is not there yet.
  std::map<std::string, reference::OutputError> outputs;  // The worst over the schedules.
};

// An aligned table, two lines a case: relative errors against the exact results, and below them
// those of plain dense arithmetic on the same inputs. Then the worst of each output, what failed
// and why, what is not there yet, and a summary.
std::string RenderTable(const std::vector<CaseReport>& reports);

// {"cases": [{"name", "status", "detail", "outputs": {name: {"rel", "max_abs", "plain_rel",
// "rel_limit", "max_abs_limit"}}}], "passed", "failed", "not_yet"} on one line.
std::string RenderJson(const std::vector<CaseReport>& reports);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_GOLDEN_REPORT_H_
