#include "kernels/cpu/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace lmhead::cpu {
namespace {

class TopKTest : public testing::TestWithParam<RowPasses> {
 protected:
  std::vector<int32_t> Ids(const std::vector<float>& logits, int64_t tile_size, int32_t top_k) {
    std::vector<LogitEntry> entries(top_k);
    int32_t num_entries = 0;
    const auto size = static_cast<int64_t>(logits.size());
    for (int64_t start = 0; start < size; start += tile_size) {
      const VocabTile tile = {start, std::min(tile_size, size - start)};
      AccumulateTopK(GetParam(), tile, logits.data() + start, entries, &num_entries);
    }
    EXPECT_EQ(num_entries, std::min<int64_t>(top_k, size));
    SortTopK(entries);
    std::vector<int32_t> ids;
    for (const LogitEntry& entry : entries) {
      ids.push_back(entry.id);
      if (std::isnan(logits[entry.id])) continue;
      EXPECT_EQ(entry.logit, logits[entry.id]);
    }
    return ids;
  }

  void ExpectSorted(const std::vector<float>& logits, int32_t top_k) {
    std::vector<int32_t> want(logits.size());
    std::iota(want.begin(), want.end(), 0);
    std::stable_sort(want.begin(), want.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    want.resize(top_k);
    for (const int64_t tile_size : {1, 16, 100, 5000}) {
      EXPECT_EQ(Ids(logits, tile_size, top_k), want) << "tiles of " << tile_size;
    }
  }
};

TEST_P(TopKTest, TheLargestInOrderOfEveryLength) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int64_t length : {1, 2, 15, 17, 33, 257, 4099}) {
    std::vector<float> logits(length);
    for (float& logit : logits) logit = normal(random);
    for (const int32_t top_k : {1, 2, 7, 64, 1024}) {
      if (top_k <= length) ExpectSorted(logits, top_k);
    }
    if (length <= 257) ExpectSorted(logits, static_cast<int32_t>(length));
  }
}

TEST_P(TopKTest, AmongEqualsTheLowestIds) {
  std::mt19937 random(4);
  std::vector<float> logits(1009);
  for (float& logit : logits) logit = static_cast<float>(random() % 3);
  for (const int32_t top_k : {1, 10, 500, 1009}) ExpectSorted(logits, top_k);
  ExpectSorted(std::vector<float>(100, 1.0f), 10);
}

TEST_P(TopKTest, RisingLogitsReplaceAllThatWereThere) {
  std::vector<float> logits(1009);
  std::iota(logits.begin(), logits.end(), -500.0f);
  ExpectSorted(logits, 20);
}

TEST_P(TopKTest, MaskedLogitsComeLast) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> logits(40, -infinity);
  logits[30] = -3.0f;
  logits[35] = 2.0f;
  EXPECT_EQ(Ids(logits, 16, 4), (std::vector<int32_t>{35, 30, 0, 1}));
}

TEST_P(TopKTest, ANanCountsAsMasked) {
  std::vector<float> logits(40, -1.0f);
  logits[0] = logits[20] = std::nanf("");
  EXPECT_EQ(Ids(logits, 16, 3), (std::vector<int32_t>{1, 2, 3}));
}

INSTANTIATE_TEST_SUITE_P(All, TopKTest,
                         testing::ValuesIn(SupportedRowPasses().begin(),
                                           SupportedRowPasses().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace lmhead::cpu
