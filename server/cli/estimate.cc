// lmhead estimate: what dense logits would take, and what the service plans instead.

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/head_spec.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/memory/memory_plan.h"

ABSL_FLAG(int64_t, batch, 1, "estimate: sequences of a micro-batch.");
ABSL_FLAG(int64_t, seq, 0, "estimate: tokens a sequence.");
ABSL_FLAG(bool, bias, false, "estimate: the head has a bias.");
ABSL_FLAG(bool, frozen, false, "estimate: the head is not trained: no gradient, no optimizer.");
ABSL_FLAG(std::string, optimizer, "adamw", "estimate: adamw, sgd or sgd_momentum.");
ABSL_FLAG(int64_t, teacher_hidden, 0,
          "estimate: columns of the widest teacher head that the head is distilled from; 0: none.");
ABSL_FLAG(int32_t, top_k_max, 0, "estimate: entries a token of top-k outputs and top-k teachers.");

namespace lmhead {
namespace {

constexpr int kExitUsage = 2;
constexpr int32_t kRanksMax = 1024;

// Dense logits and their copies take up to 12 bytes an element; more elements would overflow.
constexpr int64_t kDenseElementsMax = int64_t{1} << 59;

struct Estimate {
  HeadSpec spec;
  PlanOptions options;
  int64_t num_sequences = 0;
  int64_t sequence_length = 0;
  DenseLogits dense;
  std::vector<MemoryPlan> plans;     // Fastest first.
  std::optional<MemoryPlan> chosen;  // None when none fits the limit.

  int64_t num_tokens() const { return num_sequences * sequence_length; }
  int32_t all_ranks() const { return options.num_ranks * options.num_replicas; }
};

// What stands in for the dense logits: everything but the weight and its training state, which a
// trainer holds in any case.
int64_t WorkingBytes(const MemoryPlan& plan) {
  return plan[MemoryCategory::kLogitsScratch] + plan[MemoryCategory::kDeviceStaging] +
         plan[MemoryCategory::kCollective] + plan[MemoryCategory::kLibraryWorkspace];
}

absl::Status CheckRange(const char* flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s is %d; wanted %d to %d", flag, value, low, high));
}

absl::StatusOr<v1::DType> ParseDType(const std::string& name) {
  if (name.empty() || name == "bf16" || name == "bfloat16") return v1::DTYPE_BFLOAT16;
  if (name == "fp32" || name == "float32") return v1::DTYPE_FLOAT32;
  return absl::InvalidArgumentError(
      absl::StrCat("--dtype is '", name, "'; wanted bfloat16 (bf16) or float32 (fp32)"));
}

absl::StatusOr<v1::OptimizerSpec> ParseOptimizer(const std::string& name, bool frozen) {
  v1::OptimizerSpec spec;
  if (name == "adamw") {
    spec.set_kind(v1::OPTIMIZER_KIND_ADAMW);
  } else if (name == "sgd" || name == "sgd_momentum") {
    spec.set_kind(v1::OPTIMIZER_KIND_SGD);
    if (name == "sgd_momentum")
      spec.set_momentum(0.9);  // Any will do: the plan asks if there is one.
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--optimizer is '", name, "'; wanted adamw, sgd or sgd_momentum"));
  }
  if (frozen) {
    spec.Clear();
    spec.set_kind(v1::OPTIMIZER_KIND_NONE);
  }
  return spec;
}

absl::StatusOr<BackendKind> ParseBackend(const std::string& name) {
  if (name == "auto" || name == "cuda") return BackendKind::kCuda;
  if (name == "cpu") return BackendKind::kCpu;
  return absl::InvalidArgumentError(
      absl::StrCat("--backend is '", name, "'; wanted cuda, cpu or auto"));
}

absl::StatusOr<HeadSpec> SpecFromFlags() {
  const bool frozen = absl::GetFlag(FLAGS_frozen);
  const auto dtype = ParseDType(absl::GetFlag(FLAGS_dtype));
  if (!dtype.ok()) return dtype.status();
  const auto optimizer = ParseOptimizer(absl::GetFlag(FLAGS_optimizer), frozen);
  if (!optimizer.ok()) return optimizer.status();
  const absl::Status checks[] = {
      CheckRange("vocab", absl::GetFlag(FLAGS_vocab), 1, kVocabSizeMax),
      CheckRange("hidden", absl::GetFlag(FLAGS_hidden), 1, kHiddenSizeMax),
      CheckRange("teacher_hidden", absl::GetFlag(FLAGS_teacher_hidden), 0, kHiddenSizeMax),
      CheckRange("top_k_max", absl::GetFlag(FLAGS_top_k_max), 0,
                 std::min<int64_t>(kTopKMax, absl::GetFlag(FLAGS_vocab))),
      CheckRange("batch_tokens", absl::GetFlag(FLAGS_batch_tokens), 0, kBatchTokensMax)};
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  v1::HeadSpec spec;
  spec.set_vocab_size(absl::GetFlag(FLAGS_vocab));
  spec.set_hidden_size(absl::GetFlag(FLAGS_hidden));
  spec.set_weight_dtype(*dtype);
  spec.set_has_bias(absl::GetFlag(FLAGS_bias));
  spec.set_trainable(!frozen);
  *spec.mutable_optimizer() = *optimizer;
  spec.set_batch_tokens(absl::GetFlag(FLAGS_batch_tokens));
  spec.set_teacher_hidden_size(absl::GetFlag(FLAGS_teacher_hidden));
  spec.set_top_k_max(absl::GetFlag(FLAGS_top_k_max));
  return HeadSpecFromProto(spec, NameRule::kMayBeEmpty);
}

absl::StatusOr<PlanOptions> OptionsFromFlags() {
  const auto backend = ParseBackend(absl::GetFlag(FLAGS_backend));
  if (!backend.ok()) return backend.status();
  const int64_t limit = absl::GetFlag(FLAGS_memory_limit_bytes);
  absl::Status status = CheckRange("memory_limit_bytes", limit, 0, kUnboundedBytes);
  if (!status.ok()) return status;
  const int32_t replicas = absl::GetFlag(FLAGS_replicas);
  status = CheckRange("replicas", replicas, 1, kRanksMax);
  if (!status.ok()) return status;
  const int32_t asked = absl::GetFlag(FLAGS_ranks);
  const int32_t ranks = asked == 0 ? replicas : asked;
  status = CheckRange("ranks", ranks, 1, kRanksMax);
  if (!status.ok()) return status;
  if (ranks % replicas != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--replicas is %d; wanted a divisor of --ranks, %d", replicas, ranks));
  }
  return PlanOptions{.backend = *backend,
                     .num_ranks = ranks / replicas,
                     .num_replicas = replicas,
                     .budget_bytes = limit == 0 ? kUnboundedBytes : limit};
}

// Tokens times vocabulary must be a number that can be counted with.
absl::Status CheckDense(int64_t batch, int64_t seq, int64_t vocab) {
  for (const absl::Status& status : {CheckRange("batch", batch, 1, kDenseElementsMax),
                                     CheckRange("seq", seq, 1, kDenseElementsMax)}) {
    if (!status.ok()) return status;
  }
  int64_t elements = 0;
  if (__builtin_mul_overflow(batch, seq, &elements) ||
      __builtin_mul_overflow(elements, vocab, &elements) || elements > kDenseElementsMax) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--batch %d x --seq %d x --vocab %d are more than 2^59 logits", batch, seq, vocab));
  }
  return absl::OkStatus();
}

absl::StatusOr<Estimate> EstimateFromFlags() {
  auto spec = SpecFromFlags();
  if (!spec.ok()) return spec.status();
  const auto options = OptionsFromFlags();
  if (!options.ok()) return options.status();
  Estimate estimate{.spec = *std::move(spec),
                    .options = *options,
                    .num_sequences = absl::GetFlag(FLAGS_batch),
                    .sequence_length = absl::GetFlag(FLAGS_seq)};
  absl::Status status =
      CheckDense(estimate.num_sequences, estimate.sequence_length, estimate.spec.vocab_size);
  if (!status.ok()) return status;
  if (options->num_ranks > estimate.spec.vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--ranks is %d; wanted at most --vocab, %d, for each of --replicas",
                        estimate.all_ranks(), estimate.spec.vocab_size));
  }
  estimate.dense =
      PlanDenseLogits(estimate.num_tokens(), estimate.spec.vocab_size, estimate.spec.weight_dtype);
  for (const Schedule schedule : SchedulesOf(estimate.spec)) {
    estimate.plans.push_back(PlanForSchedule(estimate.spec, schedule, estimate.options));
  }
  const auto chosen = PlanHead(estimate.spec, estimate.options);
  if (chosen.ok()) estimate.chosen = *chosen;
  return estimate;
}

std::string InGib(int64_t bytes) {
  return absl::StrFormat("%.3f GiB", static_cast<double>(bytes) / (1024.0 * kMiB));
}

// How many times the service's bytes on all its ranks the dense logits are.
double Ratio(const Estimate& estimate, int64_t bytes_a_rank) {
  return static_cast<double>(estimate.dense.TotalBytes()) /
         (static_cast<double>(bytes_a_rank) * estimate.all_ranks());
}

std::string RenderDense(const Estimate& estimate) {
  const DenseLogits& dense = estimate.dense;
  const std::string dtype(DTypeName(estimate.spec.weight_dtype));
  const auto line = [](const std::string& what, int64_t bytes) {
    return absl::StrFormat("  %-36s%16s\n", what, InGib(bytes));
  };
  std::string text = "dense logits in the trainer\n";
  absl::StrAppend(&text, line(absl::StrCat("logits, ", dtype), dense.logits_bytes));
  if (dense.float32_logits_bytes > 0) {
    absl::StrAppend(&text, line("logits, float32 copy", dense.float32_logits_bytes));
  }
  absl::StrAppend(&text, line("log_softmax, float32", dense.log_softmax_bytes),
                  line(absl::StrCat("gradient of the logits, ", dtype), dense.grad_logits_bytes),
                  line("total", dense.TotalBytes()));
  return text;
}

std::string RenderPlans(const Estimate& estimate) {
  const auto line = [&](std::string_view title, auto&& cell) {
    std::string text = absl::StrFormat("  %-20s", std::string(title));
    for (const MemoryPlan& plan : estimate.plans) absl::StrAppendFormat(&text, "%16s", cell(plan));
    return text + "\n";
  };
  const int32_t replicas = estimate.options.num_replicas;
  std::string text =
      absl::StrFormat("lmhead with the %s backend, %d rank%s%s, bytes of each\n",
                      estimate.options.backend == BackendKind::kCuda ? "cuda" : "cpu",
                      estimate.all_ranks(), estimate.all_ranks() == 1 ? "" : "s",
                      replicas == 1 ? "" : absl::StrCat(" in ", replicas, " replicas"));
  absl::StrAppend(&text, line("schedule", [](const MemoryPlan& plan) {
    return std::string(ScheduleName(plan.schedule));
  }));
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    absl::StrAppend(&text, line(MemoryCategoryName(category), [category](const MemoryPlan& plan) {
      return InGib(plan[category]);
    }));
  }
  absl::StrAppend(
      &text, line("total", [](const MemoryPlan& plan) { return InGib(plan.TotalBytes()); }),
      line("of it for logits", [](const MemoryPlan& plan) { return InGib(WorkingBytes(plan)); }),
      line("batch_tokens", [](const MemoryPlan& plan) { return absl::StrCat(plan.batch_tokens); }),
      line("vocab_tile", [](const MemoryPlan& plan) { return absl::StrCat(plan.vocab_tile); }));
  return text;
}

std::string RenderChoice(const Estimate& estimate) {
  if (!estimate.chosen.has_value()) {
    return absl::StrFormat(
        "none fits --memory_limit_bytes=%d (%s): lower --batch_tokens or use more --ranks\n",
        estimate.options.budget_bytes, InGib(estimate.options.budget_bytes));
  }
  const MemoryPlan& plan = *estimate.chosen;
  const double ratio = Ratio(estimate, WorkingBytes(plan));
  return absl::StrFormat(
      "chosen: %s, %s a rank; dense logits take %.2f times what all ranks hold.\n"
      "Weight and training state are held either way: beside them the service needs %s a rank,\n"
      "however many tokens there are, where dense logits take %s for these: %.2f times as "
      "much.\n%s",
      std::string(ScheduleName(plan.schedule)), InGib(plan.TotalBytes()),
      Ratio(estimate, plan.TotalBytes()), InGib(WorkingBytes(plan)),
      InGib(estimate.dense.TotalBytes()), ratio,
      ratio < 1.0 ? "So few tokens need no service.\n" : "");
}

std::string RenderText(const Estimate& estimate) {
  const HeadSpec& spec = estimate.spec;
  return absl::StrFormat("%d x %d tokens, vocabulary %d, hidden size %d, %s, %s\n\n%s\n%s\n%s",
                         estimate.num_sequences, estimate.sequence_length, spec.vocab_size,
                         spec.hidden_size, std::string(DTypeName(spec.weight_dtype)),
                         spec.trainable ? absl::GetFlag(FLAGS_optimizer) : "not trained",
                         RenderDense(estimate), RenderPlans(estimate), RenderChoice(estimate));
}

nlohmann::ordered_json PlanJson(const MemoryPlan& plan) {
  nlohmann::ordered_json categories;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    categories[std::string(MemoryCategoryName(category))] = plan[category];
  }
  return {{"schedule", ScheduleName(plan.schedule)}, {"categories", std::move(categories)},
          {"total_bytes", plan.TotalBytes()},        {"logits_working_bytes", WorkingBytes(plan)},
          {"batch_tokens", plan.batch_tokens},       {"vocab_tile", plan.vocab_tile}};
}

std::string RenderJson(const Estimate& estimate) {
  const DenseLogits& dense = estimate.dense;
  nlohmann::ordered_json json = {
      {"backend", estimate.options.backend == BackendKind::kCuda ? "cuda" : "cpu"},
      {"num_ranks", estimate.all_ranks()},
      {"num_replicas", estimate.options.num_replicas},
      {"num_tokens", estimate.num_tokens()},
      {"dense",
       {{"logits_bytes", dense.logits_bytes},
        {"float32_logits_bytes", dense.float32_logits_bytes},
        {"log_softmax_bytes", dense.log_softmax_bytes},
        {"grad_logits_bytes", dense.grad_logits_bytes},
        {"total_bytes", dense.TotalBytes()}}}};
  for (const MemoryPlan& plan : estimate.plans) json["plans"].push_back(PlanJson(plan));
  if (estimate.chosen.has_value()) {
    json["chosen"] = ScheduleName(estimate.chosen->schedule);
    json["ratio"] = Ratio(estimate, estimate.chosen->TotalBytes());
  } else {
    json["chosen"] = nullptr;
  }
  return json.dump() + "\n";
}

}  // namespace

int RunEstimate(absl::Span<char* const> positional) {
  absl::StatusOr<Estimate> estimate =
      positional.empty()
          ? EstimateFromFlags()
          : absl::InvalidArgumentError(absl::StrCat("takes flags only, got '", positional[0], "'"));
  if (!estimate.ok()) {
    std::fprintf(stderr,
                 "lmhead estimate: %s\n"
                 "Example: lmhead estimate --batch 1 --seq 131072 --vocab 131072 --hidden 4096 "
                 "--dtype bf16\n",
                 std::string(estimate.status().message()).c_str());
    return kExitUsage;
  }
  const std::string text =
      absl::GetFlag(FLAGS_json) ? RenderJson(*estimate) : RenderText(*estimate);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace lmhead
