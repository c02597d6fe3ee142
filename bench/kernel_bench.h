// Times a head on a GPU beside the bare matrix products that it cannot do without.

#ifndef LMHEAD_BENCH_KERNEL_BENCH_H_
#define LMHEAD_BENCH_KERNEL_BENCH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"

namespace lmhead::bench {

struct KernelShape {
  int64_t rows = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
};

// Milliseconds of the three products of one batch, each alone.
struct ProductTimes {
  double logits = 0.0;
  double grad_hidden = 0.0;
  double grad_weight = 0.0;
};

// cuBLASLt's products with the best of the algorithms it offers: logits and grad_hidden in
// bfloat16, grad_weight accumulated in float32.
class BareProducts {
 public:
  static absl::StatusOr<std::unique_ptr<BareProducts>> Create(const KernelShape& shape);
  ~BareProducts();

  // Milliseconds a batch of `num_batches` batches in a row, each of all products, the logits
  // `num_logits` times: recompute has them twice, and so has a teacher of the same width.
  absl::StatusOr<double> Time(int num_batches, int num_logits);

  // Each product alone, `num_runs` of it in a row.
  absl::StatusOr<ProductTimes> TimeEach(int num_runs);

 private:
  struct Impl;
  explicit BareProducts(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct BatchTimes {
  double compute = 0.0;  // Milliseconds a batch, on the device.
  double wall = 0.0;     // Milliseconds a batch, copies up and down included, batches overlapping.
};

struct HeadMemory {
  int64_t plan_bytes = 0;
  int64_t account_peak_bytes = 0;
  int64_t device_bytes = 0;  // By the driver's figure, since before the head was created.
};

// What is asked of a head's batches, besides the gradient of the hidden states.
struct BatchWork {
  LossRecipe recipe;
  OutputSpec outputs;
};

// A trainable bfloat16 head with random weight and rows, and its memory.
class TimedHead {
 public:
  // `options` gives schedule, bias and softcap, and with a teacher_hidden_size of the shape's
  // hidden_size or a top_k_max what teachers and top-k outputs need. There is a teacher then.
  static absl::StatusOr<std::unique_ptr<TimedHead>> Create(const KernelShape& shape,
                                                           const HeadSpec& options);
  ~TimedHead();

  // Trains on `num_batches` full batches in a row.
  absl::StatusOr<BatchTimes> Time(int num_batches, const BatchWork& work);

  absl::StatusOr<HeadMemory> Memory() const;

 private:
  struct Impl;
  explicit TimedHead(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_KERNEL_BENCH_H_
