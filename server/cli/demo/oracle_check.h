// The demo's last question: did the service compute what the definition says?
//
// One more step, through both workers, whose loss and gradients are compared with the oracle in
// double precision (kernels/reference) on the very weights and hidden states the service had. The
// step is aborted after its gradients have been read.

#ifndef LMHEAD_SERVER_CLI_DEMO_ORACLE_CHECK_H_
#define LMHEAD_SERVER_CLI_DEMO_ORACLE_CHECK_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/cli/demo/trainer.h"

namespace lmhead::demo {

// Relative errors: |sum - oracle| / |oracle| of the loss, ||grad - oracle|| / ||oracle|| of the
// gradients.
struct CheckReport {
  int64_t num_tokens = 0;
  double loss = 0.0;  // Mean, as the oracle has it.
  double loss_error = 0.0;
  double grad_hidden_states_error = 0.0;
  double grad_weight_error = 0.0;
  double grad_bias_error = 0.0;
  double loss_bound = 0.0;
  double grad_bound = 0.0;

  double WorstGradError() const;
  bool Passed() const;  // False for an error that is not a number, too.
};

// Checks `num_tokens` rows of the training text (fewer when the text is shorter).
absl::StatusOr<CheckReport> CheckAgainstOracle(Trainer* trainer, int64_t num_tokens);

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_ORACLE_CHECK_H_
