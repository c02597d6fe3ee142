#include "server/config/listen_address.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lmhead {
namespace {

constexpr absl::string_view kUnix = "unix:";
constexpr int kPortMax = 65535;

bool IsUnixSocket(const std::string& address) { return address.rfind(kUnix.data(), 0) == 0; }

absl::Status Wrong(const char* flag, const std::string& address, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": got '", address, "', ", why));
}

bool IsPort(const std::string& text) {
  int port = -1;
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos &&
         absl::SimpleAtoi(text, &port) && port <= kPortMax;
}

}  // namespace

absl::Status CheckHostPort(const char* flag, const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return Wrong(flag, address, "which has no port, wanted host:port");
  }
  if (!IsUnixSocket(address) && IsPort(address.substr(colon + 1))) return absl::OkStatus();
  return Wrong(flag, address, absl::StrCat("wanted host:port with a port of 0 to ", kPortMax));
}

absl::Status CheckListenAddress(const char* flag, const std::string& address) {
  if (!IsUnixSocket(address)) return CheckHostPort(flag, address);
  const size_t length = address.size() - kUnix.size();
  if (length > 0 && length < sizeof(sockaddr_un::sun_path)) return absl::OkStatus();
  return Wrong(flag, address,
               absl::StrCat("wanted unix:/path with 1 to ", sizeof(sockaddr_un::sun_path) - 1,
                            " characters after unix:"));
}

absl::Status CheckSocketIsFree(const char* flag, const std::string& address) {
  if (!IsUnixSocket(address)) return absl::OkStatus();
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  const std::string path = address.substr(kUnix.size());
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool answered = connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  if (!answered) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "cannot listen on ", address, ": another process does; end it, or choose another --", flag));
}

}  // namespace lmhead
