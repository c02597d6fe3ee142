#include "proto/wire/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "proto/types/limits.h"

namespace lmhead {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

v1::HeadSpec GoodHead() {
  v1::HeadSpec spec;
  spec.set_name("lm");
  spec.set_vocab_size(1000);
  spec.set_hidden_size(64);
  spec.set_weight_dtype(v1::DTYPE_BFLOAT16);
  spec.set_trainable(true);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  return spec;
}

v1::HeadSpec GoodFrozenHead() {
  v1::HeadSpec spec = GoodHead();
  spec.set_trainable(false);
  spec.clear_optimizer();
  return spec;
}

TEST(HeadSpec, DefaultsAreFilledIn) {
  const auto spec = HeadSpecFromProto(GoodHead());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name, "lm");
  EXPECT_EQ(spec->vocab_size, 1000);
  EXPECT_EQ(spec->hidden_size, 64);
  EXPECT_EQ(spec->weight_dtype, DType::kBFloat16);
  EXPECT_EQ(spec->logit_scale, 1.0f);
  EXPECT_EQ(spec->softcap, 0.0f);
  EXPECT_EQ(spec->schedule, Schedule::kAuto);
  EXPECT_EQ(spec->optimizer.kind, OptimizerKind::kAdamW);
  EXPECT_EQ(spec->optimizer.beta1, 0.9);
  EXPECT_EQ(spec->optimizer.beta2, 0.999);
  EXPECT_EQ(spec->optimizer.eps, 1e-8);
  EXPECT_EQ(spec->weight_init.kind, WeightInitKind::kNone);
}

TEST(HeadSpec, AFrozenHeadNeedsNoOptimizer) {
  const auto spec = HeadSpecFromProto(GoodFrozenHead());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->optimizer.kind, OptimizerKind::kNone);
}

TEST(HeadSpec, ConversionsAreInverse) {
  v1::HeadSpec adamw = GoodHead();
  adamw.set_has_bias(true);
  adamw.set_logit_scale(-0.5f);
  adamw.set_softcap(30.0f);
  adamw.set_schedule(v1::SCHEDULE_RECOMPUTE);
  adamw.set_batch_tokens(512);
  adamw.mutable_optimizer()->set_beta1(0.0);
  adamw.mutable_optimizer()->set_weight_decay(0.1);
  adamw.mutable_optimizer()->set_decay_bias(true);
  adamw.mutable_weight_init()->set_kind(v1::WeightInit::KIND_NORMAL);
  adamw.mutable_weight_init()->set_std(0.02);
  adamw.mutable_weight_init()->set_seed(42);
  v1::HeadSpec sgd = GoodHead();
  sgd.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  sgd.mutable_optimizer()->set_momentum(0.9);
  v1::HeadSpec frozen = GoodFrozenHead();
  frozen.set_schedule(v1::SCHEDULE_FROZEN);
  frozen.mutable_weight_init()->set_kind(v1::WeightInit::KIND_ZEROS);
  for (const v1::HeadSpec& proto : {adamw, sgd, frozen}) {
    const auto spec = HeadSpecFromProto(proto);
    ASSERT_TRUE(spec.ok()) << spec.status();
    const auto again = HeadSpecFromProto(HeadSpecToProto(*spec));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, *spec);
  }
  EXPECT_EQ(HeadSpecFromProto(adamw)->optimizer.beta1, 0.0);
}

TEST(HeadSpec, AnEstimateNeedsNoName) {
  v1::HeadSpec spec = GoodHead();
  spec.clear_name();
  EXPECT_FALSE(HeadSpecFromProto(spec).ok());
  EXPECT_TRUE(HeadSpecFromProto(spec, NameRule::kMayBeEmpty).ok());
  spec.set_name("no spaces");
  EXPECT_FALSE(HeadSpecFromProto(spec, NameRule::kMayBeEmpty).ok());
}

struct BadHead {
  const char* says;
  void (*change)(v1::HeadSpec*);
};

class HeadSpecRules : public testing::TestWithParam<BadHead> {};

TEST_P(HeadSpecRules, AreChecked) {
  v1::HeadSpec spec = GoodHead();
  GetParam().change(&spec);
  const absl::Status status = HeadSpecFromProto(spec).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    All, HeadSpecRules,
    testing::Values(
        BadHead{"head name is empty", [](v1::HeadSpec* s) { s->clear_name(); }},
        BadHead{"head name has 129 characters",
                [](v1::HeadSpec* s) { s->set_name(std::string(129, 'a')); }},
        BadHead{"head name has byte 0x20 at position 1", [](v1::HeadSpec* s) { s->set_name("a b"); }},
        BadHead{"head name has byte 0x2f", [](v1::HeadSpec* s) { s->set_name("../etc"); }},
        BadHead{"vocab_size is 0", [](v1::HeadSpec* s) { s->set_vocab_size(0); }},
        BadHead{"vocab_size is -1", [](v1::HeadSpec* s) { s->set_vocab_size(-1); }},
        BadHead{"vocab_size is", [](v1::HeadSpec* s) { s->set_vocab_size(kVocabSizeMax + 1); }},
        BadHead{"hidden_size is 0", [](v1::HeadSpec* s) { s->set_hidden_size(0); }},
        BadHead{"hidden_size is", [](v1::HeadSpec* s) { s->set_hidden_size(kHiddenSizeMax + 1); }},
        BadHead{"weight_dtype is not stated", [](v1::HeadSpec* s) { s->clear_weight_dtype(); }},
        BadHead{"weight_dtype is DTYPE_FLOAT16",
                [](v1::HeadSpec* s) { s->set_weight_dtype(v1::DTYPE_FLOAT16); }},
        BadHead{"weight_dtype is 9",
                [](v1::HeadSpec* s) { s->set_weight_dtype(static_cast<v1::DType>(9)); }},
        BadHead{"logit_scale is nan", [](v1::HeadSpec* s) { s->set_logit_scale(kNan); }},
        BadHead{"logit_scale is inf", [](v1::HeadSpec* s) { s->set_logit_scale(kInfinity); }},
        BadHead{"softcap is -1", [](v1::HeadSpec* s) { s->set_softcap(-1.0f); }},
        BadHead{"softcap is inf", [](v1::HeadSpec* s) { s->set_softcap(kInfinity); }},
        BadHead{"batch_tokens is -1", [](v1::HeadSpec* s) { s->set_batch_tokens(-1); }},
        BadHead{"batch_tokens is",
                [](v1::HeadSpec* s) { s->set_batch_tokens(kBatchTokensMax + 1); }},
        BadHead{"optimizer.kind is not stated", [](v1::HeadSpec* s) { s->clear_optimizer(); }},
        BadHead{"optimizer.kind is 9",
                [](v1::HeadSpec* s) {
                  s->mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(9));
                }},
        BadHead{"optimizer.kind is OPTIMIZER_KIND_ADAMW, but trainable is false",
                [](v1::HeadSpec* s) { s->set_trainable(false); }},
        BadHead{"optimizer.beta1 is 1",
                [](v1::HeadSpec* s) { s->mutable_optimizer()->set_beta1(1.0); }},
        BadHead{"optimizer.beta2 is -0.1",
                [](v1::HeadSpec* s) { s->mutable_optimizer()->set_beta2(-0.1); }},
        BadHead{"optimizer.eps is 0", [](v1::HeadSpec* s) { s->mutable_optimizer()->set_eps(0.0); }},
        BadHead{"optimizer.weight_decay is -1",
                [](v1::HeadSpec* s) { s->mutable_optimizer()->set_weight_decay(-1.0); }},
        BadHead{"optimizer.weight_decay is nan",
                [](v1::HeadSpec* s) { s->mutable_optimizer()->set_weight_decay(kNan); }},
        BadHead{"optimizer.momentum is set",
                [](v1::HeadSpec* s) { s->mutable_optimizer()->set_momentum(0.9); }},
        BadHead{"optimizer.momentum is 1",
                [](v1::HeadSpec* s) {
                  s->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
                  s->mutable_optimizer()->set_momentum(1.0);
                }},
        BadHead{"optimizer.beta1 is set",
                [](v1::HeadSpec* s) {
                  s->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
                  s->mutable_optimizer()->set_beta1(0.9);
                }},
        BadHead{"optimizer.decay_bias is set",
                [](v1::HeadSpec* s) {
                  s->mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_NONE);
                  s->mutable_optimizer()->set_decay_bias(true);
                }},
        BadHead{"schedule is SCHEDULE_FROZEN, but trainable is true",
                [](v1::HeadSpec* s) { s->set_schedule(v1::SCHEDULE_FROZEN); }},
        BadHead{"schedule is SCHEDULE_EVAL",
                [](v1::HeadSpec* s) { s->set_schedule(v1::SCHEDULE_EVAL); }},
        BadHead{"schedule is SCHEDULE_RETAIN, but trainable is false",
                [](v1::HeadSpec* s) {
                  *s = GoodFrozenHead();
                  s->set_schedule(v1::SCHEDULE_RETAIN);
                }},
        BadHead{"schedule is 9",
                [](v1::HeadSpec* s) { s->set_schedule(static_cast<v1::Schedule>(9)); }},
        BadHead{"weight_init.std is 0",
                [](v1::HeadSpec* s) {
                  s->mutable_weight_init()->set_kind(v1::WeightInit::KIND_NORMAL);
                }},
        BadHead{"weight_init.std is 0.5, but weight_init.kind is KIND_ZEROS",
                [](v1::HeadSpec* s) {
                  s->mutable_weight_init()->set_kind(v1::WeightInit::KIND_ZEROS);
                  s->mutable_weight_init()->set_std(0.5);
                }},
        BadHead{"weight_init.kind is 9", [](v1::HeadSpec* s) {
                  s->mutable_weight_init()->set_kind(static_cast<v1::WeightInit::Kind>(9));
                }}));

TEST(LossRecipe, DefaultsAreFilledIn) {
  const auto recipe = LossRecipeFromProto(v1::LossRecipe(), 10);
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(*recipe, LossRecipe());
  EXPECT_EQ(recipe->ignore_index, -100);
  EXPECT_EQ(recipe->temperature, 1.0f);
}

TEST(LossRecipe, ConversionsAreInverse) {
  const LossRecipe recipe{.ignore_index = 0,
                          .label_smoothing = 0.1f,
                          .z_loss = 1e-4f,
                          .class_weights = {1.0f, 0.0f, 2.5f},
                          .temperature = 0.7f,
                          .per_token_temperature = true,
                          .token_weights = true};
  const auto again = LossRecipeFromProto(LossRecipeToProto(recipe), 3);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, recipe);
}

TEST(LossRecipe, RulesAreChecked) {
  struct Case {
    const char* says;
    void (*change)(v1::LossRecipe*);
  };
  const Case cases[] = {
      {"recipe.label_smoothing is 1", [](v1::LossRecipe* r) { r->set_label_smoothing(1.0f); }},
      {"recipe.label_smoothing is nan", [](v1::LossRecipe* r) { r->set_label_smoothing(kNan); }},
      {"recipe.z_loss is -1", [](v1::LossRecipe* r) { r->set_z_loss(-1.0f); }},
      {"recipe.temperature is -1", [](v1::LossRecipe* r) { r->set_temperature(-1.0f); }},
      {"recipe.temperature is inf", [](v1::LossRecipe* r) { r->set_temperature(kInfinity); }},
      {"recipe.class_weights has 1 entries", [](v1::LossRecipe* r) { r->add_class_weights(1); }},
      {"recipe.class_weights[1] is -2",
       [](v1::LossRecipe* r) {
         r->add_class_weights(1);
         r->add_class_weights(-2);
         r->add_class_weights(1);
       }},
  };
  for (const Case& test : cases) {
    v1::LossRecipe recipe;
    test.change(&recipe);
    const absl::Status status = LossRecipeFromProto(recipe, 3).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.says));
  }
}

TEST(LossRecipe, WhatIsNotBuiltYetIsNamed) {
  v1::LossRecipe distillation;
  distillation.mutable_distillation();
  v1::LossRecipe policy;
  policy.mutable_policy();
  const absl::Status first = LossRecipeFromProto(distillation, 3).status();
  const absl::Status second = LossRecipeFromProto(policy, 3).status();
  EXPECT_TRUE(absl::IsUnimplemented(first));
  EXPECT_THAT(std::string(first.message()), HasSubstr("recipe.distillation"));
  EXPECT_TRUE(absl::IsUnimplemented(second));
  EXPECT_THAT(std::string(second.message()), HasSubstr("recipe.policy"));
}

TEST(OutputSpec, ConversionsAreInverse) {
  for (int bits = 0; bits < 64; ++bits) {
    const OutputSpec outputs{.grad_hidden_states = (bits & 1) != 0,
                             .token_loss = (bits & 2) != 0,
                             .logprob = (bits & 4) != 0,
                             .lse = (bits & 8) != 0,
                             .entropy = (bits & 16) != 0,
                             .argmax = (bits & 32) != 0};
    const auto again = OutputSpecFromProto(OutputSpecToProto(outputs));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, outputs);
  }
}

TEST(OutputSpec, TopKIsNotBuiltYet) {
  v1::OutputSpec outputs;
  outputs.set_top_k(5);
  const absl::Status status = OutputSpecFromProto(outputs).status();
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("outputs.top_k"));
  outputs.set_top_k(-1);
  EXPECT_TRUE(absl::IsInvalidArgument(OutputSpecFromProto(outputs).status()));
}

TEST(LossSums, ConversionsAreInverse) {
  const LossSums sums{.loss_sum = 1.5,
                      .num_tokens = 2,
                      .num_valid_tokens = 3,
                      .num_nonfinite_rows = 4,
                      .num_correct = 5,
                      .weight_sum = 6.5,
                      .cross_entropy_sum = 7.5,
                      .z_loss_sum = 8.5,
                      .entropy_sum = 9.5};
  EXPECT_EQ(LossSumsFromProto(LossSumsToProto(sums)), sums);
}

TEST(StageTimings, ConversionsAreInverse) {
  const StageTimings timings = StageTimingsFromProto(StageTimingsToProto(
      {.queue_seconds = 1, .upload_seconds = 2, .compute_seconds = 3, .download_seconds = 4}));
  EXPECT_EQ(timings.queue_seconds, 1);
  EXPECT_EQ(timings.upload_seconds, 2);
  EXPECT_EQ(timings.compute_seconds, 3);
  EXPECT_EQ(timings.download_seconds, 4);
}

TEST(DType, EveryValue) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const auto again = DTypeFromProto(DTypeToProto(dtype), "hidden_dtype");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, dtype);
  }
  const absl::Status status = DTypeFromProto(v1::DTYPE_UNSPECIFIED, "hidden_dtype").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("hidden_dtype is not stated"));
}

}  // namespace
}  // namespace lmhead
