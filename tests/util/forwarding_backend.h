// A backend that passes every call on to another one: what tests derive backends with faults from.

#ifndef LMHEAD_TESTS_UTIL_FORWARDING_BACKEND_H_
#define LMHEAD_TESTS_UTIL_FORWARDING_BACKEND_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/compute/backend.h"

namespace lmhead {

class ForwardingBackend : public ComputeBackend {
 public:
  explicit ForwardingBackend(std::unique_ptr<ComputeBackend> real) : real_(std::move(real)) {}

  void ComputeBatch(const BatchInput& input, BatchDone done) override {
    real_->ComputeBatch(input, std::move(done));
  }
  absl::Status ReduceGradients() override { return real_->ReduceGradients(); }
  absl::StatusOr<double> GradSquaredNorm() override { return real_->GradSquaredNorm(); }
  absl::Status ApplyUpdate(const OptimizerUpdate& update) override {
    return real_->ApplyUpdate(update);
  }
  absl::Status DiscardGradients() override { return real_->DiscardGradients(); }
  absl::Status AddGradRows(std::span<const int32_t> row_ids, int64_t row_start,
                           ConstMatrixView rows) override {
    return real_->AddGradRows(row_ids, row_start, rows);
  }
  absl::Status WriteRows(TensorKind kind, int64_t row_start, ConstMatrixView rows) override {
    return real_->WriteRows(kind, row_start, rows);
  }
  absl::Status ReadRows(TensorKind kind, int64_t row_start, MatrixView rows) override {
    return real_->ReadRows(kind, row_start, rows);
  }
  absl::Status CheckState() override { return real_->CheckState(); }
  int64_t num_updates() const override { return real_->num_updates(); }
  void set_num_updates(int64_t num_updates) override { real_->set_num_updates(num_updates); }

 private:
  const std::unique_ptr<ComputeBackend> real_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_FORWARDING_BACKEND_H_
