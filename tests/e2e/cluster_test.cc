// What a cluster asks of the processes: probes under load, logs for machines, signals, the doctor.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/e2e/service_fixture.h"
#include "tests/util/certificates.h"
#include "tests/util/command.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::e2e {
namespace {

using ::testing::HasSubstr;

grpc::Status Check(grpc::health::v1::Health::Stub* stub, const std::string& name) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(name);
  grpc::health::v1::HealthCheckResponse response;
  grpc::Status status = stub->Check(&context, request, &response);
  if (!status.ok()) return status;
  if (response.status() == grpc::health::v1::HealthCheckResponse::SERVING) return status;
  return grpc::Status(grpc::StatusCode::INTERNAL, "not serving");
}

TEST(Health, AnswersWithinASecondUnderFullLoad) {
  auto server = StartServer({"--health_listen=127.0.0.1:0"});
  ASSERT_FALSE(server->health_address().empty());
  auto client = ConnectTo(server->address());
  const HeadShape shape = {.vocab_size = 4096, .hidden_size = 256};
  LMHEAD_ASSERT_OK(CreateHead(client.get(), shape));
  std::atomic<bool> stop{false};
  std::vector<std::thread> load;
  for (int worker = 0; worker < 4; ++worker) {
    load.emplace_back([&, worker] {
      auto own = ConnectTo(server->address());
      Rows rows = MakeRows(shape, 1024, 1, worker);
      while (!stop.load()) {
        auto writer = own->OpenWriter({.head = shape.name, .worker = WorkerName(worker)});
        if (!writer.ok()) continue;
        LossRows loss;
        loss.hidden_states = {rows.hidden_states.data(), rows.num_tokens(), shape.hidden_size,
                              DType::kFloat32};
        loss.targets = rows.targets;
        EXPECT_TRUE((*writer)->Compute(loss).ok());
      }
    });
  }
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server->health_address(), grpc::InsecureChannelCredentials()));
  int num_answers = 0;
  for (int i = 0; i < 30; ++i) {
    for (const char* name : {"liveness", "readiness"}) {
      const grpc::Status status = Check(stub.get(), name);
      EXPECT_TRUE(status.ok()) << name << ": " << status.error_message();
      num_answers += status.ok() ? 1 : 0;
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  stop = true;
  for (std::thread& thread : load) thread.join();
  EXPECT_EQ(num_answers, 60);
}

TEST(Health, AWatchHoldsUpNoEnd) {
  auto server = StartServer({"--drain_timeout_seconds=3600"});
  const auto channel = grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials());
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Watch",
                                         grpc::internal::RpcMethod::SERVER_STREAMING, channel);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const std::unique_ptr<grpc::ClientReader<grpc::health::v1::HealthCheckResponse>> watch(
      grpc::internal::ClientReaderFactory<grpc::health::v1::HealthCheckResponse>::Create(
          channel.get(), method, &context, grpc::health::v1::HealthCheckRequest()));
  grpc::health::v1::HealthCheckResponse response;
  watch->Read(&response);  // It has arrived.
  EXPECT_EQ(server->Stop().value_or(-1), 0) << server->Log();
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

// What a call of the reflection service at an address is answered with.
grpc::StatusCode AskForReflection(const std::string& address) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
  context.set_wait_for_ready(true);
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const grpc::internal::RpcMethod method(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      grpc::internal::RpcMethod::NORMAL_RPC, channel);
  // Field 1 is the host there, the service here; the answer's fields do not matter.
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  return grpc::internal::BlockingUnaryCall(channel.get(), method, &context, request, &response)
      .error_code();
}

TEST(Reflection, IsServedOnlyWhenAskedFor) {
  const std::vector<std::string> flags = {"--health_listen=127.0.0.1:0", "--ranks=2",
                                          "--local_ranks=1", "--group_listen=127.0.0.1:0"};
  auto server = StartServer(flags);
  for (const std::string& address :
       {server->address(), server->health_address(), server->group_address()}) {
    EXPECT_EQ(AskForReflection(address), grpc::StatusCode::UNIMPLEMENTED) << address;
  }
  auto open = flags;
  open.push_back("--reflection");
  server = StartServer(open);
  EXPECT_NE(AskForReflection(server->address()), grpc::StatusCode::UNIMPLEMENTED);
  for (const std::string& address : {server->health_address(), server->group_address()}) {
    EXPECT_EQ(AskForReflection(address), grpc::StatusCode::UNIMPLEMENTED) << address;
  }
}

// The lines of a JSON log; a line that is no object fails the test.
std::vector<nlohmann::json> JsonLines(const std::string& log) {
  std::vector<nlohmann::json> lines;
  for (const auto& text : absl::StrSplit(log, '\n', absl::SkipEmpty())) {
    lines.push_back(nlohmann::json::parse(std::string(text), nullptr, /*allow_exceptions=*/false));
    EXPECT_TRUE(lines.back().is_object()) << text;
  }
  return lines;
}

TEST(JsonLogs, CarryTheRequestIdOfCallsAndStreams) {
  auto server =
      StartServer({"--log_format=json", "--log_level=debug", "--drain_timeout_seconds=1"});
  auto client = Client::Connect(server->address(), {.request_id = "run-42"});
  LMHEAD_ASSERT_OK(client);
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client->get(), shape));
  auto incarnation = BeginStep(client->get(), shape, 1, 1);
  LMHEAD_ASSERT_OK(incarnation);
  // A chunk with a target that is out of range ends its stream.
  Rows rows = MakeRows(shape, 8, 1, 0);
  rows.targets[5] = 1'000'000;
  WriterSpec spec = {
      .head = shape.name, .step = 1, .worker = WorkerName(0), .incarnation = *incarnation};
  auto writer = (*client)->OpenWriter(spec);
  LMHEAD_ASSERT_OK(writer);
  LossRows loss;
  loss.hidden_states = {rows.hidden_states.data(), rows.num_tokens(), shape.hidden_size,
                        DType::kFloat32};
  loss.targets = rows.targets;
  const absl::Status refused = (*writer)->Compute(loss).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("[request run-42]"));
  writer->reset();
  ASSERT_EQ(server->Stop().value_or(-1), 0);

  bool begun = false;
  bool stream_ended = false;
  for (const nlohmann::json& line : JsonLines(server->Log())) {
    absl::Time time;
    EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, line.value("time", ""), &time, nullptr))
        << line;
    EXPECT_TRUE(line.contains("level") && line.contains("message")) << line;
    if (line.value("request_id", "") != "run-42") continue;
    const std::string message = line["message"];
    if (message.find("BeginStep") != std::string::npos) {
      begun = true;
      EXPECT_EQ(line["head"], shape.name);
      EXPECT_EQ(line["step"], 1);
    }
    if (message.find("target of row 5") != std::string::npos) {
      stream_ended = true;
      EXPECT_EQ(line["head"], shape.name);
      EXPECT_EQ(line["step"], 1);
      EXPECT_EQ(line["worker"], WorkerName(0));
      EXPECT_EQ(line["chunk"], 0);
    }
  }
  EXPECT_TRUE(begun) << server->Log();
  EXPECT_TRUE(stream_ended) << server->Log();
}

TEST(JsonLogs, TakeTheLinesOfGrpcIn) {
  const TestAuthority authority("authority");
  const Leaf leaf = authority.Issue({"DNS:localhost", "IP:127.0.0.1"});
  const SecretFolder files({{"tls.crt", leaf.cert_pem}, {"tls.key", leaf.key_pem}});
  auto server =
      StartServer({"--log_format=json", absl::StrCat("--tls_cert_file=", files.Path("tls.crt")),
                   absl::StrCat("--tls_key_file=", files.Path("tls.key"))});
  // A handshake that fails is logged by gRPC itself.
  const auto plaintext =
      Client::Connect(server->address(), {.connect_timeout = absl::Seconds(1), .max_attempts = 1});
  EXPECT_FALSE(plaintext.ok());
  ASSERT_EQ(server->Stop().value_or(-1), 0);
  bool told = false;
  for (const nlohmann::json& line : JsonLines(server->Log())) {
    if (line.is_object()) told |= line.value("message", "").find("gRPC: ") == 0;
  }
  EXPECT_TRUE(told) << server->Log();
}

TEST(Logs, WhoKnocksOftenFillsThemNot) {
  const TestAuthority authority("authority");
  const Leaf leaf = authority.Issue({"DNS:localhost"});
  const SecretFolder files({{"tls.crt", leaf.cert_pem}, {"tls.key", leaf.key_pem}});
  auto server = StartServer({absl::StrCat("--tls_cert_file=", files.Path("tls.crt")),
                             absl::StrCat("--tls_key_file=", files.Path("tls.key"))});
  // None of these handshakes gets anywhere.
  constexpr int kKnocks = 200;
  const std::string command =
      absl::StrCat("curl -s -o /dev/null --max-time 5 http://", server->address());
  RunCommand(absl::StrCat("for i in $(seq ", kKnocks, "); do ", command, "; done"));
  ASSERT_EQ(server->Stop().value_or(-1), 0);
  int told = 0;
  for (const auto& line : absl::StrSplit(server->Log(), '\n')) {
    if (line.find("gRPC: ") != absl::string_view::npos) ++told;
  }
  EXPECT_GT(told, 0) << server->Log();
  EXPECT_LT(told, kKnocks / 2) << server->Log();
}

TEST(Logs, ACommandThatFailsSaysSoInOneLine) {
  const TestAuthority authority("authority");
  const TestAuthority stranger("stranger");
  const Leaf leaf = authority.Issue({"DNS:localhost", "IP:127.0.0.1"});
  const SecretFolder files(
      {{"tls.crt", leaf.cert_pem}, {"tls.key", leaf.key_pem}, {"other.crt", stranger.cert_pem()}});
  auto server = StartServer({absl::StrCat("--tls_cert_file=", files.Path("tls.crt")),
                             absl::StrCat("--tls_key_file=", files.Path("tls.key"))});
  const CommandResult output =
      RunCommand(absl::StrCat(LmheadBinary(), " status --address=", server->address(),
                              " --tls_ca_file=", files.Path("other.crt"), " 2>&1"));
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.output, HasSubstr("certificate verify failed"));
  EXPECT_EQ(std::count(output.output.begin(), output.output.end(), '\n'), 1) << output.output;
}

TEST(Signals, ASecondSigtermIsQuickAndStillExitsWithZero) {
  auto server = StartServer({"--drain_timeout_seconds=3600"});
  auto client = ConnectTo(server->address());
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client.get(), shape));
  LMHEAD_ASSERT_OK(BeginStep(client.get(), shape, 1, 1));
  kill(server->pid(), SIGTERM);
  while (server->Log().find("stopping") == std::string::npos) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  auto code = server->Stop();  // The second one.
  LMHEAD_ASSERT_OK(code);
  EXPECT_EQ(*code, 0);
  EXPECT_THAT(server->Log(), HasSubstr("told to stop at once"));
}

TEST(Serve, RefusesPlaintextThatOthersReach) {
  auto server = LocalServer::Start(LmheadBinary(), {"--listen=0.0.0.0:0"});
  ASSERT_FALSE(server.ok());
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("--insecure"));
  LMHEAD_ASSERT_OK(LocalServer::Start(LmheadBinary(), {"--listen=0.0.0.0:0", "--insecure"}));
}

TEST(Serve, TakesNoSocketFromAServerThatRuns) {
  const TemporaryFolder folder;
  const std::string listen = absl::StrCat("--listen=unix:", folder.Path("lmhead.sock"));
  auto server = StartServer({listen});
  for (const std::string& other :
       {listen, absl::StrCat("--health_listen=unix:", folder.Path("lmhead.sock"))}) {
    const auto second = LocalServer::Start(LmheadBinary(), {"--listen=127.0.0.1:0", other});
    ASSERT_FALSE(second.ok());
    EXPECT_THAT(std::string(second.status().message()), HasSubstr("another process does"));
  }
  EXPECT_NE(ConnectTo(server->address()), nullptr);
  // A socket that was left behind is no server.
  server->Kill();
  EXPECT_NE(ConnectTo(StartServer({listen})->address()), nullptr);
}

// --- lmhead doctor ---

CommandResult RunLmhead(const std::string& arguments) {
  return RunCommand(absl::StrCat(LmheadBinary(), " ", arguments, " 2>&1"));
}

// The finding of a check in the doctor's JSON; null when there is none.
nlohmann::json FindingOf(const CommandResult& output, const std::string& check) {
  const nlohmann::json json = nlohmann::json::parse(output.output, nullptr, false);
  EXPECT_TRUE(json.is_object()) << output.output;
  if (!json.is_object()) return nullptr;
  for (const nlohmann::json& finding : json["findings"]) {
    if (finding["check"] == check) return finding;
  }
  return nullptr;
}

// The doctor asks what serve asks, so that the two cannot differ; what is wrong is not guessed
// here.
TEST(Doctor, SaysOfGpusWhatServeSays) {
  for (const char* flags : {"--backend=cuda", "--devices=0,1", "--devices=1000000"}) {
    const CommandResult output =
        RunLmhead(absl::StrCat("doctor --json --listen=127.0.0.1:0 ", flags));
    const nlohmann::json finding = FindingOf(output, "backend");
    ASSERT_FALSE(finding.is_null()) << output.output;
    if (finding["severity"] == "ok") continue;  // There are such GPUs.
    EXPECT_EQ(finding["severity"], "fail") << finding;
    auto server = LocalServer::Start(LmheadBinary(), {flags});
    ASSERT_FALSE(server.ok()) << flags;
    const std::string said(server.status().message());
    EXPECT_THAT(said, HasSubstr(finding["what"].get<std::string>()));
    EXPECT_THAT(said, HasSubstr(std::string(flags).substr(0, 9)));
    // What CUDA says of a driver that is not there.
    EXPECT_THAT(said, testing::Not(testing::ContainsRegex("--[a-z]+=[a-z0-9,]+: no CUDA device")));
  }
}

TEST(Doctor, FindsNothingWrongWithAGoodSetUp) {
  const TestAuthority authority("authority");
  const Leaf leaf = authority.Issue({"DNS:head-0"});
  const SecretFolder files({{"tls.crt", leaf.cert_pem},
                            {"tls.key", leaf.key_pem},
                            {"ca.crt", authority.cert_pem()},
                            {"policy.json", R"({"identities": []})"}});
  const CommandResult output = RunLmhead(absl::StrCat(
      "doctor --json --backend=cpu --listen=127.0.0.1:0 --tls_cert_file=", files.Path("tls.crt"),
      " --tls_key_file=", files.Path("tls.key"), " --tls_client_ca_file=", files.Path("ca.crt"),
      " --tls_ca_file=", files.Path("ca.crt"), " --auth_policy_file=", files.Path("policy.json")));
  EXPECT_EQ(output.exit_code, 0) << output.output;
  for (const char* check : {"port --listen", "tls_cert_file", "tls_ca_file", "tls_client_ca_file",
                            "auth_policy_file"}) {
    EXPECT_EQ(FindingOf(output, check).value("severity", ""), "ok") << check << output.output;
  }
  for (const char* check : {"/dev/shm", "memlock", "nofile", "clock", "memory"}) {
    EXPECT_FALSE(FindingOf(output, check).is_null()) << check << output.output;
  }
}

TEST(Doctor, WarnsOfIdentitiesThatNobodyHas) {
  const TestAuthority authority("authority");
  const Leaf leaf = authority.Issue({"DNS:head-0"});
  const SecretFolder files(
      {{"tls.crt", leaf.cert_pem},
       {"tls.key", leaf.key_pem},
       {"tokens.json",
        absl::StrCat(R"({"tokens": [{"name": "ci", "sha256": ")", std::string(64, 'a'), R"("}]})")},
       {"policy.json", R"({"identities": [{"token": "ci", "roles": ["admin"]},
                                          {"token": "cl", "roles": ["admin"]},
                                          {"name": "ops.example.org", "roles": ["admin"]}]})"}});
  const CommandResult output = RunLmhead(absl::StrCat(
      "doctor --backend=cpu --listen=127.0.0.1:0 --tls_cert_file=", files.Path("tls.crt"),
      " --tls_key_file=", files.Path("tls.key"), " --auth_policy_file=", files.Path("policy.json"),
      " --auth_token_file=", files.Path("tokens.json")));
  EXPECT_EQ(output.exit_code, 0) << output.output;
  EXPECT_THAT(output.output, HasSubstr("nobody can come as token cl"));
  EXPECT_THAT(output.output, HasSubstr("nobody can come as certificate ops.example.org"));
  EXPECT_THAT(output.output, testing::Not(HasSubstr("nobody can come as token ci")));
}

TEST(Doctor, SaysWhatIsWrongAndHowToMendIt) {
  const TestAuthority authority("authority");
  const TestAuthority stranger("stranger");
  const absl::Time now = absl::Now();
  const Leaf leaf = authority.Issue({"DNS:head-0"}, now - absl::Hours(2), now - absl::Hours(1));
  const Leaf soon = authority.Issue({"DNS:head-0"}, now - absl::Hours(2), now + absl::Hours(1));
  const SecretFolder files({{"expired.crt", leaf.cert_pem},
                            {"soon.crt", soon.cert_pem},
                            {"soon.key", soon.key_pem},
                            {"other.key", leaf.key_pem},
                            {"other-ca.crt", stranger.cert_pem()},
                            {"policy.json", R"({"identities": [], "extra": 1})"}});
  auto server = StartServer();
  const std::string tls = absl::StrCat(" --tls_client_ca_file=", files.Path("other-ca.crt"),
                                       " --auth_policy_file=", files.Path("policy.json"));
  const struct {
    std::string flags;
    const char* check;
    const char* severity;
    const char* says;
  } cases[] = {
      {absl::StrCat("--listen=", server->address()), "port --listen", "fail", "in use"},
      {"--listen=no-port", "port --listen", "fail", "no port"},
      {"--listen=127.0.0.1:99999", "port --listen", "fail", "0 to 65535"},
      {"--metrics_listen=unix:/tmp/m", "port --metrics_listen", "fail", "wanted host:port"},
      {absl::StrCat("--metrics_listen=", server->address()), "port --metrics_listen", "fail",
       "in use"},
      {"--health_listen=127.0.0.1:64999 --metrics_listen=127.0.0.1:64999", "port --health_listen",
       "fail", "in use"},
      {"--ranks=3 --replicas=2", "flags", "fail", "--replicas: got 2"},
      {"--staging_slots=0", "flags", "fail", "--staging_slots: got 0"},
      {"--drain_timeout_seconds=-1", "flags", "fail", "--drain_timeout_seconds: got -1"},
      {"--log_format=xml", "flags", "fail", "--log_format: got 'xml'"},
      {"--collective=mpi", "flags", "fail", "--collective: got 'mpi'"},
      {"--listen=0.0.0.0:0", "security", "fail", "--insecure"},
      {"--listen=0.0.0.0:0 --insecure", "security", "warn", "plaintext"},
      {absl::StrCat("--tls_cert_file=", files.Path("expired.crt"),
                    " --tls_key_file=", files.Path("other.key"), tls),
       "tls_cert_file", "fail", "expired"},
      {absl::StrCat("--tls_cert_file=", files.Path("soon.crt"),
                    " --tls_key_file=", files.Path("other.key"), tls),
       "tls_key_file", "fail", "not that of"},
      {absl::StrCat("--tls_cert_file=", files.Path("soon.crt"),
                    " --tls_key_file=", files.Path("soon.key"), tls),
       "tls_cert_file", "warn", "valid until"},
      {absl::StrCat("--tls_cert_file=", files.Path("soon.crt"), " --tls_key_file=",
                    files.Path("soon.key"), tls, " --tls_ca_file=", files.Path("other-ca.crt")),
       "tls_ca_file", "fail", "certificate"},
      {absl::StrCat("--tls_cert_file=", files.Path("soon.crt"),
                    " --tls_key_file=", files.Path("soon.key"), tls),
       "auth_policy_file", "fail", "unknown key 'extra'"},
      {"--tls_cert_file=/no/such --tls_key_file=/no/such", "tls_cert_file", "fail", "No such file"},
      {"--checkpoint_dir=/no/such/folder", "checkpoint_dir", "fail", "No such file"},
  };
  for (const auto& c : cases) {
    const CommandResult output = RunLmhead(absl::StrCat(
        "doctor --json --backend=cpu ",
        c.flags.find("--listen") == std::string::npos ? "--listen=127.0.0.1:0 " : "", c.flags));
    const nlohmann::json finding = FindingOf(output, c.check);
    ASSERT_FALSE(finding.is_null()) << c.flags << output.output;
    EXPECT_EQ(finding.value("severity", ""), c.severity) << finding;
    EXPECT_THAT(finding.value("what", ""), HasSubstr(c.says));
    EXPECT_FALSE(finding.value("mend", "").empty()) << finding;
    if (std::string(c.severity) == "fail") EXPECT_EQ(output.exit_code, 1) << c.flags;
  }
  const CommandResult text = RunLmhead("doctor --backend=cpu --listen=127.0.0.1:0");
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_THAT(text.output, HasSubstr("port --listen"));
}

}  // namespace
}  // namespace lmhead::e2e
