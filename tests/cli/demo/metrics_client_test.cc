#include "server/cli/demo/metrics_client.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "absl/strings/str_cat.h"

namespace lmhead::demo {
namespace {

using ::testing::HasSubstr;

constexpr char kExposition[] =
    "# HELP memory_peak_bytes Bytes\n"
    "# TYPE memory_peak_bytes gauge\n"
    "memory_peak_bytes{rank=\"0\",scope=\"process\"} 1024\n"
    "memory_peak_bytes{rank=\"1\",scope=\"process\"} 2048\n"
    "memory_peak_bytes{rank=\"0\",scope=\"step\"} 7\n"
    "memory_peak_bytes_other 5\n"
    "tokens_total 1.5e+06\n";

TEST(MetricValue, SumsTheSeriesWithTheLabels) {
  EXPECT_EQ(*MetricValue(kExposition, "memory_peak_bytes", {"scope=\"process\""}), 3072.0);
  EXPECT_EQ(*MetricValue(kExposition, "memory_peak_bytes", {"scope=\"step\"", "rank=\"0\""}), 7.0);
  EXPECT_EQ(*MetricValue(kExposition, "tokens_total", {}), 1.5e6);
}

TEST(MetricValue, SaysWhichSeriesIsMissing) {
  const auto missing = MetricValue(kExposition, "tokens", {});
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("tokens"));
  EXPECT_FALSE(MetricValue(kExposition, "memory_peak_bytes", {"scope=\"week\""}).ok());
}

// Answers one connection with fixed bytes.
class OneAnswer {
 public:
  explicit OneAnswer(std::string answer) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof(address);
    bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
    listen(listener_, 1);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, answer = std::move(answer)] {
      const int fd = accept(listener_, nullptr, nullptr);
      char request[1024];
      const ssize_t received = recv(fd, request, sizeof(request), 0);
      request_.assign(request, received > 0 ? received : 0);
      send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
      close(fd);
    });
  }
  ~OneAnswer() {
    if (thread_.joinable()) thread_.join();
    close(listener_);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  std::string Request() {
    thread_.join();
    return request_;
  }

 private:
  int listener_ = -1, port_ = 0;
  std::string request_;
  std::thread thread_;
};

TEST(ScrapeMetrics, ReturnsTheBody) {
  OneAnswer server("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\na 1\nb 2\n");
  const auto body = ScrapeMetrics(server.address());
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(*body, "a 1\nb 2\n");
  EXPECT_THAT(server.Request(), HasSubstr("GET /metrics HTTP/1.0\r\n"));
}

TEST(ScrapeMetrics, OtherAnswersAreErrorsThatNameTheAddress) {
  for (const std::string answer : {"HTTP/1.1 404 Not Found\r\n\r\n", "", "nonsense"}) {
    OneAnswer server(answer);
    const auto body = ScrapeMetrics(server.address());
    EXPECT_EQ(body.status().code(), absl::StatusCode::kUnavailable) << answer;
    EXPECT_THAT(std::string(body.status().message()), HasSubstr(server.address()));
  }
  EXPECT_EQ(ScrapeMetrics("127.0.0.1").status().code(), absl::StatusCode::kUnavailable);
  // Port 1 of loopback: nobody listens.
  EXPECT_EQ(ScrapeMetrics("127.0.0.1:1").status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace lmhead::demo
