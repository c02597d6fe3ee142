#include "server/compute/nccl_library.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

// By the loader's own search first, then where NVIDIA's packages put it.
constexpr const char* kFileNames[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2",
                                      "/usr/local/cuda/lib/libnccl.so.2"};

// The first with non-blocking communicators that every call may be used with.
constexpr int kLeastVersion = 21800;

absl::Status Open(void** handle) {
  std::string errors;
  for (const char* name : kFileNames) {
    *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (*handle != nullptr) return absl::OkStatus();
    absl::StrAppend(&errors, errors.empty() ? "" : "; ", dlerror());
  }
  return absl::UnavailableError(absl::StrCat(
      "NCCL was not found, install it or add its folder to LD_LIBRARY_PATH (", errors, ")"));
}

absl::Status Resolve(void* handle, NcclLibrary* library) {
  std::string missing;
  const auto resolve = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(handle, name));
    if (*function == nullptr) absl::StrAppend(&missing, " ", name);
  };
  resolve("ncclGetVersion", &library->GetVersion);
  resolve("ncclGetUniqueId", &library->GetUniqueId);
  resolve("ncclGetErrorString", &library->GetErrorString);
  resolve("ncclGetLastError", &library->GetLastError);
  resolve("ncclCommInitRankConfig", &library->CommInitRankConfig);
  resolve("ncclCommGetAsyncError", &library->CommGetAsyncError);
  resolve("ncclCommAbort", &library->CommAbort);
  resolve("ncclAllGather", &library->AllGather);
  resolve("ncclAllReduce", &library->AllReduce);
  resolve("ncclReduce", &library->Reduce);
  resolve("ncclBroadcast", &library->Broadcast);
  if (!missing.empty()) return absl::UnavailableError(absl::StrCat("NCCL lacks", missing));
  int version = 0;
  library->GetVersion(&version);
  if (version >= kLeastVersion) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("NCCL has version number ", version, ", wanted at least ", kLeastVersion));
}

absl::StatusOr<NcclLibrary> Load() {
  void* handle = nullptr;
  if (absl::Status status = Open(&handle); !status.ok()) return status;
  NcclLibrary library{};
  if (absl::Status status = Resolve(handle, &library); !status.ok()) return status;
  return library;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> NcclLibrary::Get() {
  static const absl::StatusOr<NcclLibrary>& library = *new absl::StatusOr(Load());
  if (!library.ok()) return library.status();
  return &*library;
}

}  // namespace lmhead
