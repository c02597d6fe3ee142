// The real CPU backend, with faults on demand: what a broken device does, and a gate to hold the
// executor in the middle of a chunk.

#ifndef LMHEAD_TESTS_HEAD_FAULTY_BACKEND_H_
#define LMHEAD_TESTS_HEAD_FAULTY_BACKEND_H_

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "server/compute/backend.h"
#include "tests/util/forwarding_backend.h"

namespace lmhead {

// Switched by the test, read on the executor's thread.
struct Faults {
  std::atomic<bool> batch{false};
  std::atomic<bool> norm{false};
  std::atomic<bool> update{false};
  std::atomic<bool> discard{false};
  std::atomic<int> num_discards{0};
  std::function<void()> before_batch;  // Set before the first chunk.
  std::function<void()> in_norm;       // Set before PrepareStep.
  std::function<void()> in_update;     // Set before CommitStep.
};

class FaultyBackend : public ForwardingBackend {
 public:
  FaultyBackend(std::unique_ptr<ComputeBackend> real, Faults* faults)
      : ForwardingBackend(std::move(real)), faults_(faults) {}

  void ComputeBatch(const BatchInput& input, BatchDone done) override {
    if (faults_->before_batch) faults_->before_batch();
    if (faults_->batch) return done(absl::InternalError("launch failed"));
    ForwardingBackend::ComputeBatch(input, std::move(done));
  }
  absl::StatusOr<double> GradSquaredNorm() override {
    if (faults_->in_norm) faults_->in_norm();
    if (faults_->norm) return absl::InternalError("norm failed");
    return ForwardingBackend::GradSquaredNorm();
  }
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override {
    if (faults_->in_update) faults_->in_update();
    if (faults_->update) return absl::InternalError("update failed");
    return ForwardingBackend::ApplyUpdate(update);
  }
  absl::Status DiscardGradients() override {
    ++faults_->num_discards;
    if (faults_->discard) return absl::InternalError("discard failed");
    return ForwardingBackend::DiscardGradients();
  }

 private:
  Faults* const faults_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_HEAD_FAULTY_BACKEND_H_
