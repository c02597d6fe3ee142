// Certificates made at test time, and files that change the way Kubernetes changes a mounted
// Secret.

#ifndef LMHEAD_TESTS_UTIL_CERTIFICATES_H_
#define LMHEAD_TESTS_UTIL_CERTIFICATES_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/util/temporary_folder.h"

namespace lmhead {

// A certificate and its private key, in PEM.
struct Leaf {
  std::string cert_pem;
  std::string key_pem;
};

// A certificate authority with a key of its own. Ends the test program when OpenSSL fails.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name);
  ~TestAuthority();

  // A certificate for names such as "DNS:head-0", "URI:spiffe://a/b", "IP:127.0.0.1".
  Leaf Issue(const std::vector<std::string>& names) const;
  Leaf Issue(const std::vector<std::string>& names, absl::Time not_before,
             absl::Time not_after) const;

  const std::string& cert_pem() const { return cert_pem_; }

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::string cert_pem_;
};

// A temporary folder of files, each a link to ..data/NAME, where ..data is a link to a folder that
// is replaced as a whole: by one rename, so that who opens a file sees the old set or the new one.
class SecretFolder {
 public:
  using Files = std::map<std::string, std::string>;  // Contents by name.

  explicit SecretFolder(const Files& files);

  // Replaces the contents of some files; the others stay.
  void Swap(const Files& changed);

  std::string Path(const std::string& name) const { return folder_.Path(name); }

 private:
  void Publish();

  const TemporaryFolder folder_;
  Files files_;
  int generation_ = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_CERTIFICATES_H_
