// The demo's last question: did the service compute what the definition says?
//
// One more step, through both workers, whose loss and gradients are compared with the oracle in
// double precision (kernels/reference) on the very weights and hidden states the service had. The
// step is aborted after its gradients have been read.

#ifndef LMHEAD_SERVER_CLI_DEMO_ORACLE_CHECK_H_
#define LMHEAD_SERVER_CLI_DEMO_ORACLE_CHECK_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/reference/compare.h"
#include "server/cli/demo/trainer.h"

namespace lmhead::demo {

// Errors of what the service gave against the oracle. Each may be at most twice that of plain dense
// arithmetic in the head's dtype on the same inputs (kernels/reference/compare.h): a trainer that
// keeps bfloat16 logits has the roundings of those, and so may the service.
struct CheckReport {
  int64_t num_tokens = 0;
  double loss = 0.0;  // Mean, as the oracle has it.
  reference::OutputError loss_sum;
  reference::OutputError grad_hidden_states;
  reference::OutputError grad_weight;
  reference::OutputError grad_bias;

  double WorstGradError() const;  // Relative.
  bool Passed() const;            // False for an error that is not a number, too.
};

// Checks `num_tokens` rows of the training text (fewer when the text is shorter).
absl::StatusOr<CheckReport> CheckAgainstOracle(Trainer* trainer, int64_t num_tokens);

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_ORACLE_CHECK_H_
