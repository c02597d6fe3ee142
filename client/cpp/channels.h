// gRPC channels with the arguments that the service was measured with.

#ifndef LMHEAD_CLIENT_CPP_CHANNELS_H_
#define LMHEAD_CLIENT_CPP_CHANNELS_H_

#include <grpcpp/channel.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace lmhead {

// A channel with a TCP connection of its own (channels of one process to one address otherwise
// share one), keepalive, and no retries by gRPC: retries are the caller's, who knows what was
// counted. Connects lazily. Takes the process-lifetime gRPC reference.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, int64_t message_bytes_max);

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
