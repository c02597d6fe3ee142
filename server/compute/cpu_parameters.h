// The tensors of one rank's shard of a head in host memory: weight and bias, and what training
// keeps of them.
//
// Ids are those of the whole head. All float32 but a bfloat16 weight, which is its float32 master
// weight rounded. Of several replicas each keeps the master weight and the optimizer's state of the
// rows that it owns alone. Thread-hostile.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_PARAMETERS_H_
#define LMHEAD_SERVER_COMPUTE_CPU_PARAMETERS_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/head_spec.h"
#include "proto/types/tensor_view.h"
#include "proto/types/vocab_range.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

class CpuParameters {
 public:
  // Carves the tensors. `arena` must outlive the parameters.
  CpuParameters(const HeadSpec& spec, const MemoryPlan& plan, const RankContext& context,
                HostArena* arena);

  const HeadSpec& spec() const { return spec_; }
  VocabRange range() const { return range_; }  // The rank's.

  // Fills the weight as spec.weight_init says, by blocks of `scratch_rows` rows through `scratch`,
  // float32 [scratch_rows, hidden_size].
  void InitialiseWeight(float* scratch, int64_t scratch_rows);

  // Rows [start, start + rows) of the weight. REQUIRES: they lie in range().
  ConstMatrixView WeightRows(int64_t start, int64_t rows) const;

  // The bias of the ids of range(); null when the head has none.
  const float* bias() const { return static_cast<const float*>(bias_.data); }

  // The accumulators of row `id` and the rows after it. REQUIRES: the head is trainable.
  float* GradWeightAt(int64_t id) const {
    return weight_.grad + (id - range_.start) * spec_.hidden_size;
  }
  float* GradBiasAt(int64_t id) const { return bias_.grad + (id - range_.start); }

  // Those of ComputeBackend.
  absl::Status ReduceGradients();
  double GradSquaredNorm() const;
  absl::Status ApplyUpdate(const OptimizerUpdate& update);
  void DiscardGradients();
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows);
  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows);
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) const;
  int64_t num_updates() const { return num_updates_; }
  void set_num_updates(int64_t num_updates) { num_updates_ = num_updates; }

 private:
  // A tensor [range_.size(), cols] and what training keeps of it. The tensor itself is `data`, in
  // `dtype`. `master` is the float32 array that the optimizer updates, [owned_.size(), cols] like
  // its state: part of `data` for a float32 tensor.
  struct Parameter {
    int64_t cols = 0;
    DType dtype = DType::kFloat32;
    void* data = nullptr;
    float* master = nullptr;   // Null when the head is not trainable and dtype is not float32.
    float* grad = nullptr;     // [range_.size(), cols]; null when the head is not trainable.
    float* exp_avg = nullptr;  // As the optimizer keeps one, like the next.
    float* exp_avg_sq = nullptr;
  };
  // Rows of a tensor that are here, and their ids.
  struct Tensor {
    MatrixView rows;
    VocabRange range;
  };

  Parameter Carve(const MemoryPlan& plan, int64_t cols, DType dtype, HostArena* arena);
  void Update(const Parameter& parameter, double weight_decay, const OptimizerUpdate& update);
  float* OwnedGrad(const Parameter& parameter) const {
    return parameter.grad + (owned_.start - range_.start) * parameter.cols;
  }
  bool has_master() const { return weight_.master != nullptr && weight_.dtype != DType::kFloat32; }
  absl::StatusOr<Tensor> FindTensor(TensorKind kind) const;
  absl::StatusOr<MatrixView> TensorRows(TensorKind kind, int64_t row_start, int64_t rows,
                                        int64_t cols) const;

  const HeadSpec spec_;
  const VocabRange range_;
  const VocabRange owned_;  // All of range_ without peers.
  Collective* const peers_;
  Parameter weight_;
  Parameter bias_;
  int64_t num_updates_ = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_PARAMETERS_H_
