// lmhead-bench golden: does a real service give the exact results, within its arithmetic?

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/commands.h"
#include "bench/common.h"
#include "bench/golden_case.h"
#include "bench/golden_report.h"
#include "bench/golden_run.h"
#include "client/cpp/client.h"
#include "kernels/reference/compare.h"
#include "kernels/reference/reference.h"
#include "server/cli/common_flags.h"
#include "server/config/server_config.h"

ABSL_FLAG(int32_t, shards, 1,
          "golden: Ranks of the service that each head is split over, threads of its process. Not "
          "with --address.");

namespace lmhead::bench {
namespace {

using reference::OutputError;
using reference::Outputs;

constexpr int kExitFailed = 1;
constexpr int kExitNotRun = 2;

// The oracle against the file's results: double precision on both sides. Entropy is the difference
// of numbers that large logits make large.
constexpr double kCaseErrorMax = 1e-6;

struct GoldenOptions {
  std::vector<std::string> files;
  std::vector<Schedule> schedules;
  DType dtype = DType::kFloat32;
  int32_t shards = 1;
};

absl::StatusOr<GoldenOptions> ParseOptions(absl::Span<char* const> positional) {
  if (positional.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("wanted one folder of case files, got ", positional.size()));
  }
  GoldenOptions options;
  auto schedules = SchedulesFromFlag(
      {Schedule::kRetain, Schedule::kRecompute, Schedule::kFrozen, Schedule::kEval});
  if (!schedules.ok()) return schedules.status();
  options.schedules = *std::move(schedules);
  const auto dtype = DTypeFromFlag(DType::kFloat32);
  if (!dtype.ok()) return dtype.status();
  options.dtype = *dtype;
  options.shards = absl::GetFlag(FLAGS_shards);
  if (options.shards < 1 || options.shards > kRanksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shards is ", options.shards, "; wanted 1 to ", kRanksMax));
  }
  if (options.shards > 1 && !absl::GetFlag(FLAGS_address).empty()) {
    return absl::InvalidArgumentError(
        "--shards belongs to the service, which is there already at --address");
  }
  auto files = ListGoldenCases(positional[0]);
  if (!files.ok()) return files.status();
  options.files = *std::move(files);
  return options;
}

// Whether the results in the file are those of its inputs; what is wrong with them otherwise.
std::string CheckCase(const GoldenCase& golden) {
  const Outputs computed = OutputsOf(
      reference::ComputeLoss(golden.head, golden.recipe, golden.tokens, golden.teacher_head()));
  for (const auto& [name, exact] : golden.expected) {
    const auto found = computed.find(name);
    if (found == computed.end()) return absl::StrCat("the file has an ", name, " without inputs");
    const OutputError error =
        reference::CompareOutput(name, found->second, exact, found->second, DType::kFloat32);
    if (error.rel <= kCaseErrorMax) continue;
    return absl::StrFormat("the file's %s is not that of its inputs: off by %.2e", name, error.rel);
  }
  return "";
}

// Compares what one schedule gave and adds it to the report.
void AddOutputs(const GoldenCase& golden, Schedule schedule, const Outputs& outputs,
                const Outputs& plain, DType dtype, CaseReport* report) {
  std::vector<std::string> failures;
  for (const auto& [name, got] : outputs) {
    const auto exact = golden.expected.find(name);
    if (exact == golden.expected.end()) continue;
    const OutputError error =
        reference::CompareOutput(name, got, exact->second, plain.at(name), dtype);
    const auto [entry, is_new] = report->outputs.emplace(name, error);
    if (!is_new) entry->second.Worsen(error);
    if (error.Passed()) continue;
    failures.push_back(absl::StrFormat("%s is off by %.2e (at most %.2e), absolute %.2e (%.2e)",
                                       name, error.rel, error.rel_limit, error.max_abs,
                                       error.max_abs_limit));
  }
  if (failures.empty()) return;
  report->status = CaseStatus::kFailed;
  absl::StrAppend(&report->detail, report->detail.empty() ? "" : "; ",
                  std::string(ScheduleName(schedule)), ": ", absl::StrJoin(failures, ", "));
}

CaseReport RunCase(Client& client, const std::string& file, const GoldenOptions& options,
                   const std::string& head) {
  const absl::StatusOr<GoldenCase> golden = LoadGoldenCase(file);
  CaseReport report;
  report.name = golden.ok() ? golden->name : std::filesystem::path(file).stem().string();
  if (!golden.ok()) {
    report.status = CaseStatus::kFailed;
    report.detail = std::string(golden.status().message());
    return report;
  }
  if (!golden->unknown_fields.empty()) {
    report.status = CaseStatus::kNotYet;
    report.detail = absl::StrJoin(golden->unknown_fields, ", ");
    return report;
  }
  if (report.detail = CheckCase(*golden); !report.detail.empty()) {
    report.status = CaseStatus::kFailed;
    return report;
  }
  const Outputs plain = PlainOutputs(golden->head, golden->recipe, golden->tokens, options.dtype,
                                     golden->teacher_head());
  for (const Schedule schedule : options.schedules) {
    const absl::StatusOr<Outputs> outputs =
        RunGoldenCase(client, *golden, schedule, options.dtype, head);
    if (outputs.ok()) {
      AddOutputs(*golden, schedule, *outputs, plain, options.dtype, &report);
      continue;
    }
    report.status =
        absl::IsUnimplemented(outputs.status()) ? CaseStatus::kNotYet : CaseStatus::kFailed;
    report.detail =
        absl::StrCat(std::string(ScheduleName(schedule)), ": ", outputs.status().message());
    return report;
  }
  return report;
}

absl::StatusOr<std::vector<CaseReport>> RunCases(absl::Span<char* const> positional) {
  const absl::StatusOr<GoldenOptions> options = ParseOptions(positional);
  if (!options.ok()) return options.status();
  std::vector<std::string> server_flags;
  if (options->shards > 1) server_flags.push_back(absl::StrCat("--ranks=", options->shards));
  absl::StatusOr<Service> service = ReachService(server_flags);
  if (!service.ok()) return service.status();
  std::vector<CaseReport> reports;
  for (const std::string& file : options->files) {
    // The process id keeps two runs against one service apart.
    reports.push_back(RunCase(*service->client, file, *options,
                              absl::StrCat("golden-", getpid(), "-", reports.size())));
  }
  if (absl::Status stopped = StopService(*service); !stopped.ok()) return stopped;
  return reports;
}

}  // namespace

int RunGolden(absl::Span<char* const> positional) {
  const absl::StatusOr<std::vector<CaseReport>> reports = RunCases(positional);
  if (!reports.ok()) {
    std::fprintf(stderr, "lmhead-bench golden: %s\n",
                 std::string(reports.status().message()).c_str());
    return kExitNotRun;
  }
  const std::string text = absl::GetFlag(FLAGS_json) ? RenderJson(*reports) : RenderTable(*reports);
  std::fputs(text.c_str(), stdout);
  const bool failed = std::any_of(reports->begin(), reports->end(), [](const CaseReport& report) {
    return report.status == CaseStatus::kFailed;
  });
  return failed ? kExitFailed : 0;
}

}  // namespace lmhead::bench
