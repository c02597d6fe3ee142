// Lanes over gRPC and loopback, both ends in this process.

#include "server/shard/lanes.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "lmhead/v1/shard.grpc.pb.h"
#include "server/shard/follower_lane.h"
#include "server/shard/leader_lane.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);

// The leader's side: lanes of one call, number 1, for whoever calls.
class LaneServer final
    : public v1::ShardService::WithRawCallbackMethod_Lane<v1::ShardService::Service> {
 public:
  explicit LaneServer(std::shared_ptr<Lanes> lanes) : lanes_(std::move(lanes)) {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    grpc_ = builder.BuildAndStart();
  }
  ~LaneServer() override { Stop(); }

  void Stop() {
    grpc_->Shutdown(absl::ToChronoTime(absl::Now()));
    grpc_->Wait();
  }

  LaneServerReactor* Lane(grpc::CallbackServerContext* context) override {
    return LeaderLane::Start(
        context,
        {.find_lanes = [this](const v1::JoinLane& join) -> absl::StatusOr<std::shared_ptr<Lanes>> {
           if (join.call() == 1) return lanes_;
           return absl::FailedPreconditionError(absl::StrCat("no call ", join.call()));
         },
         .on_complete = [this] { ++num_completed_; }},
        admitted_);
  }

  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port_),
                                     grpc::InsecureChannelCredentials(), arguments);
  }

  int num_completed() const { return num_completed_; }
  void set_admitted(const absl::Status& admitted) { admitted_ = admitted; }

 private:
  const std::shared_ptr<Lanes> lanes_;
  std::atomic<int> num_completed_ = 0;
  absl::Status admitted_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> grpc_;
};

// Both ends, joined.
class LanesTest : public ::testing::TestWithParam<int> {
 protected:
  ~LanesTest() override {
    for (const std::shared_ptr<Lanes>& each : {follower_, leader_}) {
      each->Close(absl::CancelledError("the test ends"));
      each->AwaitEnd();
    }
    server_.Stop();
  }

  void Open(int num_lanes) {
    v1::JoinLane join;
    join.set_call(1);
    for (int i = 0; i < num_lanes; ++i) FollowerLane::Open(server_.NewChannel(), join, follower_);
  }
  void OpenAll() {
    Open(num_lanes_);
    const absl::Time deadline = absl::Now() + kPatience;
    while (!leader_->complete() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_TRUE(leader_->complete());
  }

  // What the server answers to a call with this as its first message.
  grpc::Status EndOfCallThatSends(const v1::LaneRequest& first) {
    const auto stub = v1::ShardService::NewStub(server_.NewChannel());
    grpc::ClientContext context;
    const auto stream = stub->Lane(&context);
    stream->Write(first);
    v1::LaneResponse answer;
    EXPECT_FALSE(stream->Read(&answer));
    return stream->Finish();
  }

  const int num_lanes_ = GetParam();
  absl::Notification leader_lost_, follower_lost_;
  const std::shared_ptr<Lanes> leader_ =
      std::make_shared<Lanes>(num_lanes_, [this] { leader_lost_.Notify(); });
  const std::shared_ptr<Lanes> follower_ =
      std::make_shared<Lanes>(num_lanes_, [this] { follower_lost_.Notify(); });
  LaneServer server_{leader_};
};

INSTANTIATE_TEST_SUITE_P(, LanesTest, ::testing::Values(1, 4));

using Array = std::vector<std::byte>;

std::vector<Array> RandomArrays(std::mt19937_64& random, size_t largest) {
  std::vector<Array> arrays(1 + random() % 5);
  for (Array& array : arrays) {
    array.resize(random() % 4 == 0 ? 0 : random() % largest);
    for (size_t at = 0; at + 8 <= array.size(); at += 8) {
      const uint64_t value = random();
      std::memcpy(&array[at], &value, 8);
    }
  }
  arrays[0].resize(1 + arrays[0].size());
  return arrays;
}

Lanes::Arrays ArraysOf(const std::vector<Array>& arrays) { return {arrays.begin(), arrays.end()}; }
Lanes::Places PlacesOf(std::vector<Array>& arrays) { return {arrays.begin(), arrays.end()}; }

// One command's arrays where they go.
struct Arrival {
  explicit Arrival(const std::vector<Array>& sent) : arrays(sent) {
    for (Array& array : arrays) std::ranges::fill(array, std::byte{0xcd});
  }
  void ExpectAt(Lanes* lanes, uint64_t command) {
    lanes->Expect(command, PlacesOf(arrays), [this](const absl::Status& told) {
      status = told;
      arrived.Notify();
    });
  }

  std::vector<Array> arrays;
  absl::Status status;
  absl::Notification arrived;
};

// In both directions at once; commands become known before, while and after their parts come.
TEST_P(LanesTest, ArraysArriveWhole) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  std::mt19937_64 random(11);
  constexpr int kCommands = 20;
  std::vector<std::vector<Array>> sent;
  std::vector<std::unique_ptr<Arrival>> down, up;
  for (int i = 0; i < kCommands; ++i) {
    sent.push_back(RandomArrays(random, 3 << 20));
    down.push_back(std::make_unique<Arrival>(sent.back()));
    up.push_back(std::make_unique<Arrival>(sent.back()));
  }
  std::thread expecting([&] {
    for (int i = 0; i < kCommands; ++i) {
      if (i % 3 == 1) absl::SleepFor(absl::Milliseconds(20));
      down[i]->ExpectAt(follower_.get(), i + 1);
    }
  });
  for (int i = 0; i < kCommands; ++i) {
    up[i]->ExpectAt(leader_.get(), i + 1);
    leader_->Send(i + 1, ArraysOf(sent[i]), nullptr);
    follower_->Send(i + 1, ArraysOf(sent[i]), nullptr);
    if (i % 4 == 3) absl::SleepFor(absl::Milliseconds(10));
  }
  expecting.join();
  for (int i = 0; i < kCommands; ++i) {
    SCOPED_TRACE(absl::StrCat("command ", i + 1));
    for (Arrival* each : {down[i].get(), up[i].get()}) {
      ASSERT_TRUE(each->arrived.WaitForNotificationWithTimeout(kPatience));
      EXPECT_TRUE(each->status.ok()) << each->status;
      EXPECT_TRUE(each->arrays == sent[i]);
    }
  }
  EXPECT_EQ(server_.num_completed(), 1);
  EXPECT_FALSE(leader_lost_.HasBeenNotified());
  EXPECT_FALSE(follower_lost_.HasBeenNotified());
}

TEST_P(LanesTest, WhatIsSentIsKeptUntilItIsCopied) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  std::mt19937_64 random(3);
  auto sent = std::make_shared<const std::vector<Array>>(RandomArrays(random, 8 << 20));
  const std::weak_ptr<const std::vector<Array>> watched = sent;
  Arrival arrival(*sent);
  const std::vector<Array> wanted = *sent;
  follower_->Send(1, ArraysOf(*sent), sent);
  sent = nullptr;
  arrival.ExpectAt(leader_.get(), 1);
  ASSERT_TRUE(arrival.arrived.WaitForNotificationWithTimeout(kPatience));
  EXPECT_TRUE(arrival.arrays == wanted);
  EXPECT_TRUE(watched.expired());
}

// The memory of a forgotten command is gone at once; the sanitizers see a late copy.
TEST_P(LanesTest, AForgottenCommandLeavesItsMemoryAlone) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  std::mt19937_64 random(5);
  std::vector<std::unique_ptr<Arrival>> arrivals;  // Told of what arrived in the last moment.
  for (uint64_t command = 1; command < 20; command += 2) {
    auto sent = std::make_unique<std::vector<Array>>(1);
    sent->front().resize(24 << 20);
    Arrival& arrival = *arrivals.emplace_back(std::make_unique<Arrival>(*sent));
    arrival.ExpectAt(follower_.get(), command);
    leader_->Send(command, ArraysOf(*sent), nullptr);
    absl::SleepFor(absl::Microseconds(random() % 4000));
    if (command % 4 == 1) {
      leader_->Forget(command);
      sent = nullptr;
      follower_->Forget(command);
      arrival.arrays = {};
    } else {
      follower_->Forget(command);
      arrival.arrays = {};
      leader_->Forget(command);
      sent = nullptr;
    }
    // The next one comes whole.
    const std::vector<Array> next = RandomArrays(random, 1 << 20);
    Arrival whole(next);
    whole.ExpectAt(follower_.get(), command + 1);
    leader_->Send(command + 1, ArraysOf(next), nullptr);
    ASSERT_TRUE(whole.arrived.WaitForNotificationWithTimeout(kPatience));
    EXPECT_TRUE(whole.arrays == next);
  }
}

// A command that is refused before it is expected does not hold up what comes after it.
TEST_P(LanesTest, ACommandThatWasNeverExpectedCanBeForgotten) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  std::vector<Array> unwanted(1);
  unwanted[0].resize(9 << 20);
  leader_->Send(1, ArraysOf(unwanted), nullptr);
  absl::SleepFor(absl::Milliseconds(20));  // Parts wait at every lane.
  follower_->Forget(1);
  std::mt19937_64 random(8);
  const std::vector<Array> next = RandomArrays(random, 1 << 20);
  Arrival whole(next);
  whole.ExpectAt(follower_.get(), 2);
  leader_->Send(2, ArraysOf(next), nullptr);
  ASSERT_TRUE(whole.arrived.WaitForNotificationWithTimeout(kPatience));
  EXPECT_TRUE(whole.arrays == next);
}

TEST_P(LanesTest, ClosingAnswersWhatIsExpectedAndEndsTheOtherEnd) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  auto sent = std::make_unique<std::vector<Array>>(1);
  sent->front().resize(32 << 20);
  auto expected = std::make_unique<Arrival>(*sent);
  Arrival at_follower(*sent);
  at_follower.ExpectAt(follower_.get(), 1);
  leader_->Send(1, ArraysOf(*sent), nullptr);
  expected->ExpectAt(leader_.get(), 1);
  leader_->Close(absl::AbortedError("enough"));
  sent = nullptr;
  ASSERT_TRUE(expected->arrived.HasBeenNotified());
  EXPECT_EQ(expected->status.code(), absl::StatusCode::kAborted);
  expected = nullptr;
  ASSERT_TRUE(follower_lost_.WaitForNotificationWithTimeout(kPatience));
  EXPECT_THAT(std::string(follower_->loss().message()), HasSubstr("a lane has ended"));
  EXPECT_FALSE(leader_lost_.HasBeenNotified()) << "it was closed, not lost";
  Arrival late({Array(1)});
  late.ExpectAt(leader_.get(), 2);
  ASSERT_TRUE(late.arrived.HasBeenNotified());
  EXPECT_EQ(late.status.code(), absl::StatusCode::kUnavailable);
  leader_->Send(2, {}, nullptr);
  leader_->Forget(2);
  follower_->Close(absl::CancelledError("the test ends"));
  EXPECT_TRUE(at_follower.arrived.HasBeenNotified());
}

// By two threads at once, of a command whose part is being copied.
TEST_P(LanesTest, AForgottenCommandIsNotAnsweredByAClose) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  std::vector<Array> sent(1, Array(64 << 20));
  Arrival arrival(sent);
  arrival.ExpectAt(leader_.get(), 1);
  follower_->Send(1, ArraysOf(sent), nullptr);
  absl::SleepFor(absl::Milliseconds(5));
  std::thread closing([this] { leader_->Close(absl::AbortedError("enough")); });
  leader_->Forget(1);
  arrival.arrays = {};
  closing.join();
  leader_->AwaitEnd();
  follower_->Close(absl::CancelledError("the test ends"));
}

TEST_P(LanesTest, AServerThatEndsLosesThem) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  server_.Stop();
  ASSERT_TRUE(leader_lost_.WaitForNotificationWithTimeout(kPatience));
  ASSERT_TRUE(follower_lost_.WaitForNotificationWithTimeout(kPatience));
}

TEST_P(LanesTest, ALaneTooManyIsRefused) {
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  v1::LaneRequest first;
  first.mutable_join()->set_call(1);
  const grpc::Status status = EndOfCallThatSends(first);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(),
            absl::StrCat("the Follow call has all of its ", num_lanes_, " lanes"));
  EXPECT_FALSE(leader_lost_.HasBeenNotified());
}

TEST_P(LanesTest, StrangersAreRefusedAndLoseNothing) {
  v1::LaneRequest first;
  EXPECT_EQ(EndOfCallThatSends(first).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  first.mutable_part()->set_data("x");
  EXPECT_EQ(EndOfCallThatSends(first).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  first.mutable_join()->set_call(7);
  EXPECT_EQ(EndOfCallThatSends(first).error_message(), "no call 7");
  server_.set_admitted(absl::PermissionDeniedError("not a rank"));
  first.mutable_join()->set_call(1);
  EXPECT_EQ(EndOfCallThatSends(first).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  server_.set_admitted(absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(OpenAll());
  EXPECT_FALSE(leader_lost_.HasBeenNotified());
}

// A peer that writes where nothing is to be written loses the lanes, and writes nothing.
class BadPartTest : public LanesTest {
 protected:
  size_t num_written_ = 0;  // Of the first array, by parts before the bad one.

  void ExpectLost(const v1::LanePart& part, const std::string& why) {
    std::vector<Array> arrays = {Array(100), Array(), Array(50)};
    Arrival arrival(arrays);
    arrival.ExpectAt(leader_.get(), 4);
    const auto stub = v1::ShardService::NewStub(server_.NewChannel());
    grpc::ClientContext context;
    const auto stream = stub->Lane(&context);
    v1::LaneRequest message;
    message.mutable_join()->set_call(1);
    ASSERT_TRUE(stream->Write(message));
    *message.mutable_part() = part;
    for (int i = 0; i < 3 && stream->Write(message); ++i) continue;
    ASSERT_TRUE(leader_lost_.WaitForNotificationWithTimeout(kPatience));
    EXPECT_THAT(std::string(leader_->loss().message()), HasSubstr(why));
    leader_->Close(absl::CancelledError("the test ends"));
    v1::LaneResponse answer;
    EXPECT_FALSE(stream->Read(&answer));
    stream->Finish();
    EXPECT_EQ(arrival.status.code(), absl::StatusCode::kCancelled);
    std::vector<Array> wanted = {Array(100, std::byte{0xcd}), {}, Array(50, std::byte{0xcd})};
    std::fill_n(wanted[0].begin(), num_written_, std::byte{'z'});
    EXPECT_TRUE(arrival.arrays == wanted);
  }

  static v1::LanePart Part(uint32_t array, uint64_t offset, size_t bytes) {
    v1::LanePart part;
    part.set_command(4);
    part.set_array(array);
    part.set_offset(offset);
    part.set_data(std::string(bytes, 'z'));
    return part;
  }
};

INSTANTIATE_TEST_SUITE_P(, BadPartTest, ::testing::Values(1));

TEST_P(BadPartTest, OfAnArrayThatIsNotThere) { ExpectLost(Part(3, 0, 10), "of array 3 (0 bytes)"); }
TEST_P(BadPartTest, OfAnEmptyArray) { ExpectLost(Part(1, 0, 1), "of array 1 (0 bytes)"); }
TEST_P(BadPartTest, BeyondTheEnd) {
  ExpectLost(Part(0, 100, 1), "1 bytes from byte 100 on of array 0 (100 bytes)");
}
TEST_P(BadPartTest, OverTheEnd) {
  ExpectLost(Part(2, 40, 11), "11 bytes from byte 40 on of array 2 (50 bytes)");
}
TEST_P(BadPartTest, FarBeyondTheEnd) { ExpectLost(Part(0, ~uint64_t{0}, 2), "of array 0"); }
TEST_P(BadPartTest, SentTwice) {
  num_written_ = 80;
  ExpectLost(Part(0, 0, 80), "lacks 70");
}
TEST_P(BadPartTest, WithoutData) { ExpectLost(Part(0, 0, 0), "ends before its data"); }

}  // namespace
}  // namespace lmhead
