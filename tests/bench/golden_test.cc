#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/golden_case.h"
#include "bench/golden_compare.h"
#include "bench/golden_report.h"
#include "bench/plain_dense.h"
#include "tests/util/paths.h"

namespace lmhead::bench {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using ::testing::SizeIs;

std::string PathOf(const std::string& name) { return GoldenFolder() + "/" + name + ".safetensors"; }

class GoldenCaseFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/golden_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // A case file of these options and no tensors but the given ones, which are of one byte.
  std::string Write(const std::string& options, const std::vector<std::string>& tensors = {}) {
    nlohmann::json header = {{"__metadata__", {{"case", options}}}};
    for (size_t i = 0; i < tensors.size(); ++i) {
      header[tensors[i]] = {{"dtype", "U8"}, {"shape", {1}}, {"data_offsets", {i, i + 1}}};
    }
    const std::string text = header.dump();
    const uint64_t size = text.size();
    const std::string path = directory_ + "/case.safetensors";
    std::ofstream(path, std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&size), sizeof size) << text
        << std::string(tensors.size(), '\0');
    return path;
  }

  std::string directory_;
};

TEST(GoldenCaseTest, LoadsInputsOptionsAndResults) {
  const auto golden = LoadGoldenCase(PathOf("ce_everything"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_EQ(golden->name, "ce_everything");
  EXPECT_EQ(golden->num_tokens, 7);
  EXPECT_THAT(golden->weight, SizeIs(37 * 16));
  EXPECT_THAT(golden->bias, SizeIs(37));
  EXPECT_THAT(golden->token_weights, SizeIs(7));
  EXPECT_FLOAT_EQ(golden->recipe.label_smoothing, 0.05f);
  EXPECT_FLOAT_EQ(golden->recipe.temperature, 1.3f);
  EXPECT_FLOAT_EQ(golden->softcap, 5.0f);
  EXPECT_FLOAT_EQ(golden->logit_scale, 0.5f);
  EXPECT_THAT(golden->unknown_fields, IsEmpty());
  EXPECT_THAT(golden->expected.at("grad_weight"), SizeIs(37 * 16));
  EXPECT_THAT(golden->expected.at("num_valid_tokens"), ElementsAre(6));
}

TEST(GoldenCaseTest, WhatItDoesNotKnowIsListed) {
  const auto golden = LoadGoldenCase(PathOf("forward_kl_t2"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_THAT(golden->unknown_fields, Contains("loss=forward_kl"));
  EXPECT_THAT(golden->unknown_fields, Contains("kl_temperature=2.0"));
  EXPECT_THAT(golden->unknown_fields, Contains("teacher_hidden_states"));
}

TEST_F(GoldenCaseFileTest, UnknownTensorsAndOutputsAreListed) {
  const auto golden = LoadGoldenCase(
      Write(R"({"name":"x","num_tokens":1,"hidden_size":1,"vocab_size":1})", {"out.new", "old"}));
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_THAT(golden->unknown_fields, ElementsAre("old", "out.new"));
}

TEST_F(GoldenCaseFileTest, FilesThatAreNoCasesAreRefused) {
  const auto error = [&](const std::string& options) {
    const auto golden = LoadGoldenCase(Write(options));
    EXPECT_FALSE(golden.ok()) << options;
    return std::string(golden.status().message());
  };
  EXPECT_THAT(error("[1]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(error("{"), HasSubstr("not a JSON object"));
  EXPECT_THAT(error("{}"), HasSubstr("name"));
  EXPECT_THAT(error(R"({"name":1})"), HasSubstr("not a golden case"));
  EXPECT_THAT(error(R"({"name":"x","num_tokens":1,"hidden_size":1,"vocab_size":1})"),
              HasSubstr("hidden_states"));
  EXPECT_FALSE(LoadGoldenCase(directory_ + "/none.safetensors").ok());
}

// The yardstick itself: on every case that it knows, double precision gives the stored results,
// float32 is near and bfloat16 is coarser.
TEST(PlainDenseTest, AgreesWithTheExactResults) {
  int num_cases = 0;
  for (const auto& entry : std::filesystem::directory_iterator(GoldenFolder())) {
    const auto golden = LoadGoldenCase(entry.path().string());
    ASSERT_TRUE(golden.ok()) << golden.status();
    if (!golden->unknown_fields.empty()) continue;
    ++num_cases;
    const Outputs exact = ComputePlainDense(*golden, Arithmetic::kDouble);
    const Outputs float32 = ComputePlainDense(*golden, Arithmetic::kFloat32);
    EXPECT_EQ(exact.size(), golden->expected.size()) << golden->name;
    for (const auto& [name, expected] : golden->expected) {
      const auto rel = [&, &name = name, &expected = expected](const Outputs& outputs) {
        return CompareOutput(name, outputs.at(name), expected, expected, DType::kFloat32).rel;
      };
      EXPECT_LE(rel(exact), 1e-6) << golden->name << " " << name;
      // The largest offset, 4096, leaves 2^-12 of absolute precision to the logits.
      EXPECT_LE(rel(float32), golden->name == "ce_large_offset" ? 1e-3 : 2e-5)
          << golden->name << " " << name;
    }
  }
  EXPECT_GE(num_cases, 18);
}

TEST(PlainDenseTest, BFloat16IsCoarser) {
  const auto golden = LoadGoldenCase(PathOf("ce_plain")).value();
  const std::vector<double>& exact = golden.expected.at("grad_weight");
  const auto rel = [&](Arithmetic arithmetic) {
    const Outputs outputs = ComputePlainDense(golden, arithmetic);
    return CompareOutput("grad_weight", outputs.at("grad_weight"), exact, exact, DType::kFloat32)
        .rel;
  };
  EXPECT_LT(rel(Arithmetic::kFloat32), 1e-5);
  EXPECT_GT(rel(Arithmetic::kBFloat16), 1e-4);
  EXPECT_LT(rel(Arithmetic::kBFloat16), 5e-2);
}

OutputError Compare(const std::string& name, const std::vector<double>& got,
                    const std::vector<double>& exact, const std::vector<double>& plain) {
  return CompareOutput(name, got, exact, plain, DType::kFloat32);
}

TEST(CompareOutputTest, MeasuresRelativeAndAbsoluteError) {
  const OutputError error = Compare("lse", {3, 4.5}, {3, 4}, {3, 4});
  EXPECT_DOUBLE_EQ(error.rel, 0.1);
  EXPECT_DOUBLE_EQ(error.max_abs, 0.5);
  EXPECT_FALSE(error.Passed());
}

TEST(CompareOutputTest, TwiceThePlainErrorIsTheBound) {
  EXPECT_TRUE(Compare("lse", {3, 4.019}, {3, 4}, {3, 4.01}).Passed());
  EXPECT_FALSE(Compare("lse", {3, 4.021}, {3, 4}, {3, 4.01}).Passed());
  // Where the plain error happens to be nothing, a few roundings are allowed.
  EXPECT_TRUE(Compare("lse", {3, 4.000004}, {3, 4}, {3, 4}).Passed());
}

TEST(CompareOutputTest, ExactZerosMustBeZero) {
  EXPECT_TRUE(Compare("grad_weight", {0, 0}, {0, 0}, {0, 0}).Passed());
  EXPECT_FALSE(Compare("grad_weight", {0, 1e-30}, {0, 0}, {0, 0}).Passed());
}

// A certain row's entropy may underflow to something near 0, but no gradient or loss may.
TEST(CompareOutputTest, OnlyEntropyMayUnderflow) {
  EXPECT_TRUE(Compare("entropy", {0, 1e-30}, {0, 0}, {0, 0}).Passed());
  EXPECT_FALSE(Compare("entropy", {0, 1e-15}, {0, 0}, {0, 0}).Passed());
  EXPECT_FALSE(Compare("token_loss", {0, 1e-30}, {0, 0}, {0, 0}).Passed());
}

TEST(CompareOutputTest, NotANumberWrongSizesAndWrongCountsFail) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(Compare("lse", {nan}, {1}, {1}).Passed());
  EXPECT_FALSE(Compare("lse", {nan, 1}, {1, 1}, {1, 1}).Passed());
  EXPECT_FALSE(Compare("lse", {infinity}, {1}, {1}).Passed());
  EXPECT_FALSE(Compare("lse", {}, {1}, {1}).Passed());
  EXPECT_FALSE(Compare("argmax", {1, 2}, {1, 3}, {1, 3}).Passed());
  EXPECT_TRUE(Compare("argmax", {1, 3}, {1, 3}, {1, 3}).Passed());
  EXPECT_FALSE(Compare("num_valid_tokens", {6}, {7}, {7}).Passed());
}

TEST(CompareOutputTest, WorseningKeepsTheLargestAndNeverHidesWhatIsNotANumber) {
  OutputError error = Compare("lse", {1.5}, {1}, {1});
  error.Worsen(Compare("lse", {1.25}, {1}, {1}));
  EXPECT_DOUBLE_EQ(error.rel, 0.5);
  error.Worsen(Compare("lse", {std::numeric_limits<double>::quiet_NaN()}, {1}, {1}));
  error.Worsen(Compare("lse", {1}, {1}, {1}));
  EXPECT_FALSE(error.Passed());
  EXPECT_TRUE(std::isnan(error.rel));
}

std::vector<CaseReport> SomeReports() {
  return {{.name = "good", .outputs = {{"lse", Compare("lse", {2}, {2}, {2})}}},
          {.name = "bad",
           .status = CaseStatus::kFailed,
           .detail = "retain: lse is off",
           .outputs = {{"lse", Compare("lse", {3}, {2}, {2})}}},
          {.name = "later", .status = CaseStatus::kNotYet, .detail = "loss=forward_kl"}};
}

TEST(GoldenReportTest, TableNamesWorstErrorsFailuresAndWhatIsMissing) {
  const std::string text = RenderTable(SomeReports());
  EXPECT_THAT(text, HasSubstr("5.0e-01!"));
  EXPECT_THAT(text, HasSubstr("PASS"));
  EXPECT_THAT(text, HasSubstr("5.0e-01 (bad), absolute 1.0e+00 (bad)"));
  EXPECT_THAT(text, HasSubstr("FAIL: retain: lse is off"));
  EXPECT_THAT(text, HasSubstr("not yet: loss=forward_kl"));
  EXPECT_THAT(text, HasSubstr("1 passed, 1 failed, 1 not yet"));
}

TEST(GoldenReportTest, JsonHoldsTheSame) {
  const auto json = nlohmann::json::parse(RenderJson(SomeReports()));
  EXPECT_EQ(json["passed"], 1);
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json["not_yet"], 1);
  EXPECT_EQ(json["cases"][1]["name"], "bad");
  EXPECT_EQ(json["cases"][1]["status"], "failed");
  EXPECT_DOUBLE_EQ(json["cases"][1]["outputs"]["lse"]["rel"], 0.5);
  EXPECT_DOUBLE_EQ(json["cases"][1]["outputs"]["lse"]["max_abs"], 1.0);
  EXPECT_EQ(json["cases"][2]["status"], "not_yet");
}

}  // namespace
}  // namespace lmhead::bench
