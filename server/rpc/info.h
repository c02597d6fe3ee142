// Server-side state as messages of lmhead.v1.

#ifndef LMHEAD_SERVER_RPC_INFO_H_
#define LMHEAD_SERVER_RPC_INFO_H_

#include "lmhead/v1/types.pb.h"
#include "server/head/head.h"
#include "server/memory/memory_plan.h"
#include "server/metrics/metrics.h"

namespace lmhead {

v1::MemoryPlan MemoryPlanToProto(const MemoryPlan& plan);
v1::HeadInfo HeadStatusToProto(const HeadStatus& status);
v1::MemoryReport RankMemoryToProto(const RankMemory& memory, int64_t staging_bytes);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_RPC_INFO_H_
