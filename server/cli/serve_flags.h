// The flags of `lmhead serve`, which `lmhead doctor` takes as well.

#ifndef LMHEAD_SERVER_CLI_SERVE_FLAGS_H_
#define LMHEAD_SERVER_CLI_SERVE_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/flags/declare.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/config/server_config.h"

ABSL_DECLARE_FLAG(std::string, checkpoint_dir);
ABSL_DECLARE_FLAG(std::string, devices);
ABSL_DECLARE_FLAG(std::string, group_listen);
ABSL_DECLARE_FLAG(std::string, health_listen);
ABSL_DECLARE_FLAG(std::string, listen);
ABSL_DECLARE_FLAG(std::string, log_format);
ABSL_DECLARE_FLAG(std::string, log_level);
ABSL_DECLARE_FLAG(std::string, metrics_listen);
ABSL_DECLARE_FLAG(std::string, ready_file);

namespace lmhead {

// INVALID_ARGUMENT naming the flag that is wrong, or that does not fit another.
absl::StatusOr<ServerConfig> ServerConfigFromFlags();

// --drain_timeout_seconds. Likewise.
absl::StatusOr<absl::Duration> DrainTimeoutFromFlags();

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_SERVE_FLAGS_H_
