#include "client/cpp/channels.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/limits.h"
#include "proto/wire/process.h"

namespace lmhead {

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelSecurity& security,
                                           int64_t message_bytes_max) {
  KeepGrpcInitialized();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(message_bytes_max));
  arguments.SetMaxSendMessageSize(static_cast<int>(message_bytes_max));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // A proxy for web pages is none for this.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMilliseconds);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMilliseconds);
  // 0 means no bound: with the default of 2 a frozen peer of an idle stream is never noticed.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  if (!security.server_name.empty()) arguments.SetSslTargetNameOverride(security.server_name);
  return grpc::CreateCustomChannel(address, security.credentials, arguments);
}

std::shared_ptr<grpc::Channel> ChannelPool::Take(int64_t message_bytes_max) {
  {
    const absl::MutexLock lock(&mu_);
    const auto found = idle_.find(message_bytes_max);
    if (found != idle_.end()) return std::move(idle_.extract(found).mapped());
  }
  return MakeChannel(address_, security_, message_bytes_max);
}

void ChannelPool::Give(int64_t message_bytes_max, std::shared_ptr<grpc::Channel> channel) {
  const absl::MutexLock lock(&mu_);
  idle_.emplace(message_bytes_max, std::move(channel));
}

absl::Status WaitForConnection(grpc::Channel& channel, const std::string& address,
                               absl::Duration timeout, const std::function<bool()>& stop) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!stop()) {
    const absl::Time until = std::min(deadline, absl::Now() + absl::Milliseconds(100));
    if (channel.WaitForConnected(absl::ToChronoTime(until))) return absl::OkStatus();
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrFormat("%s: no connection within %s; is the server running there, and is TLS on "
                          "at both ends or at neither?",
                          address, absl::FormatDuration(timeout)));
    }
    // A channel without a usable address answers at once: do not spin.
    if (absl::Now() < until) absl::SleepFor(absl::Milliseconds(20));
  }
  return absl::CancelledError(absl::StrCat(address, ": cancelled while connecting"));
}

absl::Duration RetryDelay(int attempt) {
  return std::min(absl::Seconds(5), absl::Milliseconds(100) * (1 << std::clamp(attempt - 1, 0, 6)));
}

absl::Status AtAddress(const std::string& address, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(address, ": ", status.message()));
}

}  // namespace lmhead
