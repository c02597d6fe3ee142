#include "server/security/server_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace lmhead {
namespace {

// One port: gRPC asks at every handshake whether there is anything new since it asked last.
class Port {
 public:
  explicit Port(const Security* security) : security_(security) {}

  static grpc_ssl_certificate_config_reload_status Fetch(
      void* port, grpc_ssl_server_certificate_config** config) {
    return static_cast<Port*>(port)->FetchIfNew(config);
  }

 private:
  grpc_ssl_certificate_config_reload_status FetchIfNew(
      grpc_ssl_server_certificate_config** config) {
    std::shared_ptr<const TlsIdentity> identity = security_->tls_identity();
    absl::MutexLock lock(&mu_);
    if (identity == given_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {identity->key_pem.c_str(), identity->cert_pem.c_str()};
    // gRPC insists on some, also when it asks no client for a certificate.
    const std::string& roots =
        identity->client_ca_pem.empty() ? identity->cert_pem : identity->client_ca_pem;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    given_ = std::move(identity);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const Security* const security_;
  absl::Mutex mu_;
  std::shared_ptr<const TlsIdentity> given_ ABSL_GUARDED_BY(mu_);
};

// gRPC's C++ classes read the files once, or follow them without keeping the last good pair. Its C
// interface asks at every handshake, and keeps what it has when there is nothing new.
class ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingCredentials(const Security* security) : security_(security) {}

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    Port* port = nullptr;
    {
      absl::MutexLock lock(&mu_);
      port = ports_.emplace_back(std::make_unique<Port>(security_)).get();
    }
    const bool mutual = !security_->config().tls_client_ca_file.empty();
    grpc_server_credentials* credentials = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            mutual ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                   : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            &Port::Fetch, port));
    const int number = grpc_server_add_http2_port(server, address.c_str(), credentials);
    grpc_server_credentials_release(credentials);
    return number;
  }

  const Security* const security_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Port>> ports_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const Security* security) {
  if (!security->config().tls()) return grpc::InsecureServerCredentials();
  return std::make_shared<ReloadingCredentials>(security);
}

}  // namespace lmhead
