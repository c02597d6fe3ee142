#include "server/compute/timed_collective.h"

#include <chrono>
#include <utility>

#include "absl/functional/function_ref.h"

namespace lmhead {
namespace {

class TimedCollective final : public Collective {
 public:
  TimedCollective(std::unique_ptr<Collective> inner, CollectiveTimes* times)
      : inner_(std::move(inner)), times_(times) {}

  int32_t rank() const override { return inner_->rank(); }
  int32_t size() const override { return inner_->size(); }
  Memory memory() const override { return inner_->memory(); }
  absl::Status Connect(RendezvousStore* store) override { return inner_->Connect(store); }
  absl::Status AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                         DeviceStream stream) override {
    return Time(CollectiveOp::kAllGather,
                [&] { return inner_->AllGather(send, receive, bytes_per_rank, stream); });
  }
  absl::Status Reduce(float* data, int64_t count, int32_t root, DeviceStream stream) override {
    return Time(CollectiveOp::kReduce, [&] { return inner_->Reduce(data, count, root, stream); });
  }
  absl::Status AllReduce(float* data, int64_t count, DeviceStream stream) override {
    return Time(CollectiveOp::kAllReduce, [&] { return inner_->AllReduce(data, count, stream); });
  }
  absl::Status AllReduce(double* data, int64_t count, DeviceStream stream) override {
    return Time(CollectiveOp::kAllReduce, [&] { return inner_->AllReduce(data, count, stream); });
  }
  absl::Status Broadcast(void* data, int64_t num_bytes, int32_t root,
                         DeviceStream stream) override {
    return Time(CollectiveOp::kBroadcast,
                [&] { return inner_->Broadcast(data, num_bytes, root, stream); });
  }
  absl::Status Check() override { return inner_->Check(); }
  void Abort(const absl::Status& reason) override { inner_->Abort(reason); }

 private:
  absl::Status Time(CollectiveOp op, absl::FunctionRef<absl::Status()> call) {
    const auto start = std::chrono::steady_clock::now();
    absl::Status status = call();
    times_->Add(op, absl::FromChrono(std::chrono::steady_clock::now() - start));
    return status;
  }

  const std::unique_ptr<Collective> inner_;
  CollectiveTimes* const times_;
};

}  // namespace

std::unique_ptr<Collective> TimeCollective(std::unique_ptr<Collective> inner,
                                           CollectiveTimes* times) {
  return std::make_unique<TimedCollective>(std::move(inner), times);
}

}  // namespace lmhead
