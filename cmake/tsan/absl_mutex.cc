// absl::Mutex, CondVar, Notification and BlockingCounter on pthreads, for the thread sanitizer.
//
// The system's abseil is not instrumented and takes its locks with raw futexes, so the sanitizer
// would see no lock at all and call every guarded field a race. These definitions, in the
// executable, take the place of the library's own, for lmhead and for gRPC alike; pthread calls are
// what the sanitizer understands. Slow, and right: reader locks are exclusive, and every release
// wakes whoever awaits a condition.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace absl {
ABSL_NAMESPACE_BEGIN

namespace {

struct MutexState {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t released = PTHREAD_COND_INITIALIZER;
  int num_awaiting = 0;  // Guarded by mutex.
};

struct CondVarState {
  pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
};

// The state behind a word that starts at 0, made by whoever needs it first. Not instrumented: the
// word may lie in memory that a library handed over unseen, and what orders the threads is the lock
// itself.
template <typename State>
__attribute__((no_sanitize("thread"))) State* StateOf(std::atomic<intptr_t>& word) {
  auto* address = reinterpret_cast<intptr_t*>(&word);
  intptr_t state = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  if (state == 0) {
    auto* fresh = new State;
    __tsan_release(fresh);
    if (__atomic_compare_exchange_n(address, &state, reinterpret_cast<intptr_t>(fresh), false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      return fresh;
    }
    delete fresh;
  }
  __tsan_acquire(reinterpret_cast<void*>(state));
  return reinterpret_cast<State*>(state);
}

// The state that was ever made, or null; the word is 0 again.
template <typename State>
__attribute__((no_sanitize("thread"))) State* Take(std::atomic<intptr_t>& word) {
  auto* address = reinterpret_cast<intptr_t*>(&word);
  const intptr_t state = __atomic_exchange_n(address, 0, __ATOMIC_ACQ_REL);
  if (state != 0) __tsan_acquire(reinterpret_cast<void*>(state));
  return reinterpret_cast<State*>(state);
}

void Check(int error) {
  if (error != 0) std::abort();
}

void Release(MutexState* state) {
  if (state->num_awaiting > 0) Check(pthread_cond_broadcast(&state->released));
}

// Returns false at the deadline.
bool WaitUntil(pthread_cond_t* cond, pthread_mutex_t* mutex, Time deadline) {
  if (deadline == InfiniteFuture()) {
    Check(pthread_cond_wait(cond, mutex));
    return true;
  }
  const timespec until = ToTimespec(std::max(deadline, UnixEpoch()));
  const int error = pthread_cond_timedwait(cond, mutex, &until);
  if (error != ETIMEDOUT) Check(error);
  return error == 0;
}

}  // namespace

// Whoever destroys a mutex is ordered after its last holder in ways that may be unseen (a count of
// references): the lock is taken once more, so that the sanitizer sees it.
Mutex::~Mutex() {
  auto* state = Take<MutexState>(mu_);
  if (state == nullptr) return;
  Check(pthread_mutex_lock(&state->mutex));
  Check(pthread_mutex_unlock(&state->mutex));
  delete state;
}

void Mutex::Lock() { Check(pthread_mutex_lock(&StateOf<MutexState>(mu_)->mutex)); }

bool Mutex::TryLock() { return pthread_mutex_trylock(&StateOf<MutexState>(mu_)->mutex) == 0; }

void Mutex::Unlock() {
  MutexState* state = StateOf<MutexState>(mu_);
  Release(state);
  Check(pthread_mutex_unlock(&state->mutex));
}

bool Mutex::AwaitWithDeadline(const Condition& cond, Time deadline) {
  if (cond.Eval()) return true;
  MutexState* state = StateOf<MutexState>(mu_);
  Release(state);  // Waiting releases the lock: what this thread changed may be what others await.
  ++state->num_awaiting;
  bool in_time = true;
  while (!cond.Eval() && in_time) in_time = WaitUntil(&state->released, &state->mutex, deadline);
  --state->num_awaiting;
  return in_time || cond.Eval();
}

void Mutex::Await(const Condition& cond) { AwaitWithDeadline(cond, InfiniteFuture()); }

bool Mutex::AwaitWithTimeout(const Condition& cond, Duration timeout) {
  return AwaitWithDeadline(cond, Now() + timeout);
}

void Mutex::LockWhen(const Condition& cond) {
  Lock();
  Await(cond);
}

bool Mutex::LockWhenWithDeadline(const Condition& cond, Time deadline) {
  Lock();
  return AwaitWithDeadline(cond, deadline);
}

bool Mutex::LockWhenWithTimeout(const Condition& cond, Duration timeout) {
  return LockWhenWithDeadline(cond, Now() + timeout);
}

void Mutex::ReaderLock() { Lock(); }
bool Mutex::ReaderTryLock() { return TryLock(); }
void Mutex::ReaderUnlock() { Unlock(); }
void Mutex::ReaderLockWhen(const Condition& cond) { LockWhen(cond); }
bool Mutex::ReaderLockWhenWithDeadline(const Condition& cond, Time deadline) {
  return LockWhenWithDeadline(cond, deadline);
}
bool Mutex::ReaderLockWhenWithTimeout(const Condition& cond, Duration timeout) {
  return LockWhenWithTimeout(cond, timeout);
}

void Mutex::AssertHeld() const {}
void Mutex::AssertReaderHeld() const {}
void Mutex::AssertNotHeld() const {}
void Mutex::ForgetDeadlockInfo() {}
void Mutex::EnableDebugLog(const char* name) {}
void Mutex::EnableInvariantDebugging(void (*invariant)(void*), void* arg) {}

CondVar::~CondVar() { delete Take<CondVarState>(cv_); }

bool CondVar::WaitWithDeadline(Mutex* mu, Time deadline) {
  static_assert(sizeof(Mutex) == sizeof(std::atomic<intptr_t>));
  MutexState* state = StateOf<MutexState>(reinterpret_cast<std::atomic<intptr_t>&>(*mu));
  Release(state);
  return !WaitUntil(&StateOf<CondVarState>(cv_)->cond, &state->mutex, deadline);
}

void CondVar::Wait(Mutex* mu) { WaitWithDeadline(mu, InfiniteFuture()); }

bool CondVar::WaitWithTimeout(Mutex* mu, Duration timeout) {
  return WaitWithDeadline(mu, Now() + timeout);
}

void CondVar::Signal() { Check(pthread_cond_signal(&StateOf<CondVarState>(cv_)->cond)); }
void CondVar::SignalAll() { Check(pthread_cond_broadcast(&StateOf<CondVarState>(cv_)->cond)); }
void CondVar::EnableDebugLog(const char* name) {}

void Notification::Notify() {
  MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}

Notification::~Notification() { MutexLock lock(&mutex_); }

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  if (HasBeenNotifiedInternal(&notified_yet_)) return true;
  const bool notified =
      mutex_.LockWhenWithDeadline(Condition(&HasBeenNotifiedInternal, &notified_yet_), deadline);
  mutex_.Unlock();
  return notified;
}

void Notification::WaitForNotification() const {
  WaitForNotificationWithDeadline(InfiniteFuture());
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  return WaitForNotificationWithDeadline(Now() + timeout);
}

// The library counts with an unseen atomic and locks at the last count alone: what the other
// counting threads did before would look unordered to whoever waited.
BlockingCounter::BlockingCounter(int initial_count)
    : count_(initial_count), num_waiting_(0), done_(initial_count == 0) {}

bool BlockingCounter::DecrementCount() {
  MutexLock lock(&lock_);
  done_ = count_.fetch_sub(1) == 1;
  return done_;
}

void BlockingCounter::Wait() {
  lock_.LockWhen(Condition(&done_));
  lock_.Unlock();
}

ABSL_NAMESPACE_END
}  // namespace absl
