#include "kernels/cpu/divergence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/reference.h"
#include "tests/conformance/compare.h"

namespace lmhead::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row of given logits of both sides, or of a student and a list.
struct Problem {
  DistillationSpec spec = {.kl_temperature = 1.0f, .divergence_weight = 1.0f};
  std::vector<float> student;
  std::vector<float> teacher;  // Of any length; empty for a list.
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<float> bias;  // Empty, or of the student.
  float softcap = 0.0f;
  float label_smoothing = 0.0f;
  float temperature = 1.0f;
  int32_t target = 0;

  int64_t vocab_size() const { return static_cast<int64_t>(student.size()); }
  bool has_list() const { return spec.divergence == Divergence::kTopkForwardKl; }
};

RowConfig ConfigOf(const Problem& problem) {
  return {.vocab_size = problem.vocab_size(),
          .bias = problem.bias.empty() ? nullptr : problem.bias.data(),
          .softcap = problem.softcap,
          .label_smoothing = problem.label_smoothing,
          .cross_entropy_weight = problem.spec.cross_entropy_weight};
}

DivergenceConfig DivergenceConfigOf(const Problem& problem) {
  const DistillationSpec& spec = problem.spec;
  const double temperature = spec.kl_temperature;
  return {.divergence = spec.divergence,
          .topk_mass = spec.topk_mass,
          .vocabulary = spec.vocabulary,
          .whole_vocabulary = spec.top_k >= problem.vocab_size(),
          .kl_temperature = spec.kl_temperature,
          .jsd_beta = spec.jsd_beta,
          .weight = spec.divergence_weight *
                    (spec.scale_by_temperature_squared ? temperature * temperature : 1.0)};
}

// The oracle on the same logits: hidden sizes of one, so that the weights are the logits.
reference::Result Expected(const Problem& problem) {
  const std::vector<float>& student = problem.student;
  const reference::Head head{
      .vocab_size = problem.vocab_size(),
      .hidden_size = 1,
      .weight = {student.begin(), student.end()},
      .bias = problem.bias.empty() ? std::vector<double>(student.size(), 0.0)
                                   : std::vector<double>(problem.bias.begin(), problem.bias.end()),
      .softcap = problem.softcap};
  const reference::Head teacher{
      .vocab_size = static_cast<int64_t>(problem.teacher.size()),
      .hidden_size = 1,
      // The oracle has no masked weights: a masked logit is one of the bias.
      .weight = std::vector<double>(problem.teacher.size(), 0.0),
      .bias = {problem.teacher.begin(), problem.teacher.end()}};
  LossRecipe recipe{.label_smoothing = problem.label_smoothing,
                    .temperature = problem.temperature,
                    .distillation = problem.spec};
  reference::Tokens tokens{.hidden_states = {1.0}, .targets = {problem.target}};
  if (problem.has_list()) {
    tokens.teacher_topk_ids = problem.ids;
    tokens.teacher_topk_logprobs = {problem.logprobs.begin(), problem.logprobs.end()};
  } else {
    tokens.teacher_hidden_states = {1.0};
  }
  return reference::ComputeLoss(head, reference::Recipe(recipe), tokens,
                                problem.has_list() ? nullptr : &teacher);
}

struct Walk {
  DivergenceOutputs outputs;
  double cross_entropy = 0.0;
  std::vector<float> grad;
};

// Walks the row tile by tile, as several parts of the vocabulary that are merged afterwards.
class Walker {
 public:
  Walker(const RowPasses& passes, const Problem& problem, int64_t tile_size, int64_t num_parts)
      : passes_(passes),
        problem_(problem),
        config_(ConfigOf(problem)),
        divergence_(DivergenceConfigOf(problem)),
        tile_size_(tile_size),
        num_parts_(num_parts),
        scale_(problem.temperature / problem.spec.kl_temperature),
        entries_(problem.ids.size()) {
    for (float v : problem.teacher) teacher_.push_back(v / problem.spec.kl_temperature);
  }

  Walk Run() {
    logits_ = problem_.student;
    BeginDivergence(&total_);
    row_ = {.target = problem_.target, .temperature = problem_.temperature, .coefficient = 1.0f};
    BeginRow(&row_);
    BeginEntries(problem_.ids, problem_.logprobs, entries_.data(), &total_);
    for (int64_t part = 0; part < num_parts_; ++part) Accumulate(part);
    if (problem_.spec.divergence == Divergence::kJsd) {
      PrepareMixture(divergence_, &total_);
      if (total_.has_gradient) {
        ForEachTile(0, problem_.vocab_size(), [&](VocabTile tile, float* z) {
          passes_.accumulate_mixture(divergence_, JointOf(tile), scale_, z, total_,
                                     &total_.mixture);
        });
      }
    }
    Walk walk;
    const RowOutputs outputs = FinishRow(config_, {}, &row_);
    walk.cross_entropy = outputs.cross_entropy;
    walk.outputs = FinishDivergence(divergence_, problem_.temperature, &total_);
    ForEachTile(0, problem_.vocab_size(), [&](VocabTile tile, float* z) {
      passes_.grad_divergence(config_, divergence_, tile, JointOf(tile), row_, total_, z);
      SetListedGrad(config_, divergence_, tile, row_, total_, entries_, z);
    });
    walk.grad = logits_;
    return walk;
  }

 private:
  template <typename Body>
  void ForEachTile(int64_t start, int64_t stop, Body&& body) {
    for (; start < stop; start += tile_size_) {
      body(VocabTile{start, std::min(tile_size_, stop - start)}, logits_.data() + start);
    }
  }

  int64_t teacher_size() const { return static_cast<int64_t>(teacher_.size()); }

  JointTile JointOf(VocabTile tile) const {
    if (problem_.has_list()) return {.cols = tile.cols};
    const int64_t cols = std::clamp<int64_t>(teacher_size() - tile.start, 0, tile.cols);
    const bool padded = problem_.spec.vocabulary == TeacherVocabulary::kPad;
    return {.teacher_logits = teacher_.data() + std::min(tile.start, teacher_size()),
            .teacher_cols = cols,
            .cols = padded ? tile.cols : cols};
  }

  void Accumulate(int64_t part) {
    const int64_t start = problem_.vocab_size() * part / num_parts_;
    const int64_t stop = problem_.vocab_size() * (part + 1) / num_parts_;
    DivergenceState state;
    BeginDivergence(&state);
    if (part == num_parts_ - 1 && teacher_size() > problem_.vocab_size()) {
      passes_.accumulate_exp(teacher_.data() + problem_.vocab_size(),
                             teacher_size() - problem_.vocab_size(), 1.0f, &state.stats.beyond_max,
                             &state.stats.beyond_sum_exp);
    }
    ForEachTile(start, stop, [&](VocabTile tile, float* z) {
      passes_.transform(config_, tile, row_, z);
      passes_.accumulate(config_, tile, z, &row_);
      if (problem_.has_list()) {
        AccumulateOutside(passes_, tile, scale_, entries_, z, &state);
      } else {
        passes_.accumulate_divergence(divergence_, JointOf(tile), scale_, z, &state.stats);
      }
    });
    AccumulateListed({start, stop - start}, scale_, entries_, &state.stats);
    MergeDivergence(divergence_.divergence, state.stats, &total_.stats);
  }

  const RowPasses& passes_;
  const Problem& problem_;
  const RowConfig config_;
  const DivergenceConfig divergence_;
  const int64_t tile_size_;
  const int64_t num_parts_;
  const float scale_;
  std::vector<float> teacher_;
  std::vector<float> logits_;
  std::vector<TeacherEntry> entries_;
  RowState row_;
  DivergenceState total_;
};

class DivergenceTest : public testing::TestWithParam<RowPasses> {
 protected:
  std::vector<float> Normals(int64_t count, float std, float mean = 0.0f) {
    std::normal_distribution<float> normal(mean, std);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random_);
    return values;
  }

  // The `top_k` most likely ids of a distribution, less `kept` of their mass.
  void SetList(const std::vector<float>& logits, int32_t top_k, float kept, Problem* problem) {
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    double sum = 0.0;
    for (const float z : logits) sum += std::exp(static_cast<double>(z));
    problem->spec.top_k = top_k;
    problem->ids.assign(order.begin(), order.begin() + top_k);
    problem->logprobs.clear();
    for (const int32_t id : problem->ids) {
      problem->logprobs.push_back(static_cast<float>(logits[id] - std::log(sum) + std::log(kept)));
    }
  }

  // In reverse KL and JSD a gradient is p times the difference of a logarithm and its mean, both of
  // logits that float32 rounds.
  static double GradTolerance(const Problem& problem, double tolerance) {
    const Divergence divergence = problem.spec.divergence;
    const bool of_logs = divergence == Divergence::kReverseKl || divergence == Divergence::kJsd;
    return of_logs ? 4 * tolerance : 2 * tolerance;
  }

  void ExpectEqualsOracle(const Problem& problem, double tolerance = 1e-6) {
    const reference::Result want = Expected(problem);
    for (const int64_t tile_size : {int64_t{1}, int64_t{16}, int64_t{100}, problem.vocab_size()}) {
      for (const int64_t num_parts : {1, 3}) {
        SCOPED_TRACE(testing::Message() << "tiles of " << tile_size << ", parts " << num_parts);
        const Walk got = Walker(GetParam(), problem, tile_size, num_parts).Run();
        const double loss = got.outputs.divergence + got.cross_entropy;
        if (loss != want.token_loss[0]) {
          EXPECT_NEAR(loss, want.token_loss[0],
                      tolerance * std::max(1.0, std::fabs(want.token_loss[0])));
        }
        EXPECT_NEAR(got.outputs.dropped_teacher_mass, want.sums.dropped_teacher_mass_sum,
                    tolerance);
        EXPECT_LE(RelativeError(got.grad, want.grad_bias), GradTolerance(problem, tolerance));
      }
    }
  }

  std::mt19937 random_{11};
};

constexpr Divergence kOfTeacherHeads[] = {Divergence::kForwardKl, Divergence::kReverseKl,
                                          Divergence::kJsd};

TEST_P(DivergenceTest, EveryDivergenceOfRowsOfEveryLength) {
  for (const Divergence divergence : kOfTeacherHeads) {
    for (const int64_t length : {1, 2, 15, 17, 33, 257, 1009}) {
      SCOPED_TRACE(testing::Message() << "divergence " << int(divergence) << " of " << length);
      Problem problem;
      problem.spec.divergence = divergence;
      if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.3f;
      problem.student = Normals(length, 3.0f);
      problem.teacher = Normals(length, 3.0f);
      ExpectEqualsOracle(problem);
    }
  }
}

TEST_P(DivergenceTest, TemperaturesWeightsSoftcapAndAMixWithCrossEntropy) {
  for (const Divergence divergence : kOfTeacherHeads) {
    SCOPED_TRACE(int(divergence));
    Problem problem;
    problem.spec = {.divergence = divergence,
                    .kl_temperature = 1.7f,
                    .scale_by_temperature_squared = true,
                    .cross_entropy_weight = 0.3f,
                    .divergence_weight = 0.7f};
    if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.9f;
    problem.student = Normals(257, 4.0f);
    problem.teacher = Normals(257, 2.0f);
    problem.softcap = 5.0f;
    problem.label_smoothing = 0.1f;
    problem.temperature = 0.8f;
    problem.target = 200;
    ExpectEqualsOracle(problem);
  }
}

TEST_P(DivergenceTest, MaskedIdsOfEitherSide) {
  for (const Divergence divergence : kOfTeacherHeads) {
    for (const bool student_masked : {false, true}) {
      for (const bool teacher_masked : {false, true}) {
        SCOPED_TRACE(testing::Message() << int(divergence) << student_masked << teacher_masked);
        Problem problem;
        problem.spec.divergence = divergence;
        if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.5f;
        problem.student = Normals(257, 2.0f);
        problem.teacher = Normals(257, 2.0f);
        problem.bias.assign(257, 0.0f);
        for (size_t i = 0; i < 120; ++i) {  // Whole tiles, the first ones too.
          if (student_masked) problem.bias[i] = -kInfinity;
          if (teacher_masked) problem.teacher[i] = -kInfinity;
        }
        problem.target = 130;
        ExpectEqualsOracle(problem);
        problem.spec.cross_entropy_weight = 0.5f;
        ExpectEqualsOracle(problem);
      }
    }
  }
}

TEST_P(DivergenceTest, AllOfASideMasked) {
  for (const Divergence divergence : kOfTeacherHeads) {
    Problem problem;
    problem.spec.divergence = divergence;
    problem.spec.cross_entropy_weight = 0.5f;
    if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.5f;
    problem.student = Normals(37, 2.0f);
    problem.teacher.assign(37, -kInfinity);
    ExpectEqualsOracle(problem);
    problem.teacher = Normals(37, 2.0f);
    problem.bias.assign(37, -kInfinity);
    ExpectEqualsOracle(problem);
  }
}

TEST_P(DivergenceTest, LargeLogitsAndConfidentRows) {
  for (const Divergence divergence : kOfTeacherHeads) {
    SCOPED_TRACE(int(divergence));
    Problem problem;
    problem.spec.divergence = divergence;
    if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.2f;
    problem.student = Normals(257, 1e4f);
    problem.teacher = Normals(257, 1e4f);
    ExpectEqualsOracle(problem);
    problem.student = Normals(257, 1.0f, 4096.0f);
    problem.teacher = Normals(257, 1.0f, -1e6f);
    ExpectEqualsOracle(problem);
    problem.student = Normals(257, 1.0f);
    problem.teacher = Normals(257, 1.0f);
    problem.student[9] = problem.teacher[9] = 40.0f;
    ExpectEqualsOracle(problem);
  }
}

// A weight that 1 - beta does not show in float32; the smaller side has nearly all of m.
TEST_P(DivergenceTest, MixturesOfNearlyOneSide) {
  for (const float beta :
       {1e-3f, 1e-6f, 1e-7f, 1e-9f, 1e-20f, 1e-38f, 0.999f, 0.999999f, 0.99999994f}) {
    SCOPED_TRACE(beta);
    Problem problem;
    problem.spec.divergence = Divergence::kJsd;
    problem.spec.jsd_beta = beta;
    problem.student = Normals(257, 6.0f);
    problem.teacher = Normals(257, 6.0f);
    const reference::Result want = Expected(problem);
    const Walk got = Walker(GetParam(), problem, 100, 3).Run();
    EXPECT_NEAR(got.outputs.divergence, want.token_loss[0], 1e-6);
    ASSERT_EQ(got.grad.size(), want.grad_bias.size());
    for (size_t i = 0; i < got.grad.size(); ++i) {
      EXPECT_NEAR(got.grad[i], want.grad_bias[i], 1e-6) << i;
    }
  }
}

// A fused multiplication and its own rounding are far apart for such numbers.
TEST_P(DivergenceTest, TheSmallestTemperature) {
  for (const Divergence divergence : kOfTeacherHeads) {
    SCOPED_TRACE(int(divergence));
    Problem problem;
    problem.spec.divergence = divergence;
    problem.spec.kl_temperature = kTemperatureMin;
    if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.5f;
    problem.student = Normals(257, 1e4f);
    problem.teacher = Normals(257, 1e4f);
    const Walk got = Walker(GetParam(), problem, 100, 3).Run();
    const double want = Expected(problem).token_loss[0];
    EXPECT_NEAR(got.outputs.divergence, want, 1e-5 * want);
    for (const float value : got.grad) EXPECT_TRUE(std::isfinite(value));
  }
}

// Where p and q are alike a divergence is a difference of nearly nothing.
TEST_P(DivergenceTest, AlikeDistributions) {
  for (const Divergence divergence : kOfTeacherHeads) {
    Problem problem;
    problem.spec.divergence = divergence;
    if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.5f;
    problem.student = problem.teacher = Normals(1009, 3.0f);
    const Walk equal = Walker(GetParam(), problem, 100, 1).Run();
    EXPECT_GE(equal.outputs.divergence, 0.0);
    EXPECT_LE(equal.outputs.divergence, 1e-12);
    for (const float value : equal.grad) EXPECT_NEAR(value, 0.0f, 1e-7);
    for (float& z : problem.teacher) z += 1e-3f * std::sin(z * 100.0f);
    const double want = Expected(problem).token_loss[0];
    EXPECT_NEAR(Walker(GetParam(), problem, 100, 1).Run().outputs.divergence, want, 3e-7);
  }
}

TEST_P(DivergenceTest, VocabulariesOfDifferentSizes) {
  for (const Divergence divergence : kOfTeacherHeads) {
    for (const auto vocabulary : {TeacherVocabulary::kCommon, TeacherVocabulary::kPad}) {
      for (const int64_t teacher_size : {200, 257, 300}) {
        const bool padded = vocabulary == TeacherVocabulary::kPad;
        if (padded && divergence == Divergence::kForwardKl && teacher_size > 257) continue;
        if (padded && divergence == Divergence::kReverseKl && teacher_size < 257) continue;
        SCOPED_TRACE(testing::Message()
                     << int(divergence) << " " << int(vocabulary) << " " << teacher_size);
        Problem problem;
        problem.spec.divergence = divergence;
        problem.spec.vocabulary = vocabulary;
        problem.spec.cross_entropy_weight = 0.25f;
        if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.3f;
        problem.student = Normals(257, 2.0f);
        problem.teacher = Normals(teacher_size, 2.0f);
        problem.target = 250;
        ExpectEqualsOracle(problem);
      }
    }
  }
}

TEST_P(DivergenceTest, ListsOfEveryMassPolicy) {
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    for (const int32_t top_k : {1, 5, 100, 257}) {
      for (const float kept : {1.0f, 0.6f}) {
        SCOPED_TRACE(testing::Message() << int(mass) << " " << top_k << " " << kept);
        Problem problem;
        problem.spec = {.divergence = Divergence::kTopkForwardKl,
                        .kl_temperature = 1.5f,
                        .scale_by_temperature_squared = true,
                        .topk_mass = mass,
                        .cross_entropy_weight = 0.2f};
        problem.student = Normals(257, 2.0f);
        SetList(Normals(257, 2.0f), top_k, kept, &problem);
        problem.target = problem.ids[0];
        problem.label_smoothing = 0.1f;
        problem.softcap = 6.0f;
        problem.temperature = 1.3f;
        ExpectEqualsOracle(problem);
      }
    }
  }
}

// The mass outside the list is far below the rounding of 1.
TEST_P(DivergenceTest, ListsThatHoldNearlyAllOfAConfidentStudent) {
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    SCOPED_TRACE(int(mass));
    Problem problem;
    problem.spec = {.divergence = Divergence::kTopkForwardKl, .topk_mass = mass};
    problem.student = Normals(257, 1.0f);
    problem.student[7] = 45.0f;
    std::vector<float> teacher = Normals(257, 1.0f);
    teacher[7] = 12.0f;
    SetList(teacher, 3, 1.0f, &problem);
    ExpectEqualsOracle(problem, 2e-6);
  }
}

TEST_P(DivergenceTest, ListsWithPaddingAndMaskedIds) {
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    SCOPED_TRACE(int(mass));
    Problem problem;
    problem.spec = {.divergence = Divergence::kTopkForwardKl, .topk_mass = mass};
    problem.student = Normals(257, 2.0f);
    SetList(Normals(257, 2.0f), 8, 0.8f, &problem);
    problem.logprobs[6] = problem.logprobs[7] = -kInfinity;
    ExpectEqualsOracle(problem);
    problem.bias.assign(257, 0.0f);
    problem.bias[problem.ids[7]] = -kInfinity;  // Without mass: nothing is lost by it.
    ExpectEqualsOracle(problem);
    problem.bias[problem.ids[1]] = -kInfinity;  // With mass: infinite.
    problem.spec.cross_entropy_weight = 0.5f;
    problem.target = problem.ids[0];
    EXPECT_EQ(Expected(problem).token_loss[0], kInfinity);
    ExpectEqualsOracle(problem);
  }
}

TEST_P(DivergenceTest, ANanAmongTheLogitsShows) {
  for (const Divergence divergence : kOfTeacherHeads) {
    Problem problem;
    problem.spec.divergence = divergence;
    if (divergence == Divergence::kJsd) problem.spec.jsd_beta = 0.5f;
    problem.student = Normals(33, 2.0f);
    problem.teacher = Normals(33, 2.0f);
    problem.teacher[20] = std::nanf("");
    EXPECT_TRUE(std::isnan(Walker(GetParam(), problem, 16, 1).Run().outputs.divergence));
    problem.teacher.assign(33, -kInfinity);
    problem.teacher[20] = std::nanf("");
    EXPECT_TRUE(std::isnan(Walker(GetParam(), problem, 16, 1).Run().outputs.divergence));
  }
}

INSTANTIATE_TEST_SUITE_P(All, DivergenceTest,
                         testing::ValuesIn(SupportedRowPasses().begin(),
                                           SupportedRowPasses().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace lmhead::cpu
