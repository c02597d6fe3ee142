#include "client/cpp/channel_credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/wire/process.h"

namespace lmhead {
namespace {

constexpr unsigned int kRefreshSeconds = 5;

absl::StatusOr<std::string> ReadFile(const char* what, const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  if (file.is_open() && !contents.str().empty()) return contents.str();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " ", path, ": ",
                   errno != 0 ? std::strerror(errno) : "the file is empty or not readable"));
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile("token_file", path);
  if (!text.ok()) return text.status();
  const std::string token(absl::StripAsciiWhitespace(*text));
  for (const char c : token) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) {
      return absl::InvalidArgumentError(
          absl::StrCat("token_file ", path, ": wanted one token of printable characters"));
    }
  }
  if (token.empty())
    return absl::InvalidArgumentError(absl::StrCat("token_file ", path, ": no token"));
  return token;
}

// Sends the token of a file, which it reads again when the file has changed.
class TokenFile final : public grpc::MetadataCredentialsPlugin {
 public:
  TokenFile(std::string path, std::string token)
      : path_(std::move(path)), token_(std::move(token)), stamp_(StampOf(path_)) {}

  // Looks at one small file: no thread of its own is needed.
  bool IsBlocking() const override { return false; }
  const char* GetType() const override { return "lmhead token file"; }
  grpc::string DebugString() override { return absl::StrCat("token of ", path_); }

  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    const absl::MutexLock lock(&mu_);
    if (const Stamp stamp = StampOf(path_); stamp != stamp_) {
      // A file that is just being written is looked at again by the next call.
      if (absl::StatusOr<std::string> token = ReadToken(path_); token.ok()) {
        token_ = *std::move(token);
        stamp_ = stamp;
      }
    }
    metadata->emplace("authorization", absl::StrCat("Bearer ", token_));
    return grpc::Status::OK;
  }

 private:
  struct Stamp {
    dev_t device = 0;
    ino_t inode = 0;
    off_t size = 0;
    int64_t seconds = 0;
    int64_t nanoseconds = 0;
    friend bool operator==(const Stamp&, const Stamp&) = default;
  };

  static Stamp StampOf(const std::string& path) {
    struct stat status = {};
    if (stat(path.c_str(), &status) != 0) return {};
    return {status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
            status.st_mtim.tv_nsec};
  }

  const std::string path_;
  absl::Mutex mu_;
  std::string token_ ABSL_GUARDED_BY(mu_);
  Stamp stamp_ ABSL_GUARDED_BY(mu_);
};

absl::Status CheckFields(const ClientCredentials& given) {
  if (given.tls_cert_file.empty() != given.tls_key_file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        given.tls_key_file.empty() ? "tls_cert_file" : "tls_key_file", " is given without ",
        given.tls_key_file.empty() ? "tls_key_file" : "tls_cert_file"));
  }
  if (!given.tls_ca_file.empty()) return absl::OkStatus();
  const char* field = !given.tls_cert_file.empty()     ? "tls_cert_file"
                      : !given.tls_server_name.empty() ? "tls_server_name"
                      : !given.token_file.empty()      ? "token_file"
                                                       : nullptr;
  if (field == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field,
      " is for TLS only, which tls_ca_file switches on: name the file of the authorities "
      "that the service's certificate is of"));
}

std::shared_ptr<grpc::ChannelCredentials> MakeTls(const ClientCredentials& given) {
  namespace tls = grpc::experimental;
  std::shared_ptr<tls::CertificateProviderInterface> files;
  const bool mutual = !given.tls_cert_file.empty();
  if (mutual) {
    files = std::make_shared<tls::FileWatcherCertificateProvider>(
        given.tls_key_file, given.tls_cert_file, given.tls_ca_file, kRefreshSeconds);
  } else {
    files =
        std::make_shared<tls::FileWatcherCertificateProvider>(given.tls_ca_file, kRefreshSeconds);
  }
  tls::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(files);
  options.watch_root_certs();
  if (mutual) options.watch_identity_key_cert_pairs();
  return tls::TlsCredentials(options);
}

}  // namespace

absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const ClientCredentials& given) {
  KeepGrpcInitialized();
  if (absl::Status status = CheckFields(given); !status.ok()) return status;
  if (given.tls_ca_file.empty()) {
    return ChannelSecurity{.credentials = grpc::InsecureChannelCredentials()};
  }
  // gRPC would only log what it cannot read.
  for (const auto& [what, path] : {std::pair("tls_ca_file", &given.tls_ca_file),
                                   std::pair("tls_cert_file", &given.tls_cert_file),
                                   std::pair("tls_key_file", &given.tls_key_file)}) {
    if (path->empty()) continue;
    if (absl::StatusOr<std::string> text = ReadFile(what, *path); !text.ok()) return text.status();
  }
  ChannelSecurity security = {
      .credentials = MakeTls(given), .server_name = given.tls_server_name, .tls = true};
  if (!given.token_file.empty()) {
    absl::StatusOr<std::string> token = ReadToken(given.token_file);
    if (!token.ok()) return token.status();
    security.credentials = grpc::CompositeChannelCredentials(
        security.credentials, grpc::MetadataCredentialsFromPlugin(std::make_unique<TokenFile>(
                                  given.token_file, *std::move(token))));
  }
  return security;
}

}  // namespace lmhead
