// A commit applied a gradient that was NaN, and the head was lost.

#include <gmock/gmock.h>

#include <cmath>
#include <vector>

#include "tests/rpc/rpc_fixture.h"

namespace lmhead {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Truly;

const auto kIsFinite = Truly([](float value) { return std::isfinite(value); });

class NonfiniteGradientTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    CreateHead(Spec());
  }

  // A ratio of e^200: no float32 holds the gradient.
  void FeedRatioThatOverflows() {
    Begin(1);
    v1::StreamOpen open = Open(1);
    open.mutable_recipe()->mutable_policy()->set_kind(v1::PolicySpec::KIND_CLIPPED);
    v1::Chunk chunk = MakeChunk(0);
    for (int64_t row = 0; row < chunk.num_tokens(); ++row) {
      chunk.add_old_logprob(-200.0f);
      chunk.add_advantage(-1.0f);
    }
    TestStream stream(stub_.get());
    ASSERT_TRUE(stream.Send(open));
    ASSERT_TRUE(stream.Read().has_opened());
    ASSERT_TRUE(stream.Send(chunk));
    ASSERT_TRUE(stream.Read().has_result());
    ASSERT_TRUE(stream.SendEnd(1));
    ASSERT_TRUE(stream.Read().has_ended());
    ASSERT_TRUE(stream.Finish().ok());
  }
};

TEST_F(NonfiniteGradientTest, IsNotCommittedAndLeavesNothingBehind) {
  const std::vector<float> before = ReadWeight();
  FeedRatioThatOverflows();
  v1::PrepareStepResponse prepared;
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_FALSE(std::isfinite(prepared.grad_squared_norm()));
  v1::CommitStepResponse committed;
  for (const bool allow_nonfinite_rows : {false, true}) {
    const grpc::Status status = Commit(1, &committed, 0.5, allow_nonfinite_rows);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr("the squared gradient of step 1 of head lm"));
    EXPECT_THAT(status.error_message(), HasSubstr("abort the step"));
  }
  EXPECT_EQ(ReadWeight(), before);

  ASSERT_TRUE(Abort(1, "the gradient is not finite").ok());
  Begin(1);
  FeedWorker(Open(1), 2);
  ASSERT_TRUE(Prepare(1, &prepared).ok());
  EXPECT_TRUE(std::isfinite(prepared.grad_squared_norm()));
  ASSERT_TRUE(Commit(1, &committed).ok());
  const std::vector<float> after = ReadWeight();
  EXPECT_NE(after, before);
  EXPECT_THAT(after, Each(kIsFinite));
}

}  // namespace
}  // namespace lmhead
