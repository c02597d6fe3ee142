// What PEM files of certificates and keys say: for the server before it presents them, and for
// `lmhead doctor`.

#ifndef LMHEAD_SERVER_SECURITY_CERTIFICATE_H_
#define LMHEAD_SERVER_SECURITY_CERTIFICATE_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lmhead {

struct CertificateFacts {
  std::string subject;             // "CN = head-0, O = …".
  std::vector<std::string> names;  // Subject alternative names: "DNS:head-0", "URI:spiffe://…".
  absl::Time not_before;
  absl::Time not_after;
};

// Every certificate of a PEM text, in order. INVALID_ARGUMENT when there is none or one is broken.
absl::StatusOr<std::vector<CertificateFacts>> ReadCertificates(std::string_view pem);

// OK when `key_pem` is the private key of the first certificate. INVALID_ARGUMENT otherwise.
absl::Status CheckKeyPair(std::string_view cert_pem, std::string_view key_pem);

// OK when the first certificate of `cert_pem` chains to one of `ca_pem` by the others of
// `cert_pem`, at this moment. INVALID_ARGUMENT with OpenSSL's reason.
absl::Status CheckChain(std::string_view cert_pem, std::string_view ca_pem);

// When the first certificate of a chain to expire does.
absl::Time EarliestExpiry(const std::vector<CertificateFacts>& chain);

// OK when every certificate of the chain is valid at `now`. INVALID_ARGUMENT with its dates.
absl::Status CheckValidity(const std::vector<CertificateFacts>& chain, absl::Time now);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_CERTIFICATE_H_
