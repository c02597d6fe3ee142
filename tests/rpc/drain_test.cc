// How a server stops, in each phase of a step; and how steps end whose workers have gone silent.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/rpc/health_server.h"
#include "tests/rpc/rpc_fixture.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;
using HealthStatus = grpc::health::v1::HealthCheckResponse;

// What the health port says of a name; UNKNOWN when it does not answer.
HealthStatus::ServingStatus Ask(const std::string& address, const std::string& name) {
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(name);
  HealthStatus response;
  const grpc::Status status = stub->Check(&context, request, &response);
  return status.ok() ? response.status() : HealthStatus::UNKNOWN;
}

class DrainTest : public RpcTest {
 protected:
  void SetUp() override {
    ServerConfig config = Config();
    config.health_listen = "127.0.0.1:0";
    Restart(config);
    CreateHead(Spec());
  }
  ~DrainTest() override {
    if (stopping_.joinable()) stopping_.join();
  }

  // Stops on a thread, and returns once new work is refused.
  void StartStopping(absl::Duration timeout) {
    stopping_ = std::thread([this, timeout] { server_->Stop(absl::Now() + timeout); });
    while (Ask(server_->health_address(), "readiness") != HealthStatus::NOT_SERVING) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    while (StatusOfEvaluation().error_code() != grpc::StatusCode::UNAVAILABLE) {
      absl::SleepFor(absl::Milliseconds(10));
    }
  }

  grpc::Status StatusOfEvaluation() { return StatusOfOpen(Open(0)); }

  grpc::Status StatusOfBegin(uint64_t step) {
    grpc::ClientContext context;
    v1::BeginStepRequest request;
    request.set_head("lm");
    request.set_step(step);
    request.add_workers("w0");
    v1::BeginStepResponse response;
    return stub_->BeginStep(&context, request, &response);
  }

  std::thread stopping_;
};

TEST_F(DrainTest, ReadinessTellsAndLivenessStays) {
  EXPECT_EQ(Ask(server_->health_address(), "readiness"), HealthStatus::SERVING);
  EXPECT_EQ(Ask(server_->health_address(), "liveness"), HealthStatus::SERVING);
  EXPECT_EQ(Ask(server_->health_address(), ""), HealthStatus::SERVING);
  EXPECT_EQ(Ask(server_->health_address(), "lmhead.v1.LmHeadService"), HealthStatus::UNKNOWN);
  Begin(1);
  StartStopping(absl::Minutes(5));
  EXPECT_EQ(Ask(server_->health_address(), ""), HealthStatus::NOT_SERVING);
  EXPECT_EQ(Ask(server_->health_address(), "liveness"), HealthStatus::SERVING);
  server_->Stop(absl::Now());
  EXPECT_EQ(Ask(server_->health_address(), "liveness"), HealthStatus::SERVING);
}

TEST_F(DrainTest, TheHealthPortServesNothingElse) {
  const auto stub = v1::LmHeadService::NewStub(
      grpc::CreateChannel(server_->health_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::GetServerInfoResponse response;
  EXPECT_EQ(stub->GetServerInfo(&context, {}, &response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(DrainTest, TheHealthPortNamesATakenAddress) {
  const auto second = HealthServer::Start(server_->health_address());
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--health_listen"));
}

TEST_F(DrainTest, AnIdleServerStopsAtOnce) {
  server_->Stop(absl::Now() + absl::Hours(1));
  EXPECT_EQ(StatusOfBegin(1).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(DrainTest, AnOpenStepComesToItsEndAndNothingNewBegins) {
  Begin(1, 2);
  FeedWorker(Open(1, "w0"), 2);
  StartStopping(absl::Hours(1));
  const grpc::Status evaluation = StatusOfEvaluation();
  EXPECT_THAT(evaluation.error_message(), HasSubstr("stopping"));
  EXPECT_EQ(StatusOfBegin(2).error_code(), grpc::StatusCode::UNAVAILABLE);
  {
    grpc::ClientContext context;
    v1::CreateHeadRequest request;
    *request.mutable_spec() = Spec("another");
    v1::CreateHeadResponse response;
    EXPECT_EQ(stub_->CreateHead(&context, request, &response).error_code(),
              grpc::StatusCode::UNAVAILABLE);
  }
  // The second worker had not even opened its stream.
  Begin(1, 2);
  FeedWorker(Open(1, "w1"), 3);
  v1::PrepareStepResponse prepared;
  const grpc::Status status = Prepare(1, &prepared);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(prepared.num_chunks(), 5u);
  v1::CommitStepResponse committed;
  EXPECT_TRUE(Commit(1, &committed).ok());
  stopping_.join();  // An hour early.
}

TEST_F(DrainTest, AStepThatDoesNotEndIsAbortedWithTheReason) {
  Begin(1, 2);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  v1::PrepareStepResponse prepared;
  auto waiting = std::async(std::launch::async, [&] { return Prepare(1, &prepared, 600.0); });
  server_->Stop(absl::Now() + absl::Milliseconds(300));
  const grpc::Status ended = stream.Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::ABORTED) << ended.error_message();
  EXPECT_THAT(ended.error_message(), HasSubstr("--drain_timeout_seconds"));
  const grpc::Status unprepared = waiting.get();
  EXPECT_EQ(unprepared.error_code(), grpc::StatusCode::ABORTED) << unprepared.error_message();
  EXPECT_THAT(unprepared.error_message(), HasSubstr("--drain_timeout_seconds"));
}

TEST_F(DrainTest, ASecondStopIsQuick) {
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1)));
  ASSERT_TRUE(stream.Read().has_opened());
  StartStopping(absl::Hours(1));
  server_->Stop(absl::Now());
  stopping_.join();
  EXPECT_THAT(stream.Finish().error_message(), HasSubstr("told to stop at once"));
}

TEST_F(DrainTest, APreparedStepMayStillBeCommitted) {
  Begin(1);
  FeedWorker(Open(1), 1);
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  StartStopping(absl::Hours(1));
  v1::CommitStepResponse committed;
  const grpc::Status status = Commit(1, &committed);
  EXPECT_TRUE(status.ok()) << status.error_message();
  stopping_.join();
}

TEST_F(DrainTest, AnAbortEndsTheDrain) {
  Begin(1);
  StartStopping(absl::Hours(1));
  EXPECT_TRUE(Abort(1, "no time").ok());
  stopping_.join();
}

// --- Leases ---

class LeaseTest : public RpcTest {
 protected:
  void SetUp() override {}

  void Start(absl::Duration lease, absl::Duration step_timeout) {
    ServerConfig config = Config();
    config.worker_lease = lease;
    config.step_timeout = step_timeout;
    Restart(config);
    CreateHead(Spec());
  }
};

TEST_F(LeaseTest, ASilentWorkerEndsTheStepForTheOthers) {
  Start(absl::Seconds(1), absl::ZeroDuration());
  Begin(1, 2);
  TestStream stream(stub_.get());  // w0 lives by its stream, however long it sends nothing.
  ASSERT_TRUE(stream.Send(Open(1, "w0")));
  ASSERT_TRUE(stream.Read().has_opened());
  v1::PrepareStepResponse prepared;
  const grpc::Status waited = Prepare(1, &prepared, 600.0);
  EXPECT_EQ(waited.error_code(), grpc::StatusCode::ABORTED) << waited.error_message();
  EXPECT_THAT(waited.error_message(), HasSubstr("worker w1"));
  EXPECT_THAT(waited.error_message(), HasSubstr("--worker_lease_seconds"));
  EXPECT_EQ(stream.Read().kind_case(), v1::ComputeLossResponse::KIND_NOT_SET);
  const grpc::Status ended = stream.Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::ABORTED) << ended.error_message();
  EXPECT_THAT(ended.error_message(), HasSubstr("worker w1"));
  // The head goes on.
  Begin(2);
  FeedWorker(Open(2), 2);
  v1::CommitStepResponse committed;
  ASSERT_TRUE(Prepare(2, &prepared).ok());
  EXPECT_TRUE(Commit(2, &committed).ok());
}

TEST_F(LeaseTest, AStepThatIsOpenTooLongIsAborted) {
  Start(absl::ZeroDuration(), absl::Seconds(1));
  Begin(1);
  TestStream stream(stub_.get());
  ASSERT_TRUE(stream.Send(Open(1, "w0")));
  ASSERT_TRUE(stream.Read().has_opened());
  const v1::ComputeLossResponse nothing = stream.Read();
  EXPECT_EQ(nothing.kind_case(), v1::ComputeLossResponse::KIND_NOT_SET);
  const grpc::Status ended = stream.Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::ABORTED) << ended.error_message();
  EXPECT_THAT(ended.error_message(), HasSubstr("--step_timeout_seconds"));
}

}  // namespace
}  // namespace lmhead
