// A collective of host memory whose calls are timed.

#ifndef LMHEAD_SERVER_COMPUTE_TIMED_COLLECTIVE_H_
#define LMHEAD_SERVER_COMPUTE_TIMED_COLLECTIVE_H_

#include <memory>

#include "server/compute/collective.h"
#include "server/compute/collective_times.h"

namespace lmhead {

// `inner`, whose calls are added to `times`, which outlives it. REQUIRES: a call of `inner` returns
// when it is done (Collective::Memory::kHost).
std::unique_ptr<Collective> TimeCollective(std::unique_ptr<Collective> inner,
                                           CollectiveTimes* times);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_TIMED_COLLECTIVE_H_
