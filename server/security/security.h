// The security files of a server as they are now: certificate, key, client CAs, policy, tokens.
//
// A thread looks for changes once a second and takes them over without a restart: by contents, so
// that the swap of a symbolic link (how Kubernetes updates a mounted Secret), a rename and a write
// in place all count. What is broken (a key that is not the certificate's, an expired certificate,
// a policy with an unknown key) is refused with an error in the log, and the last good files stay
// in force. Certificate and key are taken over together only: half an update changes nothing.
//
// Certificates apply to new connections, policy and tokens to new calls and streams.

#ifndef LMHEAD_SERVER_SECURITY_SECURITY_H_
#define LMHEAD_SERVER_SECURITY_SECURITY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/security/policy.h"
#include "server/security/security_config.h"
#include "server/security/tokens.h"

namespace lmhead {

// What a TLS server presents and trusts. Does not change.
struct TlsIdentity {
  std::string cert_pem;
  std::string key_pem;
  std::string client_ca_pem;  // Empty: clients need no certificate.
  absl::Time expiry;          // Of the first certificate of the chain to expire.
};

// What the transport knows of a caller.
struct CallerFacts {
  std::vector<std::string> certificate_names;  // Of a verified client certificate: DNS names, URIs.
  bool has_certificate = false;
  std::optional<std::string> authorization;  // Value of that header.
};

// Who calls, and what they may do.
struct Caller {
  std::string
      name;  // "trainer-0.example.org", "token grafana", "anyone"; for messages and the log.
  Grant grant;
};

// Thread-safe.
class Security {
 public:
  // Reads everything once. INVALID_ARGUMENT naming the flag, the file and what is wrong with it.
  // REQUIRES: config is validated.
  static absl::StatusOr<std::unique_ptr<Security>> Load(const SecurityConfig& config);
  ~Security();
  Security(const Security&) = delete;
  Security& operator=(const Security&) = delete;

  const SecurityConfig& config() const { return config_; }

  // Who the caller is. UNAUTHENTICATED when a token is not known, or when the server demands an
  // identity and there is none; the message tells no token.
  absl::StatusOr<Caller> Identify(const CallerFacts& facts) const;

  // PERMISSION_DENIED unless `caller` has one of `wanted`; the message says who came, what was
  // wanted and which file to edit.
  absl::Status CheckRole(const Caller& caller, std::string_view method, RoleSet wanted) const;

  // PERMISSION_DENIED unless `caller` may speak as `worker`.
  absl::Status CheckWorker(const Caller& caller, std::string_view method,
                           std::string_view worker) const;

  // Null without TLS.
  std::shared_ptr<const TlsIdentity> tls_identity() const;

  // Changes of the files that were refused so far.
  int64_t num_reload_failures() const;

 private:
  // A file as last read: its text, or why it cannot be read.
  struct File {
    std::string text;
    absl::Status status;
    friend bool operator==(const File&, const File&) = default;
  };
  struct Contents {
    File cert, key, client_ca, policy, tokens;
    friend bool operator==(const Contents&, const Contents&) = default;
  };

  explicit Security(const SecurityConfig& config) : config_(config) {}

  static File ReadFile(const char* flag, const std::string& path);
  Contents ReadAll() const;
  // Takes over what differs from `contents_`; each group by itself, whatever is wrong with others.
  absl::Status Apply(const Contents& contents);
  absl::Status ApplyTls(const Contents& contents);
  absl::Status ApplyPolicy(const Contents& contents);
  absl::Status ApplyTokens(const Contents& contents);
  void WatchLoop();
  void Refresh();
  void WarnOfExpiry(absl::Time now);
  std::string PolicyHint() const;

  const SecurityConfig config_;
  Contents contents_;           // In force. Of the watching thread, after Load.
  std::string last_complaint_;  // Of the watching thread: each is logged once.
  absl::Time warned_at_ = absl::InfinitePast();

  mutable absl::Mutex mu_;
  std::shared_ptr<const TlsIdentity> tls_identity_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(mu_);    // Null: no policy file.
  std::shared_ptr<const TokenSet> tokens_ ABSL_GUARDED_BY(mu_);  // Null: no token file.
  int64_t num_reload_failures_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread watcher_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_SECURITY_SECURITY_H_
