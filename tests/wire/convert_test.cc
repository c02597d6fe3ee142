#include "proto/wire/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
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
  adamw.set_teacher_hidden_size(96);
  adamw.set_top_k_max(20);
  adamw.set_partition_vocab_size(2048);
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
        BadHead{"teacher_hidden_size is -1",
                [](v1::HeadSpec* s) { s->set_teacher_hidden_size(-1); }},
        BadHead{"top_k_max is 1025", [](v1::HeadSpec* s) { s->set_top_k_max(1025); }},
        BadHead{"top_k_max is 4, want 0 to 3",
                [](v1::HeadSpec* s) {
                  s->set_vocab_size(3);
                  s->set_top_k_max(4);
                }},
        BadHead{"partition_vocab_size is -1",
                [](v1::HeadSpec* s) { s->set_partition_vocab_size(-1); }},
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
      {"recipe.temperature is nan", [](v1::LossRecipe* r) { r->set_temperature(kNan); }},
      {"recipe.temperature is 1e-07, want 1e-06 to 1e+06",
       [](v1::LossRecipe* r) { r->set_temperature(1e-7f); }},
      {"recipe.temperature is 1e+07", [](v1::LossRecipe* r) { r->set_temperature(1e7f); }},
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

LossRecipe DistillationRecipe(const DistillationSpec& spec) {
  LossRecipe recipe;
  recipe.distillation = spec;
  return recipe;
}

LossRecipe PolicyRecipe(const PolicySpec& spec) {
  LossRecipe recipe;
  recipe.policy = spec;
  return recipe;
}

TEST(LossRecipe, ConversionsOfObjectivesAreInverse) {
  const DistillationSpec jsd{.divergence = Divergence::kJsd,
                             .teacher_head = "teacher",
                             .kl_temperature = 2.0f,
                             .scale_by_temperature_squared = true,
                             .jsd_beta = 0.3f,
                             .cross_entropy_weight = 0.25f,
                             .divergence_weight = 0.75f,
                             .teacher_hidden_dtype = DType::kBFloat16,
                             .paired_stream = true,
                             .vocabulary = TeacherVocabulary::kCommon};
  const DistillationSpec topk{
      .divergence = Divergence::kTopkForwardKl, .top_k = 7, .topk_mass = TopkMass::kTail};
  const PolicySpec coefficients{.kind = PolicyKind::kCoefficients};
  const PolicySpec clipped{.kind = PolicyKind::kClipped,
                           .clip_low = 0.2f,
                           .clip_high = 0.28f,
                           .entropy_coefficient = 0.01f,
                           .reference_kl_coefficient = 0.001f,
                           .dual_clip = 3.0f};
  for (const LossRecipe& recipe : {DistillationRecipe(jsd), DistillationRecipe(topk),
                                   PolicyRecipe(coefficients), PolicyRecipe(clipped)}) {
    const auto again = LossRecipeFromProto(LossRecipeToProto(recipe), 30);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, recipe);
  }
}

v1::LossRecipe GoodDistillation() {
  v1::LossRecipe recipe;
  v1::DistillationSpec& spec = *recipe.mutable_distillation();
  spec.set_divergence(v1::DistillationSpec::DIVERGENCE_FORWARD_KL);
  spec.set_teacher_head("teacher");
  spec.set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
  return recipe;
}

v1::LossRecipe GoodTopk() {
  v1::LossRecipe recipe;
  v1::DistillationSpec& spec = *recipe.mutable_distillation();
  spec.set_divergence(v1::DistillationSpec::DIVERGENCE_TOPK_FORWARD_KL);
  spec.set_top_k(4);
  spec.set_topk_mass(v1::DistillationSpec::TOPK_MASS_KEEP);
  return recipe;
}

v1::LossRecipe GoodClipped() {
  v1::LossRecipe recipe;
  recipe.mutable_policy()->set_kind(v1::PolicySpec::KIND_CLIPPED);
  return recipe;
}

v1::LossRecipe GoodCoefficients() {
  v1::LossRecipe recipe;
  recipe.mutable_policy()->set_kind(v1::PolicySpec::KIND_COEFFICIENTS);
  return recipe;
}

TEST(LossRecipe, DistillationDefaultsAreFilledIn) {
  const auto recipe = LossRecipeFromProto(GoodDistillation(), 3);
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->distillation->kl_temperature, 1.0f);
  EXPECT_EQ(recipe->distillation->divergence_weight, 1.0f);
  EXPECT_EQ(recipe->distillation->cross_entropy_weight, 0.0f);
}

TEST(LossRecipe, JsdAtItsEndsIsTheKlItIs) {
  for (const auto& [beta, divergence] :
       {std::pair(0.0f, Divergence::kForwardKl), std::pair(1.0f, Divergence::kReverseKl),
        std::pair(0.5f, Divergence::kJsd)}) {
    v1::LossRecipe proto = GoodDistillation();
    proto.mutable_distillation()->set_divergence(v1::DistillationSpec::DIVERGENCE_JSD);
    proto.mutable_distillation()->set_jsd_beta(beta);
    const auto recipe = LossRecipeFromProto(proto, 3);
    ASSERT_TRUE(recipe.ok()) << recipe.status();
    EXPECT_EQ(recipe->distillation->divergence, divergence);
    EXPECT_EQ(recipe->distillation->jsd_beta, beta == 0.5f ? 0.5f : 0.0f);
  }
}

// A recipe that is good until it is changed, and then refused with these words.
struct BadRecipe {
  const char* says;
  v1::LossRecipe (*good)();
  void (*change)(v1::LossRecipe*);
};

void ExpectRefused(std::span<const BadRecipe> cases) {
  for (const BadRecipe& test : cases) {
    v1::LossRecipe recipe = test.good();
    ASSERT_TRUE(LossRecipeFromProto(recipe, 3).ok());
    test.change(&recipe);
    const absl::Status status = LossRecipeFromProto(recipe, 3).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << test.says << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.says));
  }
}

TEST(LossRecipe, DistillationsThatMakeNoSenseAreRefused) {
  using Spec = v1::DistillationSpec;
  const BadRecipe cases[] = {
      {"recipe.distillation and recipe.policy are both set", GoodTopk,
       [](v1::LossRecipe* r) { *r->mutable_policy() = GoodClipped().policy(); }},
      {"recipe.label_smoothing is set, but a policy", GoodClipped,
       [](v1::LossRecipe* r) { r->set_label_smoothing(0.1f); }},
      {"recipe.z_loss is set, but a policy", GoodCoefficients,
       [](v1::LossRecipe* r) { r->set_z_loss(0.1f); }},
      {"recipe.class_weights is set, but the cross-entropy term has weight 0", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_class_weights()->Resize(3, 1.0f); }},
      {"recipe.z_loss is set, but the cross-entropy term has weight 0", GoodDistillation,
       [](v1::LossRecipe* r) { r->set_z_loss(0.1f); }},
      {"divergence is 0", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->clear_divergence(); }},
      {"divergence is 9", GoodDistillation,
       [](v1::LossRecipe* r) {
         r->mutable_distillation()->set_divergence(static_cast<Spec::Divergence>(9));
       }},
      {"vocabulary is 9", GoodDistillation,
       [](v1::LossRecipe* r) {
         r->mutable_distillation()->set_vocabulary(static_cast<Spec::Vocabulary>(9));
       }},
      {"topk_mass is 9", GoodTopk,
       [](v1::LossRecipe* r) {
         r->mutable_distillation()->set_topk_mass(static_cast<Spec::TopkMass>(9));
       }},
      {"cross_entropy_weight is -1", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_cross_entropy_weight(-1.0f); }},
      {"divergence_weight is -2", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_divergence_weight(-2.0f); }},
      {"divergence_weight is nan", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_divergence_weight(kNan); }},
      {"kl_temperature is -1", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_kl_temperature(-1.0f); }},
      {"kl_temperature is 1e-07, want 1e-06 to 1e+06", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_kl_temperature(1e-7f); }},
      {"kl_temperature is 1e+07", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_kl_temperature(1e7f); }},
      {"kl_temperature is inf", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_kl_temperature(kInfinity); }},
      {"jsd_beta is 1.5", GoodDistillation,
       [](v1::LossRecipe* r) {
         r->mutable_distillation()->set_divergence(Spec::DIVERGENCE_JSD);
         r->mutable_distillation()->set_jsd_beta(1.5f);
       }},
      {"jsd_beta is set, but only DIVERGENCE_JSD", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_jsd_beta(0.5f); }},
      {"top_k is set, but only DIVERGENCE_TOPK_FORWARD_KL", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_top_k(4); }},
      {"topk_mass is set, but only DIVERGENCE_TOPK_FORWARD_KL", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_topk_mass(Spec::TOPK_MASS_TAIL); }},
      {"top_k is 0, want 1 to 1024", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->clear_top_k(); }},
      {"top_k is 1025, want 1 to 1024", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_top_k(1025); }},
      {"topk_mass is not stated", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->clear_topk_mass(); }},
      {"teacher_head is empty", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->clear_teacher_head(); }},
      {"teacher_head has byte 0x20", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_teacher_head("a b"); }},
      {"teacher_head is set, but the teacher of DIVERGENCE_TOPK", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_teacher_head("teacher"); }},
      {"teacher_hidden_dtype is not stated", GoodDistillation,
       [](v1::LossRecipe* r) { r->mutable_distillation()->clear_teacher_hidden_dtype(); }},
      {"teacher_hidden_dtype is set, but the teacher of", GoodTopk,
       [](v1::LossRecipe* r) {
         r->mutable_distillation()->set_teacher_hidden_dtype(v1::DTYPE_FLOAT32);
       }},
      {"paired_stream is set, but the teacher of", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_paired_stream(true); }},
      {"vocabulary is set, but the teacher of", GoodTopk,
       [](v1::LossRecipe* r) { r->mutable_distillation()->set_vocabulary(Spec::VOCABULARY_PAD); }},
  };
  ExpectRefused(cases);
}

TEST(LossRecipe, PoliciesThatMakeNoSenseAreRefused) {
  const BadRecipe cases[] = {
      {"recipe.policy.kind is 0", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->clear_kind(); }},
      {"clip_low is set, but only KIND_CLIPPED", GoodCoefficients,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_clip_low(0.2f); }},
      {"clip_high is set, but only KIND_CLIPPED", GoodCoefficients,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_clip_high(0.2f); }},
      {"entropy_coefficient is set, but only KIND_CLIPPED", GoodCoefficients,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_entropy_coefficient(0.2f); }},
      {"reference_kl_coefficient is set, but only KIND_CLIPPED", GoodCoefficients,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_reference_kl_coefficient(0.2f); }},
      {"dual_clip is set, but only KIND_CLIPPED", GoodCoefficients,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_dual_clip(3.0f); }},
      {"clip_low is 1, want a finite number in [0, 1)", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_clip_low(1.0f); }},
      {"clip_high is -0.5", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_clip_high(-0.5f); }},
      {"dual_clip is 1, want a finite number > 1", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_dual_clip(1.0f); }},
      {"dual_clip is -3", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_dual_clip(-3.0f); }},
      {"entropy_coefficient is nan", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_entropy_coefficient(kNan); }},
      {"reference_kl_coefficient is -1", GoodClipped,
       [](v1::LossRecipe* r) { r->mutable_policy()->set_reference_kl_coefficient(-1.0f); }},
  };
  ExpectRefused(cases);
}

TEST(OutputSpec, ConversionsAreInverse) {
  for (int bits = 0; bits < 64; ++bits) {
    const OutputSpec outputs{.grad_hidden_states = (bits & 1) != 0,
                             .token_loss = (bits & 2) != 0,
                             .logprob = (bits & 4) != 0,
                             .lse = (bits & 8) != 0,
                             .entropy = (bits & 16) != 0,
                             .argmax = (bits & 32) != 0,
                             .top_k = bits};
    const auto again = OutputSpecFromProto(OutputSpecToProto(outputs));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, outputs);
  }
}

TEST(OutputSpec, TopKIsBounded) {
  v1::OutputSpec outputs;
  for (const int32_t top_k : {-1, 1025}) {
    outputs.set_top_k(top_k);
    const absl::Status status = OutputSpecFromProto(outputs).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("outputs.top_k"));
  }
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
                      .entropy_sum = 9.5,
                      .divergence_sum = 10.5,
                      .policy_sum = -11.5,
                      .dropped_teacher_mass_sum = 12.5,
                      .num_clipped = 13,
                      .old_policy_kl_sum = 14.5};
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
