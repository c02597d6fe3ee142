#include "proto/wire/gradient_piece.h"

#include <xxhash.h>

#include <memory>

namespace lmhead {

uint64_t GradientPieceChecksum(const v1::AccumulateWeightGradientRequest& request) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const int64_t row_start = request.row_start();
  XXH3_64bits_update(state.get(), &row_start, sizeof(row_start));
  XXH3_64bits_update(state.get(), request.row_ids().data(),
                     static_cast<size_t>(request.row_ids_size()) * sizeof(int32_t));
  XXH3_64bits_update(state.get(), request.rows().data(), request.rows().size());
  return XXH3_64bits_digest(state.get());
}

}  // namespace lmhead
