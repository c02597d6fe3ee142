// What every backend asserts of a call before anything accumulates. Validated at the edge already.

#ifndef LMHEAD_SERVER_COMPUTE_BATCH_CHECK_H_
#define LMHEAD_SERVER_COMPUTE_BATCH_CHECK_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "proto/types/head_spec.h"
#include "proto/types/tensor_view.h"
#include "proto/types/vocab_range.h"
#include "server/compute/backend.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// INVALID_ARGUMENT for shapes, arrays and ids that do not fit the head and the recipe, naming
// chunk, row and value; FAILED_PRECONDITION for a mode that the head or its schedule does not have,
// and for a teacher or a top-k that the head has no memory for.
absl::Status CheckBatch(const HeadSpec& spec, const MemoryPlan& plan, const BatchInput& input);

// That the teacher of a batch fits its chunks and its student. FAILED_PRECONDITION when the two are
// split over the ranks in different places.
absl::Status CheckTeacher(const HeadSpec& spec, VocabRange range, const HeadSpec& teacher,
                          VocabRange teacher_range, const BatchInput& input);

// INVALID_ARGUMENT unless rows [row_start, row_start + rows) of `cols` columns lie inside a tensor
// of `tensor_cols` columns and the rows of `range`.
absl::Status CheckTensorRows(const HeadSpec& spec, VocabRange range, int64_t tensor_cols,
                             int64_t row_start, int64_t rows, int64_t cols);

// Of AddGradRows().
absl::Status CheckGradRows(const HeadSpec& spec, std::span<const int32_t> row_ids,
                           int64_t row_start, ConstMatrixView rows);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_BATCH_CHECK_H_
