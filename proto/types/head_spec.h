// What a head is: the domain types behind lmhead.v1.HeadSpec. The comments there are the reference.

#ifndef LMHEAD_PROTO_TYPES_HEAD_SPEC_H_
#define LMHEAD_PROTO_TYPES_HEAD_SPEC_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/types/dtype.h"

namespace lmhead {

// Wire values (lmhead.v1.Schedule); kAuto lets the memory plan choose.
enum class Schedule : uint8_t { kAuto = 0, kEval = 1, kFrozen = 2, kRetain = 3, kRecompute = 4 };

// "auto", "eval", "frozen", "retain" or "recompute".
constexpr std::string_view ScheduleName(Schedule schedule) {
  switch (schedule) {
    case Schedule::kAuto:
      return "auto";
    case Schedule::kEval:
      return "eval";
    case Schedule::kFrozen:
      return "frozen";
    case Schedule::kRetain:
      return "retain";
    case Schedule::kRecompute:
      return "recompute";
  }
  return "unknown schedule";
}

// Wire values (lmhead.v1.OptimizerKind).
enum class OptimizerKind : uint8_t { kNone = 1, kAdamW = 2, kSgd = 3 };

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kNone;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double momentum = 0.0;
  bool decay_bias = false;

  friend bool operator==(const OptimizerSpec&, const OptimizerSpec&) = default;
};

// Wire values (lmhead.v1.WeightInit.Kind); kNone means that every row must be loaded.
enum class WeightInitKind : uint8_t { kNone = 0, kZeros = 1, kNormal = 2 };

struct WeightInit {
  WeightInitKind kind = WeightInitKind::kNone;
  double std = 0.0;
  uint64_t seed = 0;

  friend bool operator==(const WeightInit&, const WeightInit&) = default;
};

// A validated specification has every default filled in.
struct HeadSpec {
  std::string name;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  DType weight_dtype = DType::kFloat32;  // kFloat32 or kBFloat16.
  bool has_bias = false;
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0 means none.
  bool trainable = false;
  OptimizerSpec optimizer;
  Schedule schedule = Schedule::kAuto;
  int64_t batch_tokens = 0;  // 0 means the server's default.
  WeightInit weight_init;
  int64_t teacher_hidden_size = 0;   // Of the widest teacher; 0 means none.
  int32_t top_k_max = 0;             // Of top-k outputs and top-k teachers.
  int64_t partition_vocab_size = 0;  // See ShardRange; 0 means vocab_size.

  friend bool operator==(const HeadSpec&, const HeadSpec&) = default;
};

}  // namespace lmhead

#endif  // LMHEAD_PROTO_TYPES_HEAD_SPEC_H_
