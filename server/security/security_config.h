// Who may speak to a server: the security flags of `lmhead serve` as one value.

#ifndef LMHEAD_SERVER_SECURITY_SECURITY_CONFIG_H_
#define LMHEAD_SERVER_SECURITY_SECURITY_CONFIG_H_

#include <string>

#include "absl/status/status.h"

namespace lmhead {

// Fields are the flags of the same names. All empty: plaintext, and every caller may do everything.
struct SecurityConfig {
  std::string tls_cert_file;       // PEM, the server's own certificate first.
  std::string tls_key_file;        // PEM, its private key.
  std::string tls_client_ca_file;  // PEM; set: a client without a certificate of these is refused.
  std::string auth_policy_file;    // Identities and their roles (policy.h).
  std::string auth_token_file;     // Names and digests of bearer tokens (tokens.h).
  bool insecure = false;           // Allow plaintext on an address that other machines reach.

  bool tls() const { return !tls_cert_file.empty(); }
};

// Whether only this machine reaches an address to listen on: unix:, localhost, 127.0.0.0/8, ::1.
bool IsLocalAddress(const std::string& listen);

// OK when the fields fit each other and the address. INVALID_ARGUMENT naming the flag to change.
absl::Status ValidateSecurityConfig(const SecurityConfig& config, const std::string& listen,
                                    const char* flag = "--listen");

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_SECURITY_CONFIG_H_
