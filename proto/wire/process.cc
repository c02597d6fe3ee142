#include "proto/wire/process.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "proto/types/limits.h"

namespace lmhead {

namespace {

using GrpcLog = void (*)(GrpcSeverity severity, const char* message);
std::atomic<GrpcLog> grpc_log{nullptr};

void OnGrpcLog(gpr_log_func_args* line) {
  const GrpcSeverity severity = line->severity == GPR_LOG_SEVERITY_ERROR  ? GrpcSeverity::kError
                                : line->severity == GPR_LOG_SEVERITY_INFO ? GrpcSeverity::kInfo
                                                                          : GrpcSeverity::kDebug;
  grpc_log.load()(severity, line->message);
}

}  // namespace

void RouteGrpcLog(GrpcLog log) {
  grpc_log.store(log);
  gpr_set_log_function(&OnGrpcLog);
}

void KeepGrpcInitialized() {
  [[maybe_unused]] static const bool initialized = [] {
    grpc_init();
    return true;
  }();
}

void TuneAllocator() {
#ifdef __GLIBC__
  constexpr int kMmapThreshold = static_cast<int>(1024 * kMiB);
  constexpr int kTrimThreshold = static_cast<int>(2048 * kMiB - 1);
  constexpr int kTopPad = static_cast<int>(64 * kMiB);
  constexpr int kArenas = 4;
  mallopt(M_MMAP_THRESHOLD, kMmapThreshold);
  mallopt(M_TRIM_THRESHOLD, kTrimThreshold);
  mallopt(M_TOP_PAD, kTopPad);
  mallopt(M_ARENA_MAX, kArenas);
#endif
}

void LetOpenMpThreadsSleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "PASSIVE", /*overwrite=*/1);
  execv("/proc/self/exe", argv);  // Returns only when it failed: then the threads spin.
}

}  // namespace lmhead
