// What `lmhead doctor` looks at, each check by itself. Nothing is changed on the machine, and no
// server is needed; the ports of a server that runs are found taken.

#ifndef LMHEAD_SERVER_CLI_DOCTOR_CHECKS_H_
#define LMHEAD_SERVER_CLI_DOCTOR_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/security/security_config.h"

namespace lmhead {

enum class Severity : uint8_t { kOk, kWarn, kFail };

struct Finding {
  std::string check;  // "gpu", "port --listen", …
  Severity severity = Severity::kOk;
  std::string what;  // What was found.
  std::string mend;  // What to do; empty when it is well.
};
using Findings = std::vector<Finding>;

// Driver, devices, cuBLASLt and NCCL, and what serve would compute on. `backend` is the flag's
// value, `devices` those that are named: either without a GPU fails. Returns how many GPUs there
// are.
int CheckGpu(const std::string& backend, const std::vector<int>& devices, Findings* findings);

// Whether addresses to listen on are free. Each is held until the end, so that two flags with one
// address are found.
class PortChecks {
 public:
  PortChecks() = default;
  ~PortChecks();
  PortChecks(const PortChecks&) = delete;
  PortChecks& operator=(const PortChecks&) = delete;

  // `flag` is "listen"; an empty address is passed over. Unix sockets are for gRPC alone.
  void Check(const std::string& flag, const std::string& address, bool may_be_socket,
             Findings* findings);

 private:
  std::vector<int> sockets_;
};

// /dev/shm, which NCCL needs among several GPUs, locked memory and open files.
void CheckLimits(int num_gpus, Findings* findings);

// The system's clock against the files of this machine and the kernel's opinion of it.
void CheckClock(Findings* findings);

// Memory of the machine or container against --memory_limit_bytes of the CPU backend.
void CheckMemory(int num_gpus, int64_t memory_limit_bytes, Findings* findings);

// Room where checkpoints go; an empty folder name is passed over.
void CheckCheckpointDir(const std::string& folder, Findings* findings);

// Certificates, keys, policy and tokens, by themselves and against each other. `ca_file` is what
// clients will check the server's certificate against; empty: not known.
void CheckSecurityFiles(const SecurityConfig& config, const std::string& listen,
                        const std::string& ca_file, Findings* findings);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_DOCTOR_CHECKS_H_
