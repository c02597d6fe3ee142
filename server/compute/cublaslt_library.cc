#include "server/compute/cublaslt_library.h"

#include "absl/strings/str_cat.h"
#include "server/compute/cuda_status.h"
#include "server/library/nvidia_libraries.h"

namespace lmhead {
namespace {

absl::StatusOr<CublasLtLibrary> Load() {
  absl::StatusOr<DynamicLibrary> dynamic = OpenCublasLt();
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
