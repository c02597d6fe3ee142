// The yardstick: the head the plain way, on dense logits in float32, as a straightforward trainer
// computes it.
//
// An implementation may be at most twice as far from the oracle (compare.h). With logits in
// bfloat16, they, a teacher's too, and their gradient are rounded to it between the passes;
// everything else, grads of weight, bias and hidden states among it, stays in float32. The formulas
// and the treatment of masked logits, ignored rows and rows that are not finite are the oracle's
// (reference.h).

#ifndef LMHEAD_KERNELS_REFERENCE_PLAIN_DENSE_H_
#define LMHEAD_KERNELS_REFERENCE_PLAIN_DENSE_H_

#include "kernels/reference/reference.h"
#include "proto/types/dtype.h"

namespace lmhead::reference {

// Loss, outputs and all gradients of `tokens`. A trainer also rounds grad_hidden_states to the
// dtype of the hidden states, which is not known here: RoundedTo does it.
// REQUIRES: as ComputeLoss. Inputs that float32 does not hold are rounded to it.
Result ComputePlainDense(const Head& head, const Recipe& recipe, const Tokens& tokens,
                         DType logits_dtype, const Head* teacher = nullptr, int32_t top_k = 0);

}  // namespace lmhead::reference

#endif  // LMHEAD_KERNELS_REFERENCE_PLAIN_DENSE_H_
