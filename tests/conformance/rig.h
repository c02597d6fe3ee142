// A backend under test with one head, and its teacher's, fed with plain vectors and asked for plain
// vectors.

#ifndef LMHEAD_TESTS_CONFORMANCE_RIG_H_
#define LMHEAD_TESTS_CONFORMANCE_RIG_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/reference/reference.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"
#include "tests/conformance/chunk_data.h"

namespace lmhead {

// An implementation of ComputeBackend, whole or split over ranks of this process, in one replica or
// several. All heads of a name and number of ranks and replicas share one group.
struct BackendUnderTest {
  std::string name;
  BackendKind kind = BackendKind::kCpu;
  int32_t num_ranks = 1;  // Of a replica.
  int32_t num_replicas = 1;
  absl::StatusOr<std::unique_ptr<ComputeBackend>> (*create)(const HeadSpec& spec,
                                                            const MemoryPlan& plan,
                                                            MemoryAccount* account,
                                                            const RankContext& context) = nullptr;
  bool is_group() const { return num_ranks * num_replicas > 1; }

  // One rank's end of a group; not needed for one rank. number_of_all: among those of all replicas.
  absl::StatusOr<std::unique_ptr<Collective>> (*create_collective)(int32_t rank, int32_t size,
                                                                   int32_t number_of_all) = nullptr;
};

// Every output of one chunk.
struct ChunkAnswer {
  LossSums sums;
  std::vector<float> token_loss;
  std::vector<float> logprob;
  std::vector<float> lse;
  std::vector<float> entropy;
  std::vector<int32_t> argmax;
  std::vector<int32_t> topk_ids;  // [num_tokens, top_k], like the next.
  std::vector<float> topk_logprobs;
  std::vector<float> grad_hidden_states;  // Empty in mode kNone.
};

// One head in the backend.
class HeadUnderTest {
 public:
  // Creates it under spec.schedule; ends the process when that fails.
  HeadUnderTest(const BackendUnderTest& backend, const HeadSpec& spec);

  // Tensors as float32, all rows; ends the process on an error.
  void Write(TensorKind kind, const std::vector<float>& values);
  std::vector<float> Read(TensorKind kind);

  // The head as the oracle takes it.
  reference::Head ToReference();

  ComputeBackend& backend() { return *backend_; }
  const HeadSpec& spec() const { return spec_; }
  const MemoryPlan& plan() const { return plan_; }
  // Memory of one rank; of several ranks with that of all heads of their group.
  MemoryAccount& account(int32_t rank = 0);

 private:
  DType DTypeOf(TensorKind kind) const;

  const BackendUnderTest under_test_;
  const HeadSpec spec_;
  const MemoryPlan plan_;
  MemoryAccount account_;
  std::unique_ptr<ComputeBackend> backend_;
};

class Rig {
 public:
  Rig(const BackendUnderTest& backend, const HeadSpec& spec, DType hidden_dtype);

  // Gives the head a teacher: batches of recipes with a teacher head use it from now on.
  HeadUnderTest& AddTeacher(const HeadSpec& spec);

  // Computes the chunks as one batch, with every output wanted.
  absl::StatusOr<std::vector<ChunkAnswer>> Run(const LossRecipe& recipe, BackwardMode mode,
                                               const std::vector<ChunkData>& chunks);

  // As above, in the furthest mode that the head's schedule has; ends the process on an error.
  std::vector<ChunkAnswer> Run(const LossRecipe& recipe, const std::vector<ChunkData>& chunks);

  // Lets grad_hidden_states of every chunk overwrite its hidden_states, as staging slots do.
  void set_in_place(bool in_place) { in_place_ = in_place; }

  // Entries of the top-k outputs; 0 at first.
  void set_top_k(int32_t top_k) { top_k_ = top_k; }
  int32_t top_k() const { return top_k_; }

  void Write(TensorKind kind, const std::vector<float>& values) { head_.Write(kind, values); }
  std::vector<float> Read(TensorKind kind) { return head_.Read(kind); }

  // What the oracle and plain dense arithmetic say of the same chunk and the values given as weight
  // and bias.
  reference::Result Expected(const LossRecipe& recipe, const ChunkData& chunk);
  reference::Result PlainDense(const LossRecipe& recipe, const ChunkData& chunk,
                               DType logits_dtype);
  // The oracle's log-probabilities of ids, as many a row; 0 for rows that are not finite.
  std::vector<double> ExpectedLogProbs(const LossRecipe& recipe, const ChunkData& chunk,
                                       const std::vector<int32_t>& ids);

  BackwardMode mode() const;
  bool accumulates() const { return mode() == BackwardMode::kHiddenAndWeight; }
  HeadUnderTest& head() { return head_; }
  HeadUnderTest* teacher() { return teacher_.get(); }
  ComputeBackend& backend() { return head_.backend(); }
  const HeadSpec& spec() const { return head_.spec(); }

 private:
  std::optional<reference::Head> TeacherOf(const LossRecipe& recipe);

  const BackendUnderTest under_test_;
  const DType hidden_dtype_;
  bool in_place_ = false;
  int32_t top_k_ = 0;
  std::unique_ptr<HeadUnderTest> teacher_;
  HeadUnderTest head_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_RIG_H_
