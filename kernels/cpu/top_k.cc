#include "kernels/cpu/top_k.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lmhead::cpu {
namespace {

// Whether `a` comes before `b`. Of heaps by it the root is the last in order.
bool Before(const LogitEntry& a, const LogitEntry& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

void AccumulateTopK(const RowPasses& passes, VocabTile tile, const float* logits,
                    std::span<LogitEntry> entries, int32_t* num_entries) {
  const auto capacity = static_cast<int32_t>(entries.size());
  int64_t column = 0;
  // While there is room, everything enters, masked logits too.
  for (; *num_entries < capacity && column < tile.cols; ++column) {
    const float logit = logits[column];
    entries[(*num_entries)++] = {
        std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit,
        static_cast<int32_t>(tile.start + column)};
    std::push_heap(entries.begin(), entries.begin() + *num_entries, Before);
  }
  if (capacity == 0) return;
  // An equal logit of a higher id comes later in order than all that are there.
  while (true) {
    column = passes.next_above(logits, column, tile.cols, entries.front().logit);
    if (column >= tile.cols) return;
    std::pop_heap(entries.begin(), entries.end(), Before);
    entries.back() = {logits[column], static_cast<int32_t>(tile.start + column)};
    std::push_heap(entries.begin(), entries.end(), Before);
    ++column;
  }
}

void SortTopK(std::span<LogitEntry> entries) { std::sort(entries.begin(), entries.end(), Before); }

}  // namespace lmhead::cpu
