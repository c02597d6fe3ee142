// NCCL, opened when the first group of GPU ranks is made: the binary starts without it.
//
// Only its types come from <nccl.h>; nothing links against the library.

#ifndef LMHEAD_SERVER_COMPUTE_NCCL_LIBRARY_H_
#define LMHEAD_SERVER_COMPUTE_NCCL_LIBRARY_H_

#include <nccl.h>

#include "absl/status/statusor.h"

namespace lmhead {

// The functions in use, by their names without the prefix nccl.
struct NcclLibrary {
  decltype(&::ncclGetVersion) GetVersion;
  decltype(&::ncclGetUniqueId) GetUniqueId;
  decltype(&::ncclGetErrorString) GetErrorString;
  decltype(&::ncclGetLastError) GetLastError;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&::ncclCommAbort) CommAbort;
  decltype(&::ncclAllGather) AllGather;
  decltype(&::ncclAllReduce) AllReduce;
  decltype(&::ncclReduce) Reduce;
  decltype(&::ncclBroadcast) Broadcast;

  // Opens the library, once a process; it stays open. UNAVAILABLE with what was looked for and what
  // the loader said.
  static absl::StatusOr<const NcclLibrary*> Get();
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_NCCL_LIBRARY_H_
