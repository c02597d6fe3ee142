#include "bench/common.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/cli/common_flags.h"

ABSL_FLAG(std::string, server_binary, "",
          "The lmhead binary to start; the one beside this program by default.");
ABSL_FLAG(std::string, schedule, "all",
          "Schedule: retain, recompute, for golden also frozen or eval; or all of them.");

namespace lmhead::bench {

absl::StatusOr<DType> DTypeFromFlag(DType fallback) {
  const std::string name = absl::GetFlag(FLAGS_dtype);
  if (name.empty()) return fallback;
  if (name == "float32" || name == "fp32") return DType::kFloat32;
  if (name == "bfloat16" || name == "bf16") return DType::kBFloat16;
  return absl::InvalidArgumentError(
      absl::StrCat("--dtype is '", name, "'; wanted float32 (fp32) or bfloat16 (bf16)"));
}

absl::StatusOr<std::vector<Schedule>> SchedulesFromFlag(const std::vector<Schedule>& all) {
  const std::string name = absl::GetFlag(FLAGS_schedule);
  if (name == "all") return all;
  for (const Schedule schedule : all) {
    if (ScheduleName(schedule) == name) return std::vector<Schedule>{schedule};
  }
  const std::string names = absl::StrJoin(all, ", ", [](std::string* out, Schedule schedule) {
    absl::StrAppend(out, std::string(ScheduleName(schedule)));
  });
  return absl::InvalidArgumentError(
      absl::StrCat("--schedule is '", name, "'; wanted ", names, " or all"));
}

absl::StatusOr<Service> ReachService(const std::vector<std::string>& server_flags) {
  Service service;
  std::string address = absl::GetFlag(FLAGS_address);
  if (address.empty()) {
    std::string binary = absl::GetFlag(FLAGS_server_binary);
    if (binary.empty()) {
      std::error_code error;
      binary = std::filesystem::canonical("/proc/self/exe", error).parent_path() / "lmhead";
    }
    std::vector<std::string> flags = {absl::StrCat("--backend=", absl::GetFlag(FLAGS_backend))};
    flags.insert(flags.end(), server_flags.begin(), server_flags.end());
    auto child = LocalServer::Start(binary, flags);
    if (!child.ok()) return child.status();
    service.child = *std::move(child);
    address = service.child->address();
  }
  auto client = Client::Connect(
      address, service.child == nullptr ? ClientOptionsFromFlags() : ClientOptions());
  if (!client.ok()) return client.status();
  service.client = *std::move(client);
  return service;
}

absl::Status StopService(Service& service) {
  if (service.child == nullptr) return absl::OkStatus();
  const absl::StatusOr<int> exit_code = service.child->Stop();
  if (!exit_code.ok()) return exit_code.status();
  if (*exit_code == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the service ended with exit code ", *exit_code,
                                          "; its log:\n", service.child->Log()));
}

}  // namespace lmhead::bench
