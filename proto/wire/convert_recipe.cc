// The loss recipe: which options make sense together, and their defaults.

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "proto/wire/field_checks.h"

namespace lmhead {
namespace {

using Distillation = v1::DistillationSpec;
using Policy = v1::PolicySpec;

// The domain enums carry wire values; these hold them to it.
static_assert(static_cast<int>(Divergence::kForwardKl) == Distillation::DIVERGENCE_FORWARD_KL);
static_assert(static_cast<int>(Divergence::kReverseKl) == Distillation::DIVERGENCE_REVERSE_KL);
static_assert(static_cast<int>(Divergence::kJsd) == Distillation::DIVERGENCE_JSD);
static_assert(static_cast<int>(Divergence::kTopkForwardKl) ==
              Distillation::DIVERGENCE_TOPK_FORWARD_KL);
static_assert(static_cast<int>(TopkMass::kNone) == Distillation::TOPK_MASS_UNSPECIFIED);
static_assert(static_cast<int>(TopkMass::kRenormalise) == Distillation::TOPK_MASS_RENORMALISE);
static_assert(static_cast<int>(TopkMass::kKeep) == Distillation::TOPK_MASS_KEEP);
static_assert(static_cast<int>(TopkMass::kTail) == Distillation::TOPK_MASS_TAIL);
static_assert(static_cast<int>(TeacherVocabulary::kEqual) == Distillation::VOCABULARY_UNSPECIFIED);
static_assert(static_cast<int>(TeacherVocabulary::kCommon) == Distillation::VOCABULARY_COMMON);
static_assert(static_cast<int>(TeacherVocabulary::kPad) == Distillation::VOCABULARY_PAD);
static_assert(static_cast<int>(PolicyKind::kCoefficients) == Policy::KIND_COEFFICIENTS);
static_assert(static_cast<int>(PolicyKind::kClipped) == Policy::KIND_CLIPPED);

// An option that what was chosen does not have must not be set: it would be ignored.
// `why_not` finishes the sentence: "is set, but ".
absl::Status CheckUnset(std::string_view field, bool is_set, std::string_view why_not) {
  if (!is_set) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is set, but %s: leave it out", field, why_not));
}

absl::Status CheckClassWeights(const v1::LossRecipe& proto, int64_t vocab_size) {
  if (proto.class_weights().empty()) return absl::OkStatus();
  if (proto.class_weights_size() != vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("recipe.class_weights has %d entries, want none or the head's %d",
                        proto.class_weights_size(), vocab_size));
  }
  for (int i = 0; i < proto.class_weights_size(); ++i) {
    const float weight = proto.class_weights(i);
    if (std::isfinite(weight) && weight >= 0.0f) continue;
    return CheckNotNegative(absl::StrFormat("recipe.class_weights[%d]", i), weight);
  }
  return absl::OkStatus();
}

// 0 is a default of 1.
absl::Status CheckTemperature(std::string_view field, float value) {
  if (value == 0.0f || IsTemperature(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %g, want %g to %g, or 0 for 1", field,
                                                    value, kTemperatureMin, kTemperatureMax));
}

// Options of the cross entropy, where there is none.
absl::Status CheckNoCrossEntropyOptions(const v1::LossRecipe& proto, std::string_view why_not) {
  return FirstError({CheckUnset("recipe.label_smoothing", proto.label_smoothing() != 0.0f, why_not),
                     CheckUnset("recipe.z_loss", proto.z_loss() != 0.0f, why_not),
                     CheckUnset("recipe.class_weights", !proto.class_weights().empty(), why_not)});
}

// --- Distillation -------------------------------------------------------------------------------

absl::Status CheckEnums(const Distillation& proto) {
  if (!Distillation::Divergence_IsValid(proto.divergence()) ||
      proto.divergence() == Distillation::DIVERGENCE_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("recipe.distillation.divergence is %d, want DIVERGENCE_FORWARD_KL, "
                        "DIVERGENCE_REVERSE_KL, DIVERGENCE_JSD or DIVERGENCE_TOPK_FORWARD_KL",
                        proto.divergence()));
  }
  if (!Distillation::TopkMass_IsValid(proto.topk_mass())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "recipe.distillation.topk_mass is %d, which is no TopkMass", proto.topk_mass()));
  }
  if (!Distillation::Vocabulary_IsValid(proto.vocabulary())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "recipe.distillation.vocabulary is %d, which is no Vocabulary", proto.vocabulary()));
  }
  return absl::OkStatus();
}

// A teacher head's options, of a divergence that has one.
absl::Status CheckTeacherHead(const Distillation& proto) {
  const char* const not_topk = "only DIVERGENCE_TOPK_FORWARD_KL has a top-k teacher";
  if (proto.teacher_head().empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "recipe.distillation.teacher_head is empty, but %s is against a head of this server: name "
        "it",
        Distillation::Divergence_Name(proto.divergence())));
  }
  return FirstError(
      {ValidateName("recipe.distillation.teacher_head", proto.teacher_head()),
       CheckUnset("recipe.distillation.top_k", proto.top_k() != 0, not_topk),
       CheckUnset("recipe.distillation.topk_mass",
                  proto.topk_mass() != Distillation::TOPK_MASS_UNSPECIFIED, not_topk),
       DTypeFromProto(proto.teacher_hidden_dtype(), "recipe.distillation.teacher_hidden_dtype")
           .status()});
}

// A top-k teacher's options.
absl::Status CheckTopkTeacher(const Distillation& proto) {
  const char* const no_head = "the teacher of DIVERGENCE_TOPK_FORWARD_KL comes with the chunks";
  if (proto.topk_mass() == Distillation::TOPK_MASS_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        "recipe.distillation.topk_mass is not stated for DIVERGENCE_TOPK_FORWARD_KL: want "
        "TOPK_MASS_RENORMALISE, TOPK_MASS_KEEP or TOPK_MASS_TAIL");
  }
  return FirstError(
      {CheckRange("recipe.distillation.top_k", proto.top_k(), 1, kTopKMax),
       CheckUnset("recipe.distillation.teacher_head", !proto.teacher_head().empty(), no_head),
       CheckUnset("recipe.distillation.teacher_hidden_dtype",
                  proto.teacher_hidden_dtype() != v1::DTYPE_UNSPECIFIED, no_head),
       CheckUnset("recipe.distillation.paired_stream", proto.paired_stream(), no_head),
       CheckUnset("recipe.distillation.vocabulary",
                  proto.vocabulary() != Distillation::VOCABULARY_UNSPECIFIED, no_head)});
}

absl::Status CheckDistillation(const v1::LossRecipe& recipe) {
  const Distillation& proto = recipe.distillation();
  const bool is_topk = proto.divergence() == Distillation::DIVERGENCE_TOPK_FORWARD_KL;
  const bool is_jsd = proto.divergence() == Distillation::DIVERGENCE_JSD;
  const float beta = proto.jsd_beta();
  return FirstError(
      {CheckEnums(proto), is_topk ? CheckTopkTeacher(proto) : CheckTeacherHead(proto),
       CheckTemperature("recipe.distillation.kl_temperature", proto.kl_temperature()),
       CheckNumber("recipe.distillation.jsd_beta", beta, beta >= 0.0f && beta <= 1.0f, "in [0, 1]"),
       CheckUnset("recipe.distillation.jsd_beta", beta != 0.0f && !is_jsd,
                  "only DIVERGENCE_JSD has it"),
       CheckNotNegative("recipe.distillation.cross_entropy_weight", proto.cross_entropy_weight()),
       CheckNotNegative("recipe.distillation.divergence_weight", proto.divergence_weight()),
       proto.cross_entropy_weight() != 0.0f
           ? absl::OkStatus()
           : CheckNoCrossEntropyOptions(
                 recipe,
                 "the cross-entropy term has weight 0 (distillation.cross_entropy_weight)")});
}

absl::StatusOr<DistillationSpec> DistillationFromProto(const v1::LossRecipe& recipe) {
  if (absl::Status status = CheckDistillation(recipe); !status.ok()) return status;
  const Distillation& proto = recipe.distillation();
  DistillationSpec spec;
  spec.divergence = static_cast<Divergence>(proto.divergence());
  spec.teacher_head = proto.teacher_head();
  spec.kl_temperature = proto.kl_temperature() == 0.0f ? 1.0f : proto.kl_temperature();
  spec.scale_by_temperature_squared = proto.scale_by_temperature_squared();
  spec.jsd_beta = proto.jsd_beta();
  spec.top_k = proto.top_k();
  spec.topk_mass = static_cast<TopkMass>(proto.topk_mass());
  spec.cross_entropy_weight = proto.cross_entropy_weight();
  spec.divergence_weight = proto.divergence_weight() == 0.0f ? 1.0f : proto.divergence_weight();
  if (proto.teacher_hidden_dtype() != v1::DTYPE_UNSPECIFIED) {
    spec.teacher_hidden_dtype = static_cast<DType>(proto.teacher_hidden_dtype());
  }
  spec.paired_stream = proto.paired_stream();
  spec.vocabulary = static_cast<TeacherVocabulary>(proto.vocabulary());
  // At its ends the Jensen-Shannon divergence is defined as the KL; its formula tends to 0 there.
  if (spec.divergence == Divergence::kJsd && (spec.jsd_beta == 0.0f || spec.jsd_beta == 1.0f)) {
    spec.divergence = spec.jsd_beta == 0.0f ? Divergence::kForwardKl : Divergence::kReverseKl;
    spec.jsd_beta = 0.0f;
  }
  return spec;
}

v1::DistillationSpec DistillationToProto(const DistillationSpec& spec) {
  v1::DistillationSpec proto;
  proto.set_divergence(static_cast<Distillation::Divergence>(spec.divergence));
  proto.set_teacher_head(spec.teacher_head);
  proto.set_kl_temperature(spec.kl_temperature);
  proto.set_scale_by_temperature_squared(spec.scale_by_temperature_squared);
  proto.set_jsd_beta(spec.jsd_beta);
  proto.set_top_k(spec.top_k);
  proto.set_topk_mass(static_cast<Distillation::TopkMass>(spec.topk_mass));
  proto.set_cross_entropy_weight(spec.cross_entropy_weight);
  proto.set_divergence_weight(spec.divergence_weight);
  if (spec.divergence != Divergence::kTopkForwardKl) {
    proto.set_teacher_hidden_dtype(DTypeToProto(spec.teacher_hidden_dtype));
  }
  proto.set_paired_stream(spec.paired_stream);
  proto.set_vocabulary(static_cast<Distillation::Vocabulary>(spec.vocabulary));
  return proto;
}

// --- Policies -----------------------------------------------------------------------------------

absl::Status CheckCoefficients(const Policy& proto) {
  const char* const not_clipped = "only KIND_CLIPPED has it, and the kind is KIND_COEFFICIENTS";
  return FirstError(
      {CheckUnset("recipe.policy.clip_low", proto.clip_low() != 0.0f, not_clipped),
       CheckUnset("recipe.policy.clip_high", proto.clip_high() != 0.0f, not_clipped),
       CheckUnset("recipe.policy.entropy_coefficient", proto.entropy_coefficient() != 0.0f,
                  not_clipped),
       CheckUnset("recipe.policy.reference_kl_coefficient",
                  proto.reference_kl_coefficient() != 0.0f, not_clipped),
       CheckUnset("recipe.policy.dual_clip", proto.dual_clip() != 0.0f, not_clipped)});
}

absl::Status CheckClipped(const Policy& proto) {
  return FirstError(
      {CheckFraction("recipe.policy.clip_low", proto.clip_low()),
       CheckNotNegative("recipe.policy.clip_high", proto.clip_high()),
       CheckNumber("recipe.policy.entropy_coefficient", proto.entropy_coefficient(), true, ""),
       CheckNotNegative("recipe.policy.reference_kl_coefficient", proto.reference_kl_coefficient()),
       CheckNumber("recipe.policy.dual_clip", proto.dual_clip(),
                   proto.dual_clip() == 0.0f || proto.dual_clip() > 1.0f,
                   "> 1, or 0 for no dual clip")});
}

absl::StatusOr<PolicySpec> PolicyFromProto(const v1::LossRecipe& recipe) {
  const Policy& proto = recipe.policy();
  absl::Status status = CheckNoCrossEntropyOptions(recipe, "a policy has no cross-entropy term");
  if (!status.ok()) return status;
  switch (proto.kind()) {
    case Policy::KIND_COEFFICIENTS:
      status = CheckCoefficients(proto);
      break;
    case Policy::KIND_CLIPPED:
      status = CheckClipped(proto);
      break;
    default:
      status = absl::InvalidArgumentError(absl::StrFormat(
          "recipe.policy.kind is %d, want KIND_COEFFICIENTS or KIND_CLIPPED", proto.kind()));
  }
  if (!status.ok()) return status;
  return PolicySpec{.kind = static_cast<PolicyKind>(proto.kind()),
                    .clip_low = proto.clip_low(),
                    .clip_high = proto.clip_high(),
                    .entropy_coefficient = proto.entropy_coefficient(),
                    .reference_kl_coefficient = proto.reference_kl_coefficient(),
                    .dual_clip = proto.dual_clip()};
}

v1::PolicySpec PolicyToProto(const PolicySpec& spec) {
  v1::PolicySpec proto;
  proto.set_kind(static_cast<Policy::Kind>(spec.kind));
  proto.set_clip_low(spec.clip_low);
  proto.set_clip_high(spec.clip_high);
  proto.set_entropy_coefficient(spec.entropy_coefficient);
  proto.set_reference_kl_coefficient(spec.reference_kl_coefficient);
  proto.set_dual_clip(spec.dual_clip);
  return proto;
}

}  // namespace

absl::StatusOr<LossRecipe> LossRecipeFromProto(const v1::LossRecipe& proto, int64_t vocab_size) {
  if (proto.has_distillation() && proto.has_policy()) {
    return absl::InvalidArgumentError(
        "recipe.distillation and recipe.policy are both set, want one of them: a stream has one "
        "objective");
  }
  LossRecipe recipe;
  if (proto.has_ignore_index()) recipe.ignore_index = proto.ignore_index();
  recipe.label_smoothing = proto.label_smoothing();
  recipe.z_loss = proto.z_loss();
  recipe.temperature = proto.temperature() == 0.0f ? 1.0f : proto.temperature();
  recipe.per_token_temperature = proto.per_token_temperature();
  recipe.token_weights = proto.token_weights();
  if (absl::Status status =
          FirstError({CheckFraction("recipe.label_smoothing", recipe.label_smoothing),
                      CheckNotNegative("recipe.z_loss", recipe.z_loss),
                      CheckTemperature("recipe.temperature", proto.temperature()),
                      CheckClassWeights(proto, vocab_size)});
      !status.ok()) {
    return status;
  }
  recipe.class_weights.assign(proto.class_weights().begin(), proto.class_weights().end());
  if (proto.has_distillation()) {
    absl::StatusOr<DistillationSpec> distillation = DistillationFromProto(proto);
    if (!distillation.ok()) return distillation.status();
    recipe.distillation = *std::move(distillation);
  }
  if (proto.has_policy()) {
    const absl::StatusOr<PolicySpec> policy = PolicyFromProto(proto);
    if (!policy.ok()) return policy.status();
    recipe.policy = *policy;
  }
  return recipe;
}

v1::LossRecipe LossRecipeToProto(const LossRecipe& recipe) {
  v1::LossRecipe proto;
  proto.set_ignore_index(recipe.ignore_index);
  proto.set_label_smoothing(recipe.label_smoothing);
  proto.set_z_loss(recipe.z_loss);
  proto.mutable_class_weights()->Add(recipe.class_weights.begin(), recipe.class_weights.end());
  proto.set_temperature(recipe.temperature);
  proto.set_per_token_temperature(recipe.per_token_temperature);
  proto.set_token_weights(recipe.token_weights);
  if (recipe.distillation.has_value()) {
    *proto.mutable_distillation() = DistillationToProto(*recipe.distillation);
  }
  if (recipe.policy.has_value()) *proto.mutable_policy() = PolicyToProto(*recipe.policy);
  return proto;
}

}  // namespace lmhead
