#include "server/compute/nccl_library.h"

#include "server/compute/cuda_status.h"
#include "server/library/nvidia_libraries.h"

namespace lmhead {
namespace {

absl::StatusOr<NcclLibrary> Load() {
  absl::StatusOr<DynamicLibrary> dynamic = OpenNccl();
  if (!dynamic.ok()) return dynamic.status();
  NcclLibrary library{};
  dynamic->Resolve("ncclGetVersion", &library.GetVersion);
  dynamic->Resolve("ncclGetUniqueId", &library.GetUniqueId);
  dynamic->Resolve("ncclGetErrorString", &library.GetErrorString);
  dynamic->Resolve("ncclGetLastError", &library.GetLastError);
  dynamic->Resolve("ncclCommInitRankConfig", &library.CommInitRankConfig);
  dynamic->Resolve("ncclCommGetAsyncError", &library.CommGetAsyncError);
  dynamic->Resolve("ncclCommAbort", &library.CommAbort);
  dynamic->Resolve("ncclAllGather", &library.AllGather);
  dynamic->Resolve("ncclAllReduce", &library.AllReduce);
  dynamic->Resolve("ncclReduce", &library.Reduce);
  dynamic->Resolve("ncclBroadcast", &library.Broadcast);
  LMHEAD_RETURN_IF_ERROR(dynamic->Check());
  int version = 0;
  library.GetVersion(&version);
  LMHEAD_RETURN_IF_ERROR(CheckNcclVersion(version));
  return library;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> NcclLibrary::Get() {
  static const absl::StatusOr<NcclLibrary>& library = *new absl::StatusOr(Load());
  if (!library.ok()) return library.status();
  return &*library;
}

}  // namespace lmhead
