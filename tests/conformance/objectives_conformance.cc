// The suite's part on objectives other than cross entropy, and on top-k outputs.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/reference/reference.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/conformance/compare.h"

namespace lmhead {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Wider than a vocabulary tile of the CPU backend (1024 columns), and ragged.
constexpr Shape kRagged = {24, 16, 2053};
constexpr int64_t kTeacherHidden = 40;

constexpr Divergence kDivergences[] = {Divergence::kForwardKl, Divergence::kReverseKl,
                                       Divergence::kJsd};

LossRecipe Distilling(Divergence divergence, DType hidden_dtype) {
  LossRecipe recipe;
  recipe.distillation = DistillationSpec{
      .divergence = divergence, .teacher_head = "teacher", .teacher_hidden_dtype = hidden_dtype};
  if (divergence == Divergence::kJsd) recipe.distillation->jsd_beta = 0.3f;
  return recipe;
}

LossRecipe DistillingFromTopk(TopkMass mass, int32_t top_k) {
  LossRecipe recipe;
  recipe.distillation =
      DistillationSpec{.divergence = Divergence::kTopkForwardKl, .top_k = top_k, .topk_mass = mass};
  return recipe;
}

LossRecipe Following(PolicySpec policy) {
  LossRecipe recipe;
  recipe.policy = policy;
  return recipe;
}

const PolicySpec kClipped = {.kind = PolicyKind::kClipped, .clip_low = 0.2f, .clip_high = 0.28f};

// With everything that goes with a divergence.
void MixIn(LossRecipe* recipe) {
  DistillationSpec& spec = *recipe->distillation;
  spec.kl_temperature = 2.0f;
  spec.scale_by_temperature_squared = true;
  spec.cross_entropy_weight = 0.3f;
  spec.divergence_weight = 0.7f;
  recipe->temperature = 0.8f;
  recipe->label_smoothing = 0.1f;
  recipe->z_loss = 0.001f;
}

}  // namespace

// --- Distillation ------------------------------------------------------------------------------

TEST_P(BackendConformance, EveryDivergenceFromATeacherHead) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  spec.teacher_hidden_size = kTeacherHidden;
  for (const Divergence divergence : kDivergences) {
    for (const bool mixed : {false, true}) {
      SCOPED_TRACE(absl::StrCat("divergence ", static_cast<int>(divergence), mixed ? ", mix" : ""));
      const auto rig = MakeRig(spec);
      AddTeacher(rig.get(), spec.vocab_size);
      LossRecipe recipe = Distilling(divergence, GetParam().hidden_dtype);
      if (mixed) MixIn(&recipe);
      ExpectBatch(rig.get(), recipe,
                  {MakeChunk(rig.get(), recipe, 24), MakeChunk(rig.get(), recipe, 1)});
    }
  }
}

TEST_P(BackendConformance, TeachersOfOtherVocabularies) {
  const auto expect = [&](Divergence divergence, int64_t teacher_vocab_size,
                          TeacherVocabulary vocabulary) {
    SCOPED_TRACE(absl::StrCat("divergence ", static_cast<int>(divergence), ", teacher of ",
                              teacher_vocab_size, ", vocabulary ", static_cast<int>(vocabulary)));
    HeadSpec spec = Spec({0, 16, 1031});
    spec.teacher_hidden_size = 8;
    spec.partition_vocab_size = std::max<int64_t>(1031, teacher_vocab_size);
    const auto rig = MakeRig(spec);
    AddTeacher(rig.get(), teacher_vocab_size);
    LossRecipe recipe = Distilling(divergence, GetParam().hidden_dtype);
    recipe.distillation->vocabulary = vocabulary;
    recipe.distillation->cross_entropy_weight = 0.5f;
    ExpectBatch(rig.get(), recipe, {MakeChunk(rig.get(), recipe, 9)});
  };
  for (const Divergence divergence : kDivergences) {
    for (const int64_t size : {1019, 2053}) expect(divergence, size, TeacherVocabulary::kCommon);
  }
  for (const int64_t size : {1019, 2053}) {
    expect(Divergence::kJsd, size, TeacherVocabulary::kPad);
  }
  expect(Divergence::kForwardKl, 1019, TeacherVocabulary::kPad);
  expect(Divergence::kReverseKl, 2053, TeacherVocabulary::kPad);
}

TEST_P(BackendConformance, TopkTeachersOfEveryMass) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  spec.top_k_max = 20;
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    for (const int32_t top_k : {1, 20}) {
      for (const bool mixed : {false, true}) {
        SCOPED_TRACE(absl::StrCat("mass ", static_cast<int>(mass), ", k ", top_k));
        const auto rig = MakeRig(spec);
        LossRecipe recipe = DistillingFromTopk(mass, top_k);
        if (mixed) MixIn(&recipe);
        ExpectBatch(rig.get(), recipe,
                    {MakeChunk(rig.get(), recipe, 11), MakeChunk(rig.get(), recipe, 13)});
      }
    }
  }
}

TEST_P(BackendConformance, AShortTopkListIsPaddedWithMassZero) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.top_k_max = 4;
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    const auto rig = MakeRig(spec);
    const LossRecipe recipe = DistillingFromTopk(mass, 4);
    ChunkData chunk = MakeChunk(rig.get(), recipe, 5);
    for (size_t i = 3; i < chunk.teacher_topk_logprobs.size(); i += 4) {
      chunk.teacher_topk_logprobs[i] = -kInfinity;
    }
    ExpectBatch(rig.get(), recipe, {chunk});
  }
}

TEST_P(BackendConformance, TopkOfTheWholeVocabularyHasNoBucket) {
  HeadSpec spec = Spec({0, 8, 5});
  spec.top_k_max = 5;
  const auto rig = MakeRig(spec);
  const LossRecipe recipe = DistillingFromTopk(TopkMass::kTail, 5);
  ChunkData chunk = MakeChunk(rig.get(), recipe, 5);
  for (float& logprob : chunk.teacher_topk_logprobs) logprob = std::log(0.2f) - 1e-7f;
  for (size_t i = 0; i < chunk.teacher_topk_ids.size(); ++i) {
    chunk.teacher_topk_ids[i] = static_cast<int32_t>((i + i / 5) % 5);
  }
  ExpectBatch(rig.get(), recipe, {chunk});
}

TEST_P(BackendConformance, TheTailOfACertainStudentDoesNotOverflow) {
  if (GetParam().logits_dtype == DType::kBFloat16) GTEST_SKIP() << "the logits are the rounding";
  HeadSpec spec = Spec({0, 8, 37});
  spec.has_bias = true;
  spec.top_k_max = 3;
  const auto rig = MakeRig(spec);
  const LossRecipe recipe = DistillingFromTopk(TopkMass::kTail, 3);
  ChunkData chunk = MakeChunk(rig.get(), recipe, 2);
  std::vector<float> bias(37);
  bias[chunk.teacher_topk_ids[0]] = bias[chunk.teacher_topk_ids[3]] = 1000.0f;
  rig->Write(TensorKind::kBias, bias);
  ExpectBatch(rig.get(), recipe, {chunk}, /*largest_logit=*/1000.0);
}

TEST_P(BackendConformance, AnEqualTeacherCostsNothing) {
  HeadSpec spec = Spec({0, 16, 1031});
  spec.teacher_hidden_size = 16;
  for (const Divergence divergence : kDivergences) {
    const auto rig = MakeRig(spec);
    HeadSpec same = spec;
    same.trainable = false;
    same.optimizer.kind = OptimizerKind::kNone;
    same.schedule = Schedule::kEval;
    rig->AddTeacher(same).Write(TensorKind::kWeight, rig->Read(TensorKind::kWeight));
    const LossRecipe recipe = Distilling(divergence, GetParam().hidden_dtype);
    ChunkData chunk = MakeChunk(spec, 9);
    chunk.teacher_hidden_states = chunk.hidden_states;
    const ChunkAnswer answer = rig->Run(recipe, {chunk})[0];
    EXPECT_LE(LargestMagnitude(answer.token_loss), 1e-6);
    EXPECT_LE(LargestMagnitude(answer.grad_hidden_states), 1e-5);
  }
}

// Of one distribution nearly alone, the other far away at most ids: next to nothing, and finite.
TEST_P(BackendConformance, MixturesOfNearlyOneSide) {
  HeadSpec spec = Spec({0, 16, 1031});
  spec.has_bias = true;
  spec.teacher_hidden_size = 8;
  for (const float beta : {1e-9f, 1e-6f, 0.999999f, 0.99999994f}) {
    SCOPED_TRACE(beta);
    const auto rig = MakeRig(spec);
    AddTeacher(rig.get(), spec.vocab_size);
    rig->Write(TensorKind::kBias, Normals(spec.vocab_size, 20.0f));
    LossRecipe recipe = Distilling(Divergence::kJsd, GetParam().hidden_dtype);
    recipe.distillation->jsd_beta = beta;
    const ChunkData chunk = MakeChunk(rig.get(), recipe, 9);
    const ChunkAnswer answer = rig->Run(recipe, {chunk})[0];
    const reference::Result want = rig->Expected(recipe, chunk);
    for (size_t row = 0; row < want.token_loss.size(); ++row) {
      EXPECT_NEAR(answer.token_loss[row], want.token_loss[row], 1e-4) << row;
    }
    for (const float grad : answer.grad_hidden_states) ASSERT_TRUE(std::isfinite(grad));
  }
}

// 0 times infinity is 0 on both sides; what is infinite by definition is so, and no gradient is
// NaN.
TEST_P(BackendConformance, MaskedTokensOfStudentAndTeacher) {
  HeadSpec spec = Spec({0, 16, 1031});
  spec.has_bias = true;
  spec.teacher_hidden_size = 8;
  for (const Divergence divergence : kDivergences) {
    for (const bool of_student : {false, true}) {
      for (const bool of_teacher : {false, true}) {
        SCOPED_TRACE(absl::StrCat("divergence ", static_cast<int>(divergence),
                                  of_student ? ", student" : "", of_teacher ? ", teacher" : ""));
        const auto rig = MakeRig(spec);
        AddTeacher(rig.get(), spec.vocab_size);
        std::vector<float> bias = Normals(spec.vocab_size, 0.5f);
        for (size_t i = 1; i < bias.size(); i += 3) bias[i] = -kInfinity;
        if (of_student) rig->Write(TensorKind::kBias, bias);
        if (of_teacher) rig->teacher()->Write(TensorKind::kBias, bias);
        const LossRecipe recipe = Distilling(divergence, GetParam().hidden_dtype);
        ChunkData chunk = MakeChunk(rig.get(), recipe, 9);
        std::replace_if(
            chunk.targets.begin(), chunk.targets.end(), [](int32_t t) { return t >= 0; }, 3);
        ExpectBatch(rig.get(), recipe, {chunk});
      }
    }
  }
}

TEST_P(BackendConformance, AMaskedIdOfATopkTeacherIsInfinitelyFar) {
  HeadSpec spec = Spec({0, 16, 131});
  spec.has_bias = true;
  spec.top_k_max = 3;
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    const auto rig = MakeRig(spec);
    const LossRecipe recipe = DistillingFromTopk(mass, 3);
    const ChunkData chunk = MakeChunk(rig.get(), recipe, 6);
    std::vector<float> bias = Normals(spec.vocab_size, 0.5f);
    bias[chunk.teacher_topk_ids[1]] = -kInfinity;
    for (int32_t i = 100; i < 131; ++i) bias[i] = -kInfinity;
    rig->Write(TensorKind::kBias, bias);
    ExpectBatch(rig.get(), recipe, {chunk});
  }
}

TEST_P(BackendConformance, ATeacherWithEveryTokenMasked) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.teacher_hidden_size = 8;
  for (const Divergence divergence : kDivergences) {
    const auto rig = MakeRig(spec);
    AddTeacher(rig.get(), spec.vocab_size);
    rig->teacher()->Write(TensorKind::kBias, std::vector<float>(37, -kInfinity));
    const LossRecipe recipe = Distilling(divergence, GetParam().hidden_dtype);
    ExpectBatch(rig.get(), recipe, {MakeChunk(rig.get(), recipe, 5)});
  }
}

TEST_P(BackendConformance, RowsWhoseTeacherIsNotFiniteContributeNothing) {
  HeadSpec spec = Spec({0, 16, 131});
  spec.teacher_hidden_size = 8;
  spec.top_k_max = 4;
  const auto rig = MakeRig(spec);
  rig->set_top_k(4);
  AddTeacher(rig.get(), spec.vocab_size);
  const LossRecipe recipe = Distilling(Divergence::kForwardKl, GetParam().hidden_dtype);
  ChunkData chunk = MakeChunk(rig.get(), recipe, 9);
  chunk.teacher_hidden_states[0 * 8 + 1] = kNan;
  chunk.teacher_hidden_states[3 * 8 + 7] = kInfinity;  // An ignored row.
  chunk.hidden_states[0 * 16 + 2] = kNan;              // Counted once.
  chunk.teacher_hidden_states[6 * 8] = -kInfinity;
  ExpectBatch(rig.get(), recipe, {chunk, MakeChunk(rig.get(), recipe, 4)});
  EXPECT_EQ(rig->Run(recipe, {chunk})[0].sums.num_nonfinite_rows, 3);
}

TEST_P(BackendConformance, ChunksOfIgnoredRowsHaveNoDivergence) {
  HeadSpec spec = Spec({0, 16, 131});
  spec.teacher_hidden_size = 8;
  const auto rig = MakeRig(spec);
  AddTeacher(rig.get(), spec.vocab_size);
  const LossRecipe recipe = Distilling(Divergence::kJsd, GetParam().hidden_dtype);
  ChunkData chunk = MakeChunk(rig.get(), recipe, 7);
  chunk.targets.assign(7, kDefaultIgnoreIndex);
  const ChunkAnswer answer = rig->Run(recipe, {chunk})[0];
  ExpectAnswer(answer, rig->Expected(recipe, chunk));
  EXPECT_EQ(answer.sums.loss_sum, 0.0);
  EXPECT_EQ(LargestMagnitude(answer.grad_hidden_states), 0.0);
  if (rig->accumulates()) {
    EXPECT_EQ(LargestMagnitude(rig->Read(TensorKind::kGradWeight)), 0.0);
  }
}

// --- Policies ----------------------------------------------------------------------------------

TEST_P(BackendConformance, PoliciesOfEveryKind) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  spec.softcap = 8.0f;
  PolicySpec with_entropy = kClipped;
  with_entropy.entropy_coefficient = 0.01f;
  PolicySpec with_reference = kClipped;
  with_reference.reference_kl_coefficient = 0.1f;
  PolicySpec with_everything = with_reference;
  with_everything.entropy_coefficient = 0.02f;
  with_everything.dual_clip = 3.0f;
  for (const PolicySpec& policy :
       {PolicySpec(), kClipped, with_entropy, with_reference, with_everything}) {
    SCOPED_TRACE(absl::StrCat("kind ", static_cast<int>(policy.kind), ", entropy ",
                              policy.entropy_coefficient, ", reference ",
                              policy.reference_kl_coefficient, ", dual ", policy.dual_clip));
    for (const float temperature : {1.0f, 0.7f}) {
      const auto rig = MakeRig(spec);
      LossRecipe recipe = Following(policy);
      recipe.temperature = temperature;
      ExpectBatch(rig.get(), recipe,
                  {MakeChunk(rig.get(), recipe, 21), MakeChunk(rig.get(), recipe, 1)});
    }
  }
}

TEST_P(BackendConformance, PolicyArraysOfIgnoredRowsAreNobodys) {
  const HeadSpec spec = Spec({0, 16, 131});
  PolicySpec policy = kClipped;
  policy.reference_kl_coefficient = 0.1f;
  for (const PolicySpec& kind : {PolicySpec(), policy}) {
    const auto rig = MakeRig(spec);
    const LossRecipe recipe = Following(kind);
    ChunkData chunk = MakeChunk(rig.get(), recipe, 9);
    ASSERT_EQ(chunk.targets[3], kDefaultIgnoreIndex);
    for (std::vector<float>* values : {&chunk.logprob_grad, &chunk.entropy_grad, &chunk.old_logprob,
                                       &chunk.advantage, &chunk.reference_logprob}) {
      if (!values->empty()) (*values)[3] = kNan;
    }
    ExpectBatch(rig.get(), recipe, {chunk});
  }
}

TEST_P(BackendConformance, AMaskedTargetOfAPolicyHasFiniteGradients) {
  HeadSpec spec = Spec({0, 16, 131});
  spec.has_bias = true;
  PolicySpec policy = kClipped;
  policy.reference_kl_coefficient = 0.1f;
  policy.entropy_coefficient = 0.1f;
  for (const PolicySpec& kind : {PolicySpec(), policy}) {
    const auto rig = MakeRig(spec);
    const LossRecipe recipe = Following(kind);
    const ChunkData chunk = MakeChunk(rig.get(), recipe, 9);
    std::vector<float> bias = Normals(spec.vocab_size, 0.5f);
    bias[chunk.targets[1]] = -kInfinity;
    rig->Write(TensorKind::kBias, bias);
    ExpectBatch(rig.get(), recipe, {chunk});
  }
}

// --- Top-k outputs -----------------------------------------------------------------------------

TEST_P(BackendConformance, TopkOutputs) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  spec.top_k_max = 64;
  for (const int32_t top_k : {1, 5, 64}) {
    SCOPED_TRACE(top_k);
    const auto rig = MakeRig(spec);
    rig->set_top_k(top_k);
    LossRecipe recipe;
    recipe.temperature = 0.7f;
    ChunkData broken = MakeChunk(spec, 5);
    broken.hidden_states[17] = kNan;
    ExpectBatch(rig.get(), recipe, {MakeChunk(spec, 24), broken});
  }
}

TEST_P(BackendConformance, AmongEqualLogitsTheLowestIdComesFirst) {
  HeadSpec spec = Spec({0, 8, 2053});
  spec.has_bias = true;
  spec.top_k_max = 10;
  const auto rig = MakeRig(spec);
  rig->set_top_k(10);
  rig->Write(TensorKind::kWeight, std::vector<float>(2053 * 8));
  std::vector<float> bias(2053);
  const std::vector<int32_t> ones = {3, 700, 1023, 1024, 2052};
  for (const int32_t id : ones) bias[id] = 1.0f;
  rig->Write(TensorKind::kBias, bias);
  std::vector<int32_t> want = ones;
  want.insert(want.end(), {0, 1, 2, 4, 5});
  const ChunkAnswer answer = rig->Run(LossRecipe(), {MakeChunk(spec, 2)})[0];
  EXPECT_EQ(answer.argmax, (std::vector<int32_t>{3, 3}));
  for (int row = 0; row < 2; ++row) {
    const auto ids = answer.topk_ids.begin() + row * 10;
    EXPECT_EQ(std::vector<int32_t>(ids, ids + 10), want);
  }
}

TEST_P(BackendConformance, TopkOutputsWhereTooFewTokensAreUnmasked) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.has_bias = true;
  spec.top_k_max = 37;
  const auto rig = MakeRig(spec);
  rig->set_top_k(37);
  std::vector<float> bias(37, -kInfinity);
  bias[5] = bias[36] = 0.0f;
  rig->Write(TensorKind::kBias, bias);
  ChunkData chunk = MakeChunk(spec, 4);
  chunk.targets.assign(4, 5);
  ExpectBatch(rig.get(), LossRecipe(), {chunk});
  const ChunkAnswer answer = rig->Run(LossRecipe(), {chunk})[0];
  for (int row = 0; row < 4; ++row) {
    EXPECT_EQ(std::count(answer.topk_logprobs.begin() + row * 37,
                         answer.topk_logprobs.begin() + (row + 1) * 37, -kInfinity),
              35);
    std::vector<int32_t> ids(answer.topk_ids.begin() + row * 37,
                             answer.topk_ids.begin() + (row + 1) * 37);
    std::sort(ids.begin(), ids.end());
    for (int32_t id = 0; id < 37; ++id) EXPECT_EQ(ids[id], id);  // Each once.
  }
}

// --- The contract ------------------------------------------------------------------------------

TEST_P(BackendConformance, ObjectivesThatDoNotFitAreRefusedAndLeaveNothingBehind) {
  HeadSpec spec = Spec({0, 8, 37});
  spec.top_k_max = 4;
  spec.teacher_hidden_size = 8;
  const auto rig = MakeRig(spec);
  const auto code_of = [&](const LossRecipe& recipe, const ChunkData& chunk) {
    return rig->Run(recipe, rig->mode(), {MakeChunk(rig.get(), recipe, 2), chunk}).status().code();
  };
  using absl::StatusCode;
  const LossRecipe policy = Following(kClipped);
  ChunkData chunk = MakeChunk(rig.get(), policy, 4);
  chunk.advantage.clear();
  EXPECT_EQ(code_of(policy, chunk), StatusCode::kInvalidArgument);
  chunk = MakeChunk(rig.get(), policy, 4);
  chunk.logprob_grad.assign(4, 1.0f);
  EXPECT_EQ(code_of(policy, chunk), StatusCode::kInvalidArgument);

  const LossRecipe topk = DistillingFromTopk(TopkMass::kKeep, 4);
  chunk = MakeChunk(rig.get(), topk, 4);
  for (const int32_t id : {-1, 37}) {
    chunk.teacher_topk_ids[5] = id;
    EXPECT_EQ(code_of(topk, chunk), StatusCode::kInvalidArgument);
  }
  const LossRecipe larger = DistillingFromTopk(TopkMass::kKeep, 5);
  EXPECT_EQ(code_of(larger, MakeChunk(rig.get(), larger, 4)), StatusCode::kFailedPrecondition);

  LossRecipe distilling = Distilling(Divergence::kForwardKl, GetParam().hidden_dtype);
  chunk = MakeChunk(spec, 4);
  EXPECT_EQ(rig->Run(distilling, rig->mode(), {chunk}).status().code(),
            StatusCode::kInvalidArgument);  // There is no teacher.
  AddTeacher(rig.get(), 37);
  EXPECT_EQ(rig->Run(distilling, rig->mode(), {chunk}).status().code(),
            StatusCode::kInvalidArgument);  // Nor its hidden states.

  rig->set_top_k(5);
  EXPECT_EQ(rig->Run(LossRecipe(), rig->mode(), {chunk}).status().code(),
            StatusCode::kFailedPrecondition);
  rig->set_top_k(0);
  ExpectBatch(rig.get(), distilling, {MakeChunk(rig.get(), distilling, 4)});
}

TEST_P(BackendConformance, EqualCallsOfEveryObjectiveGiveEqualBits) {
  HeadSpec spec = Spec({0, 16, 1031});
  spec.teacher_hidden_size = 8;
  spec.top_k_max = 6;
  const LossRecipe recipes[] = {Distilling(Divergence::kJsd, GetParam().hidden_dtype),
                                DistillingFromTopk(TopkMass::kTail, 6), Following(kClipped)};
  for (const LossRecipe& recipe : recipes) {
    std::vector<ChunkAnswer> answers;
    std::vector<std::vector<float>> grad_weights;
    for (int run = 0; run < 2; ++run) {
      random_.seed(99);
      const auto rig = MakeRig(spec);
      AddTeacher(rig.get(), spec.vocab_size);
      rig->set_top_k(6);
      answers.push_back(rig->Run(recipe, {MakeChunk(rig.get(), recipe, 31)})[0]);
      if (rig->accumulates()) grad_weights.push_back(rig->Read(TensorKind::kGradWeight));
    }
    EXPECT_EQ(answers[0].token_loss, answers[1].token_loss);
    EXPECT_EQ(answers[0].grad_hidden_states, answers[1].grad_hidden_states);
    EXPECT_EQ(answers[0].topk_logprobs, answers[1].topk_logprobs);
    EXPECT_EQ(answers[0].sums, answers[1].sums);
    if (!grad_weights.empty()) {
      EXPECT_EQ(grad_weights[0], grad_weights[1]);
    }
  }
}

TEST_P(TrainingConformance, ADuplicateOfEveryObjectiveAnswersAlikeAndKeepsNothing) {
  HeadSpec spec = Spec({0, 16, 1031});
  spec.teacher_hidden_size = 8;
  spec.top_k_max = 6;
  for (const LossRecipe& recipe : {Distilling(Divergence::kReverseKl, GetParam().hidden_dtype),
                                   DistillingFromTopk(TopkMass::kTail, 6), Following(kClipped)}) {
    const auto rig = MakeRig(spec);
    AddTeacher(rig.get(), spec.vocab_size);
    const ChunkData chunk = MakeChunk(rig.get(), recipe, 20);
    const ChunkAnswer first = rig->Run(recipe, {chunk})[0];
    const std::vector<float> grad_weight = rig->Read(TensorKind::kGradWeight);
    const auto duplicate = rig->Run(recipe, BackwardMode::kHidden, {chunk});
    ASSERT_TRUE(duplicate.ok()) << duplicate.status();
    EXPECT_EQ((*duplicate)[0].grad_hidden_states, first.grad_hidden_states);
    EXPECT_EQ((*duplicate)[0].sums, first.sums);
    const auto evaluated = rig->Run(recipe, BackwardMode::kNone, {chunk});
    ASSERT_TRUE(evaluated.ok()) << evaluated.status();
    EXPECT_EQ((*evaluated)[0].sums, first.sums);
    EXPECT_EQ(rig->Read(TensorKind::kGradWeight), grad_weight);
  }
}

// Multi-token prediction: every depth has hidden states of its own into the one head, so depths are
// chunks of one step; their weights are grad_scale.
TEST_P(TrainingConformance, DepthsOfMultiTokenPredictionAreChunksOfOneStep) {
  HeadSpec spec = Spec(kRagged);
  spec.has_bias = true;
  const LossRecipe recipe;
  for (const bool joined : {true, false}) {
    const auto rig = MakeRig(spec);
    ChunkData first = MakeChunk(spec, 24);
    ChunkData second = MakeChunk(spec, 24);  // Hidden states of the next depth.
    first.grad_scale = 1.0f;
    second.grad_scale = 0.3f;
    std::copy(first.targets.begin() + 1, first.targets.end(), second.targets.begin());
    second.targets.back() = kDefaultIgnoreIndex;
    if (joined) {
      rig->Run(recipe, {first, second});
    } else {
      rig->Run(recipe, {first});
      rig->Run(recipe, {second});
    }
    ExpectGradWeight(rig.get(), {rig->Expected(recipe, first), rig->Expected(recipe, second)});
  }
}

}  // namespace lmhead
