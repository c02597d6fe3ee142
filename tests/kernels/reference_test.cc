#include "kernels/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "bench/golden_case.h"
#include "kernels/reference/compare.h"
#include "kernels/reference/objectives.h"
#include "tests/conformance/compare.h"
#include "tests/util/golden_paths.h"

namespace lmhead::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Float64 against float64: only the order of sums differs.
constexpr double kTolerance = 1e-12;

class GoldenReference : public testing::TestWithParam<std::string> {};

TEST_P(GoldenReference, EqualsTorch) {
  const absl::StatusOr<bench::GoldenCase> golden = bench::LoadGoldenCase(GetParam());
  ASSERT_TRUE(golden.ok()) << golden.status();
  const Result result =
      ComputeLoss(golden->head, golden->recipe, golden->tokens, golden->teacher_head());
  const Outputs outputs = OutputsOf(result);
  ASSERT_EQ(outputs.size(), golden->expected.size());
  // torch's exp(z - lse) carries the rounding of lse, and lse - sum p z multiplies it by lse.
  const double lse = LargestMagnitude(golden->expected.at("lse"));
  const double entropy_tolerance = kTolerance + 0x1p-53 * lse * lse;
  for (const auto& [name, want] : golden->expected) {
    SCOPED_TRACE(name);
    const std::vector<double>& got = outputs.at(name);
    if (name == "argmax" || name == "num_valid_tokens") {
      EXPECT_EQ(got, want);
    } else if (name == "loss_sum") {
      EXPECT_NEAR(got[0], want[0], kTolerance * std::max(1.0, std::fabs(want[0])));
    } else {
      EXPECT_LE(RelativeError(got, want), name == "entropy" ? entropy_tolerance : kTolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GoldenReference, testing::ValuesIn(GoldenPaths()),
                         [](const auto& info) { return GoldenTestName(info.param); });

TEST(GoldenCases, AreThere) { EXPECT_EQ(GoldenPaths().size(), 31u); }

std::vector<double> Normals(size_t count, double std, std::mt19937* random) {
  std::normal_distribution<double> normal(0.0, std);
  std::vector<double> values(count);
  for (double& value : values) value = normal(*random);
  return values;
}

// A head of 11 words and 3 hidden columns with everything switched on.
struct Problem {
  Head head{.vocab_size = 11, .hidden_size = 3, .logit_scale = 0.7, .softcap = 4.0};
  Recipe recipe;
  Tokens tokens;

  Problem() {
    std::mt19937 random(7);
    head.weight = Normals(33, 1.0, &random);
    head.bias = Normals(11, 1.0, &random);
    recipe.label_smoothing = 0.2;
    recipe.z_loss = 0.01;
    recipe.class_weights = Normals(11, 0.2, &random);
    for (double& weight : recipe.class_weights) weight += 1.0;
    tokens.hidden_states = Normals(12, 1.0, &random);
    tokens.targets = {4, -100, 0, 10};
    tokens.token_weights = {0.5, 3.0, 1.5, 0.0};
    tokens.token_temperature = {1.0, 0.5, 2.0, 1.3};
    tokens.grad_scale = 2.5;
  }

  const Head* teacher_head() const { return recipe.has_teacher_head() ? &teacher : nullptr; }
  Result Compute(int32_t top_k = 0) const {
    return ComputeLoss(head, recipe, tokens, teacher_head(), top_k);
  }
  double Objective() const { return tokens.grad_scale * Compute().sums.loss_sum; }

  // Distils from a teacher of another width, transform and vocabulary.
  void Distil(Divergence divergence, int64_t teacher_vocab_size,
              TeacherVocabulary vocabulary = TeacherVocabulary::kEqual) {
    std::mt19937 random(8);
    teacher = {
        .vocab_size = teacher_vocab_size, .hidden_size = 5, .logit_scale = 1.2, .softcap = 3.0};
    teacher.weight = Normals(teacher_vocab_size * 5, 0.7, &random);
    teacher.bias = Normals(teacher_vocab_size, 1.0, &random);
    tokens.teacher_hidden_states = Normals(4 * 5, 1.0, &random);
    recipe.distillation = Distillation{.divergence = divergence,
                                       .kl_temperature = 1.7,
                                       .scale_by_temperature_squared = true,
                                       .jsd_beta = divergence == Divergence::kJsd ? 0.3 : 0.0,
                                       .cross_entropy_weight = 0.4,
                                       .divergence_weight = 0.8,
                                       .vocabulary = vocabulary};
  }

  // Distils from three ids a token, which hold 0.9 of the teacher's mass.
  void DistilFromTopk(TopkMass mass) {
    recipe.distillation = Distillation{.divergence = Divergence::kTopkForwardKl,
                                       .kl_temperature = 1.7,
                                       .top_k = 3,
                                       .topk_mass = mass,
                                       .cross_entropy_weight = 0.4,
                                       .divergence_weight = 0.8};
    tokens.teacher_topk_ids = {4, 1, 9, 0, 1, 2, 10, 3, 0, 5, 6, 7};
    for (int token = 0; token < 4; ++token) {
      for (const double q : {0.5, 0.3, 0.1}) {
        tokens.teacher_topk_logprobs.push_back(std::log(q));
      }
    }
  }

  void FollowPolicy(const Policy& policy) {
    recipe.label_smoothing = recipe.z_loss = 0.0;
    recipe.class_weights.clear();
    recipe.policy = policy;
    const std::vector<double> logprob = WithoutPolicy().logprob;
    if (policy.kind == PolicyKind::kCoefficients) {
      tokens.logprob_grad = {0.7, 0.0, -1.1, 0.4};
      tokens.entropy_grad = {-0.2, 0.0, 0.3, 0.0};
      return;
    }
    // Ratios of 1.5, -, 0.6 and 1.1.
    tokens.old_logprob = {logprob[0] - std::log(1.5), 0.0, logprob[2] - std::log(0.6),
                          logprob[3] - std::log(1.1)};
    tokens.advantage = {2.0, 0.0, -0.7, 1.0};
    if (policy.reference_kl_coefficient != 0.0) {
      tokens.reference_logprob = {logprob[0] + 0.3, 0.0, logprob[2] - 0.4, logprob[3]};
    }
  }

  Head teacher;

 private:
  // Log-probabilities, whatever the objective.
  Result WithoutPolicy() const {
    Recipe plain = recipe;
    plain.policy.reset();
    return ComputeLoss(head, plain, tokens);
  }
};

// Central difference of the objective with respect to *value.
double Slope(Problem* problem, double* value) {
  constexpr double kStep = 1e-6;
  const double saved = *value;
  *value = saved + kStep;
  const double above = problem->Objective();
  *value = saved - kStep;
  const double below = problem->Objective();
  *value = saved;
  return (above - below) / (2 * kStep);
}

// A loss of size l is known to 1e-16 l, and so its slope to 1e-10 l.
void ExpectGradientsAreSlopes(Problem* problem, double tolerance = 1e-7) {
  const Result result = problem->Compute();
  for (size_t i = 0; i < problem->head.weight.size(); ++i) {
    EXPECT_NEAR(result.grad_weight[i], Slope(problem, &problem->head.weight[i]), tolerance) << i;
  }
  for (size_t i = 0; i < problem->head.bias.size(); ++i) {
    if (std::isinf(problem->head.bias[i])) continue;
    EXPECT_NEAR(result.grad_bias[i], Slope(problem, &problem->head.bias[i]), tolerance) << i;
  }
  for (size_t i = 0; i < problem->tokens.hidden_states.size(); ++i) {
    EXPECT_NEAR(result.grad_hidden_states[i], Slope(problem, &problem->tokens.hidden_states[i]),
                tolerance)
        << i;
  }
}

TEST(Reference, GradientsAreSlopesOfTheLoss) {
  Problem problem;
  ExpectGradientsAreSlopes(&problem);
}

TEST(Reference, GradientsAreSlopesWithMaskedLogits) {
  Problem problem;
  problem.head.bias[2] = -kInfinity;
  problem.head.bias[7] = -kInfinity;
  ExpectGradientsAreSlopes(&problem);
  problem.head.softcap = 0.0;
  ExpectGradientsAreSlopes(&problem);
  const Result result = problem.Compute();
  EXPECT_EQ(result.grad_bias[2], 0.0);
  EXPECT_TRUE(std::isfinite(result.sums.loss_sum));
}

TEST(Reference, SmoothingAroundMaskedLogitsDoesNotSeeACommonOffset) {
  Problem problem;
  problem.head.softcap = 0.0;
  problem.recipe.z_loss = 0.0;
  problem.head.bias[2] = -kInfinity;
  const double before = problem.Objective();
  for (double& bias : problem.head.bias) bias += 1000.0;
  EXPECT_NEAR(problem.Objective(), before, 1e-9 * std::fabs(before));
}

TEST(Reference, AMaskedTargetHasInfiniteLossAndFiniteGradients) {
  Problem problem;
  problem.head.bias[4] = -kInfinity;
  const Result result = problem.Compute();
  EXPECT_EQ(result.logprob[0], -kInfinity);
  EXPECT_EQ(result.token_loss[0], kInfinity);
  for (const double grad : result.grad_weight) EXPECT_TRUE(std::isfinite(grad));
}

TEST(Reference, ARowWithoutUnmaskedLogitsHasNoGradient) {
  Problem problem;
  problem.head.bias.assign(11, -kInfinity);
  const Result result = problem.Compute();
  EXPECT_EQ(result.lse[0], -kInfinity);
  EXPECT_EQ(result.entropy[0], 0.0);
  EXPECT_EQ(result.argmax[0], 0);
  EXPECT_EQ(LargestMagnitude(result.grad_weight), 0.0);
  EXPECT_EQ(LargestMagnitude(result.grad_hidden_states), 0.0);
}

TEST(Reference, RowsThatAreNotFiniteAreCountedAndLeftOut) {
  Problem problem;
  problem.tokens.hidden_states[1] = std::nan("");
  problem.tokens.hidden_states[3] = kInfinity;  // An ignored row.
  const Result result = problem.Compute();
  EXPECT_EQ(result.sums.num_nonfinite_rows, 2);
  EXPECT_EQ(result.sums.num_valid_tokens, 2);
  EXPECT_EQ(result.sums.num_tokens, 4);
  EXPECT_EQ(result.lse[0], 0.0);
  EXPECT_EQ(result.token_loss[0], 0.0);
  EXPECT_EQ(result.grad_hidden_states[0], 0.0);
  for (const double grad : result.grad_weight) EXPECT_TRUE(std::isfinite(grad));
}

// --- Distillation ------------------------------------------------------------------------------

TEST(ReferenceDistillation, GradientsAreSlopesOfTheLoss) {
  for (const Divergence divergence :
       {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd}) {
    SCOPED_TRACE(static_cast<int>(divergence));
    Problem problem;
    problem.Distil(divergence, 11);
    ExpectGradientsAreSlopes(&problem);
  }
}

// All ids are listed, with 0.9 of the teacher's mass: whatever the policy, the gradient is that of
// the value.
TEST(ReferenceDistillation, GradientsAreSlopesOfAListOfTheWholeVocabulary) {
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    SCOPED_TRACE(static_cast<int>(mass));
    Problem problem;
    problem.DistilFromTopk(mass);
    problem.recipe.distillation->top_k = 11;
    problem.tokens.teacher_topk_ids.clear();
    problem.tokens.teacher_topk_logprobs.clear();
    for (int token = 0; token < 4; ++token) {
      for (int id = 10; id >= 0; --id) {
        problem.tokens.teacher_topk_ids.push_back(id);
        problem.tokens.teacher_topk_logprobs.push_back(std::log(0.9 * (id + 1) / 66.0));
      }
    }
    ExpectGradientsAreSlopes(&problem);
  }
}

TEST(ReferenceDistillation, GradientsAreSlopesWhereVocabulariesDiffer) {
  const auto expect = [](Divergence divergence, int64_t teacher_vocab_size,
                         TeacherVocabulary vocabulary) {
    SCOPED_TRACE(testing::Message() << static_cast<int>(divergence) << " " << teacher_vocab_size);
    Problem problem;
    problem.Distil(divergence, teacher_vocab_size, vocabulary);
    ExpectGradientsAreSlopes(&problem);
  };
  for (const int64_t size : {7, 16}) {
    for (const Divergence divergence :
         {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd}) {
      expect(divergence, size, TeacherVocabulary::kCommon);
    }
    expect(Divergence::kJsd, size, TeacherVocabulary::kPad);
  }
  expect(Divergence::kForwardKl, 7, TeacherVocabulary::kPad);
  expect(Divergence::kReverseKl, 16, TeacherVocabulary::kPad);
}

TEST(ReferenceDistillation, GradientsAreSlopesOfTopkTeachers) {
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    SCOPED_TRACE(static_cast<int>(mass));
    Problem problem;
    problem.DistilFromTopk(mass);
    ExpectGradientsAreSlopes(&problem);
    problem.head.bias[2] = -kInfinity;
    problem.head.softcap = 0.0;
    problem.tokens.teacher_topk_ids = {4, 1, 9, 0, 1, 3, 10, 3, 0, 5, 6, 7};
    ExpectGradientsAreSlopes(&problem);
  }
}

TEST(ReferenceDistillation, JsdOfBetaZeroAndOneAreTheKls) {
  const auto loss = [](Divergence divergence, double beta) {
    Problem problem;
    problem.Distil(divergence, 11);
    problem.recipe.distillation->jsd_beta = beta;
    return problem.Compute();
  };
  EXPECT_EQ(loss(Divergence::kJsd, 0.0).token_loss, loss(Divergence::kForwardKl, 0.0).token_loss);
  EXPECT_EQ(loss(Divergence::kJsd, 1.0).grad_weight, loss(Divergence::kReverseKl, 0.0).grad_weight);
}

TEST(ReferenceDistillation, AnEqualTeacherCostsNothing) {
  for (const Divergence divergence :
       {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd}) {
    Problem problem;
    problem.Distil(divergence, 11);
    problem.recipe.distillation->cross_entropy_weight = 0.0;
    problem.teacher = problem.head;
    problem.tokens.teacher_hidden_states = problem.tokens.hidden_states;
    const Result result = problem.Compute();
    EXPECT_NEAR(result.sums.divergence_sum, 0.0, 1e-14);
    EXPECT_LE(LargestMagnitude(result.grad_weight), 1e-14);
  }
}

TEST(ReferenceDistillation, SumsArePartsOfTheLoss) {
  Problem problem;
  problem.Distil(Divergence::kReverseKl, 11);
  const LossSums mixed = problem.Compute().sums;
  EXPECT_NEAR(mixed.loss_sum, mixed.cross_entropy_sum + mixed.z_loss_sum + mixed.divergence_sum,
              1e-13);
  EXPECT_EQ(mixed.dropped_teacher_mass_sum, 0.0);
  problem.recipe.distillation->divergence_weight = 0.0;
  problem.recipe.distillation->cross_entropy_weight = 1.0;
  const LossSums alone = problem.Compute().sums;
  EXPECT_NEAR(mixed.cross_entropy_sum, 0.4 * alone.cross_entropy_sum, 1e-13);
  EXPECT_NEAR(mixed.z_loss_sum, 0.4 * alone.z_loss_sum, 1e-13);
}

TEST(ReferenceDistillation, DroppedTeacherMassIsReported) {
  Problem problem;
  problem.DistilFromTopk(TopkMass::kKeep);
  EXPECT_NEAR(problem.Compute().sums.dropped_teacher_mass_sum, 0.3, 1e-14);  // Three valid rows.
  problem.Distil(Divergence::kForwardKl, 16, TeacherVocabulary::kCommon);
  const double dropped = problem.Compute().sums.dropped_teacher_mass_sum;
  EXPECT_GT(dropped, 0.01);
  EXPECT_LT(dropped, 3.0);
  problem.Distil(Divergence::kForwardKl, 7, TeacherVocabulary::kCommon);
  EXPECT_EQ(problem.Compute().sums.dropped_teacher_mass_sum, 0.0);
}

TEST(ReferenceDistillation, MaskedTokensNeverMakeANan) {
  for (const Divergence divergence :
       {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd}) {
    SCOPED_TRACE(static_cast<int>(divergence));
    Problem masked_student;
    masked_student.Distil(divergence, 11);
    masked_student.head.bias[2] = -kInfinity;
    Problem masked_teacher;
    masked_teacher.Distil(divergence, 11);
    masked_teacher.teacher.bias[2] = -kInfinity;
    const Result student = masked_student.Compute();
    const Result teacher = masked_teacher.Compute();
    EXPECT_EQ(student.token_loss[0] == kInfinity, divergence == Divergence::kForwardKl);
    EXPECT_EQ(teacher.token_loss[0] == kInfinity, divergence == Divergence::kReverseKl);
    EXPECT_EQ(student.grad_bias[2], 0.0);
    for (const Result* result : {&student, &teacher}) {
      for (const double grad : result->grad_weight) EXPECT_TRUE(std::isfinite(grad));
    }
    if (divergence != Divergence::kForwardKl) ExpectGradientsAreSlopes(&masked_student);
    if (divergence != Divergence::kReverseKl) ExpectGradientsAreSlopes(&masked_teacher);
  }
}

TEST(ReferenceDistillation, OneSideWithoutUnmaskedLogitsHasInfiniteLossAndNoGradient) {
  for (const Divergence divergence :
       {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd}) {
    Problem problem;
    problem.Distil(divergence, 11);
    problem.recipe.distillation->cross_entropy_weight = 0.0;
    problem.teacher.bias.assign(11, -kInfinity);
    const Result result = problem.Compute();
    EXPECT_EQ(result.token_loss[0], kInfinity);
    EXPECT_EQ(LargestMagnitude(result.grad_weight), 0.0);
  }
}

TEST(ReferenceDistillation, TheTailOfACertainStudentDoesNotOverflow) {
  Problem problem;
  problem.DistilFromTopk(TopkMass::kTail);
  problem.head.softcap = 0.0;
  problem.head.bias.assign(11, 0.0);
  problem.head.bias[4] = 1e4;  // Row 0: all probability on an id of the teacher's.
  problem.tokens.token_temperature.assign(4, 1.0);
  problem.recipe.distillation->cross_entropy_weight = 0.0;
  const Result result = problem.Compute();
  EXPECT_GT(result.token_loss[0], 1000.0);
  for (const double grad : result.grad_weight) EXPECT_TRUE(std::isfinite(grad));
  ExpectGradientsAreSlopes(&problem, 1e-5);
}

TEST(ReferenceDistillation, TopkOfTheWholeVocabularyHasNoBucket) {
  Problem problem;
  problem.DistilFromTopk(TopkMass::kTail);
  problem.recipe.distillation->top_k = 11;
  problem.tokens.teacher_topk_ids.clear();
  problem.tokens.teacher_topk_logprobs.clear();
  for (int token = 0; token < 4; ++token) {
    for (int id = 0; id < 11; ++id) {
      problem.tokens.teacher_topk_ids.push_back(10 - id);
      problem.tokens.teacher_topk_logprobs.push_back(std::log(1.0 / 11) - 1e-7);
    }
  }
  EXPECT_TRUE(std::isfinite(problem.Compute().sums.loss_sum));
}

TEST(ReferenceDistillation, RowsWhoseTeacherIsNotFiniteAreLeftOut) {
  Problem problem;
  problem.Distil(Divergence::kForwardKl, 11);
  problem.tokens.teacher_hidden_states[2 * 5 + 1] = std::nan("");
  const Result result = problem.Compute();
  EXPECT_EQ(result.sums.num_nonfinite_rows, 1);
  EXPECT_EQ(result.sums.num_valid_tokens, 2);
  EXPECT_EQ(result.lse[2], 0.0);
  EXPECT_TRUE(std::isfinite(result.sums.loss_sum));
}

// --- Policies ----------------------------------------------------------------------------------

const Policy kClipped{.kind = PolicyKind::kClipped,
                      .clip_low = 0.2,
                      .clip_high = 0.3,
                      .entropy_coefficient = 0.05,
                      .reference_kl_coefficient = 0.1};

TEST(ReferencePolicy, GradientsAreSlopesOfTheObjective) {
  Problem coefficients;
  coefficients.FollowPolicy({.kind = PolicyKind::kCoefficients});
  ExpectGradientsAreSlopes(&coefficients);
  Problem clipped;
  clipped.FollowPolicy(kClipped);
  ExpectGradientsAreSlopes(&clipped);
}

TEST(ReferencePolicy, ObjectiveIsItsDefinition) {
  Problem problem;
  problem.FollowPolicy(kClipped);
  const Result result = problem.Compute();
  const auto rest = [&](int row, double d) {
    return -0.05 * result.entropy[row] + 0.1 * (std::exp(d) - d - 1);
  };
  // Ratio 1.5 held at 1.3, 0.6 at 0.8; 1.1 is within.
  EXPECT_NEAR(result.token_loss[0], -1.3 * 2.0 + rest(0, 0.3), 1e-12);
  EXPECT_NEAR(result.token_loss[2], 0.8 * 0.7 + rest(2, -0.4), 1e-12);
  EXPECT_NEAR(result.token_loss[3], -1.1 + rest(3, 0.0), 1e-12);
  EXPECT_EQ(result.sums.num_clipped, 2);
  EXPECT_NEAR(result.sums.old_policy_kl_sum,
              0.5 - std::log(1.5) - 0.4 - std::log(0.6) + 0.1 - std::log(1.1), 1e-12);
  EXPECT_EQ(result.sums.policy_sum, result.sums.loss_sum);
  EXPECT_EQ(result.sums.cross_entropy_sum, 0.0);
}

TEST(ReferencePolicy, ClipsHoldOneSideOnly) {
  const auto term = [](double ratio, double advantage, double dual_clip = 0.0) {
    const Policy spec{
        .kind = PolicyKind::kClipped, .clip_low = 0.2, .clip_high = 0.2, .dual_clip = dual_clip};
    return ClippedPolicyOf<double>(spec, -1.0, 1.0, -1.0 - std::log(ratio), advantage, 0.0);
  };
  EXPECT_TRUE(term(1.5, 1.0).clipped);   // Further up does not pay.
  EXPECT_FALSE(term(0.5, 1.0).clipped);  // Back up does.
  EXPECT_TRUE(term(0.5, -1.0).clipped);
  EXPECT_FALSE(term(1.5, -1.0).clipped);
  EXPECT_FALSE(term(1.5, 0.0).clipped);
  EXPECT_NEAR(term(0.5, 1.0).logprob_grad, -0.5, 1e-12);
  EXPECT_EQ(term(1.5, 1.0).logprob_grad, 0.0);
  // Dual clip: far above, a negative advantage costs at most 3 times itself.
  EXPECT_NEAR(term(5.0, -1.0, 3.0).value, 3.0, 1e-12);
  EXPECT_TRUE(term(5.0, -1.0, 3.0).clipped);
  EXPECT_EQ(term(5.0, -1.0, 3.0).logprob_grad, 0.0);
  EXPECT_FALSE(term(2.5, -1.0, 3.0).clipped);
  EXPECT_TRUE(term(5.0, 1.0, 3.0).clipped);  // By the usual clip.
  EXPECT_NEAR(term(5.0, 1.0, 3.0).value, -1.2, 1e-12);
}

TEST(ReferencePolicy, AMaskedTargetHasFiniteGradients) {
  Problem problem;
  problem.FollowPolicy(kClipped);
  problem.head.bias[4] = -kInfinity;
  const Result result = problem.Compute();
  EXPECT_EQ(result.logprob[0], -kInfinity);
  EXPECT_EQ(result.token_loss[0], kInfinity);  // Infinitely far from the reference.
  for (const double grad : result.grad_weight) EXPECT_TRUE(std::isfinite(grad));
}

// --- Top-k outputs -----------------------------------------------------------------------------

TEST(Reference, TopkOutputsAreTheLargestLogProbs) {
  Problem problem;
  problem.head.bias[6] = -kInfinity;
  problem.tokens.hidden_states[3] = std::nan("");
  const Result result = problem.Compute(11);
  const std::vector<double> all = AllLogProbs(problem.head, problem.recipe, problem.tokens);
  for (const int64_t row : {0, 2, 3}) {
    double sum = 0.0;
    for (int64_t k = 0; k < 11; ++k) {
      const int32_t id = result.topk_ids[row * 11 + k];
      EXPECT_EQ(result.topk_logprobs[row * 11 + k], all[row * 11 + id]);
      if (k > 0) {
        EXPECT_LE(result.topk_logprobs[row * 11 + k], result.topk_logprobs[row * 11 + k - 1]);
      }
      sum += std::exp(result.topk_logprobs[row * 11 + k]);
    }
    EXPECT_NEAR(sum, 1.0, 1e-14);
    EXPECT_EQ(result.topk_ids[row * 11], result.argmax[row]);
    EXPECT_EQ(result.topk_ids[row * 11 + 10], 6);
  }
  EXPECT_EQ(result.topk_ids[11], 0);  // Row 1 is not finite.
  EXPECT_EQ(result.topk_logprobs[11], 0.0);
}

TEST(Reference, AmongEqualLogitsTheLowestIdComesFirst) {
  Problem problem;
  problem.head.weight.assign(33, 0.0);
  problem.head.bias = {1, 3, 3, 1, 3, 0, 0, 0, 0, 0, 0};
  const Result result = problem.Compute(5);
  EXPECT_EQ(std::vector<int32_t>(result.topk_ids.begin(), result.topk_ids.begin() + 5),
            (std::vector<int32_t>{1, 2, 4, 0, 3}));
}

TEST(Reference, UpcastIsExact) {
  const float floats[] = {1.0f, -0.1f};
  const uint16_t bfloats[] = {FloatToBFloat16(1.5f), FloatToBFloat16(-3.0f)};
  const uint16_t halves[] = {FloatToFloat16(0.5f), FloatToFloat16(6e-8f)};
  EXPECT_EQ(Upcast({floats, 2, 1, DType::kFloat32}), (std::vector<double>{1.0, -0.1f}));
  EXPECT_EQ(Upcast({bfloats, 1, 2, DType::kBFloat16}), (std::vector<double>{1.5, -3.0}));
  EXPECT_EQ(Upcast({halves, 1, 2, DType::kFloat16}), (std::vector<double>{0.5, 0x1p-24}));
}

// Three steps worked out by torch's documented formulas with exact decimals.
TEST(ReferenceOptimizer, SgdWithMomentumAndDecay) {
  const OptimizerSpec spec{.kind = OptimizerKind::kSgd, .momentum = 0.5};
  std::vector<double> parameter = {1.0};
  OptimizerState state;
  ApplyUpdate(spec, /*weight_decay=*/0.25, /*learning_rate=*/0.5, /*grad_multiplier=*/0.5,
              std::vector<double>{2.0}, parameter, &state);
  EXPECT_DOUBLE_EQ(parameter[0], 0.375);  // g = 1 + 0.25, buffer = 1.25
  ApplyUpdate(spec, 0.25, 0.5, 0.5, std::vector<double>{-1.0}, parameter, &state);
  EXPECT_DOUBLE_EQ(parameter[0], 0.265625);  // g = -0.5 + 0.09375, buffer = 0.625 - 0.40625
}

TEST(ReferenceOptimizer, FirstAdamWStepHasTheSizeOfTheLearningRate) {
  const OptimizerSpec spec{.kind = OptimizerKind::kAdamW, .eps = 1e-12};
  std::vector<double> parameter = {1.0, 1.0};
  OptimizerState state;
  ApplyUpdate(spec, /*weight_decay=*/0.1, /*learning_rate=*/0.01, /*grad_multiplier=*/3.0,
              std::vector<double>{5.0, -0.002}, parameter, &state);
  EXPECT_NEAR(parameter[0], 0.999 - 0.01, 1e-10);
  EXPECT_NEAR(parameter[1], 0.999 + 0.01, 1e-10);
}

// beta1 = beta2 = 0: each step divides the gradient by its own magnitude.
TEST(ReferenceOptimizer, AdamWWithoutMemoryTakesSignSteps) {
  const OptimizerSpec spec{.kind = OptimizerKind::kAdamW, .beta1 = 0.0, .beta2 = 0.0, .eps = 1.0};
  std::vector<double> parameter = {0.0};
  OptimizerState state;
  for (const double grad : {1.0, -3.0}) {
    ApplyUpdate(spec, 0.0, 1.0, 1.0, std::vector<double>{grad}, parameter, &state);
  }
  EXPECT_DOUBLE_EQ(parameter[0], -1.0 / 2.0 + 3.0 / 4.0);
}

}  // namespace
}  // namespace lmhead::reference
