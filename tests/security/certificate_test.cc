#include "server/security/certificate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "tests/util/certificates.h"

namespace lmhead {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CertificateTest : public ::testing::Test {
 protected:
  const TestAuthority authority_{"authority"};
  const TestAuthority stranger_{"stranger"};
};

TEST_F(CertificateTest, TellsNamesAndDates) {
  const absl::Time now = absl::FromUnixSeconds(absl::ToUnixSeconds(absl::Now()));
  const Leaf leaf = authority_.Issue({"DNS:head-0.lm", "URI:spiffe://a/b", "IP:127.0.0.1"}, now,
                                     now + absl::Hours(1));
  const auto facts = ReadCertificates(leaf.cert_pem + authority_.cert_pem());
  ASSERT_TRUE(facts.ok()) << facts.status();
  ASSERT_EQ(facts->size(), 2u);
  EXPECT_THAT(facts->front().names, ElementsAre("DNS:head-0.lm", "URI:spiffe://a/b"));
  EXPECT_EQ(facts->front().not_before, now);
  EXPECT_EQ(facts->front().not_after, now + absl::Hours(1));
  EXPECT_EQ(EarliestExpiry(*facts), now + absl::Hours(1));
  EXPECT_THAT(facts->back().subject, HasSubstr("authority"));
  EXPECT_TRUE(CheckValidity(*facts, now).ok());
  const absl::Status expired = CheckValidity(*facts, now + absl::Hours(2));
  EXPECT_THAT(std::string(expired.message()), HasSubstr("expired"));
  const absl::Status early = CheckValidity(*facts, now - absl::Seconds(1));
  EXPECT_THAT(std::string(early.message()), HasSubstr("not valid yet"));
}

TEST_F(CertificateTest, RefusesWhatIsNoCertificate) {
  EXPECT_FALSE(ReadCertificates("").ok());
  EXPECT_FALSE(ReadCertificates("hello").ok());
  const Leaf leaf = authority_.Issue({"DNS:a"});
  EXPECT_FALSE(ReadCertificates(leaf.key_pem).ok());
  // Cut in the middle: the whole file is refused, not read up to there.
  std::string cut = leaf.cert_pem + leaf.cert_pem;
  cut.resize(cut.size() - 100);
  EXPECT_FALSE(ReadCertificates(cut).ok());
}

TEST_F(CertificateTest, KnowsWhoseKeyItIs) {
  const Leaf leaf = authority_.Issue({"DNS:a"});
  const Leaf other = authority_.Issue({"DNS:a"});
  EXPECT_TRUE(CheckKeyPair(leaf.cert_pem, leaf.key_pem).ok());
  EXPECT_THAT(std::string(CheckKeyPair(leaf.cert_pem, other.key_pem).message()),
              HasSubstr("not that of the certificate"));
  EXPECT_FALSE(CheckKeyPair(leaf.cert_pem, "").ok());
  EXPECT_FALSE(CheckKeyPair(leaf.cert_pem, leaf.cert_pem).ok());
}

TEST_F(CertificateTest, FollowsTheChain) {
  const Leaf leaf = authority_.Issue({"DNS:a"});
  EXPECT_TRUE(CheckChain(leaf.cert_pem, authority_.cert_pem()).ok());
  EXPECT_TRUE(CheckChain(leaf.cert_pem, stranger_.cert_pem() + authority_.cert_pem()).ok());
  EXPECT_FALSE(CheckChain(leaf.cert_pem, stranger_.cert_pem()).ok());
  const absl::Time now = absl::Now();
  const Leaf expired = authority_.Issue({"DNS:a"}, now - absl::Hours(2), now - absl::Hours(1));
  EXPECT_THAT(std::string(CheckChain(expired.cert_pem, authority_.cert_pem()).message()),
              HasSubstr("expired"));
}

}  // namespace
}  // namespace lmhead
