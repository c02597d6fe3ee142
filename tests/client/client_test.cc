#include "client/cpp/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "tests/client/fake_service.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ClientTest : public testing::Test {
 protected:
  void SetUp() override {
    auto client = Client::Connect(server_.address(), {.max_attempts = 3});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = std::move(*client);
  }

  FakeService service_;
  FakeServer server_{&service_};
  std::unique_ptr<Client> client_;
};

TEST(ClientConnect, NobodyThereIsUnavailableWithTheAddress) {
  const auto client =
      Client::Connect("unix:/nowhere/at/all", {.connect_timeout = absl::Milliseconds(200)});
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("unix:/nowhere/at/all"));
}

TEST(ClientConnect, NonsenseIsUnavailableWithTheAddress) {
  const auto client = Client::Connect("no such place:::", {.connect_timeout = absl::Seconds(1)});
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("no such place"));
}

TEST_F(ClientTest, AnswersServerInfo) {
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->incarnation(), service_.incarnation);
}

TEST_F(ClientTest, RepeatsWhatMayBeRepeated) {
  service_.unavailable_calls = 2;
  EXPECT_TRUE(client_->GetServerInfo().ok());
  service_.unavailable_calls = 3;
  const absl::Status status = client_->GetServerInfo().status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(std::string(status.message()), server_.address() + ": not now");
  EXPECT_EQ(service_.unavailable_calls, 0);
}

TEST_F(ClientTest, DoesNotRepeatADeletion) {
  service_.unavailable_calls = 1;
  EXPECT_TRUE(absl::IsUnavailable(client_->DeleteHead("lm", false)));
  EXPECT_EQ(service_.num_delete_calls(), 1);
}

TEST_F(ClientTest, CallsByNameAreTheSameCalls) {
  const auto info = client_->CallJson("GetServerInfo", "", absl::ZeroDuration());
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_THAT(*info, HasSubstr(absl::StrCat("\"incarnation\":\"", service_.incarnation, "\"")));
  service_.unavailable_calls = 2;
  EXPECT_TRUE(client_->CallJson("GetServerInfo", "{}", absl::ZeroDuration()).ok());
  EXPECT_EQ(service_.unavailable_calls, 0);
  service_.unavailable_calls = 1;
  EXPECT_TRUE(absl::IsUnavailable(
      client_->CallJson("DeleteHead", R"({"head": "lm"})", absl::ZeroDuration()).status()));
  EXPECT_EQ(service_.num_delete_calls(), 1);
  const absl::Status streamed =
      client_->CallJson("ComputeLoss", "{}", absl::ZeroDuration()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(streamed)) << streamed;
}

TEST_F(ClientTest, ReconnectsToAServerThatCameBack) {
  server_.Stop();
  server_.Start();
  EXPECT_TRUE(client_->GetServerInfo().ok());
}

TEST_F(ClientTest, KeepsTheServersCodeAndMessage) {
  const auto head = client_->GetHead("lm");  // The fake does not have it.
  EXPECT_TRUE(absl::IsUnimplemented(head.status())) << head.status();
  EXPECT_THAT(std::string(head.status().message()), HasSubstr(server_.address()));
}

TEST_F(ClientTest, PrepareStepGrantsItsWaitOnTopOfTheCallTimeout) {
  v1::PrepareStepRequest request;
  request.set_wait_seconds(1000.0);
  const auto long_wait = client_->PrepareStep(request);
  ASSERT_TRUE(long_wait.ok()) << long_wait.status();
  EXPECT_GT(long_wait->num_chunks(), 1000u);
  EXPECT_LT(long_wait->num_chunks(), 1200u);  // gRPC rounds deadlines up.
  request.set_wait_seconds(0.0);
  const auto default_wait = client_->PrepareStep(request);
  ASSERT_TRUE(default_wait.ok()) << default_wait.status();
  EXPECT_GT(default_wait->num_chunks(), 60u);
}

TEST_F(ClientTest, WeightsGoOutInPiecesAndComeBackWhole) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kCols = kWeightMessageBytes / 8;  // Two rows a message.
  std::vector<float> weight(kRows * kCols);
  std::iota(weight.begin(), weight.end(), 0.0f);
  service_.unavailable_calls = 1;
  ASSERT_TRUE(client_
                  ->LoadWeights("lm", v1::TENSOR_KIND_WEIGHT, 10,
                                {weight.data(), kRows, kCols, DType::kFloat32})
                  .ok());
  std::vector<float> back(weight.size());
  service_.unavailable_calls = 1;
  const absl::Status status = client_->ReadWeights("lm", v1::TENSOR_KIND_WEIGHT, 10,
                                                   {back.data(), kRows, kCols, DType::kFloat32});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(back, weight);

  std::vector<uint16_t> narrow(kRows * kCols);
  const absl::Status wrong_dtype = client_->ReadWeights(
      "lm", v1::TENSOR_KIND_WEIGHT, 10, {narrow.data(), kRows, kCols, DType::kBFloat16});
  EXPECT_TRUE(absl::IsInvalidArgument(wrong_dtype)) << wrong_dtype;
  EXPECT_THAT(std::string(wrong_dtype.message()),
              AllOf(HasSubstr("float32"), HasSubstr("bfloat16")));

  const absl::Status wrong_width = client_->ReadWeights(
      "lm", v1::TENSOR_KIND_WEIGHT, 10, {back.data(), kRows, kCols / 2, DType::kFloat32});
  EXPECT_TRUE(absl::IsInternal(wrong_width)) << wrong_width;
}

TEST_F(ClientTest, EmptyMatricesAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(
      client_->LoadWeights("lm", v1::TENSOR_KIND_WEIGHT, 0, {nullptr, 1, 1, DType::kFloat32})));
  float value = 0.0f;
  EXPECT_TRUE(absl::IsInvalidArgument(
      client_->ReadWeights("lm", v1::TENSOR_KIND_WEIGHT, 0, {&value, 0, 1, DType::kFloat32})));
}

TEST_F(ClientTest, AWriterMayOutliveItsClient) {
  WriterSpec spec{.head = "lm", .step = 1, .worker = "w0", .incarnation = service_.incarnation};
  auto writer = client_->OpenWriter(spec);
  ASSERT_TRUE(writer.ok()) << writer.status();
  client_.reset();
  const std::vector<float> hidden(6);
  const std::vector<int32_t> targets(3);
  LossRows rows{.hidden_states = {hidden.data(), 3, 2, DType::kFloat32}, .targets = targets};
  EXPECT_TRUE((*writer)->Compute(rows).ok());
  EXPECT_TRUE((*writer)->Finish().ok());
}

TEST_F(ClientTest, WritersOneAfterAnother) {
  for (uint64_t step = 1; step <= 5; ++step) {
    WriterSpec spec{.head = "lm", .step = step, .worker = absl::StrCat("w", step)};
    spec.incarnation = service_.incarnation;
    spec.num_connections = 2;
    auto writer = client_->OpenWriter(spec);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const auto finished = (*writer)->Finish();
    ASSERT_TRUE(finished.ok()) << finished.status();
  }
}

}  // namespace
}  // namespace lmhead
