// A set of rows, kept as disjoint ranges: which rows of a weight have been loaded.
//
// Thread-compatible.

#ifndef LMHEAD_SERVER_HEAD_ROW_SET_H_
#define LMHEAD_SERVER_HEAD_ROW_SET_H_

#include <cstdint>
#include <map>

namespace lmhead {

class RowSet {
 public:
  // The set of rows of a tensor of `num_rows` rows; empty at first.
  explicit RowSet(int64_t num_rows) : num_rows_(num_rows) {}

  // Adds rows [start, stop). REQUIRES: 0 <= start <= stop <= num_rows.
  void Add(int64_t start, int64_t stop);

  // The lowest row that is not in the set; num_rows when it holds all.
  int64_t FirstMissing() const;

  bool IsFull() const { return FirstMissing() == num_rows_; }

 private:
  const int64_t num_rows_;
  std::map<int64_t, int64_t> ranges_;  // start -> stop; disjoint and not adjacent.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_ROW_SET_H_
