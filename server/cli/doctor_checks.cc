#include "server/cli/doctor_checks.h"

#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/limits.h"
#include "server/config/listen_address.h"
#include "server/config/server_config.h"
#include "server/library/nvidia_libraries.h"
#include "server/memory/system_memory.h"
#include "server/security/certificate.h"
#include "server/security/policy.h"
#include "server/security/tokens.h"
#include "server/shard/hardware.h"
#include "server/shard/nvidia_driver.h"

namespace lmhead {
namespace {

constexpr int64_t kGiB = 1024 * kMiB;
constexpr int64_t kSharedMemoryWantedBytes = kGiB;  // Of NCCL among the GPUs of a host.
constexpr rlim_t kOpenFilesWanted = 4096;
constexpr int64_t kCheckpointFreeWantedBytes = 10 * kGiB;
constexpr absl::Duration kExpiryWarning = absl::Hours(14 * 24);

void Add(Findings* findings, std::string check, Severity severity, std::string what,
         std::string mend = "") {
  findings->push_back({std::move(check), severity, std::move(what), std::move(mend)});
}

std::string GiB(int64_t bytes) {
  return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / static_cast<double>(kGiB));
}

// --- GPU ---

void AddDevice(size_t index, const NvidiaDriver::Device& device, Findings* findings) {
  const std::string check = absl::StrCat("gpu ", index);
  if (!device.answers) {
    return Add(findings, check, Severity::kFail, "the driver does not answer for it",
               "look at `nvidia-smi` and the kernel's log; a reset of the GPU may be needed");
  }
  const std::string what = absl::StrCat(device.name, ", ", GiB(device.total_bytes), ", ",
                                        GiB(device.used_bytes), " in use");
  if (device.used_bytes > device.total_bytes / 10) {
    return Add(findings, check, Severity::kWarn, what,
               "another process holds memory of this GPU; the service takes 80% of it all unless "
               "--memory_limit_bytes says less");
  }
  Add(findings, check, Severity::kOk, what);
}

absl::StatusOr<std::string> CublasLtVersion() {
  absl::StatusOr<DynamicLibrary> library = OpenCublasLt();
  if (!library.ok()) return library.status();
  size_t (*get_version)() = nullptr;
  library->Resolve("cublasLtGetVersion", &get_version);
  if (absl::Status status = library->Check(); !status.ok()) return status;
  const int version = static_cast<int>(get_version());
  const int major = version < 100000 ? 1000 : 10000;  // Before and since 12.
  return absl::StrCat(version / major, ".", version % major / 100, ".", version % 100);
}

absl::StatusOr<std::string> NcclVersion() {
  absl::StatusOr<DynamicLibrary> library = OpenNccl();
  if (!library.ok()) return library.status();
  int (*get_version)(int*) = nullptr;
  library->Resolve("ncclGetVersion", &get_version);
  if (absl::Status status = library->Check(); !status.ok()) return status;
  int number = 0;
  if (const int error = get_version(&number); error != 0) {
    return absl::UnavailableError(absl::StrCat("ncclGetVersion: error ", error));
  }
  if (absl::Status status = CheckNcclVersion(number); !status.ok()) return status;
  return NcclVersionText(number);
}

void CheckCudaLibraries(int num_gpus, Findings* findings) {
  const absl::StatusOr<std::string> cublaslt = CublasLtVersion();
  if (cublaslt.ok()) {
    Add(findings, "cublasLt", Severity::kOk, *cublaslt);
  } else {
    Add(findings, "cublasLt", Severity::kFail, std::string(cublaslt.status().message()),
        "they are among the CUDA runtime libraries");
  }
  const absl::StatusOr<std::string> nccl = NcclVersion();
  if (nccl.ok()) return Add(findings, "nccl", Severity::kOk, *nccl);
  if (num_gpus < 2) {
    return Add(findings, "nccl", Severity::kOk, "none to be used, and not needed for one GPU");
  }
  Add(findings, "nccl", Severity::kWarn, std::string(nccl.status().message()),
      "install libnccl2 to split a head over the GPUs; without it that takes Gloo, which is "
      "slower");
}

}  // namespace

int CheckGpu(const std::string& backend, const std::vector<int>& devices, Findings* findings) {
  const absl::StatusOr<NvidiaDriver> driver = ReadNvidiaDriver();
  int num_gpus = 0;
  if (driver.ok()) {
    num_gpus = static_cast<int>(driver->devices.size());
    Add(findings, "driver", Severity::kOk,
        absl::StrCat(driver->version, ", CUDA ", driver->cuda_version));
    for (size_t i = 0; i < driver->devices.size(); ++i) {
      AddDevice(i, driver->devices[i], findings);
    }
    if (num_gpus > 0) CheckCudaLibraries(num_gpus, findings);
  }
  if (backend == "cpu") {
    Add(findings, "backend", Severity::kOk, "cpu");
    return num_gpus;
  }
  // What serve itself asks, so that the two never differ.
  const std::string why_not = WhyNoGpu();
  if (!why_not.empty()) {
    const bool wanted = backend == "cuda" || !devices.empty();
    const bool doubtful = !absl::IsNotFound(driver.status());
    Add(findings, "backend",
        wanted ? Severity::kFail : (doubtful ? Severity::kWarn : Severity::kOk),
        absl::StrCat(wanted ? "" : "heads compute on the CPU: ", why_not),
        wanted || doubtful ? "mend what it says, or say --backend=cpu" : "");
    return num_gpus;
  }
  const int32_t num_ranks = std::max<int32_t>(1, static_cast<int32_t>(devices.size()));
  const absl::StatusOr<Hardware> hardware =
      ChooseHardware(BackendChoice::kCuda, devices, num_ranks);
  if (hardware.ok()) {
    Add(findings, "backend", Severity::kOk, "cuda");
  } else {
    Add(findings, "backend", Severity::kFail, std::string(hardware.status().message()),
        absl::StrCat("name GPUs of this machine: 0 to ", num_gpus - 1));
  }
  return num_gpus;
}

// --- Ports ---

namespace {

// A socket that listens at host:port; an error of the system, or of the resolver.
absl::StatusOr<int> Listen(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                address.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) return absl::NotFoundError(gai_strerror(error));
  const int fd = socket(found->ai_family, SOCK_STREAM, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1) == 0;
  const std::string reason = strerror(errno);
  freeaddrinfo(found);
  if (bound) return fd;
  close(fd);
  return absl::UnavailableError(reason);
}

void CheckUnixSocket(const std::string& flag, const std::string& address, Findings* findings) {
  const std::string check = absl::StrCat("port --", flag);
  const std::string path = address.substr(strlen("unix:"));
  const std::string folder = path.find('/') == std::string::npos
                                 ? "."
                                 : path.substr(0, std::max<size_t>(1, path.rfind('/')));
  if (access(folder.c_str(), W_OK) != 0) {
    return Add(findings, check, Severity::kFail, absl::StrCat(folder, ": ", strerror(errno)),
               "make the folder of the socket, writable for the user that serves");
  }
  const absl::Status free = CheckSocketIsFree(flag.c_str(), address);
  if (free.ok()) return Add(findings, check, Severity::kOk, absl::StrCat(address, " is free"));
  Add(findings, check, Severity::kFail, std::string(free.message()), "do what it says");
}

}  // namespace

PortChecks::~PortChecks() {
  for (const int fd : sockets_) close(fd);
}

void PortChecks::Check(const std::string& flag, const std::string& address, bool may_be_socket,
                       Findings* findings) {
  if (address.empty()) return;
  const std::string check = absl::StrCat("port --", flag);
  const absl::Status good = may_be_socket ? CheckListenAddress(flag.c_str(), address)
                                          : CheckHostPort(flag.c_str(), address);
  if (!good.ok()) {
    return Add(findings, check, Severity::kFail, std::string(good.message()),
               "change the flag as it says");
  }
  if (absl::StartsWith(address, "unix:")) return CheckUnixSocket(flag, address, findings);
  const absl::StatusOr<int> fd = Listen(address);
  if (fd.ok()) {
    sockets_.push_back(*fd);
    return Add(findings, check, Severity::kOk, absl::StrCat(address, " is free"));
  }
  const std::string what = absl::StrCat(address, ": ", fd.status().message());
  if (absl::IsNotFound(fd.status())) {
    return Add(findings, check, Severity::kFail, what,
               "give an address of this machine, or 0.0.0.0");
  }
  Add(findings, check, Severity::kFail, what,
      absl::StrCat("end what listens there (`ss -ltnp`), or choose another --", flag,
                   ", which no other flag has"));
}

// --- Limits of the system ---

namespace {

void CheckSharedMemory(int num_gpus, Findings* findings) {
  struct statvfs shm = {};
  if (statvfs("/dev/shm", &shm) != 0) {
    return Add(findings, "/dev/shm", num_gpus > 1 ? Severity::kFail : Severity::kWarn,
               strerror(errno), "mount a tmpfs there");
  }
  const auto size = static_cast<int64_t>(shm.f_blocks) * static_cast<int64_t>(shm.f_frsize);
  const std::string what = absl::StrCat(GiB(size), " in size");
  if (size >= kSharedMemoryWantedBytes || num_gpus < 2) {
    return Add(findings, "/dev/shm", Severity::kOk, what);
  }
  Add(findings, "/dev/shm", Severity::kWarn, what,
      "NCCL wants 1 GiB or more among several GPUs: in Kubernetes an emptyDir with medium Memory, "
      "in Docker --shm-size=8g");
}

std::string LimitText(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : absl::StrCat(limit);
}

}  // namespace

void CheckLimits(int num_gpus, Findings* findings) {
  CheckSharedMemory(num_gpus, findings);
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool low = limit.rlim_cur != RLIM_INFINITY && num_gpus > 1;
  Add(findings, "memlock", low ? Severity::kWarn : Severity::kOk,
      absl::StrCat(LimitText(limit.rlim_cur), " bytes may be locked"),
      low ? "NCCL over InfiniBand locks memory: `ulimit -l unlimited`, LimitMEMLOCK=infinity in "
            "systemd"
          : "");
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool few = limit.rlim_cur < kOpenFilesWanted;
  Add(findings, "nofile", few ? Severity::kWarn : Severity::kOk,
      absl::StrCat(LimitText(limit.rlim_cur), " files may be open"),
      few ? absl::StrCat("each connection takes one: `ulimit -n ", kOpenFilesWanted,
                         "` or more, LimitNOFILE in systemd")
          : "");
}

void CheckClock(Findings* findings) {
  const absl::Time now = absl::Now();
  const std::string shown = absl::FormatTime(absl::RFC3339_sec, now, absl::UTCTimeZone());
  struct stat binary = {};
  if (stat("/proc/self/exe", &binary) == 0 &&
      now < absl::TimeFromTimespec(binary.st_mtim) - absl::Hours(24)) {
    return Add(findings, "clock", Severity::kFail,
               absl::StrCat("it is ", shown, ", before this program was made"),
               "set the clock: certificates are judged by it");
  }
  timex state = {};  // Asks only.
  const int answer = adjtimex(&state);
  if (answer == TIME_ERROR && (state.status & STA_UNSYNC) != 0) {
    return Add(findings, "clock", Severity::kWarn,
               absl::StrCat(shown, "; the kernel does not know it to be synchronised"),
               "run chrony or systemd-timesyncd on the host; certificates and metrics go by it");
  }
  Add(findings, "clock", Severity::kOk, shown);
}

void CheckMemory(int num_gpus, int64_t memory_limit_bytes, Findings* findings) {
  const absl::StatusOr<int64_t> bytes = ReadSystemMemoryBytes();
  if (!bytes.ok()) {
    return Add(findings, "memory", Severity::kWarn, std::string(bytes.status().message()),
               "give --memory_limit_bytes");
  }
  const std::string what = absl::StrCat(GiB(*bytes), " for this machine or container");
  if (num_gpus == 0 && memory_limit_bytes > *bytes) {
    return Add(findings, "memory", Severity::kFail,
               absl::StrCat(what, ", --memory_limit_bytes is ", GiB(memory_limit_bytes)),
               "raise the container's limit or lower the flag");
  }
  Add(findings, "memory", Severity::kOk, what);
}

void CheckCheckpointDir(const std::string& folder, Findings* findings) {
  if (folder.empty()) return;
  struct statvfs disk = {};
  if (statvfs(folder.c_str(), &disk) != 0 || access(folder.c_str(), W_OK) != 0) {
    return Add(findings, "checkpoint_dir", Severity::kFail,
               absl::StrCat(folder, ": ", strerror(errno)),
               "make the folder, writable for the user that serves");
  }
  const auto free = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
  const bool low = free < kCheckpointFreeWantedBytes;
  Add(findings, "checkpoint_dir", low ? Severity::kWarn : Severity::kOk,
      absl::StrCat(folder, ": ", GiB(free), " free"),
      low ? "a checkpoint takes 12 to 14 bytes a parameter of each head, and the old ones stay "
            "until "
            "the new one is whole"
          : "");
}

// --- Security files ---

namespace {

absl::StatusOr<std::string> ReadAll(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  if (file.is_open() && !contents.str().empty()) return contents.str();
  return absl::NotFoundError(errno != 0 ? strerror(errno) : "the file is empty or not readable");
}

// The text of a file; an empty one after a finding that says why not.
std::string ReadOrFind(const char* flag, const std::string& path, Findings* findings) {
  absl::StatusOr<std::string> text = ReadAll(path);
  if (text.ok()) return *std::move(text);
  Add(findings, flag, Severity::kFail,
      absl::StrCat(path, ": ", std::string(text.status().message())),
      "give a file that the user who serves may read");
  return "";
}

void CheckCertificates(const char* flag, const std::string& path, const std::string& pem,
                       Findings* findings) {
  const absl::StatusOr<std::vector<CertificateFacts>> chain = ReadCertificates(pem);
  if (!chain.ok()) {
    return Add(findings, flag, Severity::kFail,
               absl::StrCat(path, ": ", std::string(chain.status().message())),
               "give PEM: -----BEGIN CERTIFICATE----- …");
  }
  const absl::Time now = absl::Now();
  if (absl::Status status = CheckValidity(*chain, now); !status.ok()) {
    return Add(findings, flag, Severity::kFail,
               absl::StrCat(path, ": ", std::string(status.message())), "renew it");
  }
  const absl::Time expiry = EarliestExpiry(*chain);
  const std::string what = absl::StrCat(
      path, ": ", chain->front().subject,
      chain->front().names.empty()
          ? ""
          : absl::StrCat(" (", absl::StrJoin(chain->front().names, ", "), ")"),
      ", valid until ", absl::FormatTime(absl::RFC3339_sec, expiry, absl::UTCTimeZone()));
  if (expiry - now < kExpiryWarning) {
    return Add(findings, flag, Severity::kWarn, what,
               "renew it soon; the server takes the new file over without a restart");
  }
  Add(findings, flag, Severity::kOk, what);
}

void CheckKey(const SecurityConfig& config, const std::string& cert, const std::string& key,
              Findings* findings) {
  if (absl::Status status = CheckKeyPair(cert, key); !status.ok()) {
    return Add(findings, "tls_key_file", Severity::kFail,
               absl::StrCat(config.tls_key_file, ": ", std::string(status.message())),
               "give the key that the certificate was made for");
  }
  struct stat file = {};
  if (stat(config.tls_key_file.c_str(), &file) == 0 && (file.st_mode & (S_IRWXO)) != 0) {
    return Add(findings, "tls_key_file", Severity::kWarn,
               absl::StrCat(config.tls_key_file, ": every user may read it"),
               "chmod o= it; in Kubernetes defaultMode 0440 with an fsGroup");
  }
  Add(findings, "tls_key_file", Severity::kOk,
      absl::StrCat(config.tls_key_file, " is the certificate's"));
}

void CheckTls(const SecurityConfig& config, const std::string& ca_file, Findings* findings) {
  const std::string cert = ReadOrFind("tls_cert_file", config.tls_cert_file, findings);
  const std::string key = ReadOrFind("tls_key_file", config.tls_key_file, findings);
  if (!cert.empty()) CheckCertificates("tls_cert_file", config.tls_cert_file, cert, findings);
  if (!cert.empty() && !key.empty()) CheckKey(config, cert, key, findings);
  if (!config.tls_client_ca_file.empty()) {
    const std::string ca = ReadOrFind("tls_client_ca_file", config.tls_client_ca_file, findings);
    if (!ca.empty())
      CheckCertificates("tls_client_ca_file", config.tls_client_ca_file, ca, findings);
  }
  if (ca_file.empty() || cert.empty()) return;
  const std::string ca = ReadOrFind("tls_ca_file", ca_file, findings);
  if (ca.empty()) return;
  const absl::Status chain = CheckChain(cert, ca);
  Add(findings, "tls_ca_file", chain.ok() ? Severity::kOk : Severity::kFail,
      chain.ok() ? absl::StrCat("the server's certificate chains to ", ca_file)
                 : absl::StrCat(ca_file, ": ", std::string(chain.message())),
      chain.ok()
          ? ""
          : "add the intermediates to --tls_cert_file, or give clients the right authorities");
}

// What is in the file; nothing without a file, or after a finding that says why not.
template <typename Parsed>
std::optional<Parsed> CheckParsed(const char* flag, const std::string& path, Findings* findings) {
  if (path.empty()) return std::nullopt;
  const std::string text = ReadOrFind(flag, path, findings);
  if (text.empty()) return std::nullopt;
  absl::StatusOr<Parsed> parsed = Parsed::Parse(text);
  if (parsed.ok()) {
    Add(findings, flag, Severity::kOk, absl::StrCat(path, ": ", parsed->size(), " entries"));
    return *std::move(parsed);
  }
  Add(findings, flag, Severity::kFail,
      absl::StrCat(path, ": ", std::string(parsed.status().message())), "mend the file");
  return std::nullopt;
}

// Identities that are listed, but that nobody can come as: mostly a name that is misspelt.
void CheckIdentities(const SecurityConfig& config, const Policy& policy,
                     const std::optional<TokenSet>& tokens, Findings* findings) {
  for (const Identity& identity : policy.Identities()) {
    const bool by_token = identity.kind == Identity::Kind::kToken;
    const bool may_come = by_token ? tokens.has_value() && tokens->HasName(identity.name)
                                   : !config.tls_client_ca_file.empty();
    if (may_come) continue;
    Add(findings, "auth_policy_file", Severity::kWarn,
        absl::StrCat(config.auth_policy_file, ": nobody can come as ",
                     by_token ? "token " : "certificate ", identity.name),
        by_token ? "list that name in --auth_token_file, or mend it in the policy"
                 : "give --tls_client_ca_file, so that clients show certificates");
  }
}

}  // namespace

void CheckSecurityFiles(const SecurityConfig& config, const std::string& listen,
                        const std::string& ca_file, Findings* findings) {
  if (absl::Status status = ValidateSecurityConfig(config, listen); !status.ok()) {
    Add(findings, "security", Severity::kFail, std::string(status.message()),
        "change the flags as it says");
  } else if (!config.tls()) {
    Add(findings, "security", config.insecure ? Severity::kWarn : Severity::kOk,
        absl::StrCat("plaintext at ", listen, ": who reaches it may do everything"),
        config.insecure ? "give --tls_cert_file, or let a NetworkPolicy admit the trainers only"
                        : "");
  }
  if (config.tls()) CheckTls(config, ca_file, findings);
  const std::optional<Policy> policy =
      CheckParsed<Policy>("auth_policy_file", config.auth_policy_file, findings);
  const std::optional<TokenSet> tokens =
      CheckParsed<TokenSet>("auth_token_file", config.auth_token_file, findings);
  const bool tokens_known = tokens.has_value() || config.auth_token_file.empty();
  if (policy.has_value() && tokens_known) CheckIdentities(config, *policy, tokens, findings);
}

}  // namespace lmhead
