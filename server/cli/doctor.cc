// lmhead doctor: what on this machine, or in the files that serve would use, keeps it from serving
// well.

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/cli/doctor_checks.h"
#include "server/cli/security_flags.h"
#include "server/cli/serve_flags.h"
#include "server/config/server_config.h"
#include "server/logging/logging.h"
#include "server/server.h"

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

const char* SeverityName(Severity severity) {
  switch (severity) {
    case Severity::kOk:
      return "ok";
    case Severity::kWarn:
      return "warn";
    case Severity::kFail:
      return "fail";
  }
  return "unknown";
}

void CheckPorts(Findings* findings) {
  PortChecks ports;
  ports.Check("listen", absl::GetFlag(FLAGS_listen), /*may_be_socket=*/true, findings);
  ports.Check("metrics_listen", absl::GetFlag(FLAGS_metrics_listen), /*may_be_socket=*/false,
              findings);
  ports.Check("health_listen", absl::GetFlag(FLAGS_health_listen), /*may_be_socket=*/true,
              findings);
  ports.Check("group_listen", absl::GetFlag(FLAGS_group_listen), /*may_be_socket=*/false, findings);
}

// What serve would say of its flags, unless another check has said it.
void CheckFlags(Findings* findings) {
  absl::Status status = ServerConfigFromFlags().status();
  status.Update(DrainTimeoutFromFlags().status());
  status.Update(SetUpLogging(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format)));
  const std::string what(status.message());
  if (status.ok() || std::any_of(findings->begin(), findings->end(),
                                 [&](const Finding& other) { return other.what == what; })) {
    return;
  }
  findings->push_back({"flags", Severity::kFail, what, "change the flag as it says"});
}

Findings Examine() {
  Findings findings;
  const absl::StatusOr<std::vector<int>> devices = ParseDevices(absl::GetFlag(FLAGS_devices));
  const int num_gpus =
      CheckGpu(absl::GetFlag(FLAGS_backend), devices.value_or(std::vector<int>()), &findings);
  CheckPorts(&findings);
  CheckLimits(num_gpus, &findings);
  CheckClock(&findings);
  CheckMemory(num_gpus, absl::GetFlag(FLAGS_memory_limit_bytes), &findings);
  CheckCheckpointDir(absl::GetFlag(FLAGS_checkpoint_dir), &findings);
  CheckSecurityFiles(SecurityConfigFromFlags(), absl::GetFlag(FLAGS_listen),
                     absl::GetFlag(FLAGS_tls_ca_file), &findings);
  CheckFlags(&findings);
  return findings;
}

void PrintJson(const Findings& findings, bool failed) {
  nlohmann::ordered_json json = {
      {"version", kVersion}, {"ok", !failed}, {"findings", nlohmann::ordered_json::array()}};
  for (const Finding& finding : findings) {
    nlohmann::ordered_json entry = {{"check", finding.check},
                                    {"severity", SeverityName(finding.severity)},
                                    {"what", finding.what}};
    if (!finding.mend.empty()) entry["mend"] = finding.mend;
    json["findings"].push_back(std::move(entry));
  }
  std::printf("%s\n",
              json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

void PrintText(const Findings& findings) {
  std::printf("lmhead %s\n", kVersion);
  for (const Finding& finding : findings) {
    std::printf("%-4s  %-20s %s\n", SeverityName(finding.severity), finding.check.c_str(),
                finding.what.c_str());
    if (!finding.mend.empty()) std::printf("%-26s %s\n", "", ("-> " + finding.mend).c_str());
  }
}

}  // namespace

int RunDoctor(absl::Span<char* const> positional) {
  if (!positional.empty()) {
    std::fprintf(stderr, "lmhead doctor: got '%s'; doctor takes flags only\n", positional[0]);
    return kExitUsage;
  }
  const Findings findings = Examine();
  const bool failed = std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.severity == Severity::kFail;
  });
  if (absl::GetFlag(FLAGS_json)) {
    PrintJson(findings, failed);
  } else {
    PrintText(findings);
  }
  return failed ? kExitFailure : 0;
}

}  // namespace lmhead
