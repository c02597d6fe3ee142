// Hostile and mistaken chunks: each is refused by name, row and value.

#include "server/head/chunk_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kTokens = 2;
constexpr int64_t kVocab = 10;
constexpr int64_t kHidden = 3;
constexpr int64_t kTeacherHidden = 5;
constexpr int32_t kTopK = 3;

// A chunk and its memory; every array is there, View() shows those of a recipe.
struct Chunk {
  std::vector<std::byte> hidden{kTokens * kHidden * 4};
  std::vector<std::byte> teacher{kTokens * kTeacherHidden * 2};
  std::vector<int32_t> targets{1, 2};
  std::vector<float> logprob_grad{0.5f, -0.5f};
  std::vector<float> entropy_grad{0.5f, -0.5f};
  std::vector<float> old_logprob{-1.0f, -2.0f};
  std::vector<float> advantage{1.0f, -1.0f};
  std::vector<float> reference{-1.0f, -2.0f};
  std::vector<int32_t> ids{0, 4, 9, 9, 4, 0};
  std::vector<float> logprobs{-1.0f, -2.0f, -kInfinity, -0.5f, -3.0f, -4.0f};
  std::vector<float> temperature{0.5f, 2.0f};
  float grad_scale = 1.0f;
};

struct Stream {
  StreamSpec spec;
  ChunkShape shape{.vocab_size = kVocab, .hidden_size = kHidden, .max_chunk_tokens = 4};
};

Stream CrossEntropy() { return {}; }

Stream Tempered() {
  Stream stream;
  stream.spec.recipe.per_token_temperature = true;
  return stream;
}

Stream Distillation() {
  Stream stream;
  stream.spec.recipe.distillation = DistillationSpec{.divergence = Divergence::kForwardKl,
                                                     .teacher_head = "teacher",
                                                     .teacher_hidden_dtype = DType::kBFloat16};
  stream.shape.teacher_hidden_size = kTeacherHidden;
  return stream;
}

Stream Student() {
  Stream stream = Distillation();
  stream.spec.recipe.distillation->paired_stream = true;
  return stream;
}

Stream Teacher() {
  Stream stream = Student();
  stream.spec.teacher_side = true;
  return stream;
}

Stream Topk(TopkMass mass = TopkMass::kKeep) {
  Stream stream;
  stream.spec.recipe.distillation =
      DistillationSpec{.divergence = Divergence::kTopkForwardKl, .top_k = kTopK, .topk_mass = mass};
  return stream;
}

Stream Renormalised() { return Topk(TopkMass::kRenormalise); }
Stream KeptMass() { return Topk(); }

Stream Coefficients() {
  Stream stream;
  stream.spec.recipe.policy = PolicySpec{.kind = PolicyKind::kCoefficients};
  return stream;
}

Stream Clipped() {
  Stream stream;
  stream.spec.recipe.policy =
      PolicySpec{.kind = PolicyKind::kClipped, .reference_kl_coefficient = 0.1f};
  return stream;
}

Stream ClippedWithoutReference() {
  Stream stream;
  stream.spec.recipe.policy = PolicySpec{.kind = PolicyKind::kClipped};
  return stream;
}

// The chunk that the stream wants.
ArrivedChunk View(const Stream& stream, Chunk& chunk) {
  const LossRecipe& recipe = stream.spec.recipe;
  ArrivedChunk view = {.chunk_index = 7, .num_tokens = kTokens, .grad_scale = chunk.grad_scale};
  if (recipe.has_teacher_head() && stream.spec.side() != StreamSide::kStudent) {
    view.teacher_hidden_states = chunk.teacher;
  }
  if (stream.spec.side() == StreamSide::kTeacher) return view;
  view.hidden_states = chunk.hidden;
  view.targets = chunk.targets;
  if (recipe.per_token_temperature) view.token_temperature = chunk.temperature;
  if (recipe.teacher_top_k() > 0) {
    view.teacher_topk_ids = chunk.ids;
    view.teacher_topk_logprobs = chunk.logprobs;
  }
  if (!recipe.policy.has_value()) return view;
  if (recipe.policy->kind == PolicyKind::kCoefficients) {
    view.logprob_grad = chunk.logprob_grad;
    view.entropy_grad = chunk.entropy_grad;
  } else {
    view.old_logprob = chunk.old_logprob;
    view.advantage = chunk.advantage;
    if (recipe.policy->reference_kl_coefficient != 0.0f) view.reference_logprob = chunk.reference;
  }
  return view;
}

absl::Status Check(const Stream& stream, const ArrivedChunk& view) {
  return CheckChunk("chunk 7", stream.spec, stream.shape, view);
}

using MakeStream = Stream (*)();
constexpr MakeStream kStreams[] = {CrossEntropy, Distillation, Student,
                                   Teacher,      Renormalised, KeptMass,
                                   Coefficients, Clipped,      ClippedWithoutReference};

TEST(CheckChunk, TakesWhatTheRecipeAsksFor) {
  for (const MakeStream make : kStreams) {
    Chunk chunk;
    const Stream stream = make();
    const absl::Status status = Check(stream, View(stream, chunk));
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Each array of the wanted chunk, taken away or shortened; each array that is not wanted, added.
TEST(CheckChunk, RefusesMissingSurplusAndShortArrays) {
  Chunk chunk;
  struct Array {
    const char* name;
    std::function<size_t(const ArrivedChunk&)> size;
    std::function<void(ArrivedChunk&, size_t)> set;
  };
  const Array arrays[] = {
      {"hidden_states", [](const auto& v) { return v.hidden_states.size(); },
       [&](auto& v, size_t n) { v.hidden_states = std::span(chunk.hidden).first(n); }},
      {"targets", [](const auto& v) { return v.targets.size(); },
       [&](auto& v, size_t n) { v.targets = std::span(chunk.targets).first(n); }},
      {"logprob_grad", [](const auto& v) { return v.logprob_grad.size(); },
       [&](auto& v, size_t n) { v.logprob_grad = std::span(chunk.logprob_grad).first(n); }},
      {"entropy_grad", [](const auto& v) { return v.entropy_grad.size(); },
       [&](auto& v, size_t n) { v.entropy_grad = std::span(chunk.entropy_grad).first(n); }},
      {"old_logprob", [](const auto& v) { return v.old_logprob.size(); },
       [&](auto& v, size_t n) { v.old_logprob = std::span(chunk.old_logprob).first(n); }},
      {"advantage", [](const auto& v) { return v.advantage.size(); },
       [&](auto& v, size_t n) { v.advantage = std::span(chunk.advantage).first(n); }},
      {"reference_logprob", [](const auto& v) { return v.reference_logprob.size(); },
       [&](auto& v, size_t n) { v.reference_logprob = std::span(chunk.reference).first(n); }},
      {"topk_ids", [](const auto& v) { return v.teacher_topk_ids.size(); },
       [&](auto& v, size_t n) { v.teacher_topk_ids = std::span(chunk.ids).first(n); }},
      {"topk_logprobs", [](const auto& v) { return v.teacher_topk_logprobs.size(); },
       [&](auto& v, size_t n) { v.teacher_topk_logprobs = std::span(chunk.logprobs).first(n); }},
      {"teacher_hidden_states", [](const auto& v) { return v.teacher_hidden_states.size(); },
       [&](auto& v, size_t n) { v.teacher_hidden_states = std::span(chunk.teacher).first(n); }},
  };
  for (const MakeStream make : kStreams) {
    const Stream stream = make();
    for (const Array& array : arrays) {
      const ArrivedChunk good = View(stream, chunk);
      const size_t size = array.size(good);
      for (const size_t wrong :
           size == 0 ? std::vector<size_t>{1} : std::vector<size_t>{0, size - 1}) {
        ArrivedChunk bad = good;
        array.set(bad, wrong);
        const absl::Status status = Check(stream, bad);
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << array.name << " of " << wrong;
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr("chunk 7"), HasSubstr(array.name)));
      }
    }
  }
}

TEST(CheckChunk, RefusesValuesThatNoLossIsDefinedFor) {
  struct Case {
    const char* says;
    MakeStream make;
    void (*change)(Chunk*);
  };
  const Case cases[] = {
      {"target of row 1 is 10", CrossEntropy, [](Chunk* c) { c->targets[1] = 10; }},
      {"grad_scale is nan", CrossEntropy, [](Chunk* c) { c->grad_scale = kNan; }},
      {"token_temperature of row 0 is 0, wanted 1e-06 to 1e+06", Tempered,
       [](Chunk* c) { c->temperature[0] = 0.0f; }},
      {"token_temperature of row 1 is nan", Tempered, [](Chunk* c) { c->temperature[1] = kNan; }},
      {"token_temperature of row 1 is 1e-07", Tempered,
       [](Chunk* c) { c->temperature[1] = 1e-7f; }},
      {"token_temperature of row 1 is 1e+07", Tempered, [](Chunk* c) { c->temperature[1] = 1e7f; }},
      {"carries grad_scale", Teacher, [](Chunk* c) { c->grad_scale = 2.0f; }},
      {"logprob_grad of row 0 is nan", Coefficients, [](Chunk* c) { c->logprob_grad[0] = kNan; }},
      {"entropy_grad of row 1 is inf", Coefficients,
       [](Chunk* c) { c->entropy_grad[1] = kInfinity; }},
      {"old_logprob of row 1 is -inf", Clipped, [](Chunk* c) { c->old_logprob[1] = -kInfinity; }},
      {"advantage of row 0 is nan", Clipped, [](Chunk* c) { c->advantage[0] = kNan; }},
      {"reference_logprob of row 0 is inf", Clipped, [](Chunk* c) { c->reference[0] = kInfinity; }},
      {"topk_ids of row 0 has 10, wanted 0 to 9", KeptMass, [](Chunk* c) { c->ids[2] = 10; }},
      {"topk_ids of row 1 has -1", KeptMass, [](Chunk* c) { c->ids[3] = -1; }},
      {"topk_ids of row 1 has 4 twice", KeptMass, [](Chunk* c) { c->ids[5] = 4; }},
      {"topk_logprobs of row 0 has nan", KeptMass, [](Chunk* c) { c->logprobs[1] = kNan; }},
      {"topk_logprobs of row 1 has 0.01", KeptMass, [](Chunk* c) { c->logprobs[4] = 0.01f; }},
      {"topk_logprobs of row 0 sum to", KeptMass,
       [](Chunk* c) { c->logprobs[0] = c->logprobs[1] = -0.1f; }},
      {"topk_logprobs of row 1 are all 0", Renormalised,
       [](Chunk* c) { c->logprobs[3] = c->logprobs[4] = c->logprobs[5] = -kInfinity; }},
  };
  for (const Case& test : cases) {
    Chunk chunk;
    test.change(&chunk);
    const Stream stream = test.make();
    const absl::Status status = Check(stream, View(stream, chunk));
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << test.says << ": " << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("chunk 7"), HasSubstr(test.says)));
  }
}

TEST(CheckChunk, PolicyValuesOfIgnoredRowsDoNotMatter) {
  Chunk chunk;
  chunk.targets[1] = kDefaultIgnoreIndex;
  chunk.old_logprob[1] = kNan;
  chunk.advantage[1] = kInfinity;
  const Stream stream = Clipped();
  const absl::Status status = Check(stream, View(stream, chunk));
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CheckChunk, NoMassAtAllIsLegalUnlessItIsScaled) {
  Chunk chunk;
  for (float& logprob : chunk.logprobs) logprob = -kInfinity;
  EXPECT_TRUE(Check(KeptMass(), View(KeptMass(), chunk)).ok());
  EXPECT_FALSE(Check(Renormalised(), View(Renormalised(), chunk)).ok());
}

TEST(CheckChunk, RowsAreBounded) {
  Chunk chunk;
  Stream stream = CrossEntropy();
  stream.shape.max_chunk_tokens = 1;
  EXPECT_THAT(std::string(Check(stream, View(stream, chunk)).message()),
              HasSubstr("has 2 rows, wanted 1 to 1"));
}

}  // namespace
}  // namespace lmhead
