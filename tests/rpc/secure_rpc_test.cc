// A server with mutual TLS, a policy and tokens, and callers of every kind.

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "lmhead/v1/shard.pb.h"
#include "server/rpc/method_roles.h"
#include "server/security/tokens.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/util/certificates.h"

namespace lmhead {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kToken[] = "a-token-that-nobody-guesses";
constexpr char kTrunk0[] = "spiffe://example.org/trunk-0";
constexpr char kTrunk1[] = "trunk-1.example.org";

// trunk-0 is worker w0, trunk-1 is worker w1.
constexpr char kPolicy[] = R"({"identities": [
  {"name": "spiffe://example.org/trunk-0", "roles": ["trunk"], "workers": ["w0"]},
  {"name": "trunk-1.example.org", "roles": ["trunk"], "workers": ["w1"]},
  {"name": "stranger.example.org", "roles": ["trunk"], "workers": ["x*"]},
  {"name": "admin.example.org", "roles": ["admin"]},
  {"name": "monitor.example.org", "roles": ["monitor"]},
  {"name": "node-1.example.org", "roles": ["shard"]},
  {"token": "ci", "roles": ["admin", "trunk"], "workers": ["*"]}]})";

bool Eventually(const std::function<bool()>& done) {
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (!done()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return true;
}

class SecureRpcTest : public RpcTest {
 protected:
  SecureRpcTest() {
    const Leaf leaf = ServerLeaf();
    files_ = std::make_unique<SecretFolder>(SecretFolder::Files{
        {"tls.crt", leaf.cert_pem},
        {"tls.key", leaf.key_pem},
        {"ca.crt", authority_.cert_pem()},
        {"policy.json", kPolicy},
        {"tokens.json",
         absl::StrCat(R"({"tokens": [{"name": "ci", "sha256": ")", Sha256Hex(kToken), R"("}]})")}});
  }

  void SetUp() override { StartServer(/*mutual=*/true, /*policy=*/true, /*tokens=*/false); }

  void StartServer(bool mutual, bool policy, bool tokens) {
    config_ = Config();
    config_.security.tls_cert_file = files_->Path("tls.crt");
    config_.security.tls_key_file = files_->Path("tls.key");
    if (mutual) config_.security.tls_client_ca_file = files_->Path("ca.crt");
    if (policy) config_.security.auth_policy_file = files_->Path("policy.json");
    if (tokens) config_.security.auth_token_file = files_->Path("tokens.json");
    Restart(config_);
  }

  Leaf ServerLeaf() const { return authority_.Issue({"DNS:localhost", "IP:127.0.0.1"}); }
  Leaf LeafOf(const std::string& identity) const {
    const bool uri = identity.find("://") != std::string::npos;
    return authority_.Issue({absl::StrCat(uri ? "URI:" : "DNS:", identity)});
  }

  // To the server, unless told another address.
  std::shared_ptr<grpc::Channel> ChannelOf(const Leaf& leaf, const std::string& roots,
                                           std::string address = "") {
    if (address.empty()) address = server_->address();
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = roots;
    options.pem_cert_chain = leaf.cert_pem;
    options.pem_private_key = leaf.key_pem;
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address, grpc::SslCredentials(options), arguments);
  }
  std::shared_ptr<grpc::Channel> ChannelOf(const std::string& identity, std::string address = "") {
    return ChannelOf(LeafOf(identity), authority_.cert_pem(), std::move(address));
  }
  std::unique_ptr<v1::LmHeadService::Stub> StubOf(const std::string& identity) {
    return v1::LmHeadService::NewStub(ChannelOf(identity));
  }

  // A head, made by the admin.
  void MakeHead() {
    stub_ = StubOf("admin.example.org");
    CreateHead(Spec());
  }

  grpc::Status BeginAs(const std::string& identity, uint64_t step,
                       const std::vector<std::string>& workers) {
    grpc::ClientContext context;
    v1::BeginStepRequest request;
    request.set_head("lm");
    request.set_step(step);
    for (const std::string& worker : workers) request.add_workers(worker);
    v1::BeginStepResponse response;
    return StubOf(identity)->BeginStep(&context, request, &response);
  }

  // How a ComputeLoss stream of `worker` ends that is closed after `open`.
  grpc::Status OpenAs(const std::string& identity, const std::string& worker, uint64_t step) {
    const auto stub = StubOf(identity);
    TestStream stream(stub.get());
    stream.Send(Open(step, worker));
    return stream.Finish();
  }

  const TestAuthority authority_{"authority"};
  std::unique_ptr<SecretFolder> files_;
  ServerConfig config_;
};

// Calls any method with an empty message, as the wire knows it: whether it is a stream is the same
// there.
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const std::map<std::string, std::string>& metadata = {},
                       const std::string& service = "LmHeadService") {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
  for (const auto& [key, value] : metadata) context.AddMetadata(key, value);
  const auto call =
      stub.PrepareCall(&context, absl::StrCat("/lmhead.v1.", service, "/", method), &queue);
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  call->StartCall(nullptr);
  grpc::Status status;
  if (next()) {
    grpc::Slice empty;
    call->WriteLast(grpc::ByteBuffer(&empty, 1), grpc::WriteOptions(), nullptr);
    next();
    // The status comes behind the answers.
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (next());
  }
  call->Finish(&status, nullptr);
  next();
  return status;
}

std::vector<std::string> MethodNames() {
  std::vector<std::string> names;
  const auto* service =
      v1::GetServerInfoRequest::descriptor()->file()->FindServiceByName("LmHeadService");
  for (int i = 0; i < service->method_count(); ++i) names.push_back(service->method(i)->name());
  return names;
}

// --- Roles ---

// Written out, so that a change of the table is a change of this test.
const std::map<std::string, std::set<std::string>>& RolesWanted() {
  static const auto& wanted = *new std::map<std::string, std::set<std::string>>{
      {"GetServerInfo", {"trunk", "admin", "monitor"}},
      {"CreateHead", {"admin"}},
      {"GetHead", {"trunk", "admin", "monitor"}},
      {"ListHeads", {"trunk", "admin", "monitor"}},
      {"DeleteHead", {"admin"}},
      {"LoadWeights", {"admin"}},
      {"ReadWeights", {"trunk"}},
      {"BeginStep", {"trunk"}},
      {"ComputeLoss", {"trunk"}},
      {"PrepareStep", {"trunk"}},
      {"CommitStep", {"trunk"}},
      {"AbortStep", {"trunk", "admin"}},
      {"AccumulateWeightGradient", {"trunk"}},
      {"SaveCheckpoint", {"admin"}},
      {"RestoreCheckpoint", {"admin"}},
      {"EstimateMemory", {"admin", "monitor"}}};
  return wanted;
}

TEST_F(SecureRpcTest, EveryMethodOfTheApiHasItsRoles) {
  const std::map<std::string, std::string> identities = {{"trunk", kTrunk0},
                                                         {"admin", "admin.example.org"},
                                                         {"monitor", "monitor.example.org"},
                                                         {"shard", "node-1.example.org"},
                                                         {"none", "unlisted.example.org"}};
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels;
  for (const auto& [role, identity] : identities) channels[role] = ChannelOf(identity);
  for (const std::string& method : MethodNames()) {
    ASSERT_TRUE(RolesWanted().contains(method)) << "a new method needs roles: " << method;
    EXPECT_NE(RolesOf(method), 0) << method;
    for (const auto& [role, identity] : identities) {
      const grpc::Status status = CallEmpty(channels[role], method);
      if (RolesWanted().at(method).contains(role)) {
        EXPECT_THAT(status.error_message(), Not(HasSubstr("wanted trunk")))
            << method << " " << role;
        EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method << " " << role;
        EXPECT_THAT(status.error_message(), Not(HasSubstr("has role"))) << method << " " << role;
        continue;
      }
      EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED)
          << method << " " << role << ": " << status.error_message();
      for (const std::string& part : {method, identity, absl::StrCat("has role ", role),
                                      std::string("wanted "), config_.security.auth_policy_file}) {
        EXPECT_THAT(status.error_message(), HasSubstr(part)) << method << " " << role;
      }
    }
  }
}

// Who has a certificate of the authority, and any role but this, holds no rank.
TEST_F(SecureRpcTest, OnlyAShardMayCallTheLeader) {
  config_.ranks = {.num_ranks = 2, .num_local = 1, .group_listen = "127.0.0.1:0"};
  config_.ranks.collective_host = "127.0.0.1";
  Restart(config_);
  const google::protobuf::ServiceDescriptor* service =
      v1::FollowRequest::descriptor()->file()->FindServiceByName("ShardService");
  for (const std::string identity :
       {kTrunk0, "admin.example.org", "monitor.example.org", "unlisted.example.org"}) {
    const auto channel = ChannelOf(identity, server_->group_address());
    for (int i = 0; i < service->method_count(); ++i) {
      const std::string& method = service->method(i)->name();
      const grpc::Status status = CallEmpty(channel, method, {}, "ShardService");
      EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED)
          << method << " " << identity << ": " << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr("wanted shard"));
      EXPECT_THAT(status.error_message(), HasSubstr(identity));
    }
  }
  const auto channel = ChannelOf("node-1.example.org", server_->group_address());
  for (const char* method : {"Follow", "Lane"}) {
    EXPECT_EQ(CallEmpty(channel, method, {}, "ShardService").error_code(),
              grpc::StatusCode::INVALID_ARGUMENT)
        << method;
  }
  for (const char* method : {"SetRendezvous", "GetRendezvous"}) {
    EXPECT_EQ(CallEmpty(channel, method, {}, "ShardService").error_code(),
              grpc::StatusCode::NOT_FOUND)
        << method;
  }
}

TEST(MethodRoles, AMethodThatIsNotKnownIsNobodys) {
  EXPECT_EQ(RolesOf("DropEverything"), 0);
  EXPECT_EQ(RolesOf(""), 0);
}

// --- Workers ---

TEST_F(SecureRpcTest, AWorkerCannotSpeakAsAnother) {
  MakeHead();
  ASSERT_TRUE(BeginAs(kTrunk0, 1, {"w0", "w1"}).ok());
  const grpc::Status spoofed = OpenAs(kTrunk0, "w1", 1);
  EXPECT_EQ(spoofed.error_code(), grpc::StatusCode::PERMISSION_DENIED) << spoofed.error_message();
  EXPECT_THAT(spoofed.error_message(), HasSubstr("may not speak as worker w1, only as w0"));
  EXPECT_THAT(spoofed.error_message(), HasSubstr(kTrunk0));
  // Its own name is another matter: the stream opened, and was closed without `end`.
  EXPECT_EQ(OpenAs(kTrunk0, "w0", 1).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(OpenAs(kTrunk1, "w1", 1).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  // Evaluation needs no worker, but takes no other's either.
  EXPECT_EQ(OpenAs(kTrunk0, "", 0).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(OpenAs(kTrunk0, "w1", 0).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  grpc::ClientContext context;
  v1::AccumulateWeightGradientRequest piece;
  piece.set_head("lm");
  piece.set_step(1);
  piece.set_worker("w1");
  v1::AccumulateWeightGradientResponse response;
  EXPECT_EQ(StubOf(kTrunk0)->AccumulateWeightGradient(&context, piece, &response).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(SecureRpcTest, WhoHasNoPartInAStepCannotBeginOrEndIt) {
  MakeHead();
  const char* const stranger = "stranger.example.org";
  EXPECT_EQ(BeginAs(stranger, 1, {"w0", "w1"}).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  ASSERT_TRUE(BeginAs(kTrunk1, 1, {"w0", "w1"}).ok());
  EXPECT_TRUE(BeginAs(kTrunk0, 1, {"w0", "w1"}).ok());  // Repeated by another of its workers.
  const auto strange = StubOf(stranger);
  {
    grpc::ClientContext context;
    v1::PrepareStepRequest request;
    request.set_head("lm");
    request.set_step(1);
    request.set_incarnation(server_->incarnation());
    v1::PrepareStepResponse response;
    const grpc::Status status = strange->PrepareStep(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("worker w0 or w1"));
  }
  {
    grpc::ClientContext context;
    v1::CommitStepRequest request;
    request.set_head("lm");
    request.set_step(1);
    request.set_incarnation(server_->incarnation());
    v1::CommitStepResponse response;
    EXPECT_EQ(strange->CommitStep(&context, request, &response).error_code(),
              grpc::StatusCode::PERMISSION_DENIED);
  }
  v1::AbortStepRequest abort;
  abort.set_head("lm");
  abort.set_step(1);
  abort.set_incarnation(server_->incarnation());
  v1::AbortStepResponse response;
  {
    grpc::ClientContext context;
    EXPECT_EQ(strange->AbortStep(&context, abort, &response).error_code(),
              grpc::StatusCode::PERMISSION_DENIED);
  }
  grpc::ClientContext context;  // An operator may give the step up.
  EXPECT_TRUE(StubOf("admin.example.org")->AbortStep(&context, abort, &response).ok());
  EXPECT_TRUE(response.aborted());
}

// --- The client against the server ---

class SecureClientTest : public SecureRpcTest {
 protected:
  // Files of a client: its authorities, and a certificate when it has one.
  absl::StatusOr<std::unique_ptr<Client>> Connect(const Leaf& leaf, const std::string& roots,
                                                  const std::string& token = "",
                                                  const std::string& server_name = "") {
    client_files_ = std::make_unique<SecretFolder>(SecretFolder::Files{{"ca.crt", roots},
                                                                       {"tls.crt", leaf.cert_pem},
                                                                       {"tls.key", leaf.key_pem},
                                                                       {"token", token}});
    ClientOptions options = {.connect_timeout = absl::Seconds(2), .max_attempts = 2};
    options.credentials.tls_ca_file = client_files_->Path("ca.crt");
    options.credentials.tls_server_name = server_name;
    if (!leaf.cert_pem.empty()) {
      options.credentials.tls_cert_file = client_files_->Path("tls.crt");
      options.credentials.tls_key_file = client_files_->Path("tls.key");
    }
    if (!token.empty()) options.credentials.token_file = client_files_->Path("token");
    return Client::Connect(server_->address(), options);
  }

  std::unique_ptr<SecretFolder> client_files_;
};

TEST_F(SecureClientTest, ConnectsWithACertificateThatTheServerKnows) {
  auto client = Connect(LeafOf("admin.example.org"), authority_.cert_pem());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->CreateHead(Spec()).ok());
}

TEST_F(SecureClientTest, RefusesAServerItDoesNotKnow) {
  const TestAuthority stranger("stranger");
  auto client = Connect(LeafOf("admin.example.org"), stranger.cert_pem());
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("certificate verify failed"));
  // The right authority, but the certificate is of another host.
  auto renamed = Connect(LeafOf("admin.example.org"), authority_.cert_pem(), "", "head-7.lm");
  ASSERT_FALSE(renamed.ok());
  EXPECT_EQ(renamed.status().code(), absl::StatusCode::kUnavailable) << renamed.status();
  EXPECT_TRUE(Connect(LeafOf("admin.example.org"), authority_.cert_pem(), "", "localhost").ok());
}

TEST_F(SecureClientTest, IsRefusedWithoutACertificateOfTheServersAuthority) {
  const TestAuthority stranger("stranger");
  const absl::Time now = absl::Now();
  const Leaf leaves[] = {
      {},  // None at all.
      stranger.Issue({"DNS:admin.example.org"}),
      authority_.Issue({"DNS:admin.example.org"}, now - absl::Hours(2), now - absl::Hours(1))};
  for (const Leaf& leaf : leaves) {
    auto client = Connect(leaf, authority_.cert_pem());
    ASSERT_FALSE(client.ok());
    EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable) << client.status();
  }
}

TEST_F(SecureClientTest, ACommonNameIsNoIdentity) {
  // Its only name is CN=leaf; the policy could list "leaf" and it would not count.
  files_->Swap({{"policy.json", R"({"identities": [{"name": "leaf", "roles": ["admin"]}]})"}});
  StartServer(true, true, false);
  auto client = Connect(authority_.Issue({}), authority_.cert_pem());
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.status().code(), absl::StatusCode::kPermissionDenied) << client.status();
}

TEST_F(SecureClientTest, SpeaksByTokenOverTls) {
  StartServer(/*mutual=*/false, /*policy=*/true, /*tokens=*/true);
  auto client = Connect({}, authority_.cert_pem(), absl::StrCat(kToken, "\n"));
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->CreateHead(Spec()).ok());
  auto wrong = Connect({}, authority_.cert_pem(), "not-the-token");
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kUnauthenticated) << wrong.status();
  EXPECT_THAT(std::string(wrong.status().message()), Not(HasSubstr("not-the-token")));
  auto none = Connect({}, authority_.cert_pem());
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnauthenticated) << none.status();
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("authorization: Bearer"));
  for (const std::string& method : MethodNames()) {
    EXPECT_EQ(CallEmpty(ChannelOf(Leaf{}, authority_.cert_pem()), method).error_code(),
              grpc::StatusCode::UNAUTHENTICATED)
        << method;
  }
}

TEST_F(SecureClientTest, ATokenThatIsRenewedIsSentWithTheNextCall) {
  StartServer(/*mutual=*/false, /*policy=*/true, /*tokens=*/true);
  auto client = Connect({}, authority_.cert_pem(), kToken);
  ASSERT_TRUE(client.ok()) << client.status();
  client_files_->Swap({{"token", "tomorrow's"}});
  EXPECT_EQ((*client)->GetServerInfo().status().code(), absl::StatusCode::kUnauthenticated);
  files_->Swap({{"tokens.json", absl::StrCat(R"({"tokens": [{"name": "ci", "sha256": ")",
                                             Sha256Hex("tomorrow's"), R"("}]})")}});
  EXPECT_TRUE(Eventually([&] { return (*client)->GetServerInfo().ok(); }));
}

TEST_F(SecureClientTest, NeverSendsATokenInPlaintext) {
  const SecretFolder files(SecretFolder::Files{{"token", kToken}});
  ClientOptions options;
  options.credentials.token_file = files.Path("token");
  const auto client = Client::Connect("127.0.0.1:1", options);
  EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("tls_ca_file"));
}

TEST_F(SecureClientTest, SaysWhichFileItCannotRead) {
  ClientOptions options;
  options.credentials.tls_ca_file = "/no/such/ca.crt";
  EXPECT_THAT(std::string(Client::Connect(server_->address(), options).status().message()),
              HasSubstr("/no/such/ca.crt"));
  options.credentials.tls_cert_file = "/some/cert";
  EXPECT_THAT(std::string(Client::Connect(server_->address(), options).status().message()),
              HasSubstr("without tls_key_file"));
}

TEST_F(SecureClientTest, APlaintextClientGetsNothing) {
  const auto client =
      Client::Connect(server_->address(), {.connect_timeout = absl::Seconds(1), .max_attempts = 1});
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable) << client.status();
}

// --- Changes while streams run ---

TEST_F(SecureClientTest, CertificatesChangeUnderRunningStreams) {
  MakeHead();
  ASSERT_TRUE(BeginAs(kTrunk0, 1, {"w0"}).ok());
  const auto stub = StubOf(kTrunk0);
  TestStream stream(stub.get());
  ASSERT_TRUE(stream.Send(Open(1, "w0")));
  ASSERT_TRUE(stream.Read().has_opened());
  uint64_t next_chunk = 0;
  const auto send_one = [&] {
    return stream.Send(MakeChunk(next_chunk)) &&
           stream.Read().result().chunk_index() == next_chunk++;
  };
  ASSERT_TRUE(send_one());

  // The whole Secret moves to another authority, as when a cluster changes its own.
  const TestAuthority next("next authority");
  const Leaf leaf = next.Issue({"DNS:localhost", "IP:127.0.0.1"});
  files_->Swap(
      {{"tls.crt", leaf.cert_pem}, {"tls.key", leaf.key_pem}, {"ca.crt", next.cert_pem()}});
  const Leaf new_admin = next.Issue({"DNS:admin.example.org"});
  EXPECT_TRUE(Eventually([&] {
    EXPECT_TRUE(send_one());
    return CallEmpty(ChannelOf(new_admin, next.cert_pem()), "GetServerInfo").ok();
  }));
  // Who was connected stays; who comes anew with the old certificate is refused.
  EXPECT_TRUE(send_one());
  EXPECT_FALSE(CallEmpty(ChannelOf("admin.example.org"), "GetServerInfo").ok());
  EXPECT_FALSE(
      CallEmpty(ChannelOf(LeafOf("admin.example.org"), next.cert_pem()), "GetServerInfo").ok());
  // A broken pair changes nothing.
  files_->Swap({{"tls.key", ServerLeaf().key_pem}});
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(CallEmpty(ChannelOf(new_admin, next.cert_pem()), "GetServerInfo").ok());
  ASSERT_TRUE(stream.SendEnd(next_chunk));
  EXPECT_EQ(stream.Read().ended().num_chunks_counted(), next_chunk);
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(SecureClientTest, AClientTakesItsNewCertificateForNewConnections) {
  StartServer(/*mutual=*/true, /*policy=*/false, /*tokens=*/false);
  auto client = Connect(LeafOf("trainer.example.org"), authority_.cert_pem());
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->CreateHead(Spec()).ok());
  const TestAuthority next("next authority");
  const Leaf leaf = next.Issue({"DNS:localhost", "IP:127.0.0.1"});
  files_->Swap(
      {{"tls.crt", leaf.cert_pem}, {"tls.key", leaf.key_pem}, {"ca.crt", next.cert_pem()}});
  ASSERT_TRUE(Eventually(
      [&] { return !CallEmpty(ChannelOf("trainer.example.org"), "GetServerInfo").ok(); }));
  const Leaf mine = next.Issue({"DNS:trainer.example.org"});
  EXPECT_FALSE((*client)->OpenWriter({.head = "lm", .worker = "w0"}).ok());
  client_files_->Swap(
      {{"tls.crt", mine.cert_pem}, {"tls.key", mine.key_pem}, {"ca.crt", next.cert_pem()}});
  // Each writer has a connection of its own.
  EXPECT_TRUE(Eventually([&] {
    auto writer = (*client)->OpenWriter({.head = "lm", .worker = "w0"});
    return writer.ok();
  }));
}

TEST_F(SecureClientTest, APolicyChangesWithoutARestart) {
  const auto channel = ChannelOf("monitor.example.org");
  EXPECT_EQ(CallEmpty(channel, "DeleteHead").error_code(), grpc::StatusCode::PERMISSION_DENIED);
  files_->Swap({{"policy.json",
                 R"({"identities": [{"name": "monitor.example.org", "roles": ["admin"]}]})"}});
  EXPECT_TRUE(Eventually([&] {
    return CallEmpty(channel, "DeleteHead").error_code() == grpc::StatusCode::NOT_FOUND;
  }));
}

// --- Request ids ---

TEST_F(SecureRpcTest, ErrorsEndWithTheRequestId) {
  const auto channel = ChannelOf("monitor.example.org");
  EXPECT_THAT(CallEmpty(channel, "GetHead", {{"x-request-id", "run-7/call.1"}}).error_message(),
              EndsWith(" [request run-7/call.1]"));
  EXPECT_THAT(CallEmpty(channel, "DeleteHead", {{"x-request-id", "denied:1"}}).error_message(),
              EndsWith(" [request denied:1]"));
  EXPECT_THAT(
      CallEmpty(ChannelOf(kTrunk0), "ComputeLoss", {{"x-request-id", "stream-1"}}).error_message(),
      EndsWith(" [request stream-1]"));
  // What could forge a log line is replaced.
  const std::string forged =
      CallEmpty(channel, "GetHead", {{"x-request-id", "a] error [b"}}).error_message();
  EXPECT_THAT(forged, Not(HasSubstr("a] error")));
  EXPECT_THAT(forged, HasSubstr(" [request "));
  EXPECT_THAT(
      CallEmpty(channel, "GetHead", {{"x-request-id", std::string(200, 'x')}}).error_message(),
      Not(HasSubstr("xxxx")));
}

}  // namespace
}  // namespace lmhead
