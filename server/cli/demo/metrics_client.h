// Reads a service's Prometheus endpoint, as Prometheus would: one HTTP GET over a plain socket.

#ifndef LMHEAD_SERVER_CLI_DEMO_METRICS_CLIENT_H_
#define LMHEAD_SERVER_CLI_DEMO_METRICS_CLIENT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lmhead::demo {

// The text at http://`address`/metrics; address is host:port. UNAVAILABLE when nobody answers with
// status 200 in ten seconds.
absl::StatusOr<std::string> ScrapeMetrics(const std::string& address);

// Sum over the series `name` whose labels contain each of `labels` (such as `scope="process"`).
// NOT_FOUND when there is none.
absl::StatusOr<double> MetricValue(absl::string_view exposition, absl::string_view name,
                                   const std::vector<std::string>& labels);

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_METRICS_CLIENT_H_
