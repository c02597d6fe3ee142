#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <variant>

#include "proto/wire/chunk_codec.h"
#include "proto/wire/convert.h"
#include "tests/wire/wire_test_util.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kRowBytes = 6;
constexpr int32_t kTopK = 3;

// A result with any subset of the outputs.
v1::ChunkResult RandomResult(Random& random, int64_t num_tokens) {
  v1::ChunkResult result;
  result.set_chunk_index(Coin(random) ? random() >> (random() % 64) : 0);
  result.set_num_tokens(num_tokens);
  result.set_duplicate(Coin(random));
  v1::LossSums& sums = *result.mutable_sums();
  if (Coin(random)) sums.set_loss_sum(static_cast<double>(random() % 1000) / 7.0);
  sums.set_num_tokens(num_tokens);
  if (Coin(random)) sums.set_num_valid_tokens(num_tokens);
  if (Coin(random)) sums.set_entropy_sum(0.1);
  if (Coin(random)) sums.set_divergence_sum(0.2);
  if (Coin(random)) sums.set_policy_sum(-0.3);
  if (Coin(random)) sums.set_dropped_teacher_mass_sum(0.4);
  if (Coin(random)) sums.set_num_clipped(num_tokens);
  if (Coin(random)) sums.set_old_policy_kl_sum(0.5);
  result.mutable_timings();
  if (Coin(random)) result.mutable_timings()->set_compute_seconds(1.5e-3);
  if (Coin(random)) AddElements(random, num_tokens, result.mutable_token_loss());
  if (Coin(random)) AddElements(random, num_tokens, result.mutable_logprob());
  if (Coin(random)) AddElements(random, num_tokens, result.mutable_lse());
  if (Coin(random)) AddElements(random, num_tokens, result.mutable_entropy());
  if (Coin(random)) AddElements(random, num_tokens, result.mutable_argmax());
  if (Coin(random)) {
    AddElements(random, kTopK * num_tokens, result.mutable_topk_ids());
    AddElements(random, kTopK * num_tokens, result.mutable_topk_logprobs());
  }
  if (Coin(random)) {
    result.set_grad_hidden_states(
        RandomBytes(random, num_tokens * static_cast<int64_t>(kRowBytes)));
  }
  return result;
}

ResultView ViewOfMessage(const v1::ChunkResult& result) {
  const auto elements = [](const auto& field) {
    return std::span(field.data(), static_cast<size_t>(field.size()));
  };
  ResultView view;
  view.chunk_index = result.chunk_index();
  view.num_tokens = result.num_tokens();
  view.duplicate = result.duplicate();
  view.sums = LossSumsFromProto(result.sums());
  view.timings = StageTimingsFromProto(result.timings());
  view.token_loss = elements(result.token_loss());
  view.logprob = elements(result.logprob());
  view.lse = elements(result.lse());
  view.entropy = elements(result.entropy());
  view.argmax = elements(result.argmax());
  view.topk_ids = elements(result.topk_ids());
  view.topk_logprobs = elements(result.topk_logprobs());
  view.grad_hidden_states = std::as_bytes(std::span(result.grad_hidden_states()));
  return view;
}

std::string ResponseBytes(const v1::ChunkResult& result) {
  v1::ComputeLossResponse response;
  *response.mutable_result() = result;
  return response.SerializeAsString();
}

// Places of exactly the outputs that `shape` has, in memory of exactly their size.
class Places {
 public:
  explicit Places(const v1::ChunkResult& shape)
      : index_(shape.chunk_index()),
        num_tokens_(shape.num_tokens()),
        token_loss_(Make<float>(shape.token_loss_size())),
        logprob_(Make<float>(shape.logprob_size())),
        lse_(Make<float>(shape.lse_size())),
        entropy_(Make<float>(shape.entropy_size())),
        argmax_(Make<int32_t>(shape.argmax_size())),
        topk_ids_(Make<int32_t>(shape.topk_ids_size())),
        topk_logprobs_(Make<float>(shape.topk_logprobs_size())),
        grad_(shape.grad_hidden_states().size()) {}

  absl::StatusOr<ResultDestination> Find(uint64_t chunk_index, int64_t num_tokens) {
    if (chunk_index != index_ || num_tokens != num_tokens_) {
      return absl::InternalError("no such chunk in flight");
    }
    return ResultDestination{.token_loss = token_loss_.get(),
                             .logprob = logprob_.get(),
                             .lse = lse_.get(),
                             .entropy = entropy_.get(),
                             .argmax = argmax_.get(),
                             .topk_ids = topk_ids_.get(),
                             .topk_logprobs = topk_logprobs_.get(),
                             .top_k = kTopK,
                             .grad_hidden_states = grad_};
  }

  // The message that `decoded` and these places amount to.
  v1::ChunkResult Message(const DecodedResult& decoded) const {
    v1::ChunkResult result;
    result.set_chunk_index(decoded.chunk_index);
    result.set_num_tokens(decoded.num_tokens);
    result.set_duplicate(decoded.duplicate);
    *result.mutable_sums() = LossSumsToProto(decoded.sums);
    *result.mutable_timings() = StageTimingsToProto(decoded.timings);
    Add(token_loss_.get(), result.mutable_token_loss());
    Add(logprob_.get(), result.mutable_logprob());
    Add(lse_.get(), result.mutable_lse());
    Add(entropy_.get(), result.mutable_entropy());
    Add(argmax_.get(), result.mutable_argmax());
    Add(topk_ids_.get(), result.mutable_topk_ids(), kTopK);
    Add(topk_logprobs_.get(), result.mutable_topk_logprobs(), kTopK);
    result.mutable_grad_hidden_states()->assign(reinterpret_cast<const char*>(grad_.data()),
                                                grad_.size());
    return result;
  }

 private:
  template <typename T>
  std::unique_ptr<T[]> Make(int count) {
    return count == 0 ? nullptr : std::make_unique<T[]>(static_cast<size_t>(count));
  }
  template <typename T>
  void Add(const T* elements, google::protobuf::RepeatedField<T>* field,
           int64_t per_token = 1) const {
    if (elements != nullptr) field->Add(elements, elements + per_token * num_tokens_);
  }

  uint64_t index_;
  int64_t num_tokens_;
  std::unique_ptr<float[]> token_loss_, logprob_, lse_, entropy_;
  std::unique_ptr<int32_t[]> argmax_, topk_ids_;
  std::unique_ptr<float[]> topk_logprobs_;
  std::vector<std::byte> grad_;
};

absl::StatusOr<DecodedResponse> Decode(const std::string& bytes, Places& places,
                                       size_t slice_bytes = 37) {
  grpc::ByteBuffer buffer = BufferOf(bytes, slice_bytes);
  return DecodeResponse(&buffer, [&](uint64_t chunk_index, int64_t num_tokens) {
    return places.Find(chunk_index, num_tokens);
  });
}

v1::ChunkResult SmallResult() {
  v1::ChunkResult result;
  result.set_chunk_index(7);
  result.set_num_tokens(2);
  result.mutable_sums()->set_loss_sum(3.25);
  result.mutable_timings()->set_compute_seconds(0.5);
  for (int i = 0; i < 2; ++i) {
    result.add_token_loss(1.5f + static_cast<float>(i));
    result.add_argmax(40 + i);
  }
  result.set_grad_hidden_states("0123456789ab");
  return result;
}

TEST(ResponseEncoding, BytesEqualProtobufs) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const v1::ChunkResult result = RandomResult(random, 1 + static_cast<int64_t>(random() % 100));
    const grpc::ByteBuffer buffer = EncodeResponse(ViewOfMessage(result), [] {});
    ASSERT_EQ(BytesOf(buffer), ResponseBytes(result));
  }
}

TEST(ResponseEncoding, OpenedAndEndedBytesEqualProtobufs) {
  v1::ComputeLossResponse opened;
  opened.mutable_opened()->set_incarnation(5);
  EXPECT_EQ(BytesOf(EncodeResponse(opened.opened())), opened.SerializeAsString());
  v1::ComputeLossResponse ended;
  ended.mutable_ended()->set_num_chunks_counted(6);
  EXPECT_EQ(BytesOf(EncodeResponse(ended.ended())), ended.SerializeAsString());
}

TEST(ResponseEncoding, BorrowsTheGradientUntilTheLastReferenceGoes) {
  const v1::ChunkResult result = SmallResult();
  int releases = 0;
  std::vector<grpc::Slice> slices;
  {
    const grpc::ByteBuffer buffer = EncodeResponse(ViewOfMessage(result), [&] { ++releases; });
    ASSERT_TRUE(buffer.Dump(&slices).ok());
  }
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), result.grad_hidden_states().data());
  EXPECT_EQ(releases, 0);
  slices.clear();
  EXPECT_EQ(releases, 1);
}

TEST(ResponseDecoding, GathersWhereTheCallerSays) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const v1::ChunkResult result = RandomResult(random, 1 + static_cast<int64_t>(random() % 20));
    Places places(result);
    const auto decoded = Decode(ResponseBytes(result), places, 1 + random() % 100);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(ResponseBytes(places.Message(std::get<DecodedResult>(*decoded))),
              ResponseBytes(result));
  }
}

TEST(ResponseDecoding, OpenedAndEnded) {
  Places places(SmallResult());
  v1::ComputeLossResponse response;
  response.mutable_opened()->set_incarnation(5);
  const auto opened = Decode(response.SerializeAsString(), places);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(std::get<v1::StreamOpened>(*opened).incarnation(), 5u);
  response.mutable_ended()->set_num_chunks_counted(6);
  const auto ended = Decode(response.SerializeAsString(), places);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(std::get<v1::StreamEnded>(*ended).num_chunks_counted(), 6u);
}

TEST(ResponseDecoding, TakesOtherEncodings) {
  const v1::ChunkResult result = SmallResult();
  v1::ComputeLossResponse first, second;
  second.mutable_result()->set_chunk_index(result.chunk_index());
  second.mutable_result()->set_num_tokens(result.num_tokens());
  *first.mutable_result() = result;
  first.mutable_result()->set_chunk_index(99);
  // The gradient comes before the scalars; the last scalar wins.
  const std::string merged = first.SerializeAsString() + second.SerializeAsString();
  const std::string unknown = ResponseBytes(result) + "\xf2\x3f\x03xyz";
  for (const std::string& bytes : {merged, unknown}) {
    Places places(result);
    const auto decoded = Decode(bytes, places);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(ResponseBytes(places.Message(std::get<DecodedResult>(*decoded))),
              ResponseBytes(result));
  }
}

TEST(ResponseDecoding, TheErrorOfTheLookupIsTheResult) {
  grpc::ByteBuffer buffer = BufferOf(ResponseBytes(SmallResult()), 10);
  const auto decoded = DecodeResponse(
      &buffer, [](uint64_t chunk_index, int64_t num_tokens) -> absl::StatusOr<ResultDestination> {
        EXPECT_EQ(chunk_index, 7u);
        EXPECT_EQ(num_tokens, 2);
        return absl::CancelledError("no longer wanted");
      });
  EXPECT_EQ(decoded.status(), absl::CancelledError("no longer wanted"));
  EXPECT_FALSE(buffer.Valid());
}

TEST(ResponseDecoding, RefusesWhatWasNotAskedForAndWhatIsMissing) {
  struct Case {
    void (*change)(v1::ChunkResult*);
    const char* says;
  };
  const Case cases[] = {
      {[](v1::ChunkResult* r) { r->add_token_loss(1); }, "token_loss has 12 bytes, want 8"},
      {[](v1::ChunkResult* r) { r->clear_token_loss(); }, "token_loss is missing"},
      {[](v1::ChunkResult* r) { r->add_lse(1); }, "lse of 4 bytes was not asked for"},
      {[](v1::ChunkResult* r) { r->clear_argmax(); }, "argmax is missing"},
      {[](v1::ChunkResult* r) { r->clear_grad_hidden_states(); }, "grad_hidden_states is missing"},
      {[](v1::ChunkResult* r) { r->set_grad_hidden_states("12"); },
       "grad_hidden_states has 2 bytes, want 12"},
      {[](v1::ChunkResult* r) { r->add_topk_logprobs(1); },
       "topk_logprobs of 4 bytes was not asked for"},
  };
  for (const Case& test : cases) {
    v1::ChunkResult result = SmallResult();
    test.change(&result);
    Places places(SmallResult());
    const auto decoded = Decode(ResponseBytes(result), places);
    EXPECT_TRUE(absl::IsInternal(decoded.status())) << decoded.status();
    EXPECT_THAT(std::string(decoded.status().message()),
                AllOf(HasSubstr("chunk 7"), HasSubstr(test.says)));
  }
}

// Whatever happens to the bytes: an error, or what the generated parser makes of them.
void ExpectLikeTheGeneratedParser(const std::string& bytes, const v1::ChunkResult& original) {
  Places places(original);
  const auto decoded = Decode(bytes, places);
  v1::ComputeLossResponse parsed;
  if (!parsed.ParseFromString(bytes)) {
    ASSERT_TRUE(absl::IsInternal(decoded.status())) << decoded.status();
    return;
  }
  if (!decoded.ok()) {
    ASSERT_TRUE(absl::IsInternal(decoded.status())) << decoded.status();
    return;
  }
  const auto* result = std::get_if<DecodedResult>(&*decoded);
  if (result == nullptr) return;
  ASSERT_EQ(ResponseBytes(places.Message(*result)),
            BytesOf(EncodeResponse(ViewOfMessage(parsed.result()), [] {})));
}

TEST(ResponseDecoding, EveryTruncationIsACleanError) {
  const std::string bytes = ResponseBytes(SmallResult());
  for (size_t length = 0; length < bytes.size(); ++length) {
    SCOPED_TRACE(length);
    Places places(SmallResult());
    const auto decoded = Decode(bytes.substr(0, length), places, 5);
    ASSERT_TRUE(absl::IsInternal(decoded.status())) << decoded.status();
  }
}

TEST(ResponseDecoding, EveryFlippedByteIsAnErrorOrDecodesLikeTheGeneratedParser) {
  std::vector<v1::ChunkResult> results = {SmallResult()};
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Random random(seed);
    results.push_back(RandomResult(random, 1 + static_cast<int64_t>(seed % 3)));
  }
  for (const v1::ChunkResult& result : results) {
    const std::string bytes = ResponseBytes(result);
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (int flip = 1; flip < 256; flip = flip < 16 ? flip + 1 : flip + 17) {
        SCOPED_TRACE(testing::Message()
                     << result.ShortDebugString() << " byte " << at << " flipped by " << flip);
        std::string flipped = bytes;
        flipped[at] = static_cast<char>(flipped[at] ^ flip);
        ExpectLikeTheGeneratedParser(flipped, result);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace lmhead
