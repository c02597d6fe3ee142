#include "server/cli/demo/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_split.h"

namespace lmhead::demo {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Report, NumbersForPeople) {
  EXPECT_EQ(HumanBytes(0), "0 bytes");
  EXPECT_EQ(HumanBytes(1023), "1023 bytes");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(int64_t{32} << 30), "32.0 GiB");
  EXPECT_EQ(WithCommas(0), "0");
  EXPECT_EQ(WithCommas(999), "999");
  EXPECT_EQ(WithCommas(1000), "1,000");
  EXPECT_EQ(WithCommas(1234567), "1,234,567");
  EXPECT_EQ(WithCommas(-123456), "-123,456");
}

TEST(Report, ProgressBarFills) {
  EXPECT_THAT(RenderProgress({0, 10, 9.0, 9.0, 1.0}), HasSubstr("[....................]"));
  EXPECT_THAT(RenderProgress({5, 10, 9.0, 9.0, 1.0}), HasSubstr("[##########..........]"));
  EXPECT_THAT(RenderProgress({10, 10, 9.0, 9.0, 1.0}), HasSubstr("[####################]"));
}

// Row of the chart on which column `column` has `mark`, or -1.
int RowOf(const std::string& chart, size_t column, char mark) {
  const std::vector<std::string> lines = absl::StrSplit(chart, '\n');
  for (size_t row = 0; row < lines.size(); ++row) {
    const size_t bar = lines[row].find('|');
    if (bar != std::string::npos && bar + 1 + column < lines[row].size() &&
        lines[row][bar + 1 + column] == mark) {
      return static_cast<int>(row);
    }
  }
  return -1;
}

TEST(Report, CurveCrossesTheBaseline) {
  std::vector<double> losses;
  for (int i = 0; i < 128; ++i) losses.push_back(9.0 - 6.0 * i / 127);
  const std::string chart = RenderLossCurve(losses, 6.0);
  const int baseline = RowOf(chart, 0, '-');
  EXPECT_LT(RowOf(chart, 0, '*'), baseline);
  EXPECT_GT(RowOf(chart, 63, '*'), baseline);
  EXPECT_THAT(chart, HasSubstr(" 6.00 |"));
  EXPECT_THAT(chart, HasSubstr("unigram entropy"));
}

TEST(Report, CurveOfOddInputs) {
  EXPECT_EQ(RenderLossCurve({}, 6.0), "");
  EXPECT_NE(RowOf(RenderLossCurve({9.0}, 6.0), 0, '*'), -1);
  // Everything on one value, also on a whole number: no division by zero.
  EXPECT_NE(RowOf(RenderLossCurve({3.0, 3.0, 3.0}, 3.0), 2, '*'), -1);
}

reference::OutputError Error(double rel) {
  return {.rel = rel, .plain_rel = 4e-6, .rel_limit = 1e-5, .max_abs_limit = 1.0};
}

CheckReport GoodCheck() {
  return {.num_tokens = 4,
          .loss = 1.0,
          .loss_sum = Error(1e-6),
          .grad_hidden_states = Error(1e-6),
          .grad_weight = Error(2e-6),
          .grad_bias = Error(1e-6)};
}

TEST(CheckReport, EveryErrorCounts) {
  EXPECT_TRUE(GoodCheck().Passed());
  EXPECT_EQ(GoodCheck().WorstGradError(), 2e-6);
  EXPECT_THAT(RenderCheck(GoodCheck()), Not(HasSubstr("OVER")));
  for (reference::OutputError CheckReport::*field :
       {&CheckReport::loss_sum, &CheckReport::grad_hidden_states, &CheckReport::grad_weight,
        &CheckReport::grad_bias}) {
    for (double bad : {2e-5, std::numeric_limits<double>::quiet_NaN()}) {
      CheckReport check = GoodCheck();
      (check.*field).rel = bad;
      EXPECT_FALSE(check.Passed());
      EXPECT_THAT(RenderCheck(check), HasSubstr("OVER THE LIMIT"));
    }
    CheckReport check = GoodCheck();
    (check.*field).max_abs = 2.0;
    EXPECT_FALSE(check.Passed());
    EXPECT_THAT(RenderCheck(check), HasSubstr("largest single error 2.00e+00, limit 1.00e+00"));
  }
}

TEST(CheckReport, ColumnsStandUnderTheirTitles) {
  const std::vector<std::string> lines = absl::StrSplit(RenderCheck(GoodCheck()), '\n');
  for (const auto& [title, number] : {std::pair("relative error", "2.00e-06"),
                                      {"plain dense", "4.00e-06"},
                                      {"limit", "1.00e-05"}}) {
    const size_t title_end = lines[0].find(title) + std::string(title).size();
    EXPECT_EQ(lines[3].find(number) + 8, title_end) << title;
  }
}

TEST(Report, MemoryShowsThePeakBesideDenseLogits) {
  const MemoryFacts facts{.peak_bytes = 35 << 20,
                          .source = "http://localhost:1/metrics",
                          .tokens_per_step = 2048,
                          .vocab_size = 8192,
                          .dtype = DType::kBFloat16};
  const std::string text = RenderMemory(facts);
  EXPECT_THAT(text, HasSubstr("35.0 MiB"));
  EXPECT_THAT(text, HasSubstr("logits 32.0 MiB"));
  EXPECT_EQ(DenseLogitsOfStep(facts).logits_bytes, int64_t{2048} * 8192 * 2);
}

}  // namespace
}  // namespace lmhead::demo
