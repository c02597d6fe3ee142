#include "server/compute/nccl_collective.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/compute/cuda_status.h"
#include "server/compute/nccl_library.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

constexpr char kIdKey[] = "nccl_id";

// How often NCCL is asked for what it is doing.
constexpr absl::Duration kPollInterval = absl::Milliseconds(1);

// For an abort by NCCL; one that takes longer is left behind.
constexpr absl::Duration kAbortGrace = absl::Seconds(10);

// Keeps a thread that hangs until the process ends: it can be neither joined nor destroyed.
void LeaveBehind(std::thread thread) {
  static absl::Mutex mu(absl::kConstInit);
  static auto& threads = *new std::vector<std::thread>;
  absl::MutexLock lock(&mu);
  threads.push_back(std::move(thread));
}

// As errors call an operation.
const char* WithArticle(CollectiveOp op) {
  constexpr std::array<const char*, kNumCollectiveOps> kNames = {"an all-gather", "a reduce",
                                                                 "an all-reduce", "a broadcast"};
  return kNames[static_cast<size_t>(op)];
}

std::string ReadyKey(int32_t rank) { return absl::StrCat("nccl_rank_", rank); }

// What the rank's thread and the watch share. Held by both, so that a watch that hangs in an abort
// may be left behind.
class NcclGroup {
 public:
  NcclGroup(int32_t rank, int32_t size, const NcclOptions& options, const NcclLibrary* library)
      : rank_(rank), size_(size), options_(options), library_(*library) {}
  ~NcclGroup();

  absl::Status Connect(RendezvousStore* store);
  void Abort(const absl::Status& reason);
  absl::Status Check();

  // Queues what `start` starts, unless the group has ended, and watches it until it is done.
  template <typename Start>
  absl::Status Run(CollectiveOp op, DeviceStream stream, Start start);

  void Watch();                           // Until Stop().
  bool StopWithin(absl::Duration grace);  // False when the watch hangs.

 private:
  // A collective on its stream.
  struct Pending {
    CollectiveOp op = CollectiveOp::kAllGather;
    cudaEvent_t start = nullptr;
    cudaEvent_t done = nullptr;
    absl::Time deadline;
  };

  absl::StatusOr<ncclUniqueId> FindId(RendezvousStore* store, absl::Time deadline);
  absl::Status AwaitAbort(absl::Time deadline);
  absl::Status Settle(ncclResult_t result, const char* what, absl::Time deadline);
  absl::Status Error(ncclResult_t result, const char* what);
  absl::Status Fail(const absl::Status& error) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes the events of a collective; the caller frees them, where it fails, too.
  absl::Status RecordStart(cudaStream_t stream, Pending* pending)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status LookAtPending() ABSL_LOCKS_EXCLUDED(mu_);
  void FreeEvents(const Pending& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AbortCommunicator() ABSL_LOCKS_EXCLUDED(mu_);
  bool AbortDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return communicator_ != nullptr && !state_.ok();
  }

  const int32_t rank_;
  const int32_t size_;
  const NcclOptions options_;
  const NcclLibrary& library_;

  absl::Mutex mu_;
  absl::Status state_ ABSL_GUARDED_BY(mu_) =
      absl::FailedPreconditionError("the ranks are not connected");
  // NCCL's calls on it do not block, so they may be made with the lock held; the abort may.
  ncclComm_t communicator_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool aborting_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Pending> pending_ ABSL_GUARDED_BY(mu_);
  std::vector<cudaEvent_t> free_events_ ABSL_GUARDED_BY(mu_);
};

NcclGroup::~NcclGroup() {
  absl::MutexLock lock(&mu_);
  for (cudaEvent_t event : free_events_) cudaEventDestroy(event);
}

// --- Connecting --------------------------------------------------------------------------------

absl::Status NcclGroup::AwaitAbort(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return communicator_ == nullptr && !aborting_;
  };
  if (mu_.AwaitWithDeadline(absl::Condition(&gone), deadline)) {
    state_ = absl::OkStatus();
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      "NCCL does not come back from the abort of the last group; this process has to be restarted");
}

// Every rank says that it is there before NCCL starts, because NCCL does not say who is missing.
absl::StatusOr<ncclUniqueId> NcclGroup::FindId(RendezvousStore* store, absl::Time deadline) {
  if (rank_ == 0) {
    ncclUniqueId id;
    if (ncclResult_t result = library_.GetUniqueId(&id); result != ncclSuccess) {
      return absl::UnavailableError(
          absl::StrCat("ncclGetUniqueId: ", library_.GetErrorString(result)));
    }
    LMHEAD_RETURN_IF_ERROR(store->Set(kIdKey, std::string(id.internal, sizeof(id.internal))));
  }
  LMHEAD_RETURN_IF_ERROR(store->Set(ReadyKey(rank_), ""));
  for (int32_t rank = 0; rank < size_; ++rank) {
    absl::StatusOr<std::string> ready = store->Get(ReadyKey(rank), deadline);
    if (absl::IsDeadlineExceeded(ready.status())) {
      const std::string name =
          options_.names.empty() ? absl::StrCat("rank ", rank) : options_.names[rank];
      return absl::DeadlineExceededError(
          absl::StrCat(name, " did not connect within ", absl::FormatDuration(options_.timeout)));
    }
    LMHEAD_RETURN_IF_ERROR(ready.status());
  }
  absl::StatusOr<std::string> bytes = store->Get(kIdKey, deadline);
  LMHEAD_RETURN_IF_ERROR(bytes.status());
  ncclUniqueId id;
  if (bytes->size() != sizeof(id.internal)) {
    return absl::InternalError(
        absl::StrCat("an NCCL id of ", bytes->size(), " bytes, wanted ", sizeof(id.internal)));
  }
  std::memcpy(id.internal, bytes->data(), sizeof(id.internal));
  return id;
}

absl::Status NcclGroup::Connect(RendezvousStore* store) {
  const absl::Time deadline = absl::Now() + options_.timeout;
  Abort(absl::CancelledError("the ranks connect anew"));
  LMHEAD_RETURN_IF_ERROR(AwaitAbort(deadline));
  const absl::StatusOr<ncclUniqueId> id = FindId(store, deadline);
  if (!id.ok()) return Fail(id.status());
  if (cudaError_t error = cudaSetDevice(options_.device); error != cudaSuccess) {
    return Fail(CudaStatus(error, "cudaSetDevice"));
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclResult_t result = ncclSuccess;
  {
    absl::MutexLock lock(&mu_);
    if (!state_.ok()) return state_;
    result = library_.CommInitRankConfig(&communicator_, size_, *id, rank_, &config);
  }
  absl::Status status = Settle(result, "connecting", deadline);
  return status.ok() ? status : Fail(status);
}

// --- Calls -------------------------------------------------------------------------------------

absl::Status NcclGroup::Error(ncclResult_t result, const char* what) {
  return absl::UnavailableError(absl::StrCat("NCCL failed in ", what, ": ",
                                             library_.GetErrorString(result), ": ",
                                             library_.GetLastError(nullptr)));
}

// Waits until NCCL has taken a call in.
absl::Status NcclGroup::Settle(ncclResult_t result, const char* what, absl::Time deadline) {
  while (result == ncclInProgress) {
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("NCCL did not finish ", what, " within ",
                                                      absl::FormatDuration(options_.timeout),
                                                      ": a rank hangs or cannot be reached"));
    }
    {
      absl::MutexLock lock(&mu_);
      if (!state_.ok()) return state_;
      ncclResult_t state = ncclSuccess;
      result = library_.CommGetAsyncError(communicator_, &state);
      if (result == ncclSuccess) result = state;
    }
    if (result == ncclInProgress) absl::SleepFor(kPollInterval / 10);
  }
  return result == ncclSuccess ? absl::OkStatus() : Error(result, what);
}

absl::Status NcclGroup::RecordStart(cudaStream_t stream, Pending* pending) {
  for (cudaEvent_t* event : {&pending->start, &pending->done}) {
    if (free_events_.empty()) {
      LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventCreate(event));
    } else {
      *event = free_events_.back();
      free_events_.pop_back();
    }
  }
  return CudaStatus(cudaEventRecord(pending->start, stream), "cudaEventRecord");
}

void NcclGroup::FreeEvents(const Pending& pending) {
  for (cudaEvent_t event : {pending.start, pending.done}) {
    if (event != nullptr) free_events_.push_back(event);
  }
}

template <typename Start>
absl::Status NcclGroup::Run(CollectiveOp op, DeviceStream stream, Start start) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Pending pending = {.op = op, .deadline = absl::Now() + options_.timeout};
  ncclResult_t result = ncclSuccess;
  {
    absl::MutexLock lock(&mu_);
    if (!state_.ok()) return state_;
    if (absl::Status status = RecordStart(cuda_stream, &pending); !status.ok()) {
      FreeEvents(pending);
      return status;
    }
    result = start(library_, communicator_, cuda_stream);
  }
  absl::Status status = Settle(result, WithArticle(op), pending.deadline);
  if (!status.ok()) status = Fail(status);
  absl::MutexLock lock(&mu_);
  if (!status.ok()) {
    FreeEvents(pending);
    return status;
  }
  pending_.push_back(pending);
  return CudaStatus(cudaEventRecord(pending.done, cuda_stream), "cudaEventRecord");
}

// --- Watching and ending -----------------------------------------------------------------------

absl::Status NcclGroup::Check() {
  absl::MutexLock lock(&mu_);
  return state_;
}

absl::Status NcclGroup::Fail(const absl::Status& error) {
  absl::MutexLock lock(&mu_);
  if (state_.ok()) state_ = error;
  return state_;
}

// The watch sees the state and does the rest.
void NcclGroup::Abort(const absl::Status& reason) { Fail(reason).IgnoreError(); }

absl::Status NcclGroup::LookAtPending() {
  absl::MutexLock lock(&mu_);
  if (!state_.ok() || communicator_ == nullptr) return absl::OkStatus();
  ncclResult_t state = ncclSuccess;
  ncclResult_t result = library_.CommGetAsyncError(communicator_, &state);
  if (result == ncclSuccess) result = state;
  if (result != ncclSuccess && result != ncclInProgress) return Error(result, "a collective");
  while (!pending_.empty()) {
    const cudaError_t error = cudaEventQuery(pending_.front().done);
    if (error == cudaErrorNotReady) break;
    if (error != cudaSuccess) return CudaStatus(error, WithArticle(pending_.front().op));
    if (options_.times != nullptr) {
      float milliseconds = 0.0f;
      LMHEAD_RETURN_IF_CUDA_ERROR(
          cudaEventElapsedTime(&milliseconds, pending_.front().start, pending_.front().done));
      options_.times->Add(pending_.front().op, absl::Milliseconds(milliseconds));
    }
    FreeEvents(pending_.front());
    pending_.pop_front();
  }
  if (pending_.empty() || absl::Now() < pending_.front().deadline) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("NCCL has not finished ", WithArticle(pending_.front().op), " for ",
                   absl::FormatDuration(options_.timeout), ": a rank hangs or cannot be reached"));
}

void NcclGroup::AbortCommunicator() {
  ncclComm_t communicator = nullptr;
  {
    absl::MutexLock lock(&mu_);
    communicator = std::exchange(communicator_, nullptr);
    aborting_ = true;
  }
  library_.CommAbort(communicator);
  absl::MutexLock lock(&mu_);
  aborting_ = false;
  // Aborted or done: their events may be recorded anew.
  for (const Pending& pending : pending_) FreeEvents(pending);
  pending_.clear();
}

void NcclGroup::Watch() {
  cudaSetDevice(options_.device);
  for (;;) {
    bool abort = false;
    {
      absl::MutexLock lock(&mu_);
      const auto something_to_do = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopping_ || AbortDue() || !pending_.empty();
      };
      mu_.Await(absl::Condition(&something_to_do));
      abort = AbortDue();
      if (stopping_ && !abort) {
        stopped_ = true;
        return;
      }
    }
    if (abort) {
      AbortCommunicator();
      continue;
    }
    if (absl::Status status = LookAtPending(); !status.ok()) Abort(status);
    absl::SleepFor(kPollInterval);
  }
}

bool NcclGroup::StopWithin(absl::Duration grace) {
  Abort(absl::CancelledError("the rank ends"));
  absl::MutexLock lock(&mu_);
  stopping_ = true;
  return mu_.AwaitWithTimeout(absl::Condition(&stopped_), grace);
}

// --- The collective ----------------------------------------------------------------------------

class NcclCollective final : public Collective {
 public:
  NcclCollective(int32_t rank, int32_t size, std::shared_ptr<NcclGroup> group)
      : rank_(rank),
        size_(size),
        group_(std::move(group)),
        watch_([group = group_] { group->Watch(); }) {}
  ~NcclCollective() override {
    if (group_->StopWithin(kAbortGrace)) {
      watch_.join();
      return;
    }
    spdlog::error("rank {}: NCCL does not come back from an abort; its thread is left behind",
                  rank_);
    LeaveBehind(std::move(watch_));
  }

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return size_; }
  Memory memory() const override { return Memory::kDevice; }
  absl::Status Connect(RendezvousStore* store) override { return group_->Connect(store); }
  absl::Status Check() override { return group_->Check(); }
  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

  absl::Status AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                         DeviceStream stream) override {
    return group_->Run(CollectiveOp::kAllGather, stream,
                       [&](const NcclLibrary& library, ncclComm_t communicator, cudaStream_t on) {
                         return library.AllGather(send, receive, bytes_per_rank, ncclChar,
                                                  communicator, on);
                       });
  }
  absl::Status Reduce(float* data, int64_t count, int32_t root, DeviceStream stream) override {
    return group_->Run(CollectiveOp::kReduce, stream,
                       [&](const NcclLibrary& library, ncclComm_t communicator, cudaStream_t on) {
                         return library.Reduce(data, data, count, ncclFloat, ncclSum, root,
                                               communicator, on);
                       });
  }
  absl::Status AllReduce(float* data, int64_t count, DeviceStream stream) override {
    return Sum(data, count, ncclFloat, stream);
  }
  absl::Status AllReduce(double* data, int64_t count, DeviceStream stream) override {
    return Sum(data, count, ncclDouble, stream);
  }
  absl::Status Broadcast(void* data, int64_t num_bytes, int32_t root,
                         DeviceStream stream) override {
    return group_->Run(CollectiveOp::kBroadcast, stream,
                       [&](const NcclLibrary& library, ncclComm_t communicator, cudaStream_t on) {
                         return library.Broadcast(data, data, num_bytes, ncclChar, root,
                                                  communicator, on);
                       });
  }

 private:
  absl::Status Sum(void* data, int64_t count, ncclDataType_t type, DeviceStream stream) {
    return group_->Run(CollectiveOp::kAllReduce, stream,
                       [&](const NcclLibrary& library, ncclComm_t communicator, cudaStream_t on) {
                         return library.AllReduce(data, data, count, type, ncclSum, communicator,
                                                  on);
                       });
  }

  const int32_t rank_;
  const int32_t size_;
  const std::shared_ptr<NcclGroup> group_;
  std::thread watch_;
};

}  // namespace

bool NcclAvailable(std::string* why_not) {
  const absl::StatusOr<const NcclLibrary*> library = NcclLibrary::Get();
  if (!library.ok()) *why_not = std::string(library.status().message());
  return library.ok();
}

absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(int32_t rank, int32_t size,
                                                                 const NcclOptions& options) {
  const absl::StatusOr<const NcclLibrary*> library = NcclLibrary::Get();
  if (!library.ok()) return library.status();
  return std::make_unique<NcclCollective>(
      rank, size, std::make_shared<NcclGroup>(rank, size, options, *library));
}

}  // namespace lmhead
