// lmhead status: what a running service is, holds and does.

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "lmhead/v1/service.pb.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"

namespace lmhead {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

std::string MiB(int64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
}

// "SCHEDULE_RETAIN" -> "retain".
std::string ShortName(std::string name, const std::string& prefix) {
  if (name.rfind(prefix, 0) == 0) name.erase(0, prefix.size());
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

std::string HeadState(const v1::HeadInfo& head) {
  if (!head.poisoned_by().empty()) return "poisoned: " + head.poisoned_by();
  if (!head.weights_loaded()) return "weight not loaded";
  if (head.open_step() != 0) return absl::StrCat("step ", head.open_step(), " open");
  return absl::StrCat("step ", head.last_committed_step(), " committed");
}

// "rank 2", or with replicas "rank 2 of replica 1".
std::string RankName(const v1::GetServerInfoResponse& info, int rank) {
  const int num_ranks = info.devices_size();
  if (rank >= num_ranks || info.devices(num_ranks - 1).replica() == 0) {
    return absl::StrCat("rank ", rank);
  }
  return absl::StrCat("rank ", rank, " of replica ", info.devices(rank).replica());
}

void PrintServer(const v1::GetServerInfoResponse& info, const std::string& address) {
  std::printf(
      "lmhead %s at %s, up %s, incarnation %016llx\n", info.version().c_str(), address.c_str(),
      absl::FormatDuration(absl::Seconds(static_cast<int64_t>(info.uptime_seconds()))).c_str(),
      static_cast<unsigned long long>(info.incarnation()));
  for (const v1::DeviceInfo& device : info.devices()) {
    std::printf("%s: %s, %s, %s\n", RankName(info, device.rank()).c_str(), info.backend().c_str(),
                device.name().c_str(), MiB(device.total_memory_bytes()).c_str());
  }
  const v1::ServerLimits& limits = info.limits();
  std::printf("limits: chunk %s, message %s, %d staging slots, %d streams, %d chunks in flight\n",
              MiB(limits.max_chunk_bytes()).c_str(), MiB(limits.max_message_bytes()).c_str(),
              limits.num_staging_slots(), limits.max_streams(), limits.max_inflight_chunks());
}

void PrintHeads(const v1::GetServerInfoResponse& info) {
  std::printf("\n%-20s %10s %8s %-9s %-10s %14s  %s\n", "head", "vocabulary", "hidden", "dtype",
              "schedule", "reserved", "state");
  for (const v1::HeadInfo& head : info.heads()) {
    std::printf("%-20s %10lld %8lld %-9s %-10s %14s  %s\n", head.spec().name().c_str(),
                static_cast<long long>(head.spec().vocab_size()),
                static_cast<long long>(head.spec().hidden_size()),
                ShortName(v1::DType_Name(head.spec().weight_dtype()), "DTYPE_").c_str(),
                ShortName(v1::Schedule_Name(head.schedule()), "SCHEDULE_").c_str(),
                MiB(head.memory_plan().total_bytes()).c_str(), HeadState(head).c_str());
  }
  if (info.heads().empty()) std::printf("none\n");
}

void PrintMemory(const v1::GetServerInfoResponse& info) {
  for (int rank = 0; rank < info.memory_size(); ++rank) {
    const v1::MemoryReport& memory = info.memory(rank);
    const bool is_alone = info.memory_size() == 1;
    std::printf("\n%-20s %14s %14s %14s\n", is_alone ? "memory" : RankName(info, rank).c_str(),
                "live", "peak of step", "peak");
    for (const v1::CategoryUse& use : memory.categories()) {
      if (use.peak_process_bytes() == 0) continue;
      std::printf("%-20s %14s %14s %14s\n",
                  ShortName(v1::MemoryCategory_Name(use.category()), "MEMORY_CATEGORY_").c_str(),
                  MiB(use.live_bytes()).c_str(), MiB(use.peak_step_bytes()).c_str(),
                  MiB(use.peak_process_bytes()).c_str());
    }
    std::printf("%-20s %14s %14s %14s\n", "total", MiB(memory.live_bytes()).c_str(),
                MiB(memory.peak_step_bytes()).c_str(), MiB(memory.peak_process_bytes()).c_str());
    std::printf("%-20s %14s of %s\n", "reserved", MiB(memory.reserved_bytes()).c_str(),
                MiB(memory.limit_bytes()).c_str());
    std::printf("%-20s %14s\n", "staging slots", MiB(memory.staging_bytes()).c_str());
    std::printf("%-20s %14s %14s %14s\n", info.backend() == "cpu" ? "resident set" : "device",
                MiB(memory.device_used_bytes()).c_str(), "",
                MiB(memory.device_peak_bytes()).c_str());
  }
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "lmhead status: %s\n", std::string(status.message()).c_str());
  return kExitFailure;
}

}  // namespace

int RunStatus(absl::Span<char* const> positional) {
  if (!positional.empty()) {
    std::fprintf(stderr, "lmhead status: got '%s'; wanted --address=host:port\n", positional[0]);
    return kExitUsage;
  }
  const std::string address = AddressFromFlags();
  absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(address, ClientOptionsFromFlags());
  if (!client.ok()) return Fail(client.status());
  absl::StatusOr<v1::GetServerInfoResponse> info = (*client)->GetServerInfo();
  if (!info.ok()) return Fail(info.status());
  if (absl::GetFlag(FLAGS_json)) {
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    std::string json;
    const auto status = google::protobuf::util::MessageToJsonString(*info, &json, options);
    if (!status.ok()) return Fail(absl::InternalError(std::string(status.message())));
    std::printf("%s\n", json.c_str());
    return 0;
  }
  PrintServer(*info, address);
  PrintHeads(*info);
  PrintMemory(*info);
  return 0;
}

}  // namespace lmhead
