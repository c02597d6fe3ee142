// What several benchmarks share: flags, and the service under test.

#ifndef LMHEAD_BENCH_COMMON_H_
#define LMHEAD_BENCH_COMMON_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/local_server.h"
#include "proto/types/dtype.h"
#include "proto/types/head_spec.h"

ABSL_DECLARE_FLAG(std::string, schedule);
ABSL_DECLARE_FLAG(std::string, server_binary);

namespace lmhead::bench {

// --dtype, or `fallback` when it is not given.
absl::StatusOr<DType> DTypeFromFlag(DType fallback);

// The one of `all` that --schedule names, or all of them for "all".
absl::StatusOr<std::vector<Schedule>> SchedulesFromFlag(const std::vector<Schedule>& all);

// The service under test: a child process, or the one at --address.
struct Service {
  std::unique_ptr<LocalServer> child;  // Null when the service was there already.
  std::unique_ptr<Client> client;
};

// Connects to --address; without one starts --server_binary with --backend and `server_flags`.
absl::StatusOr<Service> ReachService(const std::vector<std::string>& server_flags);

// Ends the child, if there is one; an error when it does not end well.
absl::Status StopService(Service& service);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_COMMON_H_
