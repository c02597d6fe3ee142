#include "server/compute/gloo_collective.h"

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

using gloo::transport::UnboundBuffer;

// Bytes of a rank's share of a sum that are under way at once.
constexpr int64_t kPieceBytes = 256 * 1024;

// Gloo's own timeouts close every connection, and the others would then name the wrong rank: they
// are set to never, and ours end a wait.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// Gloo writes to connections that the other end may have closed, and asks for no signal to be
// spared: without this, a rank that dies would take the others with it.
void IgnoreBrokenPipes() {
  static const bool done = [] {
    struct sigaction action = {};
    if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
      signal(SIGPIPE, SIG_IGN);
    }
    return true;
  }();
  static_cast<void>(done);
}

std::string AddressKey(int32_t rank) { return absl::StrCat("gloo_address_", rank); }

class GlooCollective final : public Collective {
 public:
  GlooCollective(int32_t rank, int32_t size, const GlooOptions& options,
                 std::shared_ptr<gloo::transport::Device> device);
  ~GlooCollective() override;

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return size_; }
  Memory memory() const override { return Memory::kHost; }

  absl::Status Connect(RendezvousStore* store) override;
  absl::Status AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                         DeviceStream stream) override;
  absl::Status Reduce(float* data, int64_t count, int32_t root, DeviceStream stream) override {
    return Sum(data, count, root);
  }
  absl::Status AllReduce(float* data, int64_t count, DeviceStream stream) override {
    return Sum(data, count, kEveryRank);
  }
  absl::Status AllReduce(double* data, int64_t count, DeviceStream stream) override {
    return Sum(data, count, kEveryRank);
  }
  absl::Status Broadcast(void* data, int64_t num_bytes, int32_t root, DeviceStream stream) override;
  absl::Status Check() override;
  void Abort(const absl::Status& reason) override;

 private:
  static constexpr int32_t kEveryRank = -1;

  // One send or receive under way with one other rank.
  struct Transfer {
    std::unique_ptr<UnboundBuffer> buffer;
    int32_t peer = 0;
    bool receives = false;
  };
  // What one round of transfers has under way. They end with it, also when it fails: Gloo then
  // forgets their memory.
  class Round {
   public:
    Round(GlooCollective* collective, const char* what) : collective_(*collective), what_(what) {}
    void Send(const void* data, int64_t num_bytes, int32_t peer);
    void Receive(void* data, int64_t num_bytes, int32_t peer);
    absl::Status Finish();  // Starts the transfers and waits for all.

   private:
    GlooCollective& collective_;
    const char* const what_;
    std::vector<Transfer> transfers_;
  };

  absl::Status BeginConnect();
  absl::Status ConnectPairs(RendezvousStore* store, absl::Time deadline);
  absl::Status ConnectPair(int32_t peer, const std::string& addresses, absl::Time deadline);
  std::vector<char> OwnAddresses();

  template <typename T>
  absl::Status Sum(T* data, int64_t count, int32_t root);
  template <typename T>
  absl::Status SumBlock(T* data, int64_t count, int32_t root);

  absl::Status Wait(const Transfer& transfer, const char* what, absl::Time deadline);
  bool BeginWait(const Transfer* transfer, absl::Time deadline);
  void EndWait();
  void WatchDeadlines();
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Fail(int32_t peer, const char* what, const std::string& how);
  void ClosePairs(gloo::transport::Context* context);
  std::string Late(int32_t peer) const;
  std::string Name(int32_t peer) const;  // "rank 3"

  const int32_t rank_;
  const int32_t size_;
  const absl::Duration timeout_;
  const std::vector<std::string> names_;
  const std::shared_ptr<gloo::transport::Device> device_;
  std::vector<std::byte> pieces_;  // [size, kPieceBytes]
  uint64_t sequence_ = 0;          // Of rounds; the same on every rank.

  absl::Mutex mu_;
  std::shared_ptr<gloo::transport::Context> context_ ABSL_GUARDED_BY(mu_);
  absl::Status state_ ABSL_GUARDED_BY(mu_) =
      absl::FailedPreconditionError("the ranks are not connected");
  bool connecting_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool late_ ABSL_GUARDED_BY(mu_) = false;  // The wait under way has been ended for its deadline.
  const Transfer* waiting_ ABSL_GUARDED_BY(mu_) = nullptr;
  absl::Time wait_deadline_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  std::thread watch_;  // Last: starts when everything else is there.
};

GlooCollective::GlooCollective(int32_t rank, int32_t size, const GlooOptions& options,
                               std::shared_ptr<gloo::transport::Device> device)
    : rank_(rank),
      size_(size),
      timeout_(options.timeout),
      names_(options.names),
      device_(std::move(device)),
      pieces_(static_cast<size_t>(size * kPieceBytes)),
      watch_([this] { WatchDeadlines(); }) {}

GlooCollective::~GlooCollective() {
  Abort(absl::CancelledError("the rank is gone"));
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  watch_.join();
}

// --- Connecting --------------------------------------------------------------------------------

absl::Status GlooCollective::BeginConnect() {
  std::shared_ptr<gloo::transport::Context> old;
  {
    absl::MutexLock lock(&mu_);
    old = std::exchange(context_, nullptr);
    state_ = absl::OkStatus();
    connecting_ = true;
  }
  if (old != nullptr) ClosePairs(old.get());
  sequence_ = 0;
  try {
    std::shared_ptr<gloo::transport::Context> context = device_->createContext(rank_, size_);
    context->setTimeout(kNever);
    for (int32_t peer = 0; peer < size_; ++peer) {
      if (peer != rank_) context->createPair(peer);
    }
    absl::MutexLock lock(&mu_);
    context_ = std::move(context);
    return state_;
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for the other ranks: ", error.what()));
  }
}

absl::Status GlooCollective::Connect(RendezvousStore* store) {
  absl::Status status = BeginConnect();
  if (status.ok()) status = ConnectPairs(store, absl::Now() + timeout_);
  absl::MutexLock lock(&mu_);
  connecting_ = false;
  wait_deadline_ = absl::InfiniteFuture();
  if (state_.ok()) state_ = status;
  return state_;
}

std::vector<char> GlooCollective::OwnAddresses() {
  absl::MutexLock lock(&mu_);
  std::vector<char> all;
  size_t bytes = 0;
  for (int32_t peer = 0; peer < size_; ++peer) {
    std::vector<char> address;
    if (peer != rank_) address = context_->getPair(peer)->address().bytes();
    bytes = std::max(bytes, address.size());
    address.resize(bytes);  // The rank's own place is empty.
    all.insert(all.end(), address.begin(), address.end());
  }
  // Rank 0's own place came before the size was known.
  if (rank_ == 0) all.insert(all.begin(), bytes, 0);
  return all;
}

absl::Status GlooCollective::ConnectPairs(RendezvousStore* store, absl::Time deadline) {
  const std::vector<char> own = OwnAddresses();
  absl::Status set = store->Set(AddressKey(rank_), std::string(own.begin(), own.end()));
  if (!set.ok()) return set;
  for (int32_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    absl::StatusOr<std::string> addresses = store->Get(AddressKey(peer), deadline);
    if (absl::IsDeadlineExceeded(addresses.status())) {
      return absl::DeadlineExceededError(Late(peer));
    }
    if (!addresses.ok()) return addresses.status();
    absl::Status status = ConnectPair(peer, *addresses, deadline);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string GlooCollective::Late(int32_t peer) const {
  return absl::StrCat(Name(peer), " did not connect within ", absl::FormatDuration(timeout_));
}

std::string GlooCollective::Name(int32_t peer) const {
  return names_.empty() ? absl::StrCat("rank ", peer) : names_[peer];
}

// Connections end in any state by Abort() and, when the deadline passes, by the watch.
absl::Status GlooCollective::ConnectPair(int32_t peer, const std::string& addresses,
                                         absl::Time deadline) {
  std::shared_ptr<gloo::transport::Context> context;
  {
    absl::MutexLock lock(&mu_);
    if (!state_.ok()) return state_;
    context = context_;
    late_ = false;
    wait_deadline_ = deadline;
  }
  const size_t bytes = addresses.size() / static_cast<size_t>(size_);
  const auto begin = addresses.begin() + static_cast<ptrdiff_t>(bytes) * rank_;
  std::string error;
  try {
    context->getPair(peer)->connect({begin, begin + static_cast<ptrdiff_t>(bytes)});
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  absl::MutexLock lock(&mu_);
  wait_deadline_ = absl::InfiniteFuture();
  if (!state_.ok()) return state_;
  if (late_) return absl::DeadlineExceededError(Late(peer));
  if (error.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot connect to ", Name(peer), ": ", error));
}

// --- Waiting and ending ------------------------------------------------------------------------

absl::Status GlooCollective::Check() {
  absl::MutexLock lock(&mu_);
  return state_;
}

void GlooCollective::ClosePairs(gloo::transport::Context* context) {
  for (int32_t peer = 0; peer < size_; ++peer) {
    if (peer != rank_) context->getPair(peer)->close();
  }
}

void GlooCollective::Abort(const absl::Status& reason) {
  std::shared_ptr<gloo::transport::Context> context;
  {
    absl::MutexLock lock(&mu_);
    if (state_.ok()) state_ = reason;
    Wake();
    context = context_;
  }
  if (context != nullptr) ClosePairs(context.get());
}

// Ends the wait under way, if there is one.
void GlooCollective::Wake() {
  if (waiting_ == nullptr) return;
  if (waiting_->receives) {
    waiting_->buffer->abortWaitRecv();
  } else {
    waiting_->buffer->abortWaitSend();
  }
}

// The thread that ends waits whose deadline has passed.
void GlooCollective::WatchDeadlines() {
  absl::MutexLock lock(&mu_);
  while (!stopping_) {
    const absl::Time deadline = wait_deadline_;
    const auto changed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return stopping_ || wait_deadline_ != deadline;
    };
    if (mu_.AwaitWithDeadline(absl::Condition(&changed), deadline)) continue;
    wait_deadline_ = absl::InfiniteFuture();
    late_ = true;
    Wake();
    if (connecting_ && context_ != nullptr) {
      const std::shared_ptr<gloo::transport::Context> context = context_;
      mu_.Unlock();
      ClosePairs(context.get());
      mu_.Lock();
    }
  }
}

bool GlooCollective::BeginWait(const Transfer* transfer, absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  if (!state_.ok()) return false;
  late_ = false;
  waiting_ = transfer;
  wait_deadline_ = deadline;
  return true;
}

void GlooCollective::EndWait() {
  absl::MutexLock lock(&mu_);
  waiting_ = nullptr;
  wait_deadline_ = absl::InfiniteFuture();
}

absl::Status GlooCollective::Fail(int32_t peer, const char* what, const std::string& how) {
  absl::MutexLock lock(&mu_);
  if (!state_.ok()) return state_;
  if (late_) {
    state_ = absl::DeadlineExceededError(absl::StrCat(
        Name(peer), " has not answered for ", absl::FormatDuration(timeout_), " in ", what));
  } else {
    state_ = absl::UnavailableError(absl::StrCat(Name(peer), " was lost in ", what, ": ", how));
  }
  return state_;
}

absl::Status GlooCollective::Wait(const Transfer& transfer, const char* what, absl::Time deadline) {
  if (!BeginWait(&transfer, deadline)) return Check();
  std::string error = "its connection was closed";
  bool finished = false;
  try {
    finished =
        transfer.receives ? transfer.buffer->waitRecv(kNever) : transfer.buffer->waitSend(kNever);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  EndWait();
  return finished ? absl::OkStatus() : Fail(transfer.peer, what, error);
}

void GlooCollective::Round::Send(const void* data, int64_t num_bytes, int32_t peer) {
  if (num_bytes == 0) return;
  transfers_.push_back({.peer = peer, .receives = false});
  absl::MutexLock lock(&collective_.mu_);
  if (collective_.context_ == nullptr) return;
  transfers_.back().buffer = collective_.context_->createUnboundBuffer(
      const_cast<void*>(data), static_cast<size_t>(num_bytes));
}

void GlooCollective::Round::Receive(void* data, int64_t num_bytes, int32_t peer) {
  if (num_bytes == 0) return;
  Send(data, num_bytes, peer);
  transfers_.back().receives = true;
}

absl::Status GlooCollective::Round::Finish() {
  if (absl::Status status = collective_.Check(); !status.ok()) return status;
  const uint64_t slot = ++collective_.sequence_;
  const absl::Time deadline = absl::Now() + collective_.timeout_;
  for (const Transfer& transfer : transfers_) {
    try {
      if (transfer.receives) {
        transfer.buffer->recv(transfer.peer, slot);
      } else {
        transfer.buffer->send(transfer.peer, slot);
      }
    } catch (const std::exception& error) {
      return collective_.Fail(transfer.peer, what_, error.what());
    }
  }
  for (const Transfer& transfer : transfers_) {
    absl::Status status = collective_.Wait(transfer, what_, deadline);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// --- The collectives ---------------------------------------------------------------------------

absl::Status GlooCollective::AllGather(const void* send, void* receive, int64_t bytes_per_rank,
                                       DeviceStream stream) {
  LMHEAD_CHECK(stream == nullptr, "host memory has no streams");
  std::byte* const all = static_cast<std::byte*>(receive);
  std::byte* const own = all + rank_ * bytes_per_rank;
  std::memmove(own, send, static_cast<size_t>(bytes_per_rank));
  Round round(this, "an all-gather");
  for (int32_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    round.Receive(all + peer * bytes_per_rank, bytes_per_rank, peer);
    round.Send(own, bytes_per_rank, peer);
  }
  return round.Finish();
}

absl::Status GlooCollective::Broadcast(void* data, int64_t num_bytes, int32_t root,
                                       DeviceStream stream) {
  LMHEAD_CHECK(stream == nullptr, "host memory has no streams");
  Round round(this, "a broadcast");
  if (rank_ != root) round.Receive(data, num_bytes, root);
  for (int32_t peer = 0; rank_ == root && peer < size_; ++peer) {
    if (peer != rank_) round.Send(data, num_bytes, peer);
  }
  return round.Finish();
}

template <typename T>
absl::Status GlooCollective::Sum(T* data, int64_t count, int32_t root) {
  const int64_t block = size_ * kPieceBytes / static_cast<int64_t>(sizeof(T));
  for (int64_t start = 0; start < count; start += block) {
    absl::Status status = SumBlock(data + start, std::min(block, count - start), root);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Each rank adds up its own piece of the block, then gives it to the root, or to all.
template <typename T>
absl::Status GlooCollective::SumBlock(T* data, int64_t count, int32_t root) {
  const int64_t piece = (count + size_ - 1) / size_;
  const auto start = [&](int32_t rank) { return std::min(rank * piece, count); };
  const auto bytes = [&](int32_t rank) {
    return (start(rank + 1) - start(rank)) * static_cast<int64_t>(sizeof(T));
  };
  T* const own = data + start(rank_);
  const auto from = [&](int32_t rank) {
    return rank == rank_ ? own : reinterpret_cast<T*>(pieces_.data() + rank * kPieceBytes);
  };
  Round scatter(this, "a sum");
  for (int32_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    scatter.Receive(from(peer), bytes(rank_), peer);
    scatter.Send(data + start(peer), bytes(peer), peer);
  }
  if (absl::Status status = scatter.Finish(); !status.ok()) return status;

  const int64_t own_count = start(rank_ + 1) - start(rank_);
  for (int64_t i = 0; i < own_count; ++i) {
    T sum = from(0)[i];
    for (int32_t rank = 1; rank < size_; ++rank) sum += from(rank)[i];
    own[i] = sum;
  }

  Round gather(this, "a sum");
  for (int32_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (root == kEveryRank || rank_ == root) gather.Receive(data + start(peer), bytes(peer), peer);
    if (root == kEveryRank || peer == root) gather.Send(own, bytes(rank_), peer);
  }
  return gather.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> CreateGlooCollective(int32_t rank, int32_t size,
                                                                 const GlooOptions& options) {
  LMHEAD_CHECK(size >= 2 && rank >= 0 && rank < size, absl::StrCat("rank ", rank, " of ", size));
  LMHEAD_CHECK(options.names.empty() || options.names.size() == static_cast<size_t>(size),
               absl::StrCat(options.names.size(), " names"));
  IgnoreBrokenPipes();
  try {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = options.host;
    return std::make_unique<GlooCollective>(rank, size, options,
                                            gloo::transport::tcp::CreateDevice(attributes));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("'", options.host,
                                               "' is not an address of this machine that the other "
                                               "ranks could reach: ",
                                               error.what()));
  }
}

}  // namespace lmhead
