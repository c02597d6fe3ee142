#include "server/cli/grpc_log.h"

#include <chrono>
#include <cstdlib>
#include <memory>

#include "proto/wire/process.h"
#include "spdlog/logger.h"
#include "spdlog/sinks/dup_filter_sink.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr std::chrono::seconds kQuiet{10};

spdlog::logger& Logger() {
  // Never destroyed: gRPC may log until the process ends.
  static spdlog::logger& logger = *[] {
    const auto sink = std::make_shared<spdlog::sinks::dup_filter_sink_mt>(kQuiet);
    for (const auto& ours : spdlog::default_logger()->sinks()) sink->add_sink(ours);
    auto* const made = new spdlog::logger("grpc", sink);
    made->set_level(spdlog::default_logger()->level());
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return logger;
}

// What gRPC calls an error is a connection that failed, such as a client without a certificate.
void Log(GrpcSeverity severity, const char* message) {
  const auto level = severity == GrpcSeverity::kError ? spdlog::level::warn : spdlog::level::debug;
  Logger().log(level, "gRPC: {}", message);
}

}  // namespace

void TakeGrpcLogIn() { RouteGrpcLog(&Log); }

void SilenceGrpcLog() {
  if (std::getenv("GRPC_VERBOSITY") != nullptr) return;
  RouteGrpcLog([](GrpcSeverity, const char*) {});
}

}  // namespace lmhead
