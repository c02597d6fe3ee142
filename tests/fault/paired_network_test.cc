// A bad network between a student's program, its teacher's, and the service: every chunk meets its
// other side, and is counted exactly once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/conformance/tolerances.h"
#include "tests/e2e/service_fixture.h"
#include "tests/fault/chaos_proxy.h"

namespace lmhead::fault {
namespace {

using e2e::HeadShape;

constexpr int64_t kVocab = 331;
constexpr int64_t kHidden = 64;
constexpr int64_t kTeacherHidden = 96;
constexpr int64_t kTokens = 1500;
constexpr int64_t kChunkTokens = 64;
constexpr uint64_t kNumChunks = (kTokens + kChunkTokens - 1) / kChunkTokens;

HeadShape Student() {
  return {.vocab_size = kVocab,
          .hidden_size = kHidden,
          .optimizer = v1::OPTIMIZER_KIND_SGD,
          .has_bias = false};
}

std::vector<float> Normal(int64_t count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

absl::Status CreateHeads(Client* client) {
  v1::HeadSpec student = e2e::MakeSpec(Student());
  student.set_teacher_hidden_size(kTeacherHidden);
  student.mutable_weight_init()->set_kind(v1::WeightInit::KIND_NORMAL);
  student.mutable_weight_init()->set_std(0.2);
  v1::HeadSpec teacher = student;
  teacher.set_name("teacher");
  teacher.set_hidden_size(kTeacherHidden);
  teacher.set_teacher_hidden_size(0);
  teacher.set_trainable(false);
  teacher.clear_optimizer();
  for (const v1::HeadSpec& spec : {student, teacher}) {
    if (auto created = client->CreateHead(spec); !created.ok()) return created.status();
  }
  return absl::OkStatus();
}

WriterSpec MakeWriterSpec(uint64_t incarnation, bool teacher_side) {
  WriterSpec spec{.head = Student().name,
                  .step = 1,
                  .worker = e2e::WorkerName(0),
                  .incarnation = incarnation,
                  .hidden_dtype = DType::kFloat32,
                  .teacher_side = teacher_side,
                  .num_connections = 2,
                  .max_inflight_chunks = 3,
                  .chunk_tokens = kChunkTokens};
  v1::DistillationSpec& distillation = *spec.recipe.mutable_distillation();
  distillation.set_divergence(v1::DistillationSpec::DIVERGENCE_FORWARD_KL);
  distillation.set_teacher_head("teacher");
  distillation.set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
  distillation.set_paired_stream(true);
  if (!teacher_side) spec.outputs.set_grad_hidden_states(true);
  return spec;
}

absl::StatusOr<LossResult> Feed(const std::string& address, const WriterSpec& spec,
                                const LossRows& rows) {
  auto client = Client::Connect(address, {.max_attempts = 50});
  if (!client.ok()) return client.status();
  auto writer = (*client)->OpenWriter(spec);
  if (!writer.ok()) return writer.status();
  auto result = (*writer)->Compute(rows);
  if (!result.ok()) return result.status();
  if (auto ended = (*writer)->Finish(); !ended.ok()) return ended.status();
  return result;
}

// What a step of both programs came to.
struct Outcome {
  LossResult student;
  LossResult teacher;
  v1::PrepareStepResponse prepared;
  std::vector<float> grad;
};

absl::StatusOr<Outcome> RunStep(Client* control, const std::string& student_address,
                                const std::string& teacher_address) {
  const auto incarnation = e2e::BeginStep(control, Student(), 1, 1);
  if (!incarnation.ok()) return incarnation.status();
  const e2e::Rows rows = e2e::MakeRows(Student(), kTokens, 1, 0);
  const std::vector<float> teacher_hidden = Normal(kTokens * kTeacherHidden, 5);
  Outcome outcome;
  outcome.grad.resize(rows.hidden_states.size());
  LossRows student_rows;
  student_rows.hidden_states = {rows.hidden_states.data(), kTokens, kHidden, DType::kFloat32};
  student_rows.targets = rows.targets;
  student_rows.grad_hidden_states = {outcome.grad.data(), kTokens, kHidden, DType::kFloat32};
  LossRows teacher_rows;
  teacher_rows.teacher_hidden_states = {teacher_hidden.data(), kTokens, kTeacherHidden,
                                        DType::kFloat32};
  absl::StatusOr<LossResult> teacher;
  std::thread teachers_program(
      [&] { teacher = Feed(teacher_address, MakeWriterSpec(*incarnation, true), teacher_rows); });
  const auto student = Feed(student_address, MakeWriterSpec(*incarnation, false), student_rows);
  teachers_program.join();
  if (!student.ok()) return student.status();
  if (!teacher.ok()) return teacher.status();
  outcome.student = *student;
  outcome.teacher = *teacher;
  const auto prepared = e2e::PrepareStep(control, Student(), 1, *incarnation);
  if (!prepared.ok()) return prepared.status();
  outcome.prepared = *prepared;
  return outcome;
}

TEST(PairedNetworkTest, ChunksMeetAndAreCountedOnceOverConnectionsThatBreak) {
  const auto calm = e2e::StartServer();
  const auto calm_client = e2e::ConnectTo(calm->address());
  LMHEAD_ASSERT_OK(CreateHeads(calm_client.get()));
  const auto want = RunStep(calm_client.get(), calm->address(), calm->address());
  LMHEAD_ASSERT_OK(want);

  for (int seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const auto server = e2e::StartServer();
    const auto control = e2e::ConnectTo(server->address());
    LMHEAD_ASSERT_OK(CreateHeads(control.get()));
    // The first connections of both programs break, each somewhere else; then the network is calm.
    const auto forecast = [seed](int connection) {
      std::mt19937_64 random(static_cast<uint64_t>(100 * seed + connection));
      return connection < 8
                 ? Weather{.cut_after_bytes = 20'000 + static_cast<int64_t>(random() % 60'000),
                           .reset = (random() & 1) != 0}
                 : Weather{};
    };
    ChaosProxy to_student(server->address(), forecast);
    ChaosProxy to_teacher(server->address(), forecast);
    const auto got = RunStep(control.get(), to_student.address(), to_teacher.address());
    LMHEAD_ASSERT_OK(got);
    EXPECT_GT(to_student.num_cuts(), 0);
    EXPECT_GT(to_teacher.num_cuts(), 0);
    EXPECT_EQ(got->prepared.num_chunks(), kNumChunks);
    EXPECT_EQ(got->prepared.sums().num_tokens(), kTokens);
    // Chunks may be joined into other batches than before: each run is within the table's bound.
    const double loss = want->prepared.sums().loss_sum();
    EXPECT_NEAR(got->prepared.sums().loss_sum(), loss,
                2 * kFloat32Logits.token_outputs * std::abs(loss));
    EXPECT_LE(e2e::RelativeError(got->grad, std::span<const float>(want->grad)),
              2 * (kFloat32Logits.grad_hidden_states + RoundingOf(DType::kFloat32)));
    EXPECT_EQ(got->teacher.num_chunks, static_cast<int64_t>(kNumChunks));
  }
}

}  // namespace
}  // namespace lmhead::fault
