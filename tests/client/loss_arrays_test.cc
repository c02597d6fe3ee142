// What the step writer sends and gathers for each objective: every array cut at the same rows, both
// sides of paired streams, and what it refuses before anything is sent.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/step_writer.h"
#include "tests/client/fake_service.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr int64_t kTokens = 10;
constexpr int64_t kRowsPerChunk = 4;
constexpr int64_t kHidden = 3;
constexpr int64_t kTeacherHidden = 2;
constexpr int32_t kTopK = 2;

std::vector<float> Counting(size_t count, float start) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = start + static_cast<float>(i);
  return values;
}

class LossArraysTest : public testing::Test {
 protected:
  LossArraysTest() {
    for (int32_t i = 0; i < kTokens; ++i) targets_.push_back(i);
    for (int32_t i = 0; i < kTokens * kTopK; ++i) ids_.push_back(1000 + i);
    service_.check_chunk = [this](const v1::Chunk& chunk) {
      const absl::MutexLock lock(&mu_);
      chunks_[chunk.chunk_index()] = chunk;
      return grpc::Status::OK;
    };
  }

  WriterSpec Spec(const v1::LossRecipe& recipe) const {
    return {.head = "lm",
            .step = 1,
            .worker = "w0",
            .incarnation = service_.incarnation,
            .hidden_dtype = DType::kFloat32,
            .recipe = recipe,
            .chunk_tokens = kRowsPerChunk};
  }

  LossRows Rows() const {
    LossRows rows;
    rows.hidden_states = {hidden_.data(), kTokens, kHidden, DType::kFloat32};
    rows.targets = targets_;
    return rows;
  }

  ConstMatrixView TeacherHidden() const {
    return {teacher_hidden_.data(), kTokens, kTeacherHidden, DType::kFloat32};
  }

  absl::Status Compute(const WriterSpec& spec, const LossRows& rows) {
    auto client = Client::Connect(server_.address(), {});
    if (!client.ok()) return client.status();
    auto writer = (*client)->OpenWriter(spec);
    if (!writer.ok()) return writer.status();
    if (auto result = (*writer)->Compute(rows); !result.ok()) return result.status();
    return (*writer)->Finish().status();
  }

  // A field of all chunks, in order.
  template <typename T>
  std::vector<T> Sent(
      const std::function<google::protobuf::RepeatedField<T>(const v1::Chunk&)>& field) const {
    std::vector<T> values;
    for (const auto& [index, chunk] : chunks_) {
      const auto elements = field(chunk);
      values.insert(values.end(), elements.begin(), elements.end());
    }
    return values;
  }
  std::vector<float> SentTeacherHidden() const {
    std::string bytes;
    for (const auto& [index, chunk] : chunks_) bytes += chunk.teacher_hidden_states();
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  static v1::LossRecipe Distillation(bool paired) {
    v1::LossRecipe recipe;
    v1::DistillationSpec& spec = *recipe.mutable_distillation();
    spec.set_divergence(v1::DistillationSpec::DIVERGENCE_FORWARD_KL);
    spec.set_teacher_head("teacher");
    spec.set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
    spec.set_paired_stream(paired);
    return recipe;
  }
  static v1::LossRecipe Policy(v1::PolicySpec::Kind kind) {
    v1::LossRecipe recipe;
    recipe.mutable_policy()->set_kind(kind);
    return recipe;
  }
  static v1::LossRecipe Topk() {
    v1::LossRecipe recipe;
    recipe.mutable_distillation()->set_divergence(v1::DistillationSpec::DIVERGENCE_TOPK_FORWARD_KL);
    recipe.mutable_distillation()->set_top_k(kTopK);
    return recipe;
  }

  const std::vector<float> hidden_ = Counting(kTokens * kHidden, 0.0f);
  const std::vector<float> teacher_hidden_ = Counting(kTokens * kTeacherHidden, 100.0f);
  const std::vector<float> first_ = Counting(kTokens, 200.0f);
  const std::vector<float> second_ = Counting(kTokens, 300.0f);
  const std::vector<float> third_ = Counting(kTokens, 400.0f);
  const std::vector<float> logprobs_ = Counting(kTokens * kTopK, 500.0f);
  std::vector<int32_t> targets_, ids_;
  absl::Mutex mu_;
  std::map<uint64_t, v1::Chunk> chunks_;
  FakeService service_;
  FakeServer server_{&service_};
};

TEST_F(LossArraysTest, CoefficientsAreCutWithTheRows) {
  LossRows rows = Rows();
  rows.logprob_grad = first_;
  rows.entropy_grad = second_;
  const absl::Status status = Compute(Spec(Policy(v1::PolicySpec::KIND_COEFFICIENTS)), rows);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(chunks_.size(), 3u);
  EXPECT_EQ(Sent<float>([](const auto& c) { return c.logprob_grad(); }), first_);
  EXPECT_EQ(Sent<float>([](const auto& c) { return c.entropy_grad(); }), second_);
}

TEST_F(LossArraysTest, ClippedPolicysArraysAreCutWithTheRows) {
  LossRows rows = Rows();
  rows.old_logprob = first_;
  rows.advantage = second_;
  v1::LossRecipe recipe = Policy(v1::PolicySpec::KIND_CLIPPED);
  ASSERT_TRUE(Compute(Spec(recipe), rows).ok());
  EXPECT_EQ(Sent<float>([](const auto& c) { return c.old_logprob(); }), first_);
  EXPECT_EQ(Sent<float>([](const auto& c) { return c.advantage(); }), second_);
  recipe.mutable_policy()->set_reference_kl_coefficient(0.5f);
  rows.reference_logprob = third_;
  ASSERT_TRUE(Compute(Spec(recipe), rows).ok());
  EXPECT_EQ(Sent<float>([](const auto& c) { return c.reference_logprob(); }), third_);
}

TEST_F(LossArraysTest, ListsOfATeacherAreCutWithTheRows) {
  LossRows rows = Rows();
  rows.teacher_topk_ids = ids_;
  rows.teacher_topk_logprobs = logprobs_;
  ASSERT_TRUE(Compute(Spec(Topk()), rows).ok());
  EXPECT_EQ(Sent<int32_t>([](const auto& c) { return c.topk_ids(); }), ids_);
  EXPECT_EQ(Sent<float>([](const auto& c) { return c.topk_logprobs(); }), logprobs_);
}

TEST_F(LossArraysTest, TeacherHiddenStatesAreCutWithTheRows) {
  LossRows rows = Rows();
  rows.teacher_hidden_states = TeacherHidden();
  ASSERT_TRUE(Compute(Spec(Distillation(false)), rows).ok());
  EXPECT_EQ(SentTeacherHidden(), teacher_hidden_);
}

TEST_F(LossArraysTest, ChunkBytesCountBothSidesHiddenStatesAndLists) {
  LossRows rows = Rows();
  rows.teacher_hidden_states = TeacherHidden();
  WriterSpec spec = Spec(Distillation(false));
  spec.chunk_tokens = 0;
  spec.chunk_bytes = 2 * (kHidden + kTeacherHidden) * 4;
  ASSERT_TRUE(Compute(spec, rows).ok());
  EXPECT_EQ(chunks_.size(), 5u);
}

TEST_F(LossArraysTest, TopKOutputsAreGathered) {
  std::vector<int32_t> ids(kTokens * kTopK);
  std::vector<float> logprobs(kTokens * kTopK);
  LossRows rows = Rows();
  rows.topk_ids = ids.data();
  rows.topk_logprobs = logprobs.data();
  WriterSpec spec = Spec({});
  spec.outputs.set_top_k(kTopK);
  ASSERT_TRUE(Compute(spec, rows).ok());
  for (int32_t i = 0; i < kTokens; ++i) {
    for (int32_t k = 0; k < kTopK; ++k) {
      EXPECT_EQ(ids[i * kTopK + k], FakeTopkId(i, k));
      EXPECT_EQ(logprobs[i * kTopK + k], FakeTopkLogprob(i, k));
    }
  }
}

TEST_F(LossArraysTest, AStudentTellsOfEveryResult) {
  const absl::Status status = Compute(Spec(Distillation(true)), Rows());
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(service_.received(), UnorderedElementsAre(0, 1, 2));
  for (const auto& [index, chunk] : chunks_) EXPECT_TRUE(chunk.teacher_hidden_states().empty());
}

TEST_F(LossArraysTest, ATeachersSideSendsItsHiddenStatesAlone) {
  WriterSpec spec = Spec(Distillation(true));
  spec.teacher_side = true;
  LossRows rows;
  rows.teacher_hidden_states = TeacherHidden();
  const absl::Status status = Compute(spec, rows);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(service_.opens().front().teacher_side());
  EXPECT_EQ(SentTeacherHidden(), teacher_hidden_);
  EXPECT_TRUE(service_.received().empty());
  for (const auto& [index, chunk] : chunks_) {
    EXPECT_TRUE(chunk.hidden_states().empty());
    EXPECT_TRUE(chunk.targets().empty());
  }
}

TEST_F(LossArraysTest, WhatDoesNotFitTheRecipeIsRefusedBeforeItIsSent) {
  struct Case {
    const char* says;
    v1::LossRecipe recipe;
    std::function<void(WriterSpec*, LossRows*)> change;
  };
  const v1::LossRecipe clipped = Policy(v1::PolicySpec::KIND_CLIPPED);
  const Case cases[] = {
      {"logprob_grad has 0 elements, want 10", Policy(v1::PolicySpec::KIND_COEFFICIENTS),
       [](WriterSpec*, LossRows*) {}},
      {"old_logprob has 10 elements, want 0",
       {},
       [&](WriterSpec*, LossRows* r) { r->old_logprob = first_; }},
      {"advantage has 0 elements, want 10", clipped,
       [&](WriterSpec*, LossRows* r) { r->old_logprob = first_; }},
      {"teacher_topk_ids has 10 elements, want 20", Topk(),
       [&](WriterSpec*, LossRows* r) { r->teacher_topk_ids = targets_; }},
      {"teacher_hidden_states is [0, 0] float32 at a null address", Distillation(false),
       [](WriterSpec*, LossRows*) {}},
      {"teacher_hidden_states is given, but the recipe names no teacher_head",
       {},
       [&](WriterSpec*, LossRows* r) { r->teacher_hidden_states = TeacherHidden(); }},
      {"they come on the teacher's side", Distillation(true),
       [&](WriterSpec*, LossRows* r) { r->teacher_hidden_states = TeacherHidden(); }},
      {"want 10 rows like hidden_states", Distillation(false),
       [&](WriterSpec*, LossRows* r) {
         r->teacher_hidden_states = TeacherHidden();
         r->teacher_hidden_states.rows = 9;
       }},
      {"more than teacher_hidden_states", Distillation(true),
       [](WriterSpec* s, LossRows*) { s->teacher_side = true; }},
      {"teacher_side is set, but recipe.distillation.paired_stream is not", Distillation(false),
       [](WriterSpec* s, LossRows*) { s->teacher_side = true; }},
      {"must cut alike", Distillation(true), [](WriterSpec* s, LossRows*) { s->chunk_tokens = 0; }},
      {"a place for topk_ids is not given, but outputs.top_k is 2",
       {},
       [](WriterSpec* s, LossRows*) { s->outputs.set_top_k(kTopK); }},
      {"chunk_tokens is 4, but chunk_bytes (12) holds 1 rows",
       {},
       [](WriterSpec* s, LossRows*) { s->chunk_bytes = kHidden * 4; }},
  };
  for (const Case& test : cases) {
    WriterSpec spec = Spec(test.recipe);
    LossRows rows = Rows();
    test.change(&spec, &rows);
    const absl::Status status = Compute(spec, rows);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << test.says << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.says));
  }
  EXPECT_TRUE(chunks_.empty());
}

}  // namespace
}  // namespace lmhead
