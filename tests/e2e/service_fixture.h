// What the tests against a real service share: a server process, data, and the oracle's own
// training loop to compare with.

#ifndef LMHEAD_TESTS_E2E_SERVICE_FIXTURE_H_
#define LMHEAD_TESTS_E2E_SERVICE_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/local_server.h"
#include "kernels/reference/reference.h"

namespace lmhead::e2e {

// The `lmhead` binary of this build.
std::string LmheadBinary();

// Starts a server on the CPU backend; ends the test program when it does not come up, with its log.
std::unique_ptr<LocalServer> StartServer(std::vector<std::string> extra_flags = {});

// A connected client; ends the test program when there is none.
std::unique_ptr<Client> ConnectTo(const std::string& address);

// A head small enough for the oracle, with a vocabulary that no tile divides.
struct HeadShape {
  std::string name = "lm";
  int64_t vocab_size = 211;
  int64_t hidden_size = 24;
  DType dtype = DType::kFloat32;
  v1::Schedule schedule = v1::SCHEDULE_UNSPECIFIED;
  v1::OptimizerKind optimizer = v1::OPTIMIZER_KIND_ADAMW;
  bool has_bias = true;
};
v1::HeadSpec MakeSpec(const HeadShape& shape);

// The weight every test starts from: bfloat16-representable, a function of the shape alone.
std::vector<float> InitialWeight(const HeadShape& shape);

// Whether the tested backend holds the head's logits in bfloat16: then its gradients may be twice
// as far off as those of a plain trainer that does (OracleTrainer below).
bool HoldsBFloat16Logits(const HeadShape& shape);

// Creates the head and loads InitialWeight.
absl::Status CreateHead(Client* client, const HeadShape& shape);

// Rows of one worker in one step; hidden states are bfloat16-representable, one target in eight is
// ignored. A function of the arguments alone.
struct Rows {
  int64_t hidden_size = 0;
  std::vector<float> hidden_states;
  std::vector<int32_t> targets;
  std::vector<float> grad_hidden_states;  // Filled in by Feed.

  int64_t num_tokens() const { return static_cast<int64_t>(targets.size()); }
};
Rows MakeRows(const HeadShape& shape, int64_t num_tokens, uint64_t step, int worker);

// How a worker sends its rows.
struct FeedOptions {
  int num_connections = 1;
  int max_inflight_chunks = 4;
  int64_t chunk_tokens = 32;
};

// Sends `rows` as `worker` of an open step and ends the worker. Returns the rows' sums.
absl::StatusOr<LossResult> Feed(Client* client, const HeadShape& shape, uint64_t step,
                                uint64_t incarnation, const std::string& worker,
                                const FeedOptions& options, Rows* rows);

std::string WorkerName(int index);

// BeginStep for workers 0 to num_workers - 1; returns the incarnation.
absl::StatusOr<uint64_t> BeginStep(Client* client, const HeadShape& shape, uint64_t step,
                                   int num_workers);
absl::StatusOr<v1::PrepareStepResponse> PrepareStep(Client* client, const HeadShape& shape,
                                                    uint64_t step, uint64_t incarnation,
                                                    double wait_seconds = 0.0);
absl::StatusOr<v1::CommitStepResponse> CommitStep(Client* client, const HeadShape& shape,
                                                  uint64_t step, uint64_t incarnation,
                                                  double learning_rate, double grad_multiplier);
absl::Status AbortStep(Client* client, const HeadShape& shape, uint64_t step, uint64_t incarnation);

// Learning rate of a step: every training loop of these tests uses it.
double LearningRate(uint64_t step);

// What a training step came to.
struct StepOutcome {
  v1::PrepareStepResponse prepared;
  v1::CommitStepResponse committed;
};

// One whole step: begin, feed each worker's rows from a thread and a client of its own, prepare,
// commit with 1 / num_valid_tokens.
absl::StatusOr<StepOutcome> RunStep(Client* control, std::span<Client* const> workers,
                                    const HeadShape& shape, uint64_t step,
                                    const FeedOptions& options, std::vector<Rows>* rows);

// A whole tensor, as float.
absl::StatusOr<std::vector<float>> ReadTensor(Client* client, const HeadShape& shape,
                                              v1::TensorKind kind);

// The same training in double precision, in this process.
class OracleTrainer {
 public:
  // With `plain_logits`, the yardstick instead of the oracle: plain dense arithmetic with logits in
  // that dtype.
  explicit OracleTrainer(const HeadShape& shape, std::optional<DType> plain_logits = std::nullopt);

  // Loss and gradients of all workers' rows, as one chunk, on the weight as the service holds it
  // (rounded to its dtype). Then one update.
  reference::Result Step(std::span<const Rows> rows, uint64_t step);

  const std::vector<double>& weight() const { return master_weight_; }
  const std::vector<double>& bias() const { return bias_; }

 private:
  const HeadShape shape_;
  const std::optional<DType> plain_logits_;
  OptimizerSpec optimizer_;
  std::vector<double> master_weight_, bias_;
  reference::OptimizerState weight_state_, bias_state_;
};

// ||got - want|| / ||want||; for `want` zero throughout, ||got||.
double RelativeError(std::span<const float> got, std::span<const double> want);
double RelativeError(std::span<const float> got, std::span<const float> want);

// Fails the test, saying why, when a status is not OK.
#define LMHEAD_ASSERT_OK(expression)                                        \
  do {                                                                      \
    const absl::Status lmhead_status = ::lmhead::e2e::ToStatus(expression); \
    ASSERT_TRUE(lmhead_status.ok()) << lmhead_status;                       \
  } while (false)

inline absl::Status ToStatus(const absl::Status& status) { return status; }
template <typename T>
absl::Status ToStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace lmhead::e2e

#endif  // LMHEAD_TESTS_E2E_SERVICE_FIXTURE_H_
