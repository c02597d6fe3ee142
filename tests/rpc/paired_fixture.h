// What the tests of paired streams share: a student's head, its teacher's, and one raw stream a
// side.

#ifndef LMHEAD_TESTS_RPC_PAIRED_FIXTURE_H_
#define LMHEAD_TESTS_RPC_PAIRED_FIXTURE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/tolerances.h"
#include "tests/rpc/rpc_fixture.h"

namespace lmhead {

inline constexpr int64_t kTeacherHidden = 5;
inline constexpr int64_t kRows = 3;

class PairedStreamTest : public RpcTest {
 protected:
  void SetUp() override {
    ServerConfig config = Config();
    config.staging_slots = 16;
    config.pair_timeout = absl::Seconds(30);
    Restart(config);
    CreateHeads();
  }

  void CreateHeads() {
    v1::HeadSpec student = Spec();
    student.set_teacher_hidden_size(kTeacherHidden);
    CreateHead(student);
    v1::HeadSpec teacher = Spec("teacher");
    teacher.set_hidden_size(kTeacherHidden);
    teacher.set_trainable(false);
    teacher.clear_optimizer();
    CreateHead(teacher);
  }

  v1::StreamOpen OpenSide(uint64_t step, bool teacher_side, const std::string& worker = "w0") {
    v1::StreamOpen open = Open(step, worker);
    v1::DistillationSpec& spec = *open.mutable_recipe()->mutable_distillation();
    spec.set_divergence(v1::DistillationSpec::DIVERGENCE_FORWARD_KL);
    spec.set_teacher_head("teacher");
    spec.set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
    spec.set_paired_stream(true);
    if (teacher_side) {
      open.set_teacher_side(true);
      open.clear_outputs();
    }
    return open;
  }

  static v1::Chunk TeacherChunk(uint64_t index, int64_t num_tokens = kRows) {
    v1::Chunk chunk;
    chunk.set_chunk_index(index);
    chunk.set_num_tokens(num_tokens);
    std::vector<float> hidden(static_cast<size_t>(num_tokens * kTeacherHidden));
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = std::cos(static_cast<float>(i + index));
    chunk.set_teacher_hidden_states(hidden.data(), hidden.size() * sizeof(float));
    return chunk;
  }

  // A side, opened.
  std::unique_ptr<TestStream> Start(const v1::StreamOpen& open) {
    auto stream = std::make_unique<TestStream>(stub_.get());
    EXPECT_TRUE(stream->Send(open));
    const v1::ComputeLossResponse opened = stream->Read();
    EXPECT_TRUE(opened.has_opened()) << stream->Finish().error_message();
    window_ = opened.opened().max_inflight_chunks();
    return stream;
  }

  // What one exchange on whole streams answers, to compare with.
  v1::ChunkResult WholeResult(uint64_t index) {
    v1::StreamOpen open = OpenSide(0, false, "whole");
    open.mutable_recipe()->mutable_distillation()->set_paired_stream(false);
    const auto stream = Start(open);
    v1::Chunk chunk = MakeChunk(index, kRows);
    chunk.set_teacher_hidden_states(TeacherChunk(index).teacher_hidden_states());
    EXPECT_TRUE(stream->Send(chunk));
    return stream->Read().result();
  }

  // Computed twice, maybe in another schedule: each is within the table's bound.
  static void ExpectSameGrad(const v1::ChunkResult& got, const v1::ChunkResult& want) {
    ASSERT_EQ(got.grad_hidden_states().size(), want.grad_hidden_states().size());
    ASSERT_FALSE(want.grad_hidden_states().empty());
    const auto values = [](const v1::ChunkResult& result) {
      std::vector<float> grad(result.grad_hidden_states().size() / sizeof(float));
      std::memcpy(grad.data(), result.grad_hidden_states().data(), grad.size() * sizeof(float));
      return grad;
    };
    const std::vector<float> a = values(got), b = values(want);
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < b.size(); ++i) {
      difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
      norm += std::pow(static_cast<double>(b[i]), 2);
    }
    EXPECT_LE(std::sqrt(difference / norm),
              2 * (kFloat32Logits.grad_hidden_states + RoundingOf(DType::kFloat32)));
  }

  void ExpectEnds(TestStream& stream, uint64_t num_chunks) {
    EXPECT_TRUE(stream.SendEnd(num_chunks));
    const v1::ComputeLossResponse ended = stream.Read();
    EXPECT_EQ(ended.ended().num_chunks_counted(), num_chunks);
    const grpc::Status status = stream.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  int32_t window_ = 0;  // Of the stream started last.
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_RPC_PAIRED_FIXTURE_H_
