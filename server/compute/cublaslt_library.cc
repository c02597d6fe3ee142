#include "server/compute/cublaslt_library.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

// By the loader's own search first, then where NVIDIA's packages put it.
constexpr const char* kFileNames[] = {
    "libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13", "libcublasLt.so.12",
    "/usr/local/cuda/lib64/libcublasLt.so.12"};

absl::Status Open(void** handle) {
  std::string errors;
  for (const char* name : kFileNames) {
    *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (*handle != nullptr) return absl::OkStatus();
    absl::StrAppend(&errors, errors.empty() ? "" : "; ", dlerror());
  }
  return absl::UnavailableError(absl::StrCat(
      "cuBLASLt was not found, install it or add its folder to LD_LIBRARY_PATH (", errors, ")"));
}

absl::Status Resolve(void* handle, CublasLtLibrary* library) {
  std::string missing;
  const auto resolve = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(handle, name));
    if (*function == nullptr) absl::StrAppend(&missing, " ", name);
  };
  resolve("cublasLtCreate", &library->Create);
  resolve("cublasLtDestroy", &library->Destroy);
  resolve("cublasLtGetVersion", &library->GetVersion);
  resolve("cublasLtGetStatusName", &library->GetStatusName);
  resolve("cublasLtMatmul", &library->Matmul);
  resolve("cublasLtMatmulAlgoCheck", &library->MatmulAlgoCheck);
  resolve("cublasLtMatmulAlgoConfigGetAttribute", &library->MatmulAlgoConfigGetAttribute);
  resolve("cublasLtMatmulAlgoGetHeuristic", &library->MatmulAlgoGetHeuristic);
  resolve("cublasLtMatmulDescCreate", &library->MatmulDescCreate);
  resolve("cublasLtMatmulDescDestroy", &library->MatmulDescDestroy);
  resolve("cublasLtMatmulDescSetAttribute", &library->MatmulDescSetAttribute);
  resolve("cublasLtMatmulPreferenceCreate", &library->MatmulPreferenceCreate);
  resolve("cublasLtMatmulPreferenceDestroy", &library->MatmulPreferenceDestroy);
  resolve("cublasLtMatmulPreferenceSetAttribute", &library->MatmulPreferenceSetAttribute);
  resolve("cublasLtMatrixLayoutCreate", &library->MatrixLayoutCreate);
  resolve("cublasLtMatrixLayoutDestroy", &library->MatrixLayoutDestroy);
  if (missing.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cuBLASLt lacks", missing));
}

absl::StatusOr<CublasLtLibrary> Load() {
  void* handle = nullptr;
  if (absl::Status status = Open(&handle); !status.ok()) return status;
  CublasLtLibrary library{};
  if (absl::Status status = Resolve(handle, &library); !status.ok()) return status;
  return library;
}

}  // namespace

absl::StatusOr<const CublasLtLibrary*> CublasLtLibrary::Get() {
  static const absl::StatusOr<CublasLtLibrary>& library = *new absl::StatusOr(Load());
  if (!library.ok()) return library.status();
  return &*library;
}

absl::Status CublasLtLibrary::ToStatus(cublasStatus_t status, const char* what) const {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", GetStatusName(status)));
}

}  // namespace lmhead
