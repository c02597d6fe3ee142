// Preloaded into a server under test: counts allocations of kLargeAllocationBytes and more in a
// file that the test maps too.
//
// Wraps the C allocation functions and mmap of anonymous memory; everything in the process comes
// through one of them. Must not allocate.

#include "tests/e2e/count_allocations.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

using lmhead::e2e::AllocationCounts;
using lmhead::e2e::kLargeAllocationBytes;

AllocationCounts* counts = nullptr;

__attribute__((constructor)) void MapCounts() {
  const char* path = getenv(lmhead::e2e::kAllocationCountsVariable);
  if (path == nullptr) return;
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void* mapped = mmap(nullptr, sizeof(AllocationCounts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return;
  // The first call loads libgcc, which allocates: not later, inside an allocation.
  void* frame = nullptr;
  backtrace(&frame, 1);
  counts = static_cast<AllocationCounts*>(mapped);
  counts->attached = 1;
}

void Count(size_t bytes) {
  if (counts == nullptr || bytes < kLargeAllocationBytes) return;
  counts->num_large.fetch_add(1);
  uint64_t largest = counts->largest_bytes.load();
  while (bytes > largest && !counts->largest_bytes.compare_exchange_weak(largest, bytes)) {
  }
  if (!counts->print_stacks) return;
  void* frames[32];
  backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
}

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// glibc's own entry points, so that no look-up (which may allocate) stands before them.
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* pointer, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  Count(size);
  return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  size_t bytes = 0;
  Count(__builtin_mul_overflow(count, size, &bytes) ? 0 : bytes);
  return __libc_calloc(count, size);
}

void* realloc(void* pointer, size_t size) {
  Count(size);
  return __libc_realloc(pointer, size);
}

void* memalign(size_t alignment, size_t size) {
  Count(size);
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* pointer = memalign(alignment, size);
  if (pointer == nullptr) return ENOMEM;
  *out = pointer;
  return 0;
}

void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  static const auto next = Next<void* (*)(void*, size_t, int, int, int, off_t)>("mmap");
  if ((flags & MAP_ANONYMOUS) != 0) Count(length);
  return next(address, length, protection, flags, fd, offset);
}

void* mmap64(void* address, size_t length, int protection, int flags, int fd, off64_t offset) {
  return mmap(address, length, protection, flags, fd, offset);
}
}
