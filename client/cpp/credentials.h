// What a client shows a service, and checks it by.

#ifndef LMHEAD_CLIENT_CPP_CREDENTIALS_H_
#define LMHEAD_CLIENT_CPP_CREDENTIALS_H_

#include <string>

namespace lmhead {

// All empty: plaintext. The files are read again when they change: new connections take the new
// certificates, new calls the new token.
struct ClientCredentials {
  std::string tls_ca_file;      // PEM; set: TLS, and the service must have a certificate of these.
  std::string tls_cert_file;    // PEM, with intermediates; for services that demand a certificate.
  std::string tls_key_file;     // PEM; set exactly when tls_cert_file is.
  std::string tls_server_name;  // Name that its certificate must have; empty: the address's host.
  std::string token_file;       // Sent as `authorization: Bearer`; needs TLS.
};

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_CREDENTIALS_H_
