#include "server/cli/demo/metrics_client.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace lmhead::demo {
namespace {

constexpr int kTimeoutSeconds = 10;

absl::Status Unavailable(const std::string& address, const std::string& what) {
  return absl::UnavailableError(absl::StrCat("metrics at http://", address, "/metrics: ", what));
}

// A connected socket, or -1.
int ConnectTo(const std::string& host, const std::string& port) {
  addrinfo hints{.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = socket(info->ai_family, info->ai_socktype | SOCK_CLOEXEC, info->ai_protocol);
    if (fd < 0) continue;
    const timeval timeout{.tv_sec = kTimeoutSeconds};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    if (connect(fd, info->ai_addr, info->ai_addrlen) == 0) return fd;
    close(fd);
  }
  return -1;
}

}  // namespace

absl::StatusOr<std::string> ScrapeMetrics(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return Unavailable(address, "the address wants host:port");
  const int fd = ConnectTo(address.substr(0, colon), address.substr(colon + 1));
  if (fd < 0) return Unavailable(address, absl::StrCat("cannot connect: ", strerror(errno)));
  const absl::Cleanup closer = [fd] { close(fd); };

  // HTTP 1.0: the answer ends with the connection and is never chunked.
  const std::string request = absl::StrCat("GET /metrics HTTP/1.0\r\nHost: ", address, "\r\n\r\n");
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    return Unavailable(address, "cannot send");
  }
  std::string answer;
  char buffer[16384];
  ssize_t received = 0;
  while ((received = recv(fd, buffer, sizeof(buffer), 0)) > 0) answer.append(buffer, received);
  if (received < 0) return Unavailable(address, absl::StrCat("no answer: ", strerror(errno)));

  const size_t body = answer.find("\r\n\r\n");
  const std::string status_line = answer.substr(0, answer.find("\r\n"));
  if (body == std::string::npos || status_line.find(" 200 ") == std::string::npos) {
    return Unavailable(address, absl::StrCat("answered '", status_line, "'"));
  }
  return answer.substr(body + 4);
}

absl::StatusOr<double> MetricValue(absl::string_view exposition, absl::string_view name,
                                   const std::vector<std::string>& labels) {
  double sum = 0.0;
  bool found = false;
  for (absl::string_view line : absl::StrSplit(exposition, '\n')) {
    if (!absl::ConsumePrefix(&line, name) || line.empty()) continue;
    if (line[0] != '{' && line[0] != ' ') continue;  // Another metric with a longer name.
    const size_t space = line.rfind(' ');
    const absl::string_view series = line.substr(0, space);
    const bool matches = std::all_of(labels.begin(), labels.end(), [&](const std::string& label) {
      return series.find(absl::string_view(label)) != absl::string_view::npos;
    });
    double value = 0.0;
    if (!matches || !absl::SimpleAtod(line.substr(space + 1), &value)) continue;
    sum += value;
    found = true;
  }
  if (!found) return absl::NotFoundError(absl::StrCat("metrics have no series ", name));
  return sum;
}

}  // namespace lmhead::demo
