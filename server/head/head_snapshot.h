// What a head is worth keeping: the part of a checkpoint that is not files.

#ifndef LMHEAD_SERVER_HEAD_HEAD_SNAPSHOT_H_
#define LMHEAD_SERVER_HEAD_HEAD_SNAPSHOT_H_

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "proto/types/head_spec.h"
#include "proto/types/tensor_view.h"
#include "server/compute/backend.h"
#include "server/head/step.h"

namespace lmhead {

// The last commit, so that its answer can be given again after a restart.
struct CommitRecord {
  uint64_t incarnation = 0;  // Of the server that applied it.
  CommitParameters parameters;
  CommittedStep result;
};

// The state of a head between two steps, its tensors aside.
struct HeadSnapshot {
  HeadSpec spec;
  uint64_t last_committed_step = 0;
  int64_t num_updates = 0;
  std::optional<CommitRecord> last_commit;  // None before the first step.
  int32_t num_ranks = 1;
};

// Reads rows of a tensor into the view, whose dtype is the tensor's.
using TensorReader = absl::FunctionRef<absl::Status(TensorKind, int64_t row_start, MatrixView)>;
// Writes rows of a tensor.
using TensorWriter =
    absl::FunctionRef<absl::Status(TensorKind, int64_t row_start, ConstMatrixView)>;

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_HEAD_SNAPSHOT_H_
