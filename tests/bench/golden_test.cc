#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/golden_case.h"
#include "bench/golden_report.h"
#include "kernels/reference/compare.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::bench {
namespace {

using reference::OutputError;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

std::string PathOf(const std::string& name) { return GoldenFolder() + "/" + name + ".safetensors"; }

class GoldenCaseFileTest : public ::testing::Test {
 protected:
  // A case file of these options and no tensors but the given ones, which are of one byte.
  std::string Write(const std::string& options, const std::vector<std::string>& tensors = {}) {
    nlohmann::json header = {{"__metadata__", {{"case", options}}}};
    for (size_t i = 0; i < tensors.size(); ++i) {
      header[tensors[i]] = {{"dtype", "U8"}, {"shape", {1}}, {"data_offsets", {i, i + 1}}};
    }
    const std::string text = header.dump();
    const uint64_t size = text.size();
    const std::string path = directory_.Path("case.safetensors");
    std::ofstream(path, std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&size), sizeof size) << text
        << std::string(tensors.size(), '\0');
    return path;
  }

  const TemporaryFolder directory_;
};

TEST(GoldenCaseTest, LoadsInputsOptionsAndResults) {
  const auto golden = LoadGoldenCase(PathOf("ce_everything"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_EQ(golden->name, "ce_everything");
  EXPECT_EQ(golden->tokens.num_tokens(), 7);
  EXPECT_THAT(golden->head.weight, SizeIs(37 * 16));
  EXPECT_THAT(golden->head.bias, SizeIs(37));
  EXPECT_THAT(golden->tokens.token_weights, SizeIs(7));
  EXPECT_EQ(golden->recipe.label_smoothing, 0.05);
  EXPECT_EQ(golden->recipe.temperature, 1.3);
  EXPECT_EQ(golden->head.softcap, 5.0);
  EXPECT_EQ(golden->head.logit_scale, 0.5);
  EXPECT_THAT(golden->unknown_fields, IsEmpty());
  EXPECT_THAT(golden->expected.at("grad_weight"), SizeIs(37 * 16));
  EXPECT_THAT(golden->expected.at("num_valid_tokens"), ElementsAre(6));
}

TEST(GoldenCaseTest, LoadsATeacherOfAnotherWidth) {
  const auto golden = LoadGoldenCase(PathOf("kl_teacher_wider_softcap"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  ASSERT_TRUE(golden->teacher.has_value());
  EXPECT_EQ(golden->teacher->hidden_size, 24);
  EXPECT_EQ(golden->teacher->vocab_size, 37);
  EXPECT_EQ(golden->teacher->softcap, 4.0);
  EXPECT_EQ(golden->head.softcap, 6.0);
  EXPECT_THAT(golden->tokens.teacher_hidden_states, SizeIs(7 * 24));
  const LossRecipe recipe = RecipeOf(*golden, "other", DType::kBFloat16);
  EXPECT_EQ(recipe.distillation->teacher_head, "other");
  EXPECT_EQ(recipe.distillation->teacher_hidden_dtype, DType::kBFloat16);
}

TEST(GoldenCaseTest, LoadsEveryObjective) {
  const auto recipe = [](const std::string& name) {
    const auto golden = LoadGoldenCase(PathOf(name));
    EXPECT_TRUE(golden.ok()) << golden.status();
    return RecipeOf(*golden);
  };
  EXPECT_EQ(recipe("mix_ce_kl").distillation,
            (DistillationSpec{.divergence = Divergence::kForwardKl,
                              .teacher_head = "teacher",
                              .kl_temperature = 1.5f,
                              .scale_by_temperature_squared = true,
                              .cross_entropy_weight = 0.3f,
                              .divergence_weight = 0.7f}));
  EXPECT_EQ(recipe("topk_tail").distillation,
            (DistillationSpec{.divergence = Divergence::kTopkForwardKl,
                              .kl_temperature = 1.5f,
                              .top_k = 5,
                              .topk_mass = TopkMass::kTail}));
  EXPECT_EQ(recipe("jsd_0.3").distillation->jsd_beta, 0.3f);
  EXPECT_EQ(recipe("jsd_0.0").distillation->divergence, Divergence::kForwardKl);
  EXPECT_EQ(recipe("jsd_1.0").distillation->divergence, Divergence::kReverseKl);
  EXPECT_EQ(recipe("policy").policy, PolicySpec());
  EXPECT_EQ(recipe("policy").temperature, 0.8f);
}

TEST_F(GoldenCaseFileTest, WhatItDoesNotKnowIsListed) {
  const auto golden = LoadGoldenCase(Write(
      R"({"name":"x","num_tokens":1,"hidden_size":1,"vocab_size":1,"loss":"hinge","margin":2.0,"topk_mass":"drop"})"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_THAT(golden->unknown_fields,
              UnorderedElementsAre("loss=hinge", "margin=2.0", "topk_mass=drop"));
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
  EXPECT_FALSE(LoadGoldenCase(directory_.Path("none.safetensors")).ok());
}

OutputError Compare(double got, double exact) {
  return reference::CompareOutput("lse", {got}, {exact}, {exact}, DType::kFloat32);
}

std::vector<CaseReport> SomeReports() {
  return {{.name = "good", .outputs = {{"lse", Compare(2, 2)}}},
          {.name = "bad",
           .status = CaseStatus::kFailed,
           .detail = "retain: lse is off",
           .outputs = {{"lse", Compare(3, 2)}}},
          {.name = "later", .status = CaseStatus::kNotYet, .detail = "loss=forward_kl"}};
}

TEST(GoldenReportTest, TableNamesWorstErrorsFailuresAndWhatIsMissing) {
  const std::string text = RenderTable(SomeReports());
  EXPECT_THAT(text, HasSubstr("5.0e-01!"));
  EXPECT_THAT(text, HasSubstr("PASS"));
  EXPECT_THAT(text, HasSubstr("5.0e-01 (bad; plain dense 0.0e+00), absolute 1.0e+00 (bad)"));
  EXPECT_THAT(text, HasSubstr("\n  plain dense "));
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
  EXPECT_DOUBLE_EQ(json["cases"][1]["outputs"]["lse"]["plain_rel"], 0.0);
  EXPECT_GT(json["cases"][1]["outputs"]["lse"]["rel_limit"], 0.0);
  EXPECT_EQ(json["cases"][2]["status"], "not_yet");
}

}  // namespace
}  // namespace lmhead::bench
