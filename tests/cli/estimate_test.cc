#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/local_server.h"
#include "server/memory/memory_plan.h"
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

// A vocabulary that neither the ranks nor the replicas divide.
constexpr char kOddHead[] = "--seq 8192 --vocab 50257 --hidden 520 --bias ";

HeadSpec OddHead(bool trainable = true) {
  HeadSpec spec = {.vocab_size = 50257,
                   .hidden_size = 520,
                   .weight_dtype = DType::kBFloat16,
                   .has_bias = true,
                   .trainable = trainable};
  spec.optimizer.kind = trainable ? OptimizerKind::kAdamW : OptimizerKind::kNone;
  return spec;
}

void ExpectPlan(const nlohmann::json& got, const MemoryPlan& want) {
  EXPECT_EQ(got["schedule"], std::string(ScheduleName(want.schedule)));
  EXPECT_EQ(got["total_bytes"], want.TotalBytes());
  EXPECT_EQ(got["batch_tokens"], want.batch_tokens);
  EXPECT_EQ(got["vocab_tile"], want.vocab_tile);
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const std::string name(MemoryCategoryName(static_cast<MemoryCategory>(i)));
    EXPECT_EQ(got["categories"][name], want.bytes[i]) << name;
  }
}

// The schedules of `json` are those of the head, each with the bytes that the memory plan has.
void ExpectPlans(const nlohmann::json& json, const HeadSpec& spec, const PlanOptions& options) {
  EXPECT_EQ(json["num_ranks"], options.num_ranks * options.num_replicas);
  EXPECT_EQ(json["num_replicas"], options.num_replicas);
  const auto schedules = SchedulesOf(spec);
  ASSERT_EQ(json["plans"].size(), schedules.size());
  for (size_t i = 0; i < schedules.size(); ++i) {
    ExpectPlan(json["plans"][i], PlanForSchedule(spec, schedules[i], options));
  }
}

struct EstimateLayout {
  int32_t num_ranks = 1;  // In each replica.
  int32_t num_replicas = 1;

  std::string Flags() const {
    return absl::StrCat("--ranks=", num_ranks * num_replicas, " --replicas=", num_replicas, " ");
  }
};

TEST(EstimateTest, RanksAndReplicasArePlannedAsTheServerPlansThem) {
  for (const EstimateLayout layout :
       {EstimateLayout{1, 1}, {3, 1}, {1, 2}, {1, 3}, {2, 2}, {3, 2}, {2, 4}}) {
    for (const BackendKind backend : {BackendKind::kCpu, BackendKind::kCuda}) {
      for (const bool frozen : {false, true}) {
        const std::string flags =
            absl::StrCat(kOddHead, layout.Flags(), frozen ? "--frozen " : "",
                         "--backend=", backend == BackendKind::kCpu ? "cpu" : "cuda");
        SCOPED_TRACE(flags);
        ExpectPlans(EstimateJson(flags), OddHead(!frozen),
                    {.backend = backend,
                     .num_ranks = layout.num_ranks,
                     .num_replicas = layout.num_replicas});
      }
    }
  }
}

TEST(EstimateTest, ReplicasKeepTheStateOnceAndTheRatioCountsEveryRank) {
  const auto plan_of = [](const std::string& flags) {
    return EstimateJson(kOddHead + flags)["plans"][0];
  };
  const nlohmann::json one = plan_of("");
  const nlohmann::json four = plan_of("--replicas=4");  // A rank each.
  for (const char* name : {"weight", "grad_weight"}) {
    EXPECT_EQ(four["categories"][name], one["categories"][name]) << name;
  }
  for (const char* name : {"master_weight", "optimizer_state"}) {
    const int64_t whole = one["categories"][name];
    EXPECT_LT(4 * four["categories"][name].get<int64_t>() - whole, whole / 1000) << name;
  }
  const nlohmann::json json = EstimateJson(absl::StrCat(kOddHead, "--ranks=4 --replicas=2"));
  const double on_all_ranks = 4.0 * json["plans"][0]["total_bytes"].get<double>();
  EXPECT_NEAR(json["ratio"].get<double>(),
              json["dense"]["total_bytes"].get<double>() / on_all_ranks, 1e-9);
  EXPECT_THAT(Estimate(absl::StrCat(kOddHead, "--ranks=4 --replicas=2")).output,
              HasSubstr("backend, 4 ranks in 2 replicas, bytes of each"));
}

// A service of two replicas, each of two ranks.
class EstimateServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = LocalServer::Start(PathBesideTest("lmhead"),
                                     {"--backend=cpu", "--ranks=4", "--replicas=2",
                                      absl::StrCat("--memory_limit_bytes=", kLimitBytes)});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::string Ask(const std::string& flags) const {
    return absl::StrCat(kOddHead, "--address=", server_->address(), " ", flags);
  }

  static constexpr int64_t kLimitBytes = int64_t{600} << 20;
  std::unique_ptr<LocalServer> server_;
};

TEST_F(EstimateServiceTest, TheServicePlansForItsOwnLayoutUnlessTold) {
  PlanOptions options = {.num_ranks = 2, .num_replicas = 2};
  const nlohmann::json json = EstimateJson(Ask(""));
  ExpectPlans(json, OddHead(), options);
  EXPECT_EQ(json["backend"], "cpu");
  EXPECT_EQ(json["address"], server_->address());
  EXPECT_EQ(json["available_bytes"], kLimitBytes);
  options.budget_bytes = kLimitBytes;
  EXPECT_EQ(json["chosen"], std::string(ScheduleName(PlanHead(OddHead(), options)->schedule)));
  EXPECT_EQ(json["dense"], EstimateJson(kOddHead)["dense"]);
  EXPECT_THAT(Estimate(Ask("")).output,
              HasSubstr(absl::StrCat("lmhead at ", server_->address(),
                                     " with the cpu backend, 4 ranks in 2 replicas")));

  ExpectPlans(EstimateJson(Ask("--ranks=6 --replicas=3")), OddHead(),
              {.num_ranks = 2, .num_replicas = 3});
  ExpectPlans(EstimateJson(Ask("--ranks=6")), OddHead(), {.num_ranks = 3, .num_replicas = 2});
  ExpectPlans(EstimateJson(Ask("--replicas=1")), OddHead(), {.num_ranks = 4});
  ExpectPlans(EstimateJson(Ask("--frozen --replicas=4")), OddHead(/*trainable=*/false),
              {.num_ranks = 1, .num_replicas = 4});
}

TEST_F(EstimateServiceTest, WhatDoesNotFitIsSaid) {
  const CommandResult large = Estimate(Ask("--vocab 1000000"));
  EXPECT_EQ(large.exit_code, 0) << large.output;
  EXPECT_THAT(large.output, HasSubstr("that are free on each rank: delete a head"));
  EXPECT_TRUE(EstimateJson(Ask("--vocab 1000000"))["chosen"].is_null());
}

TEST_F(EstimateServiceTest, WhatCannotBeAskedIsNamed) {
  const auto error = [&](const std::string& flags) {
    const CommandResult result = Estimate(Ask(flags));
    EXPECT_EQ(result.exit_code, 2) << flags << "\n" << result.output;
    return result.output;
  };
  EXPECT_THAT(error("--replicas=3"),
              HasSubstr("num_replicas is 3, wanted a divisor of num_ranks, 4 (the server's)"));
  EXPECT_THAT(error("--ranks=3"),
              HasSubstr("num_replicas is 2 (the server's), wanted a divisor of num_ranks, 3"));
  EXPECT_THAT(error("--replicas=-1"), HasSubstr("num_replicas is -1, wanted 1 to 1024"));
  EXPECT_THAT(error("--backend=cpu"), HasSubstr("the service's own with --address"));
  EXPECT_THAT(error("--memory_limit_bytes=5"), HasSubstr("the service's own with --address"));
  const std::string address = server_->address();
  server_.reset();
  const CommandResult gone = Estimate(absl::StrCat(kOddHead, "--address=", address));
  EXPECT_EQ(gone.exit_code, 1);
  EXPECT_THAT(gone.output, HasSubstr(address));
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
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --ranks 22 --replicas 2"),
              HasSubstr("--ranks is 22; wanted at most --vocab, 10, for each of --replicas"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --ranks 4 --replicas 3"),
              HasSubstr("--replicas is 3; wanted a divisor of --ranks, 4"));
  EXPECT_THAT(error("--vocab 10 --hidden 10 --seq 5 --replicas 0"),
              HasSubstr("--replicas is 0; wanted 1 to 1024"));
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
