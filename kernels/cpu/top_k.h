// The k largest logits of a row, found tile by tile.
//
// Kept as a heap whose root is the least of them; a tile's logits are compared with the root a
// vector at a time, so that the cost beyond that is of the few logits that enter.

#ifndef LMHEAD_KERNELS_CPU_TOP_K_H_
#define LMHEAD_KERNELS_CPU_TOP_K_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/row_passes.h"

namespace lmhead::cpu {

struct LogitEntry {
  float logit = 0.0f;
  int32_t id = 0;
};

// Folds a tile into the `entries.size()` largest so far, of which the first *num_entries are taken.
// Tiles come by rising ids. A NaN counts as masked.
void AccumulateTopK(const RowPasses& passes, VocabTile tile, const float* logits,
                    std::span<LogitEntry> entries, int32_t* num_entries);

// Sorts what AccumulateTopK found, or several such lists beside each other: by falling logits,
// among equals the lowest id first.
void SortTopK(std::span<LogitEntry> entries);

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_TOP_K_H_
