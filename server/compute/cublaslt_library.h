// cuBLASLt, opened when the first GPU head is created: the binary starts without it.
//
// Only its types come from <cublasLt.h>; nothing links against the library.

#ifndef LMHEAD_SERVER_COMPUTE_CUBLASLT_LIBRARY_H_
#define LMHEAD_SERVER_COMPUTE_CUBLASLT_LIBRARY_H_

#include <cublasLt.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lmhead {

// The functions in use, by their names without the prefix cublasLt.
struct CublasLtLibrary {
  decltype(&::cublasLtCreate) Create;
  decltype(&::cublasLtDestroy) Destroy;
  decltype(&::cublasLtGetVersion) GetVersion;
  decltype(&::cublasLtGetStatusName) GetStatusName;
  decltype(&::cublasLtMatmul) Matmul;
  decltype(&::cublasLtMatmulAlgoCheck) MatmulAlgoCheck;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) MatmulAlgoConfigGetAttribute;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;

  // Opens the library, once a process; it stays open. UNAVAILABLE with what was looked for and what
  // the loader said.
  static absl::StatusOr<const CublasLtLibrary*> Get();

  // INTERNAL with the status' name; OK for success.
  absl::Status ToStatus(cublasStatus_t status, const char* what) const;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUBLASLT_LIBRARY_H_
