// Trains the demo's trunk (here) and head (in the service), as any trainer would.
//
// One step, with kNumWorkers threads that each stand for a trunk process:
//   1. BeginStep names the workers.
//   2. Each worker runs the trunk forward on its rows, streams them to the head, and carries the
//      returned grad_hidden_states back through the trunk.
//   3. PrepareStep answers the token count and the head's gradient norm; with the trunk's own norm
//      this gives the global clip coefficient.
//   4. CommitStep updates the head with clip / num_valid_tokens; the trunk does the same here.

#ifndef LMHEAD_SERVER_CLI_DEMO_TRAINER_H_
#define LMHEAD_SERVER_CLI_DEMO_TRAINER_H_

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "proto/types/dtype.h"
#include "proto/types/loss_recipe.h"
#include "server/cli/demo/corpus.h"
#include "server/cli/demo/trunk.h"

namespace lmhead::demo {

inline constexpr int kNumWorkers = 2;

// Held-out words that an evaluation looks at: a long text must not spend its time there.
inline constexpr int64_t kHeldoutTokensMax = 8192;

// hidden_states of one message.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;

struct TrainerOptions {
  std::string head = "demo";
  DType dtype = DType::kBFloat16;  // Of the head's weight and of the hidden states on the wire.
  int64_t hidden_size = 128;
  int64_t num_steps = 200;            // The learning-rate schedule ends there.
  int64_t tokens_per_step = 2048;     // Over all workers.
  double learning_rate_max = 1.5e-2;  // After the warm-up; falls along a cosine to a tenth.
  double max_grad_norm = 1.0;
  uint64_t seed = 1;
};

struct StepReport {
  LossSums sums;
  double learning_rate = 0.0;
  double grad_norm = 0.0;  // Of trunk and head together, a token; before clipping.
  double clip = 1.0;
};

// A step that has been computed and prepared, but neither committed nor aborted.
struct OpenStep {
  uint64_t step = 0;
  uint64_t incarnation = 0;
  LossSums sums;
  double head_grad_squared_norm = 0.0;
  uint64_t num_chunks = 0;
  // Rows in the order of the positions, widened: what was sent, and what came back.
  std::vector<float> hidden_states;
  std::vector<float> grad_hidden_states;
};

// One of the two workers; defined in trainer.cc.
class Worker;

// Thread-hostile. `client` and `corpus` must outlive it.
class Trainer {
 public:
  // Creates the head. The service keeps it until DeleteHead.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Client* client, const Corpus* corpus,
                                                         const TrainerOptions& options);
  ~Trainer();

  // One whole step on the next shuffled rows.
  absl::StatusOr<StepReport> TrainStep();

  // Sums over the held-out words, or over kHeldoutTokensMax of them evenly spaced, through an
  // evaluation stream (step 0): no gradient is kept.
  absl::StatusOr<LossSums> EvaluateHeldout();

  // The most likely next word at each position, likewise.
  absl::StatusOr<std::vector<int32_t>> Predict(std::span<const int32_t> positions);

  // Begins the next step, feeds it with both workers and prepares it.
  absl::StatusOr<OpenStep> ComputeStep(std::span<const int32_t> positions);
  absl::Status AbortStep(const OpenStep& step, std::string_view reason);

  absl::Status DeleteHead();

  Client* client() { return client_; }
  const Corpus& corpus() const { return *corpus_; }
  const TrainerOptions& options() const { return options_; }
  const v1::HeadInfo& head_info() const { return head_info_; }
  int64_t num_trunk_parameters() const { return trunk_.num_parameters(); }
  int64_t tokens_per_step() const { return tokens_per_step_; }

 private:
  Trainer(Client* client, const Corpus* corpus, const TrainerOptions& options);
  absl::Status CreateHead();
  // Rows of the next step: the training positions in an order shuffled anew each time round.
  std::vector<int32_t> NextPositions();
  double LearningRate() const;
  absl::Status FeedStep(uint64_t step, uint64_t incarnation, std::span<const int32_t> positions);
  absl::Status Commit(const OpenStep& step, const StepReport& report);

  Client* const client_;
  const Corpus* const corpus_;
  const TrainerOptions options_;
  const int64_t tokens_per_step_;  // Fewer than asked for when the text is short.
  Trunk trunk_;
  std::vector<std::unique_ptr<Worker>> workers_;
  TrunkGradient gradient_;
  v1::HeadInfo head_info_;
  uint64_t last_committed_step_ = 0;

  std::mt19937_64 generator_;
  const std::vector<int32_t> evaluated_;
  std::vector<int32_t> shuffled_;
  size_t next_ = 0;
};

}  // namespace lmhead::demo

#endif  // LMHEAD_SERVER_CLI_DEMO_TRAINER_H_
