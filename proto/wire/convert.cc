#include "proto/wire/convert.h"

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "proto/types/limits.h"
#include "proto/wire/field_checks.h"

namespace lmhead {
namespace {

// The domain enums carry wire values; these hold them to it.
static_assert(static_cast<int>(DType::kFloat32) == v1::DTYPE_FLOAT32);
static_assert(static_cast<int>(DType::kBFloat16) == v1::DTYPE_BFLOAT16);
static_assert(static_cast<int>(DType::kFloat16) == v1::DTYPE_FLOAT16);
static_assert(static_cast<int>(Schedule::kAuto) == v1::SCHEDULE_UNSPECIFIED);
static_assert(static_cast<int>(Schedule::kEval) == v1::SCHEDULE_EVAL);
static_assert(static_cast<int>(Schedule::kFrozen) == v1::SCHEDULE_FROZEN);
static_assert(static_cast<int>(Schedule::kRetain) == v1::SCHEDULE_RETAIN);
static_assert(static_cast<int>(Schedule::kRecompute) == v1::SCHEDULE_RECOMPUTE);
static_assert(static_cast<int>(OptimizerKind::kNone) == v1::OPTIMIZER_KIND_NONE);
static_assert(static_cast<int>(OptimizerKind::kAdamW) == v1::OPTIMIZER_KIND_ADAMW);
static_assert(static_cast<int>(OptimizerKind::kSgd) == v1::OPTIMIZER_KIND_SGD);
static_assert(static_cast<int>(WeightInitKind::kNone) == v1::WeightInit::KIND_UNSPECIFIED);
static_assert(static_cast<int>(WeightInitKind::kZeros) == v1::WeightInit::KIND_ZEROS);
static_assert(static_cast<int>(WeightInitKind::kNormal) == v1::WeightInit::KIND_NORMAL);

// A constant that the chosen optimizer does not have must not be set: it would be ignored.
absl::Status CheckUnused(std::string_view field, bool is_set, std::string_view kind) {
  if (!is_set) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "optimizer.%s is set, but optimizer %s has no such constant: leave it out", field, kind));
}

absl::StatusOr<OptimizerSpec> AdamWFromProto(const v1::OptimizerSpec& proto) {
  OptimizerSpec spec;
  spec.kind = OptimizerKind::kAdamW;
  if (proto.has_beta1()) spec.beta1 = proto.beta1();
  if (proto.has_beta2()) spec.beta2 = proto.beta2();
  if (proto.has_eps()) spec.eps = proto.eps();
  spec.weight_decay = proto.weight_decay();
  spec.decay_bias = proto.decay_bias();
  if (absl::Status status = FirstError(
          {CheckFraction("optimizer.beta1", spec.beta1),
           CheckFraction("optimizer.beta2", spec.beta2), CheckPositive("optimizer.eps", spec.eps),
           CheckNotNegative("optimizer.weight_decay", spec.weight_decay),
           CheckUnused("momentum", proto.momentum() != 0.0, "ADAMW")});
      !status.ok()) {
    return status;
  }
  return spec;
}

absl::StatusOr<OptimizerSpec> SgdFromProto(const v1::OptimizerSpec& proto) {
  OptimizerSpec spec;
  spec.kind = OptimizerKind::kSgd;
  spec.weight_decay = proto.weight_decay();
  spec.momentum = proto.momentum();
  spec.decay_bias = proto.decay_bias();
  if (absl::Status status =
          FirstError({CheckNotNegative("optimizer.weight_decay", spec.weight_decay),
                      CheckFraction("optimizer.momentum", spec.momentum),
                      CheckUnused("beta1", proto.has_beta1(), "SGD"),
                      CheckUnused("beta2", proto.has_beta2(), "SGD"),
                      CheckUnused("eps", proto.has_eps(), "SGD")});
      !status.ok()) {
    return status;
  }
  return spec;
}

absl::StatusOr<OptimizerSpec> NoOptimizerFromProto(const v1::OptimizerSpec& proto) {
  if (absl::Status status =
          FirstError({CheckUnused("beta1", proto.has_beta1(), "NONE"),
                      CheckUnused("beta2", proto.has_beta2(), "NONE"),
                      CheckUnused("eps", proto.has_eps(), "NONE"),
                      CheckUnused("weight_decay", proto.weight_decay() != 0.0, "NONE"),
                      CheckUnused("momentum", proto.momentum() != 0.0, "NONE"),
                      CheckUnused("decay_bias", proto.decay_bias(), "NONE")});
      !status.ok()) {
    return status;
  }
  return OptimizerSpec{};
}

absl::StatusOr<OptimizerSpec> OptimizerFromProto(const v1::OptimizerSpec& proto, bool trainable) {
  if (!trainable && proto.kind() != v1::OPTIMIZER_KIND_NONE &&
      proto.kind() != v1::OPTIMIZER_KIND_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("optimizer.kind is %s, but trainable is false: want OPTIMIZER_KIND_NONE",
                        v1::OptimizerKind_Name(proto.kind())));
  }
  switch (proto.kind()) {
    case v1::OPTIMIZER_KIND_ADAMW:
      return AdamWFromProto(proto);
    case v1::OPTIMIZER_KIND_SGD:
      return SgdFromProto(proto);
    case v1::OPTIMIZER_KIND_NONE:
      return NoOptimizerFromProto(proto);
    case v1::OPTIMIZER_KIND_UNSPECIFIED:
      if (!trainable) return NoOptimizerFromProto(proto);
      return absl::InvalidArgumentError(
          "optimizer.kind is not stated for a trainable head: want OPTIMIZER_KIND_ADAMW, "
          "OPTIMIZER_KIND_SGD or OPTIMIZER_KIND_NONE");
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("optimizer.kind is %d, which is no OptimizerKind", proto.kind()));
  }
}

absl::StatusOr<Schedule> ScheduleFromProto(v1::Schedule schedule, bool trainable) {
  if (!v1::Schedule_IsValid(schedule)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("schedule is %d, which is no Schedule", schedule));
  }
  const bool fits =
      schedule == v1::SCHEDULE_UNSPECIFIED ||
      (trainable ? schedule == v1::SCHEDULE_RETAIN || schedule == v1::SCHEDULE_RECOMPUTE
                 : schedule == v1::SCHEDULE_FROZEN);
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrFormat("schedule is %s, but trainable is %s: want %s", v1::Schedule_Name(schedule),
                        trainable ? "true" : "false",
                        trainable ? "SCHEDULE_RETAIN, SCHEDULE_RECOMPUTE or unspecified"
                                  : "SCHEDULE_FROZEN or unspecified"));
  }
  return static_cast<Schedule>(schedule);
}

absl::StatusOr<WeightInit> WeightInitFromProto(const v1::WeightInit& proto) {
  WeightInit init;
  switch (proto.kind()) {
    case v1::WeightInit::KIND_NORMAL:
      init.kind = WeightInitKind::kNormal;
      init.std = proto.std();
      init.seed = proto.seed();
      if (absl::Status status = CheckPositive("weight_init.std", init.std); !status.ok()) {
        return status;
      }
      return init;
    case v1::WeightInit::KIND_UNSPECIFIED:
    case v1::WeightInit::KIND_ZEROS:
      init.kind = static_cast<WeightInitKind>(proto.kind());
      if (proto.std() != 0.0) {
        return absl::InvalidArgumentError(
            absl::StrFormat("weight_init.std is %g, but weight_init.kind is %s: want KIND_NORMAL",
                            proto.std(), v1::WeightInit::Kind_Name(proto.kind())));
      }
      return init;
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("weight_init.kind is %d, which is no WeightInit.Kind", proto.kind()));
  }
}

}  // namespace

absl::Status ValidateName(std::string_view what, std::string_view name) {
  if (name.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s is empty, want 1 to %d characters of [A-Za-z0-9._-]", what, kNameLengthMax));
  }
  if (name.size() > static_cast<size_t>(kNameLengthMax)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %d characters, want 1 to %d", what, name.size(), kNameLengthMax));
  }
  for (size_t i = 0; i < name.size(); ++i) {
    const auto c = static_cast<unsigned char>(name[i]);
    if (absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-') continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has byte 0x%02x at position %d, want only [A-Za-z0-9._-]", what, c, i));
  }
  return absl::OkStatus();
}

absl::StatusOr<DType> DTypeFromProto(v1::DType dtype, std::string_view field) {
  switch (dtype) {
    case v1::DTYPE_FLOAT32:
    case v1::DTYPE_BFLOAT16:
    case v1::DTYPE_FLOAT16:
      return static_cast<DType>(dtype);
    case v1::DTYPE_UNSPECIFIED:
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s is not stated, want DTYPE_FLOAT32, DTYPE_BFLOAT16 or DTYPE_FLOAT16", field));
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("%s is %d, which is no DType", field, dtype));
  }
}

v1::DType DTypeToProto(DType dtype) { return static_cast<v1::DType>(dtype); }

v1::Schedule ScheduleToProto(Schedule schedule) { return static_cast<v1::Schedule>(schedule); }

absl::StatusOr<HeadSpec> HeadSpecFromProto(const v1::HeadSpec& proto, NameRule name_rule) {
  HeadSpec spec;
  spec.name = proto.name();
  spec.vocab_size = proto.vocab_size();
  spec.hidden_size = proto.hidden_size();
  spec.has_bias = proto.has_bias();
  spec.logit_scale = proto.logit_scale() == 0.0f ? 1.0f : proto.logit_scale();
  spec.softcap = proto.softcap();
  spec.trainable = proto.trainable();
  spec.batch_tokens = proto.batch_tokens();
  spec.teacher_hidden_size = proto.teacher_hidden_size();
  spec.top_k_max = proto.top_k_max();
  spec.partition_vocab_size = proto.partition_vocab_size();
  const bool nameless = name_rule == NameRule::kMayBeEmpty && spec.name.empty();
  if (absl::Status status = FirstError(
          {nameless ? absl::OkStatus() : ValidateName("head name", spec.name),
           CheckRange("vocab_size", spec.vocab_size, 1, kVocabSizeMax),
           CheckRange("hidden_size", spec.hidden_size, 1, kHiddenSizeMax),
           CheckNumber("logit_scale", spec.logit_scale, true, ""),
           CheckNotNegative("softcap", spec.softcap),
           CheckRange("batch_tokens", spec.batch_tokens, 0, kBatchTokensMax),
           CheckRange("teacher_hidden_size", spec.teacher_hidden_size, 0, kHiddenSizeMax),
           CheckRange("top_k_max", spec.top_k_max, 0, std::min<int64_t>(kTopKMax, spec.vocab_size)),
           CheckRange("partition_vocab_size", spec.partition_vocab_size, 0, kVocabSizeMax)});
      !status.ok()) {
    return status;
  }
  const absl::StatusOr<DType> dtype = DTypeFromProto(proto.weight_dtype(), "weight_dtype");
  if (!dtype.ok()) return dtype.status();
  if (*dtype == DType::kFloat16) {
    return absl::InvalidArgumentError(
        "weight_dtype is DTYPE_FLOAT16, which is for hidden states only: want DTYPE_FLOAT32 or "
        "DTYPE_BFLOAT16");
  }
  const auto optimizer = OptimizerFromProto(proto.optimizer(), spec.trainable);
  if (!optimizer.ok()) return optimizer.status();
  const auto schedule = ScheduleFromProto(proto.schedule(), spec.trainable);
  if (!schedule.ok()) return schedule.status();
  const auto weight_init = WeightInitFromProto(proto.weight_init());
  if (!weight_init.ok()) return weight_init.status();
  spec.weight_dtype = *dtype;
  spec.optimizer = *optimizer;
  spec.schedule = *schedule;
  spec.weight_init = *weight_init;
  return spec;
}

v1::HeadSpec HeadSpecToProto(const HeadSpec& spec) {
  v1::HeadSpec proto;
  proto.set_name(spec.name);
  proto.set_vocab_size(spec.vocab_size);
  proto.set_hidden_size(spec.hidden_size);
  proto.set_weight_dtype(DTypeToProto(spec.weight_dtype));
  proto.set_has_bias(spec.has_bias);
  proto.set_logit_scale(spec.logit_scale);
  proto.set_softcap(spec.softcap);
  proto.set_trainable(spec.trainable);
  proto.set_schedule(ScheduleToProto(spec.schedule));
  proto.set_batch_tokens(spec.batch_tokens);
  proto.set_teacher_hidden_size(spec.teacher_hidden_size);
  proto.set_top_k_max(spec.top_k_max);
  proto.set_partition_vocab_size(spec.partition_vocab_size);
  v1::OptimizerSpec& optimizer = *proto.mutable_optimizer();
  optimizer.set_kind(static_cast<v1::OptimizerKind>(spec.optimizer.kind));
  optimizer.set_weight_decay(spec.optimizer.weight_decay);
  optimizer.set_decay_bias(spec.optimizer.decay_bias);
  if (spec.optimizer.kind == OptimizerKind::kAdamW) {
    optimizer.set_beta1(spec.optimizer.beta1);
    optimizer.set_beta2(spec.optimizer.beta2);
    optimizer.set_eps(spec.optimizer.eps);
  }
  if (spec.optimizer.kind == OptimizerKind::kSgd) optimizer.set_momentum(spec.optimizer.momentum);
  v1::WeightInit& init = *proto.mutable_weight_init();
  init.set_kind(static_cast<v1::WeightInit::Kind>(spec.weight_init.kind));
  init.set_std(spec.weight_init.std);
  init.set_seed(spec.weight_init.seed);
  return proto;
}

absl::StatusOr<OutputSpec> OutputSpecFromProto(const v1::OutputSpec& proto) {
  if (absl::Status status = CheckRange("outputs.top_k", proto.top_k(), 0, kTopKMax); !status.ok()) {
    return status;
  }
  return OutputSpec{.grad_hidden_states = proto.grad_hidden_states(),
                    .token_loss = proto.token_loss(),
                    .logprob = proto.logprob(),
                    .lse = proto.lse(),
                    .entropy = proto.entropy(),
                    .argmax = proto.argmax(),
                    .top_k = proto.top_k()};
}

v1::OutputSpec OutputSpecToProto(const OutputSpec& outputs) {
  v1::OutputSpec proto;
  proto.set_grad_hidden_states(outputs.grad_hidden_states);
  proto.set_token_loss(outputs.token_loss);
  proto.set_logprob(outputs.logprob);
  proto.set_lse(outputs.lse);
  proto.set_entropy(outputs.entropy);
  proto.set_argmax(outputs.argmax);
  proto.set_top_k(outputs.top_k);
  return proto;
}

LossSums LossSumsFromProto(const v1::LossSums& proto) {
  return {.loss_sum = proto.loss_sum(),
          .num_tokens = proto.num_tokens(),
          .num_valid_tokens = proto.num_valid_tokens(),
          .num_nonfinite_rows = proto.num_nonfinite_rows(),
          .num_correct = proto.num_correct(),
          .weight_sum = proto.weight_sum(),
          .cross_entropy_sum = proto.cross_entropy_sum(),
          .z_loss_sum = proto.z_loss_sum(),
          .entropy_sum = proto.entropy_sum(),
          .divergence_sum = proto.divergence_sum(),
          .policy_sum = proto.policy_sum(),
          .dropped_teacher_mass_sum = proto.dropped_teacher_mass_sum(),
          .num_clipped = proto.num_clipped(),
          .old_policy_kl_sum = proto.old_policy_kl_sum()};
}

v1::LossSums LossSumsToProto(const LossSums& sums) {
  v1::LossSums proto;
  proto.set_loss_sum(sums.loss_sum);
  proto.set_num_tokens(sums.num_tokens);
  proto.set_num_valid_tokens(sums.num_valid_tokens);
  proto.set_num_nonfinite_rows(sums.num_nonfinite_rows);
  proto.set_num_correct(sums.num_correct);
  proto.set_weight_sum(sums.weight_sum);
  proto.set_cross_entropy_sum(sums.cross_entropy_sum);
  proto.set_z_loss_sum(sums.z_loss_sum);
  proto.set_entropy_sum(sums.entropy_sum);
  proto.set_divergence_sum(sums.divergence_sum);
  proto.set_policy_sum(sums.policy_sum);
  proto.set_dropped_teacher_mass_sum(sums.dropped_teacher_mass_sum);
  proto.set_num_clipped(sums.num_clipped);
  proto.set_old_policy_kl_sum(sums.old_policy_kl_sum);
  return proto;
}

StageTimings StageTimingsFromProto(const v1::StageTimings& proto) {
  return {.queue_seconds = proto.queue_seconds(),
          .upload_seconds = proto.upload_seconds(),
          .compute_seconds = proto.compute_seconds(),
          .download_seconds = proto.download_seconds()};
}

v1::StageTimings StageTimingsToProto(const StageTimings& timings) {
  v1::StageTimings proto;
  proto.set_queue_seconds(timings.queue_seconds);
  proto.set_upload_seconds(timings.upload_seconds);
  proto.set_compute_seconds(timings.compute_seconds);
  proto.set_download_seconds(timings.download_seconds);
  return proto;
}

}  // namespace lmhead
