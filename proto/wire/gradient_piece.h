// The ledger's key of an AccumulateWeightGradient call.

#ifndef LMHEAD_PROTO_WIRE_GRADIENT_PIECE_H_
#define LMHEAD_PROTO_WIRE_GRADIENT_PIECE_H_

#include <cstdint>

#include "lmhead/v1/service.pb.h"

namespace lmhead {

// XXH3-64 of what is added and where: row_start (8 bytes, little-endian), row_ids (4 bytes each),
// rows. A call that is repeated has the same one.
uint64_t GradientPieceChecksum(const v1::AccumulateWeightGradientRequest& request);

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_GRADIENT_PIECE_H_
