#include "server/compute/cublaslt_library.h"

#include "absl/strings/str_cat.h"
#include "server/compute/cuda_status.h"
#include "server/compute/dynamic_library.h"

namespace lmhead {
namespace {

// By the loader's own search first, then where NVIDIA's packages put it.
constexpr const char* kFileNames[] = {
    "libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13", "libcublasLt.so.12",
    "/usr/local/cuda/lib64/libcublasLt.so.12"};

absl::StatusOr<CublasLtLibrary> Load() {
  absl::StatusOr<DynamicLibrary> dynamic = DynamicLibrary::Open("cuBLASLt", kFileNames);
  if (!dynamic.ok()) return dynamic.status();
  CublasLtLibrary library{};
  dynamic->Resolve("cublasLtCreate", &library.Create);
  dynamic->Resolve("cublasLtDestroy", &library.Destroy);
  dynamic->Resolve("cublasLtGetVersion", &library.GetVersion);
  dynamic->Resolve("cublasLtGetStatusName", &library.GetStatusName);
  dynamic->Resolve("cublasLtMatmul", &library.Matmul);
  dynamic->Resolve("cublasLtMatmulAlgoCheck", &library.MatmulAlgoCheck);
  dynamic->Resolve("cublasLtMatmulAlgoConfigGetAttribute", &library.MatmulAlgoConfigGetAttribute);
  dynamic->Resolve("cublasLtMatmulAlgoGetHeuristic", &library.MatmulAlgoGetHeuristic);
  dynamic->Resolve("cublasLtMatmulDescCreate", &library.MatmulDescCreate);
  dynamic->Resolve("cublasLtMatmulDescDestroy", &library.MatmulDescDestroy);
  dynamic->Resolve("cublasLtMatmulDescSetAttribute", &library.MatmulDescSetAttribute);
  dynamic->Resolve("cublasLtMatmulPreferenceCreate", &library.MatmulPreferenceCreate);
  dynamic->Resolve("cublasLtMatmulPreferenceDestroy", &library.MatmulPreferenceDestroy);
  dynamic->Resolve("cublasLtMatmulPreferenceSetAttribute", &library.MatmulPreferenceSetAttribute);
  dynamic->Resolve("cublasLtMatrixLayoutCreate", &library.MatrixLayoutCreate);
  dynamic->Resolve("cublasLtMatrixLayoutDestroy", &library.MatrixLayoutDestroy);
  LMHEAD_RETURN_IF_ERROR(dynamic->Check());
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
