// A backend under test with one head, fed with plain vectors and asked for plain vectors.

#ifndef LMHEAD_TESTS_CONFORMANCE_RIG_H_
#define LMHEAD_TESTS_CONFORMANCE_RIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/reference/reference.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"
#include "server/compute/backend.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// An implementation of ComputeBackend.
struct BackendUnderTest {
  std::string name;
  BackendKind kind = BackendKind::kCpu;
  absl::StatusOr<std::unique_ptr<ComputeBackend>> (*create)(const HeadSpec& spec,
                                                            const MemoryPlan& plan,
                                                            MemoryAccount* account) = nullptr;
};

// `values` as elements of `dtype`, and back. Values that the dtype cannot hold are rounded.
std::vector<std::byte> Pack(const std::vector<float>& values, DType dtype);
std::vector<float> Unpack(const std::vector<std::byte>& bytes, DType dtype);
std::vector<float> RoundedTo(DType dtype, const std::vector<float>& values);

// The inputs of one chunk.
struct ChunkData {
  std::vector<float> hidden_states;  // [num_tokens, hidden_size], values of the hidden dtype.
  std::vector<int32_t> targets;      // [num_tokens]
  std::vector<float> token_weights;  // Empty, or [num_tokens], like the next.
  std::vector<float> token_temperature;
  float grad_scale = 1.0f;
};

// Every output of one chunk.
struct ChunkAnswer {
  LossSums sums;
  std::vector<float> token_loss;
  std::vector<float> logprob;
  std::vector<float> lse;
  std::vector<float> entropy;
  std::vector<int32_t> argmax;
  std::vector<float> grad_hidden_states;  // Empty in mode kNone.
};

class Rig {
 public:
  // Creates the backend of `spec` under spec.schedule; ends the process when that fails.
  Rig(const BackendUnderTest& backend, const HeadSpec& spec, DType hidden_dtype);
  ~Rig();

  // Computes the chunks as one batch, with every output wanted.
  absl::StatusOr<std::vector<ChunkAnswer>> Run(const LossRecipe& recipe, BackwardMode mode,
                                               const std::vector<ChunkData>& chunks);

  // As above, in the furthest mode that the head's schedule has; ends the process on an error.
  std::vector<ChunkAnswer> Run(const LossRecipe& recipe, const std::vector<ChunkData>& chunks);

  // Lets grad_hidden_states of every chunk overwrite its hidden_states, as staging slots do.
  void set_in_place(bool in_place) { in_place_ = in_place; }

  // Tensors as float32, all rows; ends the process on an error.
  void Write(TensorKind kind, const std::vector<float>& values);
  std::vector<float> Read(TensorKind kind);

  // What the oracle and plain dense arithmetic say of the same chunk and the values given as weight
  // and bias.
  reference::Result Expected(const LossRecipe& recipe, const ChunkData& chunk);
  reference::Result PlainDense(const LossRecipe& recipe, const ChunkData& chunk,
                               DType logits_dtype);

  BackwardMode mode() const;
  bool accumulates() const { return mode() == BackwardMode::kHiddenAndWeight; }
  ComputeBackend& backend() { return *backend_; }
  const HeadSpec& spec() const { return spec_; }
  MemoryAccount& account() { return account_; }
  const MemoryPlan& plan() const { return plan_; }

 private:
  DType DTypeOf(TensorKind kind) const;
  reference::Head Head();

  const HeadSpec spec_;
  const DType hidden_dtype_;
  const MemoryPlan plan_;
  bool in_place_ = false;
  MemoryAccount account_;
  std::unique_ptr<ComputeBackend> backend_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_CONFORMANCE_RIG_H_
