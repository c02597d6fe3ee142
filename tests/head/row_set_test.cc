#include "server/head/row_set.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lmhead {
namespace {

TEST(RowSet, EmptyAndFull) {
  RowSet rows(4);
  EXPECT_EQ(rows.FirstMissing(), 0);
  EXPECT_FALSE(rows.IsFull());
  rows.Add(0, 4);
  EXPECT_EQ(rows.FirstMissing(), 4);
  EXPECT_TRUE(rows.IsFull());
}

TEST(RowSet, NamesTheFirstHole) {
  RowSet rows(10);
  rows.Add(5, 10);
  EXPECT_EQ(rows.FirstMissing(), 0);
  rows.Add(0, 3);
  EXPECT_EQ(rows.FirstMissing(), 3);
  rows.Add(3, 4);
  EXPECT_EQ(rows.FirstMissing(), 4);
  rows.Add(4, 5);
  EXPECT_TRUE(rows.IsFull());
}

// Against one flag a row, over random ranges with overlaps.
TEST(RowSet, AgreesWithOneFlagARow) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    constexpr int64_t kRows = 37;
    RowSet rows(kRows);
    std::vector<bool> flags(kRows, false);
    for (int i = 0; i < 30; ++i) {
      const int64_t start = random() % kRows;
      const int64_t stop = start + random() % (kRows - start + 1);
      rows.Add(start, stop);
      for (int64_t row = start; row < stop; ++row) flags[row] = true;
      int64_t missing = 0;
      while (missing < kRows && flags[missing]) ++missing;
      ASSERT_EQ(rows.FirstMissing(), missing);
    }
  }
}

}  // namespace
}  // namespace lmhead
