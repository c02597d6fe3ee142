// The whole service in one object: memory, executor, heads, metrics and the gRPC server.
//
// A chunk's journey, once down and once up:
//   1. A worker's client cuts rows into chunks and writes them on a ComputeLoss stream.
//   2. rpc/chunk_stream has borrowed a staging slot before it started to read. No slot, no
//   StartRead:
//      HTTP/2 flow control is the back pressure, and memory is bounded by the slots.
//   3. OnReadDone: proto/wire decodes the message, gathering its arrays into the slot once; gRPC's
//      memory is dropped at once.
//   4. head/head_stream validates the chunk and asks the step's ledger: new, or counted already.
//   5. compute/executor, the one thread that drives the device, joins waiting chunks into a batch
//   and
//      hands it to the head's backend.
//   6. The backend computes loss and gradients, adds the weight gradient to its accumulators, and
//      writes grad_hidden_states over the hidden states in the slot.
//   7. The step books the chunk; rpc/chunk_stream encodes the answer around the slot's memory and
//      writes it, in the order of the stream's chunks. gRPC's release of that memory returns the
//      slot.
//
// Threads: gRPC's callback threads run 2 to 4 and 7 and never block; gRPC's synchronous threads run
// the control calls and may; the executor runs 5 and 6.

#ifndef LMHEAD_SERVER_SERVER_H_
#define LMHEAD_SERVER_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/config/server_config.h"

namespace lmhead {

// Release, such as "0.1.0".
inline constexpr char kVersion[] = LMHEAD_VERSION;

// Thread-safe.
class Server {
 public:
  // Starts serving. UNAVAILABLE when an address is taken, naming it; RESOURCE_EXHAUSTED when there
  // is no room for the staging slots; UNIMPLEMENTED for a backend that this build does not have.
  // With config.restore it waits for the followers of ranks elsewhere: minutes, in which
  // `cancelled` is asked several times a second; CANCELLED when it said true. REQUIRES: config is
  // validated.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerConfig& config,
                                                       const std::function<bool()>& cancelled = {});
  ~Server();  // Stops at once when still serving.
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Drains and stops: not ready any more, no new steps, heads or evaluations (UNAVAILABLE); open
  // steps may come to their end until `deadline`, streams and calls likewise. Then steps that are
  // still open are aborted, with the reason, and everything else is cancelled. Returns when all
  // have ended. May be called again, also meanwhile, to bring the deadline forward.
  void Stop(absl::Time deadline);

  const std::string& address() const;          // Where gRPC listens, with the real port.
  const std::string& metrics_address() const;  // Empty when metrics are not served.
  const std::string& health_address() const;   // Likewise the health port.
  const std::string& group_address() const;    // Where followers call; empty when there are none.
  uint64_t incarnation() const;

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SERVER_H_
