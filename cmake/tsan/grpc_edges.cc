// What gRPC orders, told to the thread sanitizer.
//
// The system's gRPC is not instrumented: that a started operation happens before its completion,
// and a message's sending before its receipt, goes through atomics that the sanitizer does not see.
// These definitions, in the executable, stand before the library's own: starting an operation or
// allocating memory (of a call, by whichever thread polls) releases; completing an operation or
// destroying a borrowed slice acquires. One address for all, since what is sent on one call arrives
// on another.

#include <dlfcn.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace {

char edge;

template <typename Function>
Function* Next(const char* name, Function* /*same type as*/) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

#define LMHEAD_NEXT(name)                         \
  (*[] {                                          \
    static auto* const next = Next(#name, &name); \
    return next;                                  \
  }())

struct BorrowedSlice {
  void (*destroy)(void*);
  void* user_data;
};

void DestroyBorrowed(void* argument) {
  __tsan_acquire(&edge);
  const auto* borrowed = static_cast<BorrowedSlice*>(argument);
  borrowed->destroy(borrowed->user_data);
  delete borrowed;
}

}  // namespace

extern "C" {

void* gpr_malloc(size_t size) {
  void* memory = LMHEAD_NEXT(gpr_malloc)(size);
  __tsan_release(&edge);
  return memory;
}

// Grows what a call has read of the peer's metadata, before it is handed on.
void* gpr_realloc(void* old, size_t size) {
  __tsan_acquire(&edge);
  void* memory = LMHEAD_NEXT(gpr_realloc)(old, size);
  __tsan_release(&edge);
  return memory;
}

void* gpr_malloc_aligned(size_t size, size_t alignment) {
  void* memory = LMHEAD_NEXT(gpr_malloc_aligned)(size, alignment);
  __tsan_release(&edge);
  return memory;
}

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t num_ops,
                                      void* tag, void* reserved) {
  __tsan_release(&edge);
  return LMHEAD_NEXT(grpc_call_start_batch)(call, ops, num_ops, tag, reserved);
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                      void* reserved) {
  const grpc_event event = LMHEAD_NEXT(grpc_completion_queue_next)(queue, deadline, reserved);
  __tsan_acquire(&edge);
  return event;
}

grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                       gpr_timespec deadline, void* reserved) {
  const grpc_event event = LMHEAD_NEXT(grpc_completion_queue_pluck)(queue, tag, deadline, reserved);
  __tsan_acquire(&edge);
  return event;
}

grpc_slice grpc_slice_new_with_user_data(void* bytes, size_t length, void (*destroy)(void*),
                                         void* user_data) {
  __tsan_release(&edge);
  return LMHEAD_NEXT(grpc_slice_new_with_user_data)(bytes, length, DestroyBorrowed,
                                                    new BorrowedSlice{destroy, user_data});
}

void* grpc_call_arena_alloc(grpc_call* call, size_t size) {
  void* memory = LMHEAD_NEXT(grpc_call_arena_alloc)(call, size);
  __tsan_acquire(&edge);
  return memory;
}

void grpc_call_unref(grpc_call* call) {
  __tsan_release(&edge);
  LMHEAD_NEXT(grpc_call_unref)(call);
}

}  // extern "C"
