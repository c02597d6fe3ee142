// The head at a size where offsets leave 32 bits: 16384 rows and more of 131072 logits. The oracle
// answers for a sample of the rows; all others have no target, so that grad_weight is the sample's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/reference/compare.h"
#include "kernels/reference/plain_dense.h"
#include "server/compute/cuda_backend.h"
#include "tests/conformance/compare.h"
#include "tests/conformance/rig.h"
#include "tests/conformance/tolerances.h"

namespace lmhead {
namespace {

constexpr int64_t kVocab = 131072;
constexpr int64_t kHidden = 64;
constexpr int64_t kRows = 16384;   // kRows * kVocab is 2^31: every element below fits 32 bits,
constexpr int64_t kMoreRows = 96;  // these do not.
constexpr int32_t kIgnored = kDefaultIgnoreIndex;

absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateOnFirstDevice(const HeadSpec& spec,
                                                                    const MemoryPlan& plan,
                                                                    MemoryAccount* account,
                                                                    const RankContext& context) {
  return CreateCudaBackend(spec, plan, account, /*device=*/0, context);
}

const BackendUnderTest kCuda = {
    .name = "cuda", .kind = BackendKind::kCuda, .create = CreateOnFirstDevice};

class CudaLarge : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!CudaAvailable(&why_not)) GTEST_SKIP() << why_not;
  }

  std::vector<float> Normals(int64_t count, float std) {
    std::normal_distribution<float> normal(0.0f, std);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return RoundedTo(DType::kBFloat16, values);
  }

  // Random rows without targets, but `targets` many that are spread over all of them.
  ChunkData MakeChunk(int64_t num_tokens, int64_t num_targets) {
    ChunkData chunk;
    chunk.hidden_states = Normals(num_tokens * kHidden, 1.0f);
    chunk.targets.assign(num_tokens, kIgnored);
    for (int64_t i = 0; i < num_targets; ++i) {
      const int64_t row = num_targets == 1 ? 0 : i * (num_tokens - 1) / (num_targets - 1);
      chunk.targets[row] = static_cast<int32_t>((kVocab - 1) * i / num_targets);
    }
    return chunk;
  }

  std::unique_ptr<Rig> MakeRig(Schedule schedule, int64_t batch_tokens, bool with_teacher) {
    HeadSpec spec = {.name = "large",
                     .vocab_size = kVocab,
                     .hidden_size = kHidden,
                     .weight_dtype = GetParam(),
                     .trainable = true,
                     .optimizer = {.kind = OptimizerKind::kSgd},
                     .schedule = schedule,
                     .batch_tokens = batch_tokens};
    if (with_teacher) spec.teacher_hidden_size = kHidden;
    auto rig = std::make_unique<Rig>(kCuda, spec, GetParam());
    const std::vector<float> weight = Normals(kVocab * kHidden, 0.25f);
    rig->Write(TensorKind::kWeight, weight);
    if (!with_teacher) return rig;
    HeadSpec teacher = spec;
    teacher.name = "teacher";
    teacher.trainable = false;
    teacher.optimizer.kind = OptimizerKind::kNone;
    teacher.schedule = Schedule::kEval;
    rig->AddTeacher(teacher).Write(TensorKind::kWeight, Normals(kVocab * kHidden, 0.25f));
    return rig;
  }

  void ExpectBatch(Rig* rig, const LossRecipe& recipe, const std::vector<ChunkData>& chunks,
                   double largest_logit);

  std::mt19937 random_{23};
};

// Rows with a target, and as many without.
std::vector<int64_t> SampleOf(const ChunkData& chunk) {
  std::vector<int64_t> sample;
  for (int64_t row = 0; row < chunk.num_tokens(); ++row) {
    if (chunk.targets[row] == kIgnored) continue;
    sample.push_back(row);
    if (row + 1 < chunk.num_tokens() && chunk.targets[row + 1] == kIgnored) {
      sample.push_back(row + 1);
    }
  }
  return sample;
}

template <typename T>
std::vector<T> RowsOf(const std::vector<T>& values, const ChunkData& chunk,
                      const std::vector<int64_t>& sample) {
  const int64_t cols = static_cast<int64_t>(values.size()) / chunk.num_tokens();
  std::vector<T> rows;
  for (const int64_t row : sample) {
    rows.insert(rows.end(), values.begin() + row * cols, values.begin() + (row + 1) * cols);
  }
  return rows;
}

ChunkData SampleRows(const ChunkData& chunk, const std::vector<int64_t>& sample) {
  ChunkData rows;
  rows.hidden_states = RowsOf(chunk.hidden_states, chunk, sample);
  rows.targets = RowsOf(chunk.targets, chunk, sample);
  rows.teacher_hidden_states = RowsOf(chunk.teacher_hidden_states, chunk, sample);
  rows.grad_scale = chunk.grad_scale;
  return rows;
}

void AddTo(std::vector<double>* sum, const std::vector<double>& values) {
  sum->resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) (*sum)[i] += values[i];
}

void CudaLarge::ExpectBatch(Rig* rig, const LossRecipe& recipe,
                            const std::vector<ChunkData>& chunks, double largest_logit) {
  const bool is_bfloat16 = GetParam() == DType::kBFloat16;
  const Tolerances& table = is_bfloat16 ? kBFloat16Logits : kFloat32Logits;
  const double rounding = RoundingOfLogits(largest_logit);
  // The larger of what the table and what twice the yardstick's error allow.
  const auto expect = [&](const char* name, const auto& got, const std::vector<double>& exact,
                          const std::vector<double>& plain, double tolerance) {
    const reference::OutputError error =
        reference::CompareOutput(name, {got.begin(), got.end()}, exact, plain, GetParam());
    EXPECT_LE(error.rel, std::max(error.rel_limit, tolerance + rounding)) << name;
  };
  std::vector<double> grad_weight, plain_grad_weight;
  const std::vector<ChunkAnswer> answers = rig->Run(recipe, chunks);
  for (size_t i = 0; i < chunks.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("chunk ", i));
    const std::vector<int64_t> sample = SampleOf(chunks[i]);
    const ChunkData rows = SampleRows(chunks[i], sample);
    const reference::Result want = rig->Expected(recipe, rows);
    const reference::Result plain = rig->PlainDense(recipe, rows, GetParam());
    const auto expect_rows = [&](const char* name, const auto& got, const auto& exact,
                                 const auto& dense, double tolerance) {
      expect(name, RowsOf(got, chunks[i], sample), exact, dense, tolerance);
    };
    expect_rows("token_loss", answers[i].token_loss, want.token_loss, plain.token_loss,
                table.token_outputs);
    expect_rows("logprob", answers[i].logprob, want.logprob, plain.logprob, table.token_outputs);
    expect_rows("lse", answers[i].lse, want.lse, plain.lse, table.token_outputs);
    expect_rows("entropy", answers[i].entropy, want.entropy, plain.entropy, table.token_outputs);
    expect_rows("grad_hidden_states", answers[i].grad_hidden_states, want.grad_hidden_states,
                reference::RoundedTo(GetParam(), plain.grad_hidden_states),
                table.grad_hidden_states + RoundingOf(GetParam()));
    EXPECT_EQ(answers[i].sums.num_tokens, chunks[i].num_tokens());
    EXPECT_EQ(answers[i].sums.num_valid_tokens, want.sums.num_valid_tokens);
    for (int64_t row = 0; row < chunks[i].num_tokens(); ++row) {
      if (chunks[i].targets[row] != kIgnored) continue;
      const auto grad = answers[i].grad_hidden_states.begin() + row * kHidden;
      ASSERT_TRUE(std::all_of(grad, grad + kHidden, [](float g) { return g == 0.0f; })) << row;
      ASSERT_GT(answers[i].lse[row], 0.0f) << row;  // Of every row: there are 2^17 logits.
    }
    AddTo(&grad_weight, want.grad_weight);
    AddTo(&plain_grad_weight, plain.grad_weight);
  }
  expect("grad_weight", rig->Read(TensorKind::kGradWeight), grad_weight, plain_grad_weight,
         table.grad_weight);
}

TEST_P(CudaLarge, OffsetsPastTwoToThe31) {
  for (const Schedule schedule : {Schedule::kRetain, Schedule::kRecompute}) {
    SCOPED_TRACE(std::string(ScheduleName(schedule)));
    const auto rig = MakeRig(schedule, kRows + kMoreRows, /*with_teacher=*/false);
    ExpectBatch(rig.get(), LossRecipe(), {MakeChunk(kRows, 12), MakeChunk(kMoreRows, 8)}, 16.0);
  }
}

TEST_P(CudaLarge, OffsetsPastTwoToThe31OfATeacher) {
  const auto rig = MakeRig(Schedule::kRetain, kRows + kMoreRows, /*with_teacher=*/true);
  LossRecipe recipe;
  recipe.distillation = DistillationSpec{.divergence = Divergence::kJsd,
                                         .teacher_head = "teacher",
                                         .jsd_beta = 0.5f,
                                         .teacher_hidden_dtype = GetParam()};
  std::vector<ChunkData> chunks = {MakeChunk(kRows, 6), MakeChunk(kMoreRows, 6)};
  for (ChunkData& chunk : chunks) {
    chunk.teacher_hidden_states = Normals(chunk.num_tokens() * kHidden, 1.0f);
  }
  ExpectBatch(rig.get(), recipe, chunks, 16.0);
}

TEST_P(CudaLarge, ConfidentRows) {
  const auto rig = MakeRig(Schedule::kRetain, 64, /*with_teacher=*/false);
  const std::vector<float> weight = rig->Read(TensorKind::kWeight);
  ChunkData chunk = MakeChunk(24, 24);
  for (int64_t row = 0; row < 24; ++row) {  // Ever more of the target's own direction.
    for (int64_t h = 0; h < kHidden; ++h) {
      chunk.hidden_states[row * kHidden + h] =
          static_cast<float>(row) * 0.5f * weight[chunk.targets[row] * kHidden + h];
    }
  }
  chunk.hidden_states = RoundedTo(GetParam(), chunk.hidden_states);
  ExpectBatch(rig.get(), LossRecipe(), {chunk}, 64.0);
}

TEST_P(CudaLarge, LogitsOfTenThousand) {
  const auto rig = MakeRig(Schedule::kRecompute, 64, /*with_teacher=*/false);
  ChunkData chunk = MakeChunk(24, 24);
  for (float& value : chunk.hidden_states) value *= 2048.0f;  // Exact in every dtype.
  ExpectBatch(rig.get(), LossRecipe(), {chunk}, 2e4);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaLarge, testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

}  // namespace
}  // namespace lmhead
