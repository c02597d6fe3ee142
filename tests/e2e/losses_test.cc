// Every objective through a real server process, compared with the oracle: what a trainer, a
// distiller with a resident or a listed teacher, and a policy optimiser see.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/wire/convert.h"
#include "tests/conformance/tolerances.h"
#include "tests/e2e/service_fixture.h"

namespace lmhead::e2e {
namespace {

using ::testing::HasSubstr;
using Distillation = v1::DistillationSpec;
using Policy = v1::PolicySpec;

constexpr int64_t kVocab = 211;
constexpr int64_t kHidden = 24;
constexpr int64_t kTeacherHidden = 37;
constexpr int64_t kTokens = 118;  // Not a multiple of a chunk's rows.
constexpr int64_t kChunkTokens = 32;
constexpr int32_t kTopK = 7;

std::vector<float> Normal(int64_t count, double std, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0.0f, static_cast<float>(std));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

std::vector<double> Upcast(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// A head of the server and of the oracle.
struct TestHead {
  TestHead(const std::string& name, int64_t hidden_size, bool trainable, uint64_t seed)
      : weight(Normal(kVocab * hidden_size, 0.3, seed)) {
    spec.set_name(name);
    spec.set_vocab_size(kVocab);
    spec.set_hidden_size(hidden_size);
    spec.set_weight_dtype(v1::DTYPE_FLOAT32);
    spec.set_trainable(trainable);
    if (trainable) spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    spec.set_top_k_max(kTopK);
    oracle = {.vocab_size = kVocab, .hidden_size = hidden_size, .weight = Upcast(weight)};
  }

  absl::Status Create(Client* client) const {
    if (auto created = client->CreateHead(spec); !created.ok()) return created.status();
    return client->LoadWeights(
        spec.name(), v1::TENSOR_KIND_WEIGHT, 0,
        {weight.data(), spec.vocab_size(), spec.hidden_size(), DType::kFloat32});
  }

  v1::HeadSpec spec;
  std::vector<float> weight;
  reference::Head oracle;
};

TestHead StudentHead(const std::string& name, uint64_t seed) {
  TestHead head(name, kHidden, /*trainable=*/true, seed);
  head.spec.set_teacher_hidden_size(kTeacherHidden);
  head.spec.set_softcap(20.0f);
  head.oracle.softcap = 20.0;
  return head;
}

// Another width and another transform of the logits than the student's.
TestHead TeacherHead() {
  TestHead head("teacher", kTeacherHidden, /*trainable=*/false, 99);
  head.spec.set_logit_scale(0.5f);
  head.oracle.logit_scale = 0.5;
  return head;
}

// Rows with everything that any recipe may ask for, and places for every output.
struct Batch {
  explicit Batch(uint64_t seed)
      : hidden(Normal(kTokens * kHidden, 1.0, seed)),
        teacher_hidden(Normal(kTokens * kTeacherHidden, 1.0, seed + 1)),
        logprob_grad(Normal(kTokens, 1.0, seed + 2)),
        entropy_grad(Normal(kTokens, 0.1, seed + 3)),
        old_logprob(Normal(kTokens, 0.5, seed + 4)),
        advantage(Normal(kTokens, 1.0, seed + 5)),
        reference_logprob(Normal(kTokens, 0.5, seed + 6)),
        grad(hidden.size()),
        token_loss(kTokens),
        logprob(kTokens),
        entropy(kTokens),
        topk_ids(kTokens * kTopK),
        topk_logprobs(kTokens * kTopK) {
    std::mt19937_64 generator(seed + 7);
    std::vector<int32_t> ids(kVocab);
    for (int32_t i = 0; i < kVocab; ++i) ids[i] = i;
    for (int64_t i = 0; i < kTokens; ++i) {
      targets.push_back(i % 8 == 5 ? kDefaultIgnoreIndex
                                   : static_cast<int32_t>(generator() % kVocab));
      old_logprob[i] -= 5.5f;  // About what a vocabulary of this size has.
      reference_logprob[i] -= 5.5f;
      std::shuffle(ids.begin(), ids.end(), generator);
      for (int32_t k = 0; k < kTopK; ++k) {
        teacher_topk_ids.push_back(ids[k]);
        teacher_topk_logprobs.push_back(-2.5f - 0.3f * static_cast<float>(k));
      }
    }
  }

  std::vector<float> hidden, teacher_hidden;
  std::vector<int32_t> targets;
  std::vector<float> logprob_grad, entropy_grad, old_logprob, advantage, reference_logprob;
  std::vector<int32_t> teacher_topk_ids;
  std::vector<float> teacher_topk_logprobs;
  std::vector<float> grad, token_loss, logprob, entropy;
  std::vector<int32_t> topk_ids;
  std::vector<float> topk_logprobs;
};

ConstMatrixView TeacherView(const Batch& batch) {
  return {batch.teacher_hidden.data(), kTokens, kTeacherHidden, DType::kFloat32};
}

// What of the batch a stream of this recipe carries.
LossRows RowsOf(const v1::LossRecipe& recipe, const v1::OutputSpec& outputs, Batch& batch) {
  LossRows rows;
  rows.hidden_states = {batch.hidden.data(), kTokens, kHidden, DType::kFloat32};
  rows.targets = batch.targets;
  if (recipe.policy().kind() == Policy::KIND_COEFFICIENTS) {
    rows.logprob_grad = batch.logprob_grad;
    rows.entropy_grad = batch.entropy_grad;
  }
  if (recipe.policy().kind() == Policy::KIND_CLIPPED) {
    rows.old_logprob = batch.old_logprob;
    rows.advantage = batch.advantage;
    if (recipe.policy().reference_kl_coefficient() != 0.0f) {
      rows.reference_logprob = batch.reference_logprob;
    }
  }
  if (recipe.distillation().top_k() > 0) {
    rows.teacher_topk_ids = batch.teacher_topk_ids;
    rows.teacher_topk_logprobs = batch.teacher_topk_logprobs;
  }
  if (!recipe.distillation().teacher_head().empty() && !recipe.distillation().paired_stream()) {
    rows.teacher_hidden_states = TeacherView(batch);
  }
  if (outputs.grad_hidden_states()) {
    rows.grad_hidden_states = {batch.grad.data(), kTokens, kHidden, DType::kFloat32};
  }
  if (outputs.token_loss()) rows.token_loss = batch.token_loss.data();
  if (outputs.logprob()) rows.logprob = batch.logprob.data();
  if (outputs.entropy()) rows.entropy = batch.entropy.data();
  if (outputs.top_k() > 0) {
    rows.topk_ids = batch.topk_ids.data();
    rows.topk_logprobs = batch.topk_logprobs.data();
  }
  return rows;
}

reference::Result OracleOf(const TestHead& head, const TestHead& teacher,
                           const v1::LossRecipe& recipe, const Batch& batch) {
  const auto domain = LossRecipeFromProto(recipe, kVocab);
  EXPECT_TRUE(domain.ok()) << domain.status();
  reference::Tokens tokens{.hidden_states = Upcast(batch.hidden), .targets = batch.targets};
  if (recipe.policy().kind() == Policy::KIND_COEFFICIENTS) {
    tokens.logprob_grad = Upcast(batch.logprob_grad);
    tokens.entropy_grad = Upcast(batch.entropy_grad);
  }
  if (recipe.policy().kind() == Policy::KIND_CLIPPED) {
    tokens.old_logprob = Upcast(batch.old_logprob);
    tokens.advantage = Upcast(batch.advantage);
    if (recipe.policy().reference_kl_coefficient() != 0.0f) {
      tokens.reference_logprob = Upcast(batch.reference_logprob);
    }
  }
  if (recipe.distillation().top_k() > 0) {
    tokens.teacher_topk_ids = batch.teacher_topk_ids;
    tokens.teacher_topk_logprobs = Upcast(batch.teacher_topk_logprobs);
  }
  if (domain->has_teacher_head()) tokens.teacher_hidden_states = Upcast(batch.teacher_hidden);
  return reference::ComputeLoss(head.oracle, reference::Recipe(*domain), tokens,
                                domain->has_teacher_head() ? &teacher.oracle : nullptr, kTopK);
}

v1::OutputSpec AllOutputs() {
  v1::OutputSpec outputs;
  outputs.set_grad_hidden_states(true);
  outputs.set_token_loss(true);
  outputs.set_logprob(true);
  outputs.set_entropy(true);
  outputs.set_top_k(kTopK);
  return outputs;
}

class LossesTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = StartServer({"--pair_timeout_seconds=2"}).release();
    client_ = ConnectTo(server_->address()).release();
    const absl::Status status = TeacherHead().Create(client_);
    ASSERT_TRUE(status.ok()) << status;
  }
  static void TearDownTestSuite() {
    delete std::exchange(client_, nullptr);
    delete std::exchange(server_, nullptr);
  }

  static WriterSpec WriterFor(const TestHead& head, const v1::LossRecipe& recipe,
                              const v1::OutputSpec& outputs) {
    WriterSpec spec{.head = head.spec.name(),
                    .worker = WorkerName(0),
                    .hidden_dtype = DType::kFloat32,
                    .recipe = recipe,
                    .outputs = outputs,
                    .num_connections = 2,
                    .chunk_tokens = kChunkTokens};
    return spec;
  }

  static HeadShape ShapeOf(const TestHead& head) {
    return {.name = head.spec.name(),
            .vocab_size = kVocab,
            .hidden_size = head.spec.hidden_size(),
            .has_bias = false};
  }

  // Begins a step of one worker and feeds it the batch. With `teacher_writer`, which runs beside
  // it.
  static absl::StatusOr<LossResult> FeedStep(
      Client* client, const TestHead& head, uint64_t step, const v1::LossRecipe& recipe,
      Batch& batch, const std::function<void(const WriterSpec&)>& teacher_writer = nullptr) {
    const auto incarnation = BeginStep(client, ShapeOf(head), step, 1);
    if (!incarnation.ok()) return incarnation.status();
    WriterSpec spec = WriterFor(head, recipe, AllOutputs());
    spec.step = step;
    spec.incarnation = *incarnation;
    std::thread beside;
    if (teacher_writer) beside = std::thread([&] { teacher_writer(spec); });
    absl::StatusOr<LossResult> result = [&]() -> absl::StatusOr<LossResult> {
      auto writer = client->OpenWriter(spec);
      if (!writer.ok()) return writer.status();
      auto computed = (*writer)->Compute(RowsOf(recipe, spec.outputs, batch));
      if (!computed.ok()) return computed.status();
      if (auto ended = (*writer)->Finish(); !ended.ok()) return ended.status();
      return computed;
    }();
    if (beside.joinable()) beside.join();
    if (!result.ok()) return result.status();
    auto prepared = PrepareStep(client, ShapeOf(head), step, *incarnation);
    if (!prepared.ok()) return prepared.status();
    return result;
  }

  static void ExpectSums(const LossSums& got, const LossSums& want) {
    const auto near = [](double a, double b, const char* what) {
      EXPECT_NEAR(a, b, kFloat32Logits.token_outputs * std::max(1.0, std::abs(b))) << what;
    };
    near(got.loss_sum, want.loss_sum, "loss_sum");
    near(got.cross_entropy_sum, want.cross_entropy_sum, "cross_entropy_sum");
    near(got.divergence_sum, want.divergence_sum, "divergence_sum");
    near(got.policy_sum, want.policy_sum, "policy_sum");
    near(got.dropped_teacher_mass_sum, want.dropped_teacher_mass_sum, "dropped_teacher_mass_sum");
    near(got.old_policy_kl_sum, want.old_policy_kl_sum, "old_policy_kl_sum");
    EXPECT_EQ(got.num_valid_tokens, want.num_valid_tokens);
    EXPECT_EQ(got.num_clipped, want.num_clipped);
  }

  // Everything that a step gave, against the oracle. The step is still open.
  static void ExpectLikeOracle(Client* client, const TestHead& head, const v1::LossRecipe& recipe,
                               const Batch& batch, const LossResult& result) {
    const reference::Result want = OracleOf(head, TeacherHead(), recipe, batch);
    ExpectSums(result.sums, want.sums);
    EXPECT_LE(RelativeError(batch.token_loss, want.token_loss), kFloat32Logits.token_outputs);
    EXPECT_LE(RelativeError(batch.logprob, want.logprob), kFloat32Logits.token_outputs);
    EXPECT_LE(RelativeError(batch.entropy, want.entropy), kFloat32Logits.token_outputs);
    EXPECT_EQ(batch.topk_ids, want.topk_ids);
    EXPECT_LE(RelativeError(batch.topk_logprobs, want.topk_logprobs), kFloat32Logits.token_outputs);
    EXPECT_LE(RelativeError(batch.grad, want.grad_hidden_states),
              kFloat32Logits.grad_hidden_states + RoundingOf(DType::kFloat32));
    const auto grad_weight = ReadTensor(client, ShapeOf(head), v1::TENSOR_KIND_GRAD_WEIGHT);
    ASSERT_TRUE(grad_weight.ok()) << grad_weight.status();
    EXPECT_LE(RelativeError(*grad_weight, want.grad_weight), kFloat32Logits.grad_weight);
  }

  static LocalServer* server_;
  static Client* client_;
};

LocalServer* LossesTest::server_ = nullptr;
Client* LossesTest::client_ = nullptr;

v1::LossRecipe FromTeacher(Distillation::Divergence divergence) {
  v1::LossRecipe recipe;
  Distillation& spec = *recipe.mutable_distillation();
  spec.set_divergence(divergence);
  spec.set_teacher_head("teacher");
  spec.set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
  spec.set_kl_temperature(2.0f);
  spec.set_scale_by_temperature_squared(true);
  return recipe;
}

v1::LossRecipe FromList(Distillation::TopkMass mass) {
  v1::LossRecipe recipe;
  Distillation& spec = *recipe.mutable_distillation();
  spec.set_divergence(Distillation::DIVERGENCE_TOPK_FORWARD_KL);
  spec.set_top_k(kTopK);
  spec.set_topk_mass(mass);
  return recipe;
}

v1::LossRecipe Clipped() {
  v1::LossRecipe recipe;
  Policy& spec = *recipe.mutable_policy();
  spec.set_kind(Policy::KIND_CLIPPED);
  spec.set_clip_low(0.2f);
  spec.set_clip_high(0.3f);
  spec.set_entropy_coefficient(0.01f);
  spec.set_dual_clip(3.0f);
  return recipe;
}

struct LossCase {
  const char* name;
  std::function<v1::LossRecipe()> make;
};

class EachLossTest : public LossesTest, public ::testing::WithParamInterface<LossCase> {};

TEST_P(EachLossTest, IsTheOraclesOverTheWire) {
  const TestHead head = StudentHead(absl::StrCat("lm_", GetParam().name), 5);
  LMHEAD_ASSERT_OK(head.Create(client_));
  const v1::LossRecipe recipe = GetParam().make();
  Batch batch(11);
  const auto result = FeedStep(client_, head, 1, recipe, batch);
  LMHEAD_ASSERT_OK(result);
  EXPECT_EQ(result->num_chunks, (kTokens + kChunkTokens - 1) / kChunkTokens);
  ExpectLikeOracle(client_, head, recipe, batch, *result);
}

INSTANTIATE_TEST_SUITE_P(
    All, EachLossTest,
    ::testing::Values(
        LossCase{"cross_entropy", [] { return v1::LossRecipe(); }},
        LossCase{"forward_kl", [] { return FromTeacher(Distillation::DIVERGENCE_FORWARD_KL); }},
        LossCase{"reverse_kl", [] { return FromTeacher(Distillation::DIVERGENCE_REVERSE_KL); }},
        LossCase{"jsd",
                 [] {
                   v1::LossRecipe recipe = FromTeacher(Distillation::DIVERGENCE_JSD);
                   recipe.mutable_distillation()->set_jsd_beta(0.3f);
                   return recipe;
                 }},
        LossCase{"mix",
                 [] {
                   v1::LossRecipe recipe = FromTeacher(Distillation::DIVERGENCE_FORWARD_KL);
                   recipe.mutable_distillation()->set_cross_entropy_weight(0.4f);
                   recipe.mutable_distillation()->set_divergence_weight(0.6f);
                   recipe.set_label_smoothing(0.1f);
                   return recipe;
                 }},
        LossCase{"topk_renormalise", [] { return FromList(Distillation::TOPK_MASS_RENORMALISE); }},
        LossCase{"topk_keep", [] { return FromList(Distillation::TOPK_MASS_KEEP); }},
        LossCase{"topk_tail", [] { return FromList(Distillation::TOPK_MASS_TAIL); }},
        LossCase{"coefficients",
                 [] {
                   v1::LossRecipe recipe;
                   recipe.mutable_policy()->set_kind(Policy::KIND_COEFFICIENTS);
                   return recipe;
                 }},
        LossCase{"clipped",
                 [] {
                   v1::LossRecipe recipe = Clipped();
                   recipe.mutable_policy()->set_reference_kl_coefficient(0.05f);
                   return recipe;
                 }}),
    [](const auto& info) { return info.param.name; });

TEST_F(LossesTest, OneTeacherTeachesTwoStudentsAtOnce) {
  const TestHead heads[] = {StudentHead("student_a", 21), StudentHead("student_b", 22)};
  const v1::LossRecipe recipes[] = {FromTeacher(Distillation::DIVERGENCE_FORWARD_KL),
                                    FromTeacher(Distillation::DIVERGENCE_REVERSE_KL)};
  Batch batches[] = {Batch(31), Batch(32)};
  absl::StatusOr<LossResult> results[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    LMHEAD_ASSERT_OK(heads[i].Create(client_));
    threads.emplace_back([&, i] {
      const std::unique_ptr<Client> client = ConnectTo(server_->address());
      results[i] = FeedStep(client.get(), heads[i], 1, recipes[i], batches[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 2; ++i) {
    LMHEAD_ASSERT_OK(results[i]);
    ExpectLikeOracle(client_, heads[i], recipes[i], batches[i], *results[i]);
  }
}

TEST_F(LossesTest, TopKOutputsOfOneHeadTeachAnother) {
  const TestHead source = StudentHead("source", 41);
  const TestHead learner = StudentHead("learner", 42);
  LMHEAD_ASSERT_OK(source.Create(client_));
  LMHEAD_ASSERT_OK(learner.Create(client_));
  Batch batch(43);
  v1::OutputSpec outputs;
  outputs.set_top_k(kTopK);
  auto writer = client_->OpenWriter(WriterFor(source, {}, outputs));
  LMHEAD_ASSERT_OK(writer);
  LMHEAD_ASSERT_OK((*writer)->Compute(RowsOf({}, outputs, batch)));
  LMHEAD_ASSERT_OK((*writer)->Finish());
  batch.teacher_topk_ids = batch.topk_ids;
  batch.teacher_topk_logprobs = batch.topk_logprobs;
  const v1::LossRecipe recipe = FromList(Distillation::TOPK_MASS_TAIL);
  const auto result = FeedStep(client_, learner, 1, recipe, batch);
  LMHEAD_ASSERT_OK(result);
  ExpectLikeOracle(client_, learner, recipe, batch, *result);
}

// The objective's derivatives, as a trainer works them out from what the first visit answered.
void SetCoefficients(const Policy& policy, Batch& batch) {
  for (int64_t i = 0; i < kTokens; ++i) {
    const double ratio = std::exp(static_cast<double>(batch.logprob[i]) - batch.old_logprob[i]);
    const double advantage = batch.advantage[i];
    const double held =
        std::clamp(ratio, 1.0 - policy.clip_low(), 1.0 + policy.clip_high()) * advantage;
    bool active = ratio * advantage <= held;
    if (advantage < 0.0 && -std::min(ratio * advantage, held) > -policy.dual_clip() * advantage) {
      active = false;
    }
    batch.logprob_grad[i] = active ? static_cast<float>(-ratio * advantage) : 0.0f;
    batch.entropy_grad[i] = -policy.entropy_coefficient();
  }
}

TEST_F(LossesTest, TwoVisitsOfAPolicyGiveWhatOneVisitGives) {
  const TestHead head = StudentHead("policy", 51);
  LMHEAD_ASSERT_OK(head.Create(client_));
  Batch once(52);
  LMHEAD_ASSERT_OK(FeedStep(client_, head, 1, Clipped(), once));
  const auto grad_once = ReadTensor(client_, ShapeOf(head), v1::TENSOR_KIND_GRAD_WEIGHT);
  LMHEAD_ASSERT_OK(grad_once);
  const auto info = client_->GetServerInfo();
  LMHEAD_ASSERT_OK(info);
  LMHEAD_ASSERT_OK(AbortStep(client_, ShapeOf(head), 1, info->incarnation()));

  Batch twice(52);
  v1::OutputSpec outputs;
  outputs.set_logprob(true);
  outputs.set_entropy(true);
  auto writer = client_->OpenWriter(WriterFor(head, {}, outputs));
  LMHEAD_ASSERT_OK(writer);
  LMHEAD_ASSERT_OK((*writer)->Compute(RowsOf({}, outputs, twice)));
  LMHEAD_ASSERT_OK((*writer)->Finish());
  SetCoefficients(Clipped().policy(), twice);
  v1::LossRecipe recipe;
  recipe.mutable_policy()->set_kind(Policy::KIND_COEFFICIENTS);
  LMHEAD_ASSERT_OK(FeedStep(client_, head, 2, recipe, twice));
  const auto grad_twice = ReadTensor(client_, ShapeOf(head), v1::TENSOR_KIND_GRAD_WEIGHT);
  LMHEAD_ASSERT_OK(grad_twice);
  // Each is within the table's bound of the exact one.
  EXPECT_LE(RelativeError(twice.grad, std::span<const float>(once.grad)),
            2 * (kFloat32Logits.grad_hidden_states + RoundingOf(DType::kFloat32)));
  EXPECT_LE(RelativeError(*grad_twice, std::span<const float>(*grad_once)),
            2 * kFloat32Logits.grad_weight);
}

v1::LossRecipe Paired() {
  v1::LossRecipe recipe = FromTeacher(Distillation::DIVERGENCE_FORWARD_KL);
  recipe.mutable_distillation()->set_paired_stream(true);
  return recipe;
}

TEST_F(LossesTest, PairedStreamsOfTwoProgramsGiveWhatOneGives) {
  const TestHead head = StudentHead("paired", 61);
  LMHEAD_ASSERT_OK(head.Create(client_));
  Batch batch(62);
  absl::Status of_teacher;
  const auto result = FeedStep(client_, head, 1, Paired(), batch, [&](const WriterSpec& student) {
    WriterSpec spec = student;
    spec.teacher_side = true;
    spec.outputs.Clear();
    const std::unique_ptr<Client> client = ConnectTo(server_->address());
    auto writer = client->OpenWriter(spec);
    if (!writer.ok()) {
      of_teacher = writer.status();
      return;
    }
    LossRows rows;
    rows.teacher_hidden_states = TeacherView(batch);
    of_teacher = (*writer)->Compute(rows).status();
    if (of_teacher.ok()) of_teacher = (*writer)->Finish().status();
  });
  LMHEAD_ASSERT_OK(of_teacher);
  LMHEAD_ASSERT_OK(result);
  ExpectLikeOracle(client_, head, Paired(), batch, *result);
}

TEST_F(LossesTest, ATeachersProgramThatIsDeadIsNamed) {
  const TestHead head = StudentHead("widow", 71);
  LMHEAD_ASSERT_OK(head.Create(client_));
  Batch batch(72);
  const auto result = FeedStep(client_, head, 1, Paired(), batch);
  EXPECT_TRUE(absl::IsDeadlineExceeded(result.status())) << result.status();
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("of worker worker-0 in step 1 of head widow: the teacher's side"));
}

}  // namespace
}  // namespace lmhead::e2e
