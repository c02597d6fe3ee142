#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

CommandResult Estimate(const std::string& flags) {
  return RunCommand(absl::StrCat("'", PathBesideTest("lmhead"), "' estimate ", flags, " 2>&1"));
}

constexpr char kExample[] = "--batch 1 --seq 131072 --vocab 131072 --hidden 4096 --dtype bf16 ";
constexpr int64_t kGiB = int64_t{1} << 30;

nlohmann::json EstimateJson(const std::string& flags) {
  const CommandResult result = Estimate(flags + " --json");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  return nlohmann::json::parse(result.output, nullptr, /*allow_exceptions=*/false);
}

TEST(EstimateTest, TextSetsDenseLogitsBesideThePlans) {
  const CommandResult result = Estimate(kExample);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("logits, bfloat16                          32.000 GiB"));
  EXPECT_THAT(result.output, HasSubstr("total                                    192.000 GiB"));
  EXPECT_THAT(result.output, HasSubstr("optimizer_state            4.000 GiB       4.000 GiB"));
  EXPECT_THAT(result.output, HasSubstr("retain       recompute"));
  EXPECT_THAT(result.output, HasSubstr("chosen: retain"));
}

TEST(EstimateTest, JsonHoldsDenseLogitsPlansAndChoice) {
  const nlohmann::json json = EstimateJson(kExample);
  EXPECT_EQ(json["dense"]["logits_bytes"], 32 * kGiB);
  EXPECT_EQ(json["dense"]["total_bytes"], 192 * kGiB);
  EXPECT_EQ(json["chosen"], "retain");
  ASSERT_EQ(json["plans"].size(), 2u);
  EXPECT_EQ(json["plans"][0]["schedule"], "retain");
  EXPECT_EQ(json["plans"][1]["schedule"], "recompute");
  for (const auto& plan : json["plans"]) {
    EXPECT_EQ(plan["categories"]["weight"], 1 * kGiB);
    EXPECT_EQ(plan["categories"]["master_weight"], 2 * kGiB);
    EXPECT_EQ(plan["categories"]["grad_weight"], 2 * kGiB);
    EXPECT_EQ(plan["categories"]["optimizer_state"], 4 * kGiB);
    int64_t sum = 0;
    for (const auto& [name, bytes] : plan["categories"].items()) sum += bytes.get<int64_t>();
    EXPECT_EQ(plan["total_bytes"], sum);
  }
  EXPECT_LT(json["plans"][1]["total_bytes"], json["plans"][0]["total_bytes"]);
}

TEST(EstimateTest, TheChoiceFollowsTheLimit) {
  const nlohmann::json unbounded = EstimateJson(kExample);
  const auto with_limit = [](int64_t bytes) {
    return EstimateJson(kExample + std::string("--memory_limit_bytes=") + std::to_string(bytes));
  };
  const auto total = [&](int plan) {
    return unbounded["plans"][plan]["total_bytes"].get<int64_t>();
  };
  EXPECT_EQ(with_limit(total(0))["chosen"], "retain");
  EXPECT_EQ(with_limit(total(0) - 1)["chosen"], "recompute");
  EXPECT_TRUE(with_limit(total(1) - 1)["chosen"].is_null());
  EXPECT_THAT(Estimate(std::string(kExample) + "--memory_limit_bytes=1000").output,
              HasSubstr("none fits"));
}

TEST(EstimateTest, FlagsChangeThePlan) {
  const std::string base = "--seq 8192 --vocab 50000 --hidden 512 --backend cpu ";
  const auto category = [&](const std::string& flags, const char* name) {
    return EstimateJson(base + flags)["plans"][0]["categories"][name].get<int64_t>();
  };
  const int64_t elements = 50000 * 512;
  EXPECT_EQ(category("--dtype fp32", "weight"), 4 * elements);
  EXPECT_EQ(category("--dtype fp32", "master_weight"), 0);
  EXPECT_EQ(category("--dtype fp32 --bias", "weight"), 4 * elements + 4 * 50000);
  EXPECT_EQ(category("--optimizer sgd", "optimizer_state"), 0);
  EXPECT_EQ(category("--optimizer sgd_momentum", "optimizer_state"), 4 * elements);
  EXPECT_EQ(category("--ranks 2", "weight"), elements);
  EXPECT_EQ(category("--batch_tokens 100", "logits_scratch"), 100 * 50000 * 4);
  const nlohmann::json frozen = EstimateJson(base + "--frozen");
  ASSERT_EQ(frozen["plans"].size(), 1u);
  EXPECT_EQ(frozen["chosen"], "frozen");
  EXPECT_EQ(frozen["plans"][0]["categories"]["grad_weight"], 0);
  EXPECT_EQ(frozen["plans"][0]["categories"]["optimizer_state"], 0);
}

TEST(EstimateTest, BadFlagsAreNamedAndExitWithTwo) {
  const auto error = [](const std::string& flags) {
    const CommandResult result = Estimate(flags);
    EXPECT_EQ(result.exit_code, 2) << flags << "\n" << result.output;
    return result.output;
  };
  EXPECT_THAT(error(""), HasSubstr("--vocab is 0"));
  EXPECT_THAT(error("--vocab 10"), HasSubstr("--hidden is 0"));
  EXPECT_THAT(error("--vocab 10 --hidden 10"), HasSubstr("--seq is 0"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --batch 0"), HasSubstr("--batch is 0"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --ranks 11"), HasSubstr("--ranks is 11"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --dtype int8"), HasSubstr("--dtype is 'int8'"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --optimizer lion"),
              HasSubstr("--optimizer is 'lion'"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --backend tpu"),
              HasSubstr("--backend is 'tpu'"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --memory_limit_bytes=-1"),
              HasSubstr("--memory_limit_bytes is -1"));
  EXPECT_THAT(error("--vocab 1000000000 --hidden 10 --seq 1000000000 --batch 1000"),
              HasSubstr("more than 2^59 logits"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 more"), HasSubstr("got 'more'"));
}

}  // namespace
}  // namespace lmhead
