#include "server/security/certificate.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <memory>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

template <auto free>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};
using Bio = std::unique_ptr<BIO, Deleter<BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Deleter<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY_free>>;
using Store = std::unique_ptr<X509_STORE, Deleter<X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Deleter<X509_STORE_CTX_free>>;

Bio Reader(std::string_view text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// An encrypted key must not ask at the terminal.
int NoPassword(char*, int, int, void*) { return 0; }

std::string OpenSslError() {
  char text[256] = "no reason given";
  if (const unsigned long error = ERR_peek_last_error(); error != 0) {
    ERR_error_string_n(error, text, sizeof(text));
  }
  ERR_clear_error();
  return text;
}

absl::StatusOr<std::vector<Certificate>> ParseCertificates(std::string_view pem) {
  const Bio bio = Reader(pem);
  std::vector<Certificate> certificates;
  ERR_clear_error();
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr)) {
    certificates.emplace_back(certificate);
  }
  const unsigned long error = ERR_peek_last_error();
  const bool at_end =
      ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  const std::string reason = OpenSslError();
  if (!at_end) {
    return absl::InvalidArgumentError(
        absl::StrCat("certificate ", certificates.size() + 1, " is broken: ", reason));
  }
  if (certificates.empty()) return absl::InvalidArgumentError("no PEM certificate is in it");
  return certificates;
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm fields = {};
  if (ASN1_TIME_to_tm(time, &fields) != 1) return absl::InfinitePast();
  return absl::FromTM(fields, absl::UTCTimeZone());
}

std::string Subject(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(bio.get(), X509_get_subject_name(certificate), 0, XN_FLAG_ONELINE);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

std::vector<std::string> AlternativeNames(X509* certificate) {
  std::vector<std::string> names;
  auto* list = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; list != nullptr && i < sk_GENERAL_NAME_num(list); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(list, i);
    if (name->type != GEN_DNS && name->type != GEN_URI) continue;
    const ASN1_STRING* text =
        name->type == GEN_DNS ? name->d.dNSName : name->d.uniformResourceIdentifier;
    const std::string value(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                            static_cast<size_t>(ASN1_STRING_length(text)));
    names.push_back(absl::StrCat(name->type == GEN_DNS ? "DNS:" : "URI:", value));
  }
  GENERAL_NAMES_free(list);
  return names;
}

}  // namespace

absl::StatusOr<std::vector<CertificateFacts>> ReadCertificates(std::string_view pem) {
  absl::StatusOr<std::vector<Certificate>> certificates = ParseCertificates(pem);
  if (!certificates.ok()) return certificates.status();
  std::vector<CertificateFacts> facts;
  for (const Certificate& certificate : *certificates) {
    facts.push_back({.subject = Subject(certificate.get()),
                     .names = AlternativeNames(certificate.get()),
                     .not_before = ToTime(X509_get0_notBefore(certificate.get())),
                     .not_after = ToTime(X509_get0_notAfter(certificate.get()))});
  }
  return facts;
}

absl::Status CheckKeyPair(std::string_view cert_pem, std::string_view key_pem) {
  absl::StatusOr<std::vector<Certificate>> certificates = ParseCertificates(cert_pem);
  if (!certificates.ok()) return certificates.status();
  const Bio bio = Reader(key_pem);
  ERR_clear_error();
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  const std::string reason = OpenSslError();
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no PEM private key without a password is in it: ", reason));
  }
  const bool match = X509_check_private_key(certificates->front().get(), key.get()) == 1;
  ERR_clear_error();
  if (match) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the key is not that of the certificate ",
                                                 Subject(certificates->front().get())));
}

absl::Status CheckChain(std::string_view cert_pem, std::string_view ca_pem) {
  absl::StatusOr<std::vector<Certificate>> chain = ParseCertificates(cert_pem);
  if (!chain.ok()) return chain.status();
  absl::StatusOr<std::vector<Certificate>> authorities = ParseCertificates(ca_pem);
  if (!authorities.ok()) return authorities.status();
  const Store store(X509_STORE_new());
  for (const Certificate& authority : *authorities) {
    X509_STORE_add_cert(store.get(), authority.get());
  }
  STACK_OF(X509)* others = sk_X509_new_null();
  for (size_t i = 1; i < chain->size(); ++i) sk_X509_push(others, (*chain)[i].get());
  const StoreContext context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), chain->front().get(), others);
  const bool verified = X509_verify_cert(context.get()) == 1;
  const int error = X509_STORE_CTX_get_error(context.get());
  sk_X509_free(others);
  ERR_clear_error();
  if (verified) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("certificate ", Subject(chain->front().get()),
                                                 ": ", X509_verify_cert_error_string(error)));
}

absl::Time EarliestExpiry(const std::vector<CertificateFacts>& chain) {
  absl::Time earliest = absl::InfiniteFuture();
  for (const CertificateFacts& facts : chain) earliest = std::min(earliest, facts.not_after);
  return earliest;
}

absl::Status CheckValidity(const std::vector<CertificateFacts>& chain, absl::Time now) {
  for (const CertificateFacts& facts : chain) {
    if (now >= facts.not_before && now <= facts.not_after) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "certificate ", facts.subject, now > facts.not_after ? " has expired" : " is not valid yet",
        ": it is valid from ", absl::FormatTime(facts.not_before, absl::UTCTimeZone()), " to ",
        absl::FormatTime(facts.not_after, absl::UTCTimeZone()), ", now is ",
        absl::FormatTime(now, absl::UTCTimeZone())));
  }
  return absl::OkStatus();
}

}  // namespace lmhead
