// Between the messages of lmhead.v1 and the domain types, with every rule of the .proto comments
// checked on the way in.
//
// …FromProto() fills in defaults and refuses what the comments forbid: INVALID_ARGUMENT naming the
// field, what was got and what is wanted. Jensen-Shannon divergences with beta 0 or 1 become the KL
// divergences that they are.
// …ToProto() writes what …FromProto() accepts: the two are inverse on validated values.

#ifndef LMHEAD_PROTO_WIRE_CONVERT_H_
#define LMHEAD_PROTO_WIRE_CONVERT_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lmhead/v1/loss.pb.h"
#include "lmhead/v1/types.pb.h"
#include "proto/types/dtype.h"
#include "proto/types/head_spec.h"
#include "proto/types/loss_recipe.h"

namespace lmhead {

// OK when `name` is 1 to kNameLengthMax characters of [A-Za-z0-9._-]. `what` is how the error calls
// it: "head name", "worker name".
absl::Status ValidateName(std::string_view what, std::string_view name);

// `field` is how the error calls it: "hidden_dtype".
absl::StatusOr<DType> DTypeFromProto(v1::DType dtype, std::string_view field);
v1::DType DTypeToProto(DType dtype);

v1::Schedule ScheduleToProto(Schedule schedule);

// Whether a specification without a name is accepted: EstimateMemory plans for nameless heads.
enum class NameRule { kRequired, kMayBeEmpty };

absl::StatusOr<HeadSpec> HeadSpecFromProto(const v1::HeadSpec& proto,
                                           NameRule name_rule = NameRule::kRequired);
v1::HeadSpec HeadSpecToProto(const HeadSpec& spec);

// `vocab_size` is that of the head: class_weights has as many entries, or none.
absl::StatusOr<LossRecipe> LossRecipeFromProto(const v1::LossRecipe& proto, int64_t vocab_size);
v1::LossRecipe LossRecipeToProto(const LossRecipe& recipe);

absl::StatusOr<OutputSpec> OutputSpecFromProto(const v1::OutputSpec& proto);
v1::OutputSpec OutputSpecToProto(const OutputSpec& outputs);

LossSums LossSumsFromProto(const v1::LossSums& proto);
v1::LossSums LossSumsToProto(const LossSums& sums);

StageTimings StageTimingsFromProto(const v1::StageTimings& proto);
v1::StageTimings StageTimingsToProto(const StageTimings& timings);

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_CONVERT_H_
