// gRPC channels with the arguments that the service was measured with.

#ifndef LMHEAD_CLIENT_CPP_CHANNELS_H_
#define LMHEAD_CLIENT_CPP_CHANNELS_H_

#include <grpcpp/channel.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/channel_credentials.h"

namespace lmhead {

// A channel with a TCP connection of its own (channels of one process to one address otherwise
// share one), keepalive, and no retries by gRPC: retries are the caller's, who knows what was
// counted. Connects lazily. Takes the process-lifetime gRPC reference.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelSecurity& security,
                                           int64_t message_bytes_max);

// Channels of a client's writers between their uses: a writer a step costs no new connections.
//
// gRPC joins its callback threads when the last channel goes, so that no channel may be destroyed
// on one of them: who takes a channel gives it back, and lets its pool go, on a thread of its own.
// Thread-safe.
class ChannelPool {
 public:
  ChannelPool(std::string address, ChannelSecurity security)
      : address_(std::move(address)), security_(std::move(security)) {}

  // A channel nobody else uses.
  std::shared_ptr<grpc::Channel> Take(int64_t message_bytes_max);
  void Give(int64_t message_bytes_max, std::shared_ptr<grpc::Channel> channel);

 private:
  const std::string address_;
  const ChannelSecurity security_;
  absl::Mutex mu_;
  std::multimap<int64_t, std::shared_ptr<grpc::Channel>> idle_ ABSL_GUARDED_BY(mu_);
};

// Waits until the channel is connected; `stop` is asked several times a second and ends the wait
// with CANCELLED. UNAVAILABLE with the address when it takes longer than `timeout`.
absl::Status WaitForConnection(grpc::Channel& channel, const std::string& address,
                               absl::Duration timeout, const std::function<bool()>& stop);

// Pause before attempt 1, 2, …: 100 ms, doubled each time, at most 5 s.
absl::Duration RetryDelay(int attempt);

// The same code with the address in front of the message.
absl::Status AtAddress(const std::string& address, const absl::Status& status);

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_CHANNELS_H_
