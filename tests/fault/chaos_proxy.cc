#include "tests/fault/chaos_proxy.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lmhead::fault {
namespace {

constexpr size_t kRecordedBytesMax = 1 << 20;

// Sends all of it; false when the other end is gone.
bool SendAll(int fd, const char* data, int64_t size) {
  while (size > 0) {
    const ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    size -= sent;
  }
  return true;
}

}  // namespace

struct ChaosProxy::Connection {
  int client = -1, server = -1;
  Weather weather;
  absl::Mutex mu;
  int64_t bytes_left ABSL_GUARDED_BY(mu) = -1;
  std::string sent_by_client ABSL_GUARDED_BY(mu);
  std::thread upward, downward;

  // Ends both directions at once; the threads' calls return.
  void Cut(bool reset) {
    for (int fd : {client, server}) {
      // Dissolving the association sends RST and drops what the kernel holds.
      const sockaddr nobody{.sa_family = AF_UNSPEC};
      if (reset) (void)connect(fd, &nobody, sizeof(nobody));
      shutdown(fd, SHUT_RDWR);
    }
  }

  ~Connection() {
    Cut(false);
    if (upward.joinable()) upward.join();
    if (downward.joinable()) downward.join();
    close(client);
    close(server);
  }
};

int ConnectSocket(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return -1;
  sockaddr_in to{.sin_family = AF_INET,
                 .sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)))};
  if (inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1) return -1;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) {
    close(fd);
    return -1;
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

ChaosProxy::ChaosProxy(const std::string& target, Forecast forecast)
    : forecast_(std::move(forecast)), target_(target) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof(address);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_, 64) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::perror("chaos proxy");
    std::abort();
  }
  address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  accepter_ = std::thread([this] { AcceptLoop(); });
}

ChaosProxy::~ChaosProxy() {
  stopping_ = true;
  accepter_.join();
  close(listener_);
  absl::MutexLock lock(&mu_);
  connections_.clear();
}

void ChaosProxy::SetTarget(const std::string& target) {
  absl::MutexLock lock(&mu_);
  target_ = target;
}

std::vector<std::string> ChaosProxy::SentByClients() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::string> sent;
  for (const auto& connection : connections_) {
    absl::MutexLock connection_lock(&connection->mu);
    sent.push_back(connection->sent_by_client);
  }
  return sent;
}

void ChaosProxy::AcceptLoop() {
  while (!stopping_) {
    pollfd waiting{.fd = listener_, .events = POLLIN};
    if (poll(&waiting, 1, 20) <= 0) continue;
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    absl::MutexLock lock(&mu_);
    const int server = ConnectSocket(target_);
    if (server < 0) {
      close(client);
      continue;
    }
    auto connection = std::make_unique<Connection>();
    connection->client = client;
    connection->server = server;
    const int number = num_connections_.fetch_add(1);
    if (forecast_ != nullptr) connection->weather = forecast_(number);
    {
      absl::MutexLock connection_lock(&connection->mu);
      connection->bytes_left = connection->weather.cut_after_bytes;
    }
    Connection* const raw = connection.get();
    connection->upward = std::thread([this, raw] { Forward(raw, /*from_client=*/true); });
    connection->downward = std::thread([this, raw] { Forward(raw, /*from_client=*/false); });
    connections_.push_back(std::move(connection));
  }
}

// Lowers *bytes to what may still pass; false when the connection is to be cut after that.
bool ChaosProxy::SpendBytes(Connection* connection, int64_t* bytes) {
  absl::MutexLock lock(&connection->mu);
  if (connection->bytes_left < 0) return true;
  *bytes = std::min(*bytes, connection->bytes_left);
  connection->bytes_left -= *bytes;
  return connection->bytes_left > 0;
}

void ChaosProxy::Forward(Connection* connection, bool from_client) {
  const int from = from_client ? connection->client : connection->server;
  const int to = from_client ? connection->server : connection->client;
  const Weather& weather = connection->weather;
  std::vector<char> buffer(weather.piece_bytes);
  for (;;) {
    int64_t bytes = recv(from, buffer.data(), buffer.size(), 0);
    if (bytes <= 0) break;
    if (weather.delay_microseconds > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(weather.delay_microseconds));
    }
    const bool goes_on = SpendBytes(connection, &bytes);
    if (from_client) {
      absl::MutexLock lock(&connection->mu);
      const size_t room = kRecordedBytesMax - connection->sent_by_client.size();
      connection->sent_by_client.append(buffer.data(), std::min<size_t>(bytes, room));
    }
    if (!SendAll(to, buffer.data(), bytes)) break;
    if (!goes_on) {
      if (bytes > 0) ++num_cuts_;
      connection->Cut(weather.reset);
      return;
    }
  }
  connection->Cut(/*reset=*/false);
}

}  // namespace lmhead::fault
