// Flags that more than one command has. Abseil's flags are one set for the whole executable, so
// each is defined once; what a default of "" or 0, or none, means is each command's own.

#ifndef LMHEAD_SERVER_CLI_COMMON_FLAGS_H_
#define LMHEAD_SERVER_CLI_COMMON_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/flags/declare.h"
#include "client/cpp/client.h"

ABSL_DECLARE_FLAG(std::string, address);
ABSL_DECLARE_FLAG(std::string, backend);
ABSL_DECLARE_FLAG(int64_t, batch_tokens);
ABSL_DECLARE_FLAG(std::string, dtype);
ABSL_DECLARE_FLAG(int64_t, hidden);
ABSL_DECLARE_FLAG(bool, json);
ABSL_DECLARE_FLAG(int64_t, memory_limit_bytes);
ABSL_DECLARE_FLAG(int32_t, ranks);
ABSL_DECLARE_FLAG(std::optional<int32_t>, replicas);
ABSL_DECLARE_FLAG(std::string, tls_ca_file);
ABSL_DECLARE_FLAG(std::string, tls_cert_file);
ABSL_DECLARE_FLAG(std::string, tls_key_file);
ABSL_DECLARE_FLAG(std::string, tls_server_name);
ABSL_DECLARE_FLAG(std::string, token_file);
ABSL_DECLARE_FLAG(int64_t, vocab);

namespace lmhead {

// --address, or where `lmhead serve` listens unless told.
std::string AddressFromFlags();

// How a command connects to a service: the five flags above `vocab`.
ClientOptions ClientOptionsFromFlags();

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_COMMON_FLAGS_H_
