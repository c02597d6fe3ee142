#include "tests/util/certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

namespace lmhead {
namespace {

void Require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "OpenSSL failed: %s\n", what);
  std::abort();
}

template <typename Write>
std::string ToPem(Write write) {
  BIO* bio = BIO_new(BIO_s_mem());
  Require(write(bio) == 1, "PEM");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string pem(data, static_cast<size_t>(size));
  BIO_free(bio);
  return pem;
}

EVP_PKEY* MakeKey() {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  Require(key != nullptr, "key");
  return key;
}

void AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  Require(extension != nullptr, value.c_str());
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* MakeCertificate(const std::string& common_name, EVP_PKEY* key, absl::Time not_before,
                      absl::Time not_after) {
  static int serial = 0;
  X509* certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), ++serial);
  ASN1_TIME_set(X509_getm_notBefore(certificate), absl::ToTimeT(not_before));
  ASN1_TIME_set(X509_getm_notAfter(certificate), absl::ToTimeT(not_after));
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1,
                             0);
  return certificate;
}

}  // namespace

struct TestAuthority::State {
  EVP_PKEY* key = nullptr;
  X509* certificate = nullptr;
};

TestAuthority::TestAuthority(const std::string& name) : state_(std::make_unique<State>()) {
  const absl::Time now = absl::Now();
  state_->key = MakeKey();
  state_->certificate =
      MakeCertificate(name, state_->key, now - absl::Hours(48), now + absl::Hours(24 * 365));
  X509* ca = state_->certificate;
  X509_set_issuer_name(ca, X509_get_subject_name(ca));
  AddExtension(ca, ca, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(ca, ca, NID_key_usage, "critical,keyCertSign,cRLSign");
  Require(X509_sign(ca, state_->key, EVP_sha256()) > 0, "sign");
  cert_pem_ = ToPem([&](BIO* bio) { return PEM_write_bio_X509(bio, ca); });
}

TestAuthority::~TestAuthority() {
  X509_free(state_->certificate);
  EVP_PKEY_free(state_->key);
}

Leaf TestAuthority::Issue(const std::vector<std::string>& names) const {
  const absl::Time now = absl::Now();
  return Issue(names, now - absl::Hours(1), now + absl::Hours(24 * 90));
}

Leaf TestAuthority::Issue(const std::vector<std::string>& names, absl::Time not_before,
                          absl::Time not_after) const {
  EVP_PKEY* key = MakeKey();
  X509* certificate = MakeCertificate("leaf", key, not_before, not_after);
  X509_set_issuer_name(certificate, X509_get_subject_name(state_->certificate));
  if (!names.empty()) {
    AddExtension(certificate, state_->certificate, NID_subject_alt_name, absl::StrJoin(names, ","));
  }
  Require(X509_sign(certificate, state_->key, EVP_sha256()) > 0, "sign");
  Leaf leaf = {ToPem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); }),
               ToPem([&](BIO* bio) {
                 return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
               })};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return leaf;
}

SecretFolder::SecretFolder(const Files& files) : files_(files) {
  Publish();
  for (const auto& [name, contents] : files_) {
    std::filesystem::create_symlink("..data/" + name, Path(name));
  }
}

void SecretFolder::Swap(const Files& changed) {
  for (const auto& [name, contents] : changed) files_[name] = contents;
  Publish();
}

void SecretFolder::Publish() {
  const std::string data = absl::StrCat("..", ++generation_);
  std::filesystem::create_directory(Path(data));
  for (const auto& [name, contents] : files_)
    std::ofstream(Path(absl::StrCat(data, "/", name))) << contents;
  std::filesystem::create_directory_symlink(data, Path("..data_tmp"));
  std::filesystem::rename(Path("..data_tmp"), Path("..data"));
  std::error_code ignored;
  std::filesystem::remove_all(Path(absl::StrCat("..", generation_ - 1)), ignored);
}

}  // namespace lmhead
