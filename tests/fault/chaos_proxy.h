// A TCP proxy on loopback that makes trouble: cuts connections at any byte, delays, trickles.

#ifndef LMHEAD_TESTS_FAULT_CHAOS_PROXY_H_
#define LMHEAD_TESTS_FAULT_CHAOS_PROXY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lmhead::fault {

// What happens to one connection.
struct Weather {
  int64_t cut_after_bytes = -1;  // Both directions together, wherever in a message; -1: never.
  bool reset = false;            // Cut with RST, losing what the kernel still holds; else FIN.
  int64_t piece_bytes = 65536;   // Forwarded at a time,
  int delay_microseconds = 0;    // each after this long.
};

// Thread-safe.
class ChaosProxy {
 public:
  // `forecast` is asked once a connection, with its number from 0; null means calm.
  using Forecast = std::function<Weather(int connection)>;
  ChaosProxy(const std::string& target, Forecast forecast);
  ~ChaosProxy();
  ChaosProxy(const ChaosProxy&) = delete;
  ChaosProxy& operator=(const ChaosProxy&) = delete;

  const std::string& address() const { return address_; }  // host:port

  // Where new connections go; empty closes them at once.
  void SetTarget(const std::string& target);

  int num_connections() const { return num_connections_; }
  int num_cuts() const { return num_cuts_; }

  // What the clients have sent so far, connection by connection.
  std::vector<std::string> SentByClients() const;

 private:
  struct Connection;
  void AcceptLoop();
  void Forward(Connection* connection, bool from_client);
  bool SpendBytes(Connection* connection, int64_t* bytes);

  const Forecast forecast_;
  int listener_ = -1;
  std::string address_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int> num_connections_ = 0;
  std::atomic<int> num_cuts_ = 0;
  mutable absl::Mutex mu_;
  std::string target_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mu_);
  std::thread accepter_;
};

// A TCP connection to host:port, or -1.
int ConnectSocket(const std::string& address);

}  // namespace lmhead::fault

#endif  // LMHEAD_TESTS_FAULT_CHAOS_PROXY_H_
