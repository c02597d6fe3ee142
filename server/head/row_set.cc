#include "server/head/row_set.h"

#include <algorithm>

namespace lmhead {

void RowSet::Add(int64_t start, int64_t stop) {
  if (start == stop) return;
  auto it = ranges_.upper_bound(start);
  if (it != ranges_.begin() && std::prev(it)->second >= start) --it;
  while (it != ranges_.end() && it->first <= stop) {
    start = std::min(start, it->first);
    stop = std::max(stop, it->second);
    it = ranges_.erase(it);
  }
  ranges_.emplace(start, stop);
}

int64_t RowSet::FirstMissing() const {
  if (ranges_.empty() || ranges_.begin()->first > 0) return 0;
  return ranges_.begin()->second;
}

}  // namespace lmhead
