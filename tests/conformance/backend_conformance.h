// The one suite that every ComputeBackend passes: each schedule, weight dtype and hidden dtype
// against the oracle, over ragged shapes and the traps of docs/NUMERICS.md, and the golden cases.
//
// A backend joins by naming itself in a BackendUnderTest and instantiating the suites, once for
// each number of ranks:
//
//   const BackendUnderTest kCpu = {.name = "cpu", .create = CreateCpuBackend};
//   INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, testing::ValuesIn(CasesOf(kCpu)), CaseName);
//   INSTANTIATE_TEST_SUITE_P(Cpu, TrainingConformance, testing::ValuesIn(TrainingCasesOf(kCpu)),
//                            CaseName);
//   INSTANTIATE_TEST_SUITE_P(Cpu, GoldenConformance, testing::ValuesIn(GoldenCasesOf(kCpu)),
//                            GoldenCaseName);

#ifndef LMHEAD_TESTS_CONFORMANCE_BACKEND_CONFORMANCE_H_
#define LMHEAD_TESTS_CONFORMANCE_BACKEND_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "tests/conformance/rig.h"
#include "tests/conformance/tolerances.h"

namespace lmhead {

// One point of the suite.
struct ConformanceCase {
  BackendUnderTest backend;
  Schedule schedule = Schedule::kRetain;
  DType weight_dtype = DType::kFloat32;
  DType hidden_dtype = DType::kFloat32;
  // In which dtype the backend holds logits for this weight dtype.
  DType logits_dtype = DType::kFloat32;

  const Tolerances& tolerances() const {
    return logits_dtype == DType::kBFloat16 ? kBFloat16Logits : kFloat32Logits;
  }
};

// Every schedule, weight dtype and hidden dtype; of several ranks the same dtype for both.
// `bfloat16_head_logits` is the dtype that logits of a bfloat16 head are held in.
std::vector<ConformanceCase> CasesOf(const BackendUnderTest& backend,
                                     DType bfloat16_head_logits = DType::kFloat32);
// Those of them whose head is trainable.
std::vector<ConformanceCase> TrainingCasesOf(const BackendUnderTest& backend,
                                             DType bfloat16_head_logits = DType::kFloat32);
std::string CaseName(const testing::TestParamInfo<ConformanceCase>& info);

void PrintTo(const ConformanceCase& c, std::ostream* out);

struct GoldenConformanceCase {
  ConformanceCase conformance;
  std::string path;
};

// Every golden case with every schedule and weight dtype.
std::vector<GoldenConformanceCase> GoldenCasesOf(const BackendUnderTest& backend,
                                                 DType bfloat16_head_logits = DType::kFloat32);
std::string GoldenCaseName(const testing::TestParamInfo<GoldenConformanceCase>& info);

struct Shape {
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
};

class BackendConformance : public testing::TestWithParam<ConformanceCase> {
 protected:
  // A head of the case's schedule and weight dtype.
  HeadSpec Spec(const Shape& shape) const;

  // A rig whose weight is random and of the weight dtype: logits of about unit size.
  std::unique_ptr<Rig> MakeRig(const HeadSpec& spec);

  // Random rows with every optional input; about one target in five is ignore_index.
  ChunkData MakeChunk(const HeadSpec& spec, int64_t num_tokens);
  // Such rows with what `recipe` asks for, besides.
  ChunkData MakeChunk(Rig* rig, const LossRecipe& recipe, int64_t num_tokens);
  void AddTopkTeacher(const HeadSpec& spec, int32_t top_k, ChunkData* chunk);
  void AddPolicyArrays(Rig* rig, const LossRecipe& recipe, ChunkData* chunk);

  // Gives the rig a teacher of `vocab_size` words and another width and transform.
  void AddTeacher(Rig* rig, int64_t vocab_size);

  std::vector<float> Normals(int64_t count, float std);
  std::vector<float> Uniforms(int64_t count, float low, float high);

  // Compares an answer with the oracle, all but the ids of the top k. `largest_logit` widens the
  // bounds by the rounding of logits of that size.
  void ExpectAnswer(const ChunkAnswer& answer, const reference::Result& want,
                    double largest_logit = 0.0, const reference::Result& plain = {});
  void ExpectGradWeight(Rig* rig, const std::vector<reference::Result>& wants,
                        double largest_logit = 0.0,
                        const std::vector<reference::Result>& plains = {});
  double LimitOf(double tolerance, const std::vector<double>& want,
                 const std::vector<double>& plain) const;

  // The ids of the top k are those of the largest log-probabilities, whichever of two nearly equal
  // ones comes first.
  void ExpectTopk(Rig* rig, const LossRecipe& recipe, const ChunkData& chunk,
                  const ChunkAnswer& answer, const reference::Result& want, double tolerance);

  // Runs the chunks as one batch and compares everything.
  void ExpectBatch(Rig* rig, const LossRecipe& recipe, const std::vector<ChunkData>& chunks,
                   double largest_logit = 0.0);

  std::mt19937 random_{17};
};

// What only a trainable head does.
class TrainingConformance : public BackendConformance {};

class GoldenConformance : public testing::TestWithParam<GoldenConformanceCase> {};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_BACKEND_CONFORMANCE_H_
