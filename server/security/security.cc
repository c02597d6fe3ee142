#include "server/security/security.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/security/certificate.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr absl::Duration kWatchPeriod = absl::Seconds(1);

// When the log begins to warn of a certificate's end, and how often it repeats.
constexpr absl::Duration kExpiryWarning = absl::Hours(14 * 24);
constexpr absl::Duration kWarningPeriod = absl::Hours(6);

constexpr char kBearer[] = "Bearer ";

absl::Status InFile(const char* flag, const std::string& path, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Security>> Security::Load(const SecurityConfig& config) {
  std::unique_ptr<Security> security(new Security(config));
  if (absl::Status status = security->Apply(security->ReadAll()); !status.ok()) return status;
  if (!config.tls()) return security;  // Nothing to watch.
  security->WarnOfExpiry(absl::Now());
  security->watcher_ = std::thread([raw = security.get()] { raw->WatchLoop(); });
  return security;
}

Security::~Security() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (watcher_.joinable()) watcher_.join();
}

// --- The files ---

Security::File Security::ReadFile(const char* flag, const std::string& path) {
  if (path.empty()) return {};
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (file.is_open() && !text.str().empty()) return {.text = text.str()};
  return {.status = absl::InvalidArgumentError(absl::StrCat(
              "--", flag, "=", path, ": ",
              errno != 0 ? std::strerror(errno) : "the file is empty or not readable"))};
}

Security::Contents Security::ReadAll() const {
  return {.cert = ReadFile("tls_cert_file", config_.tls_cert_file),
          .key = ReadFile("tls_key_file", config_.tls_key_file),
          .client_ca = ReadFile("tls_client_ca_file", config_.tls_client_ca_file),
          .policy = ReadFile("auth_policy_file", config_.auth_policy_file),
          .tokens = ReadFile("auth_token_file", config_.auth_token_file)};
}

absl::Status Security::Apply(const Contents& contents) {
  std::vector<std::string> complaints;
  for (const absl::Status& status :
       {ApplyTls(contents), ApplyTokens(contents), ApplyPolicy(contents)}) {
    if (!status.ok()) complaints.emplace_back(status.message());
  }
  if (complaints.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(complaints, "; "));
}

absl::Status Security::ApplyTls(const Contents& contents) {
  if (!config_.tls() || (contents.cert == contents_.cert && contents.key == contents_.key &&
                         contents.client_ca == contents_.client_ca)) {
    return absl::OkStatus();
  }
  for (const File* file : {&contents.cert, &contents.key, &contents.client_ca}) {
    if (!file->status.ok()) return file->status;
  }
  const auto of_cert = [&](const absl::Status& status) {
    return InFile("tls_cert_file", config_.tls_cert_file, status);
  };
  absl::StatusOr<std::vector<CertificateFacts>> chain = ReadCertificates(contents.cert.text);
  if (!chain.ok()) return of_cert(chain.status());
  if (absl::Status status = CheckValidity(*chain, absl::Now()); !status.ok()) {
    return of_cert(status);
  }
  if (absl::Status status = CheckKeyPair(contents.cert.text, contents.key.text); !status.ok()) {
    return InFile("tls_key_file", config_.tls_key_file, status);
  }
  if (!config_.tls_client_ca_file.empty()) {
    absl::StatusOr<std::vector<CertificateFacts>> authorities =
        ReadCertificates(contents.client_ca.text);
    if (!authorities.ok()) {
      return InFile("tls_client_ca_file", config_.tls_client_ca_file, authorities.status());
    }
  }
  const absl::Time expiry = EarliestExpiry(*chain);
  spdlog::info("TLS: presenting {} ({}), valid until {}{}", chain->front().subject,
               absl::StrJoin(chain->front().names, ", "),
               absl::FormatTime(absl::RFC3339_sec, expiry, absl::UTCTimeZone()),
               config_.tls_client_ca_file.empty() ? "" : "; clients need a certificate");
  contents_.cert = contents.cert;
  contents_.key = contents.key;
  contents_.client_ca = contents.client_ca;
  absl::MutexLock lock(&mu_);
  tls_identity_ = std::make_shared<const TlsIdentity>(
      TlsIdentity{contents.cert.text, contents.key.text, contents.client_ca.text, expiry});
  return absl::OkStatus();
}

absl::Status Security::ApplyPolicy(const Contents& contents) {
  if (config_.auth_policy_file.empty() || contents.policy == contents_.policy) {
    return absl::OkStatus();
  }
  if (!contents.policy.status.ok()) return contents.policy.status;
  absl::StatusOr<Policy> policy = Policy::Parse(contents.policy.text);
  if (!policy.ok()) {
    return InFile("auth_policy_file", config_.auth_policy_file, policy.status());
  }
  spdlog::info("policy {}: {} identities", config_.auth_policy_file, policy->size());
  contents_.policy = contents.policy;
  absl::MutexLock lock(&mu_);
  policy_ = std::make_shared<const Policy>(*std::move(policy));
  return absl::OkStatus();
}

absl::Status Security::ApplyTokens(const Contents& contents) {
  if (config_.auth_token_file.empty() || contents.tokens == contents_.tokens) {
    return absl::OkStatus();
  }
  if (!contents.tokens.status.ok()) return contents.tokens.status;
  absl::StatusOr<TokenSet> tokens = TokenSet::Parse(contents.tokens.text);
  if (!tokens.ok()) return InFile("auth_token_file", config_.auth_token_file, tokens.status());
  spdlog::info("tokens {}: {} names", config_.auth_token_file, tokens->size());
  contents_.tokens = contents.tokens;
  absl::MutexLock lock(&mu_);
  tokens_ = std::make_shared<const TokenSet>(*std::move(tokens));
  return absl::OkStatus();
}

void Security::WatchLoop() {
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), kWatchPeriod)) return;
    }
    Refresh();
    WarnOfExpiry(absl::Now());
  }
}

void Security::Refresh() {
  // Files of a swapped folder may come from both sides of the swap: what is read twice alike is
  // whole, what is not is read again a second later.
  const Contents contents = ReadAll();
  if (contents == contents_) {
    last_complaint_.clear();
    return;
  }
  if (!(ReadAll() == contents)) return;
  const absl::Status status = Apply(contents);
  if (status.ok()) {
    last_complaint_.clear();
    return;
  }
  if (status.message() == last_complaint_) return;
  last_complaint_ = std::string(status.message());
  spdlog::error("security files changed, but are not taken over (the last good ones stay): {}",
                last_complaint_);
  absl::MutexLock lock(&mu_);
  ++num_reload_failures_;
}

void Security::WarnOfExpiry(absl::Time now) {
  const std::shared_ptr<const TlsIdentity> identity = tls_identity();
  if (identity == nullptr || identity->expiry - now > kExpiryWarning ||
      now - warned_at_ < kWarningPeriod) {
    return;
  }
  warned_at_ = now;
  spdlog::warn("the certificate of {} {} at {}: renew it; it is taken over without a restart",
               config_.tls_cert_file, identity->expiry < now ? "has expired" : "expires",
               absl::FormatTime(absl::RFC3339_sec, identity->expiry, absl::UTCTimeZone()));
}

// --- Who may ---

absl::StatusOr<Caller> Security::Identify(const CallerFacts& facts) const {
  std::shared_ptr<const Policy> policy;
  std::shared_ptr<const TokenSet> tokens;
  {
    absl::MutexLock lock(&mu_);
    policy = policy_;
    tokens = tokens_;
  }
  std::vector<Identity> identities;
  std::string name;
  for (const std::string& certificate_name : facts.certificate_names) {
    identities.push_back({Identity::Kind::kCertificate, certificate_name});
    absl::StrAppend(&name, name.empty() ? "" : ", ", certificate_name);
  }
  if (facts.has_certificate && facts.certificate_names.empty()) {
    name = "a certificate without DNS or URI names";
  }
  if (tokens != nullptr && facts.authorization.has_value()) {
    const std::string& header = *facts.authorization;
    const std::optional<std::string> token =
        absl::StartsWithIgnoreCase(header, kBearer)
            ? tokens->NameOf(std::string_view(header).substr(sizeof(kBearer) - 1))
            : std::nullopt;
    if (!token.has_value()) {
      return absl::UnauthenticatedError(absl::StrCat(
          "the token that came is none of the ", tokens->size(), " of ", config_.auth_token_file,
          " (--auth_token_file)", name.empty() ? "" : absl::StrCat("; the caller is ", name)));
    }
    identities.push_back({Identity::Kind::kToken, *token});
    absl::StrAppend(&name, name.empty() ? "" : ", ", "token ", *token);
  }
  const bool demanded = tokens != nullptr || !config_.tls_client_ca_file.empty();
  if (name.empty() && demanded) {
    return absl::UnauthenticatedError(absl::StrCat(
        "neither a client certificate nor a token came; send `authorization: Bearer TOKEN` with a "
        "token of ",
        config_.auth_token_file, " (--auth_token_file)"));
  }
  return Caller{.name = name.empty() ? "anyone" : name,
                .grant = policy == nullptr ? FullGrant() : policy->GrantOf(identities)};
}

std::string Security::PolicyHint() const {
  return absl::StrCat("edit ", config_.auth_policy_file, " (--auth_policy_file)");
}

absl::Status Security::CheckRole(const Caller& caller, std::string_view method,
                                 RoleSet wanted) const {
  if ((caller.grant.roles & wanted) != 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      std::string(method), ": ", caller.name, " has role ", RoleNames(caller.grant.roles, "and"),
      ", wanted ", RoleNames(wanted, "or"), "; to change that ", PolicyHint()));
}

absl::Status Security::CheckWorker(const Caller& caller, std::string_view method,
                                   std::string_view worker) const {
  if (caller.grant.MaySpeakAs(worker)) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      std::string(method), ": ", caller.name, " may not speak as worker ", std::string(worker),
      ", only as ",
      caller.grant.workers.empty() ? "nobody" : absl::StrJoin(caller.grant.workers, ", "),
      "; to change that ", PolicyHint()));
}

std::shared_ptr<const TlsIdentity> Security::tls_identity() const {
  absl::MutexLock lock(&mu_);
  return tls_identity_;
}

int64_t Security::num_reload_failures() const {
  absl::MutexLock lock(&mu_);
  return num_reload_failures_;
}

}  // namespace lmhead
