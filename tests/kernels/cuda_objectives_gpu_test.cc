// The GPU kernels of divergences, policies and top-k lists alone, without the matrix products
// between them, against the oracle: heads whose weight is the identity have their hidden states as
// logits, which the kernels get as two tiles, or as the two shards of a vocabulary.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/add_rows.h"
#include "kernels/convert.h"
#include "kernels/divergence_grad.h"
#include "kernels/grad_logits.h"
#include "kernels/jsd_sums.h"
#include "kernels/merge_stats.h"
#include "kernels/pair_stats.h"
#include "kernels/reference/reference.h"
#include "kernels/shard_stats.h"
#include "kernels/token_loss.h"
#include "kernels/topk_select.h"
#include "kernels/topk_teacher.h"
#include "tests/kernels/gpu_util.h"

namespace lmhead::kernels {
namespace {

constexpr float kKlTemperature = 1.5f;
constexpr int32_t kTopK = 5;

struct ObjectiveCase {
  DType dtype = DType::kFloat32;
  int64_t num_rows = 0, vocab_size = 0, first_tile = 0;
  double std = 2.0;     // Of the logits.
  double offset = 0.0;  // Of all logits.
  bool transform = false;
};

std::string CaseName(const ::testing::TestParamInfo<ObjectiveCase>& info) {
  const ObjectiveCase& c = info.param;
  return absl::StrCat(std::string(DTypeName(c.dtype)), "_", c.num_rows, "x", c.vocab_size, "_",
                      c.first_tile, c.transform ? "_transform" : "",
                      c.std > 5.0 ? "_confident" : "", c.offset != 0.0 ? "_offset" : "");
}

// Logits of one tile, as a matrix product leaves them: rows padded to 16 bytes.
struct Tile {
  VocabTile columns;
  int64_t stride = 0;
  std::optional<DeviceArray<std::byte>> logits;

  MatrixView View(int64_t rows, DType dtype) const { return {logits->data(), rows, stride, dtype}; }
};

class CudaObjectiveTest : public ::testing::TestWithParam<ObjectiveCase> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU";
    const ObjectiveCase& c = GetParam();
    head_ = IdentityHead(c.vocab_size / 2);
    teacher_ = IdentityHead(c.vocab_size / 3);
    if (c.transform) {
      head_.logit_scale = 0.5;
      head_.softcap = 6.0;
      teacher_.softcap = 9.0;
    }
    tokens_.hidden_states = Logits(11);
    tokens_.teacher_hidden_states = Logits(12);
    for (int64_t row = 0; row < c.num_rows; ++row) {
      int32_t target = static_cast<int32_t>((row * 7 + 1) % c.vocab_size);
      if (target == c.vocab_size / 2) ++target;
      tokens_.targets.push_back(row % 5 == 3 ? kDefaultIgnoreIndex : target);
      tokens_.token_weights.push_back(0.5 + 0.25 * static_cast<double>(row % 4));
    }
  }

  // With one id masked.
  reference::Head IdentityHead(int64_t masked) const {
    const int64_t size = GetParam().vocab_size;
    reference::Head head = {.vocab_size = size, .hidden_size = size};
    head.weight.assign(size * size, 0.0);
    for (int64_t j = 0; j < size; ++j) head.weight[j * size + j] = 1.0;
    head.bias.assign(size, 0.0);
    head.bias[masked] = kMasked;
    return head;
  }

  std::vector<double> Logits(uint32_t seed) const {
    const ObjectiveCase& c = GetParam();
    std::vector<double> values = Normal(c.num_rows * c.vocab_size, c.std, seed);
    for (double& value : values) value += c.offset;
    return Decode(Encode(values, c.dtype), c.dtype);
  }

  void MakeTiles(const reference::Head& head, const std::vector<double>& logits, Tile (&tiles)[2]) {
    const ObjectiveCase& c = GetParam();
    const int64_t per_16_bytes = 16 / BytesPerElement(c.dtype);
    const int64_t bounds[] = {0, c.first_tile, c.vocab_size};
    const int64_t widest = std::max(c.first_tile, c.vocab_size - c.first_tile);
    for (int i = 0; i < 2; ++i) {
      Tile& tile = tiles[i];
      tile.columns = {.start = bounds[i], .cols = bounds[i + 1] - bounds[i]};
      tile.stride = (widest + per_16_bytes - 1) / per_16_bytes * per_16_bytes;
      std::vector<double> padded(c.num_rows * tile.stride, 3e4);  // Padding counts for nothing.
      for (int64_t row = 0; row < c.num_rows; ++row) {
        for (int64_t j = 0; j < tile.columns.cols; ++j) {
          const int64_t id = bounds[i] + j;
          padded[row * tile.stride + j] =
              head.bias[id] == kMasked ? kMasked : logits[row * c.vocab_size + id];
        }
      }
      tile.logits.emplace(Encode(padded, c.dtype));
    }
  }

  std::vector<RowInput> RowInputs() const {
    std::vector<RowInput> rows;
    for (size_t row = 0; row < tokens_.targets.size(); ++row) {
      rows.push_back({.target = tokens_.targets[row] < 0 ? -1 : tokens_.targets[row],
                      .grad_coefficient = static_cast<float>(tokens_.token_weights[row]),
                      .inverse_temperature = static_cast<float>(1.0 / recipe_.temperature)});
    }
    return rows;
  }

  static LogitTransform TransformOf(const reference::Head& head) {
    return {static_cast<float>(head.logit_scale), static_cast<float>(head.softcap)};
  }
  LogitsPair PairOf(const Tile& student, const Tile& teacher) const {
    const ObjectiveCase& c = GetParam();
    return {.student = student.View(c.num_rows, c.dtype),
            .teacher = teacher.View(c.num_rows, c.dtype),
            .tile = student.columns,
            .teacher_cols = student.columns.cols,
            .student_transform = TransformOf(head_),
            .teacher_transform = TransformOf(teacher_),
            .inverse_temperature = 1.0f / kKlTemperature};
  }

  // The rows of both tiles beside each other.
  std::vector<double> Gather(const Tile (&tiles)[2]) const {
    const ObjectiveCase& c = GetParam();
    std::vector<double> all(c.num_rows * c.vocab_size);
    for (const Tile& tile : tiles) {
      const std::vector<double> values = Decode(tile.logits->Read(), c.dtype);
      for (int64_t row = 0; row < c.num_rows; ++row) {
        std::copy_n(values.begin() + row * tile.stride, tile.columns.cols,
                    all.begin() + row * c.vocab_size + tile.columns.start);
      }
    }
    return all;
  }

  // Logits of a large magnitude are float32 numbers of a coarse spacing.
  double Rounding() const { return 8 * 0x1p-24 * (std::fabs(GetParam().offset) + GetParam().std); }

  void ExpectLosses(const std::vector<RowLoss>& losses, const reference::Result& want) const {
    std::vector<double> token_loss, logprob;
    double dropped = 0.0;
    int64_t num_clipped = 0;
    for (const RowLoss& loss : losses) {
      token_loss.push_back(static_cast<double>(loss.cross_entropy) + loss.z_loss + loss.divergence +
                           loss.policy);
      logprob.push_back(loss.logprob);
      dropped += loss.dropped_teacher_mass;
      num_clipped += loss.clipped;
    }
    EXPECT_LT(RelativeError(token_loss, want.token_loss), 3e-6 + Rounding());
    EXPECT_LT(RelativeError(logprob, want.logprob), 3e-6 + Rounding());
    EXPECT_NEAR(dropped, want.sums.dropped_teacher_mass_sum, 1e-5);
    EXPECT_EQ(num_clipped, want.sums.num_clipped);
  }

  void ExpectGrads(const Tile (&tiles)[2], const reference::Result& want) const {
    const double rounding = GetParam().dtype == DType::kBFloat16 ? 0x1p-8 : 4e-6 + Rounding();
    EXPECT_LT(RelativeError(Gather(tiles), want.grad_hidden_states), rounding);
  }

  reference::Head head_;
  reference::Head teacher_;
  reference::Recipe recipe_;
  reference::Tokens tokens_;
};

TEST_P(CudaObjectiveTest, DivergencesFromATeacherOverTilesAndShards) {
  const ObjectiveCase& c = GetParam();
  for (const Divergence divergence :
       {Divergence::kJsd, Divergence::kForwardKl, Divergence::kReverseKl}) {
    for (const bool shards : {false, true}) {
      SCOPED_TRACE(absl::StrCat("divergence ", static_cast<int>(divergence), ", shards ", shards));
      const float beta = divergence == Divergence::kJsd ? 0.25f : 0.0f;
      recipe_.distillation = reference::Distillation{.divergence = divergence,
                                                     .kl_temperature = kKlTemperature,
                                                     .jsd_beta = beta,
                                                     .cross_entropy_weight = 0.5,
                                                     .divergence_weight = 0.75};
      // Each side masks an id of its own, which is infinitely far for one of the KLs.
      if (divergence != Divergence::kJsd) teacher_.bias = head_.bias;
      const reference::Result want = reference::ComputeLoss(head_, recipe_, tokens_, &teacher_);
      Tile student[2], teacher[2];
      MakeTiles(head_, tokens_.hidden_states, student);
      MakeTiles(teacher_, tokens_.teacher_hidden_states, teacher);
      const DeviceArray<RowInput> rows(RowInputs());
      // Two shards, and what they merge to.
      const DeviceArray<RowStats> row_stats(std::vector<RowStats>(3 * c.num_rows));
      const DeviceArray<PairStats> pair_stats(std::vector<PairStats>(3 * c.num_rows));
      for (int i = 0; i < 2; ++i) {
        const int64_t at = shards ? i * c.num_rows : 2 * c.num_rows;
        const LogitsPair pair = PairOf(student[i], teacher[i]);
        const bool merge = !shards && i > 0;
        Check(LaunchShardStats(pair.student, pair.tile, rows.data(),
                               {.transform = pair.student_transform, .merge = merge},
                               row_stats.data() + at, nullptr));
        Check(LaunchPairStats(pair, {.divergence = divergence, .merge = merge},
                              pair_stats.data() + at, nullptr));
      }
      RowStats* const stats = row_stats.data() + 2 * c.num_rows;
      PairStats* const pairs = pair_stats.data() + 2 * c.num_rows;
      if (shards) {
        Check(LaunchMergeRowStats(row_stats.data(), c.num_rows * sizeof(RowStats), 2, c.num_rows,
                                  stats, nullptr));
        Check(LaunchMergePairStats(pair_stats.data(), c.num_rows * sizeof(PairStats), 2, c.num_rows,
                                   divergence == Divergence::kReverseKl, pairs, nullptr));
      }
      const DeviceArray<float> jsd_sums(std::vector<float>(2 * c.num_rows));
      for (int i = 0; i < 2 && divergence == Divergence::kJsd; ++i) {
        Check(LaunchJsdSums(PairOf(student[i], teacher[i]), pairs, beta, /*with_tail=*/false,
                            /*add=*/i > 0, jsd_sums.data(), nullptr));
      }
      const DeviceArray<uint8_t> nonfinite(std::vector<uint8_t>(c.num_rows, 0));
      const DeviceArray<RowLoss> losses(std::vector<RowLoss>(c.num_rows));
      const DeviceArray<RowGrad> grads(std::vector<RowGrad>(c.num_rows));
      const DeviceArray<RowDivergenceGrad> divergence_grads(
          std::vector<RowDivergenceGrad>(c.num_rows));
      Check(LaunchTokenLoss(c.num_rows, rows.data(), stats, nonfinite.data(),
                            {.vocab_size = c.vocab_size,
                             .logit_scale = TransformOf(head_).logit_scale,
                             .softcap = TransformOf(head_).softcap,
                             .cross_entropy_weight = 0.5f,
                             .divergence = {.grads = divergence_grads.data(),
                                            .kind = divergence,
                                            .beta = beta,
                                            .weight = 0.75f,
                                            .inverse_temperature = 1.0f / kKlTemperature,
                                            .pairs = pairs,
                                            .jsd_sums = jsd_sums.data()}},
                            losses.data(), grads.data(), nullptr));
      for (int i = 0; i < 2; ++i) {
        Check(LaunchDivergenceGrad(PairOf(student[i], teacher[i]),
                                   {.divergence = divergence,
                                    .beta = beta,
                                    .divergence_cols = student[i].columns.cols,
                                    .cross_entropy = true},
                                   grads.data(), divergence_grads.data(), nullptr));
      }
      ExpectLosses(losses.Read(), want);
      ExpectGrads(student, want);
    }
  }
}

TEST_P(CudaObjectiveTest, TopkTeachersOfEveryMass) {
  const ObjectiveCase& c = GetParam();
  const int32_t k = static_cast<int32_t>(std::min<int64_t>(kTopK, c.vocab_size));
  for (int64_t row = 0; row < c.num_rows; ++row) {
    for (int32_t i = 0; i < k; ++i) {
      // Distinct; the target among them in most rows, the masked id in none.
      int64_t id = (row * 7 + 1 + i * (c.vocab_size / k)) % c.vocab_size;
      if (head_.bias[id] == kMasked) head_.bias[id] = 0.0;
      tokens_.teacher_topk_ids.push_back(static_cast<int32_t>(id));
      tokens_.teacher_topk_logprobs.push_back(static_cast<float>(-1.5 - 0.25 * i));
    }
  }
  const DeviceArray<int32_t> ids(tokens_.teacher_topk_ids);
  const DeviceArray<float> logprobs(std::vector<float>(tokens_.teacher_topk_logprobs.begin(),
                                                       tokens_.teacher_topk_logprobs.end()));
  const TopkTeacher topk = {ids.data(), logprobs.data(), k};
  const float inverse_kl = 1.0f / kKlTemperature;
  for (const TopkMass mass : {TopkMass::kRenormalise, TopkMass::kKeep, TopkMass::kTail}) {
    SCOPED_TRACE(absl::StrCat("mass ", static_cast<int>(mass)));
    recipe_.distillation = reference::Distillation{.divergence = Divergence::kTopkForwardKl,
                                                   .kl_temperature = kKlTemperature,
                                                   .top_k = k,
                                                   .topk_mass = mass,
                                                   .cross_entropy_weight = 0.5,
                                                   .divergence_weight = 0.75};
    const reference::Result want = reference::ComputeLoss(head_, recipe_, tokens_);
    Tile tiles[2];
    MakeTiles(head_, tokens_.hidden_states, tiles);
    const LogitTransform transform = TransformOf(head_);
    const DeviceArray<RowInput> rows(RowInputs());
    const DeviceArray<RowStats> stats(std::vector<RowStats>(c.num_rows));
    const DeviceArray<RowStats> outside(std::vector<RowStats>(c.num_rows));
    const DeviceArray<float> values(std::vector<float>(c.num_rows * k, 0.0f));
    for (int i = 0; i < 2; ++i) {
      const MatrixView view = tiles[i].View(c.num_rows, c.dtype);
      Check(LaunchTakeTopk(view, tiles[i].columns, topk, values.data(), nullptr));
      ShardStatsOptions options = {.transform = transform, .merge = i > 0};
      Check(LaunchShardStats(view, tiles[i].columns, rows.data(), options, stats.data(), nullptr));
      options.inverse_temperature = inverse_kl;
      Check(
          LaunchShardStats(view, tiles[i].columns, rows.data(), options, outside.data(), nullptr));
    }
    const DeviceArray<TopkStats> topk_stats(std::vector<TopkStats>(c.num_rows));
    Check(LaunchFoldTopk(c.num_rows, rows.data(), topk, values.data(),
                         {.transform = transform, .inverse_temperature = inverse_kl},
                         outside.data(), stats.data(), topk_stats.data(), nullptr));
    const DeviceArray<uint8_t> nonfinite(std::vector<uint8_t>(c.num_rows, 0));
    const DeviceArray<RowLoss> losses(std::vector<RowLoss>(c.num_rows));
    const DeviceArray<RowGrad> grads(std::vector<RowGrad>(c.num_rows));
    const DeviceArray<RowDivergenceGrad> divergence_grads(
        std::vector<RowDivergenceGrad>(c.num_rows));
    Check(LaunchTokenLoss(c.num_rows, rows.data(), stats.data(), nonfinite.data(),
                          {.vocab_size = c.vocab_size,
                           .logit_scale = transform.logit_scale,
                           .softcap = transform.softcap,
                           .cross_entropy_weight = 0.5f,
                           .divergence = {.grads = divergence_grads.data(),
                                          .kind = Divergence::kTopkForwardKl,
                                          .topk_mass = mass,
                                          .weight = 0.75f,
                                          .inverse_temperature = inverse_kl,
                                          .ids_outside = k < c.vocab_size,
                                          .topk = topk_stats.data()}},
                          losses.data(), grads.data(), nullptr));
    for (const Tile& tile : tiles) {
      LogitsPair pair = {.student = tile.View(c.num_rows, c.dtype),
                         .tile = tile.columns,
                         .student_transform = transform,
                         .inverse_temperature = inverse_kl};
      Check(LaunchDivergenceGrad(pair,
                                 {.divergence = Divergence::kTopkForwardKl,
                                  .divergence_cols = tile.columns.cols,
                                  .cross_entropy = true},
                                 grads.data(), divergence_grads.data(), nullptr));
      Check(LaunchTopkGrads(
          pair.student, tile.columns, topk, values.data(),
          {.transform = transform, .cross_entropy = true, .inverse_temperature = inverse_kl},
          grads.data(), divergence_grads.data(), nullptr));
    }
    ExpectLosses(losses.Read(), want);
    ExpectGrads(tiles, want);
  }
}

TEST_P(CudaObjectiveTest, PoliciesOfEveryKind) {
  const ObjectiveCase& c = GetParam();
  const std::vector<double> noise =
      Decode(Encode(Normal(5 * c.num_rows, 1.0, 13), DType::kFloat32), DType::kFloat32);
  std::vector<double>* const arrays[] = {&tokens_.logprob_grad, &tokens_.entropy_grad,
                                         &tokens_.advantage, &tokens_.old_logprob,
                                         &tokens_.reference_logprob};
  const std::vector<double> logprob = reference::ComputeLoss(head_, recipe_, tokens_).logprob;
  std::vector<RowPolicy> policies(c.num_rows);
  for (int64_t row = 0; row < c.num_rows; ++row) {
    for (int i = 0; i < 5; ++i) arrays[i]->push_back(noise[i * c.num_rows + row]);
    // Near the policy's own, so that some rows are clipped and some are not.
    for (std::vector<double>* near : {&tokens_.old_logprob, &tokens_.reference_logprob}) {
      near->back() = static_cast<float>(logprob[row] + 0.3 * near->back());
    }
    policies[row] = {static_cast<float>(tokens_.logprob_grad[row]),
                     static_cast<float>(tokens_.entropy_grad[row]),
                     static_cast<float>(tokens_.old_logprob[row]),
                     static_cast<float>(tokens_.advantage[row]),
                     static_cast<float>(tokens_.reference_logprob[row])};
  }
  const PolicySpec specs[] = {{.kind = PolicyKind::kCoefficients},
                              {.kind = PolicyKind::kClipped,
                               .clip_low = 0.25f,
                               .clip_high = 0.125f,
                               .entropy_coefficient = 0.0625f,
                               .reference_kl_coefficient = 0.125f,
                               .dual_clip = 1.25f}};
  for (const PolicySpec& spec : specs) {
    SCOPED_TRACE(absl::StrCat("kind ", static_cast<int>(spec.kind)));
    LossRecipe recipe;
    recipe.policy = spec;
    recipe_ = reference::Recipe(recipe);
    const reference::Result want = reference::ComputeLoss(head_, recipe_, tokens_);
    Tile tiles[2];
    MakeTiles(head_, tokens_.hidden_states, tiles);
    const LogitTransform transform = TransformOf(head_);
    const DeviceArray<RowInput> rows(RowInputs());
    const DeviceArray<RowPolicy> row_policies(policies);
    const DeviceArray<RowStats> stats(std::vector<RowStats>(c.num_rows));
    for (int i = 0; i < 2; ++i) {
      Check(LaunchShardStats(tiles[i].View(c.num_rows, c.dtype), tiles[i].columns, rows.data(),
                             {.transform = transform, .entropy = true, .merge = i > 0},
                             stats.data(), nullptr));
    }
    const DeviceArray<uint8_t> nonfinite(std::vector<uint8_t>(c.num_rows, 0));
    const DeviceArray<RowLoss> losses(std::vector<RowLoss>(c.num_rows));
    const DeviceArray<RowGrad> grads(std::vector<RowGrad>(c.num_rows));
    Check(LaunchTokenLoss(c.num_rows, rows.data(), stats.data(), nonfinite.data(),
                          {.vocab_size = c.vocab_size,
                           .logit_scale = transform.logit_scale,
                           .softcap = transform.softcap,
                           .entropy = true,
                           .policy = {row_policies.data(), spec}},
                          losses.data(), grads.data(), nullptr));
    for (const Tile& tile : tiles) {
      Check(LaunchGradLogits(tile.View(c.num_rows, c.dtype), tile.columns, grads.data(), transform,
                             /*class_weights=*/nullptr, /*entropy=*/true, nullptr));
    }
    ExpectLosses(losses.Read(), want);
    ExpectGrads(tiles, want);
  }
}

TEST_P(CudaObjectiveTest, TopkListsOverTilesAndShards) {
  const ObjectiveCase& c = GetParam();
  Tile tiles[2];
  MakeTiles(head_, tokens_.hidden_states, tiles);
  const LogitTransform transform = TransformOf(head_);
  const DeviceArray<RowInput> rows(RowInputs());
  const DeviceArray<RowStats> stats(std::vector<RowStats>(c.num_rows));
  for (int i = 0; i < 2; ++i) {
    Check(LaunchShardStats(tiles[i].View(c.num_rows, c.dtype), tiles[i].columns, rows.data(),
                           {.transform = transform, .merge = i > 0}, stats.data(), nullptr));
  }
  std::vector<uint8_t> flags(c.num_rows, 0);
  const DeviceArray<uint8_t> nonfinite(flags);
  for (const int64_t wanted : {int64_t{1}, int64_t{5}, int64_t{300}, c.vocab_size}) {
    const auto k = static_cast<int32_t>(std::min({wanted, c.vocab_size, int64_t{1024}}));
    const reference::Result want = reference::ComputeLoss(head_, recipe_, tokens_, nullptr, k);
    for (const bool shards : {false, true}) {
      SCOPED_TRACE(absl::StrCat("k ", k, ", shards ", shards));
      const DeviceArray<TopkEntry> entries(std::vector<TopkEntry>(3 * c.num_rows * k, 99));
      TopkEntry* const list = entries.data() + 2 * c.num_rows * k;
      for (int i = 0; i < 2; ++i) {
        Check(LaunchTopkSelect(tiles[i].View(c.num_rows, c.dtype), tiles[i].columns, transform, k,
                               /*merge=*/!shards && i > 0,
                               shards ? entries.data() + i * c.num_rows * k : list, nullptr));
      }
      if (shards) Check(LaunchTopkMerge(entries.data(), 2, c.num_rows, k, list, nullptr));
      const DeviceArray<int32_t> ids(std::vector<int32_t>(c.num_rows * k, -7));
      const DeviceArray<float> logprobs(std::vector<float>(c.num_rows * k, 7.0f));
      Check(LaunchTopkFinish(list, c.num_rows, k, rows.data(), stats.data(), nonfinite.data(),
                             transform, ids.data(), logprobs.data(), nullptr));
      std::vector<float> got = logprobs.Read();
      std::vector<double> wanted_logprobs = want.topk_logprobs;
      for (size_t i = 0; i < got.size(); ++i) {  // The masked id, last in a list of all.
        ASSERT_EQ(got[i] == -HUGE_VALF, wanted_logprobs[i] == kMasked) << i;
        if (wanted_logprobs[i] == kMasked) got[i] = wanted_logprobs[i] = 0.0;
      }
      EXPECT_LT(RelativeError({got.begin(), got.end()}, wanted_logprobs), 3e-6 + Rounding());
      // Softcapped logits that the oracle tells apart may be equal in float32.
      if (!c.transform) EXPECT_EQ(ids.Read(), want.topk_ids);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaObjectiveTest,
    ::testing::Values(ObjectiveCase{DType::kFloat32, 3, 13, 8},
                      ObjectiveCase{DType::kBFloat16, 3, 13, 8},
                      ObjectiveCase{DType::kFloat32, 7, 257, 128, 2.0, 0.0, true},
                      ObjectiveCase{DType::kBFloat16, 7, 257, 128, 2.0, 0.0, true},
                      ObjectiveCase{DType::kFloat32, 9, 1009, 504},
                      ObjectiveCase{DType::kBFloat16, 9, 1009, 504},
                      ObjectiveCase{DType::kFloat32, 9, 521, 256, 20.0},
                      ObjectiveCase{DType::kFloat32, 9, 521, 256, 2.0, 1e4}),
    CaseName);

TEST(CudaObjectiveKernelsTest, RowsAreAddedToRows) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU";
  const DeviceArray<float> matrix(std::vector<float>{1, 2, 3, 4, 5, 6});
  const DeviceArray<float> rows(std::vector<float>{10, 20, 30, 40});
  const DeviceArray<int32_t> ids(std::vector<int32_t>{2, 0});
  Check(LaunchAddRows(rows.data(), ids.data(), 2, 2, matrix.data(), nullptr));
  EXPECT_EQ(matrix.Read(), (std::vector<float>{31, 42, 3, 4, 15, 26}));
}

TEST(CudaObjectiveKernelsTest, ColumnsAreConvertedIntoAWiderMatrix) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU";
  const std::vector<double> from = {1, 2, 99, 3, 4, 99};
  std::vector<double> to(8, 7.0);
  const DeviceArray<std::byte> source(Encode(from, DType::kFloat32));
  const DeviceArray<std::byte> target(Encode(to, DType::kBFloat16));
  Check(LaunchConvertColumns({source.data(), 2, 3, DType::kFloat32},
                             {target.data(), 2, 4, DType::kBFloat16}, 2, nullptr));
  EXPECT_EQ(Decode(target.Read(), DType::kBFloat16), (std::vector<double>{1, 2, 7, 7, 3, 4, 7, 7}));
}

}  // namespace
}  // namespace lmhead::kernels
