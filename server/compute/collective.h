// The seam between the ranks of a head: what one rank asks of the others.
//
// A Collective is one rank's end of a group. Every rank makes the same calls with the same sizes in
// the same order; the rank code does not know whether the others are threads, processes or GPUs.
// Two implementations: Gloo (host memory, over TCP) and NCCL (device memory, on a stream); a head
// of one rank has none. A rank that fails aborts the group: its own later calls and the others'
// pending ones then return the reason, naming the rank that gave it. An aborted group may connect
// anew; the objects stay, so that backends may keep a pointer to theirs.

#ifndef LMHEAD_SERVER_COMPUTE_COLLECTIVE_H_
#define LMHEAD_SERVER_COMPUTE_COLLECTIVE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lmhead {

// Where the ranks that form a group find each other: a map of strings that all of them see, made
// anew for every try. Thread-safe.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;

  // Keys are set once.
  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;

  // Waits for the key. DEADLINE_EXCEEDED after `deadline`, naming the key; the reason of whoever
  // gave the group up meanwhile.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) = 0;

  RendezvousStore(const RendezvousStore&) = delete;
  RendezvousStore& operator=(const RendezvousStore&) = delete;

 protected:
  RendezvousStore() = default;
};

// A cudaStream_t, for whoever includes no CUDA; null for host memory.
using DeviceStream = void*;

// Calls other than Check() and Abort() come from the rank's thread, one at a time.
class Collective {
 public:
  // Where the pointers of every call point. kHost: a call returns when it is done. kDevice: a call
  // is queued on `stream` and returns at once; what fails later is told by Check() or by a later
  // call.
  enum class Memory : uint8_t { kHost, kDevice };

  virtual ~Collective() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;
  virtual Memory memory() const = 0;

  // Joins the group of all ranks that call it with the same store, and waits for them; forgets a
  // group it was in before. Until it has succeeded every call fails. DEADLINE_EXCEEDED naming the
  // ranks that did not come.
  virtual absl::Status Connect(RendezvousStore* store) = 0;

  // receive[r * bytes_per_rank ..] becomes what rank r sent, for every r.
  virtual absl::Status AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                                 DeviceStream stream) = 0;

  // Elementwise sums over the ranks, in place. Reduce: on `root`; the others' data is undefined
  // afterwards. Summed in an order that depends on the ranks alone, so that results repeat.
  virtual absl::Status Reduce(float* data, int64_t count, int32_t root, DeviceStream stream) = 0;
  virtual absl::Status AllReduce(float* data, int64_t count, DeviceStream stream) = 0;
  virtual absl::Status AllReduce(double* data, int64_t count, DeviceStream stream) = 0;

  // `data` of every rank becomes root's.
  virtual absl::Status Broadcast(void* data, int64_t num_bytes, int32_t root,
                                 DeviceStream stream) = 0;

  // OK while the group works; the first failure otherwise. Does not wait.
  virtual absl::Status Check() = 0;

  // Ends the group for all ranks with a reason. Any thread, any number of times; does not block.
  virtual void Abort(const absl::Status& reason) = 0;

  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

 protected:
  Collective() = default;
};

// What a rank's backend needs to know of its place; the default is a head of one rank. A head may
// be there several times: each replica is num_ranks ranks with all of its rows. The peers of a rank
// have the same rows in the other replicas.
struct RankContext {
  int32_t rank = 0;  // Within its replica.
  int32_t num_ranks = 1;
  Collective* collective = nullptr;  // Exactly when num_ranks > 1; outlives the backend.
  int32_t replica = 0;
  int32_t num_replicas = 1;
  Collective* peers = nullptr;  // By replica. Exactly when num_replicas > 1; outlives the backend.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_COLLECTIVE_H_
