#include "server/security/security_config.h"

#include <arpa/inet.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lmhead {

bool IsLocalAddress(const std::string& listen) {
  if (absl::StartsWith(listen, "unix:")) return true;
  std::string host = listen.substr(0, listen.rfind(':'));
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  if (host == "localhost" || host == "::1") return true;
  in_addr address = {};
  // The whole of 127.0.0.0/8 is the machine itself.
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

absl::Status ValidateSecurityConfig(const SecurityConfig& config, const std::string& listen,
                                    const char* flag) {
  if (config.tls_cert_file.empty() != config.tls_key_file.empty()) {
    const bool cert = config.tls_key_file.empty();
    return absl::InvalidArgumentError(
        absl::StrCat(cert ? "--tls_cert_file" : "--tls_key_file", " is given without ",
                     cert ? "--tls_key_file" : "--tls_cert_file", "; TLS needs both"));
  }
  if (!config.tls()) {
    for (const auto& [flag, value] : {std::pair("--tls_client_ca_file", &config.tls_client_ca_file),
                                      std::pair("--auth_token_file", &config.auth_token_file),
                                      std::pair("--auth_policy_file", &config.auth_policy_file)}) {
      if (value->empty()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " needs TLS: give --tls_cert_file and --tls_key_file, too"));
    }
    if (!config.insecure && !IsLocalAddress(listen)) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, "=", listen,
                       " is plaintext on an address that other machines reach: give "
                       "--tls_cert_file and --tls_key_file, or --insecure when the network keeps "
                       "strangers out"));
    }
    return absl::OkStatus();
  }
  if (config.insecure) {
    return absl::InvalidArgumentError("--insecure and --tls_cert_file exclude each other");
  }
  if (!config.auth_policy_file.empty() && config.tls_client_ca_file.empty() &&
      config.auth_token_file.empty()) {
    return absl::InvalidArgumentError(
        "--auth_policy_file needs identities to judge: give --tls_client_ca_file (certificates) or "
        "--auth_token_file (tokens), too");
  }
  return absl::OkStatus();
}

}  // namespace lmhead
