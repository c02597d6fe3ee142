#include "server/cli/security_flags.h"

#include <string>

#include "absl/flags/flag.h"
#include "server/cli/common_flags.h"

ABSL_FLAG(std::string, tls_client_ca_file, "",
          "PEM file of the certificate authorities of clients. Given: only clients with a "
          "certificate of theirs may connect (mutual TLS).");
ABSL_FLAG(
    std::string, auth_policy_file, "",
    "JSON file that gives identities (names of client certificates, names of tokens) their "
    "roles: trunk, admin, monitor, shard; who is not in it may do nothing. Empty: who may connect "
    "may do everything.");
ABSL_FLAG(std::string, auth_token_file, "",
          "JSON file of bearer tokens, each a name and the SHA-256 of the token. Needs TLS.");
ABSL_FLAG(bool, insecure, false,
          "Allow plaintext at a --listen that other machines reach; without TLS it is refused.");

namespace lmhead {

SecurityConfig SecurityConfigFromFlags() {
  return {.tls_cert_file = absl::GetFlag(FLAGS_tls_cert_file),
          .tls_key_file = absl::GetFlag(FLAGS_tls_key_file),
          .tls_client_ca_file = absl::GetFlag(FLAGS_tls_client_ca_file),
          .auth_policy_file = absl::GetFlag(FLAGS_auth_policy_file),
          .auth_token_file = absl::GetFlag(FLAGS_auth_token_file),
          .insecure = absl::GetFlag(FLAGS_insecure)};
}

}  // namespace lmhead
