// lmhead estimate: what dense logits would take, and what the service plans instead: by this
// program, or with --address by a service that runs.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "lmhead/v1/service.pb.h"
#include "proto/types/head_spec.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "server/cli/commands.h"
#include "server/cli/common_flags.h"
#include "server/cli/estimate_report.h"
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

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// Dense logits and their copies take up to 12 bytes an element; more elements would overflow.
constexpr int64_t kDenseElementsMax = int64_t{1} << 59;

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

absl::StatusOr<v1::HeadSpec> SpecFromFlags() {
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
  return spec;
}

absl::StatusOr<PlanOptions> OptionsFromFlags() {
  const auto backend = ParseBackend(absl::GetFlag(FLAGS_backend));
  if (!backend.ok()) return backend.status();
  const int64_t limit = absl::GetFlag(FLAGS_memory_limit_bytes);
  absl::Status status = CheckRange("memory_limit_bytes", limit, 0, kUnboundedBytes);
  if (!status.ok()) return status;
  const int32_t replicas = absl::GetFlag(FLAGS_replicas).value_or(1);
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

// By this program's own formula.
absl::Status PlanHere(Estimate* estimate) {
  const auto options = OptionsFromFlags();
  if (!options.ok()) return options.status();
  estimate->options = *options;
  if (options->num_ranks > estimate->spec.vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--ranks is %d; wanted at most --vocab, %d, for each of --replicas",
                        estimate->all_ranks(), estimate->spec.vocab_size));
  }
  estimate->dense = PlanDenseLogits(estimate->num_tokens(), estimate->spec.vocab_size,
                                    estimate->spec.weight_dtype);
  for (const Schedule schedule : SchedulesOf(estimate->spec)) {
    estimate->plans.push_back(PlanForSchedule(estimate->spec, schedule, *options));
  }
  const auto chosen = PlanHead(estimate->spec, *options);
  if (chosen.ok()) estimate->chosen = *chosen;
  return absl::OkStatus();
}

MemoryPlan PlanFromProto(const v1::MemoryPlan& proto) {
  MemoryPlan plan;
  plan.schedule = static_cast<Schedule>(proto.schedule());
  plan.batch_tokens = proto.batch_tokens();
  plan.vocab_tile = proto.vocab_tile();
  for (const v1::CategoryBytes& category : proto.categories()) {
    const int index = category.category() - 1;
    if (index >= 0 && index < kNumMemoryCategories) plan.bytes[index] = category.bytes();
  }
  return plan;
}

void ReadResponse(const v1::EstimateMemoryResponse& response, Estimate* estimate) {
  estimate->options.num_replicas = std::max(1, response.num_replicas());
  estimate->options.num_ranks = std::max(1, response.num_ranks()) / estimate->options.num_replicas;
  estimate->options.budget_bytes = response.available_bytes();
  estimate->dense = {.logits_bytes = response.dense().logits_bytes(),
                     .float32_logits_bytes = response.dense().float32_logits_bytes(),
                     .log_softmax_bytes = response.dense().log_softmax_bytes(),
                     .grad_logits_bytes = response.dense().grad_logits_bytes()};
  for (const v1::MemoryPlan& plan : response.plans()) {
    estimate->plans.push_back(PlanFromProto(plan));
    if (plan.schedule() == response.chosen_schedule()) estimate->chosen = estimate->plans.back();
  }
}

// As the service at --address would have it, with its backend and what its heads leave free.
absl::Status AskService(const v1::HeadSpec& spec, Estimate* estimate) {
  if (absl::GetFlag(FLAGS_backend) != "auto" || absl::GetFlag(FLAGS_memory_limit_bytes) != 0) {
    return absl::InvalidArgumentError(
        "--backend and --memory_limit_bytes are the service's own with --address; leave them out");
  }
  v1::EstimateMemoryRequest request;
  *request.mutable_spec() = spec;
  request.set_num_ranks(absl::GetFlag(FLAGS_ranks));
  request.set_num_replicas(absl::GetFlag(FLAGS_replicas).value_or(0));
  request.set_num_sequences(estimate->num_sequences);
  request.set_sequence_length(estimate->sequence_length);
  estimate->address = AddressFromFlags();
  auto client = Client::Connect(estimate->address, ClientOptionsFromFlags());
  if (!client.ok()) return client.status();
  const auto info = (*client)->GetServerInfo();
  if (!info.ok()) return info.status();
  const auto response = (*client)->EstimateMemory(request);
  if (!response.ok()) return response.status();
  estimate->options.backend = info->backend() == "cuda" ? BackendKind::kCuda : BackendKind::kCpu;
  ReadResponse(*response, estimate);
  return absl::OkStatus();
}

absl::StatusOr<Estimate> EstimateFromFlags() {
  const auto proto = SpecFromFlags();
  if (!proto.ok()) return proto.status();
  auto spec = HeadSpecFromProto(*proto, NameRule::kMayBeEmpty);
  if (!spec.ok()) return spec.status();
  Estimate estimate{.spec = *std::move(spec),
                    .optimizer = absl::GetFlag(FLAGS_optimizer),
                    .num_sequences = absl::GetFlag(FLAGS_batch),
                    .sequence_length = absl::GetFlag(FLAGS_seq)};
  absl::Status status =
      CheckDense(estimate.num_sequences, estimate.sequence_length, estimate.spec.vocab_size);
  if (!status.ok()) return status;
  status =
      absl::GetFlag(FLAGS_address).empty() ? PlanHere(&estimate) : AskService(*proto, &estimate);
  if (!status.ok()) return status;
  return estimate;
}

}  // namespace

int RunEstimate(absl::Span<char* const> positional) {
  absl::StatusOr<Estimate> estimate =
      positional.empty()
          ? EstimateFromFlags()
          : absl::InvalidArgumentError(absl::StrCat("takes flags only, got '", positional[0], "'"));
  if (!estimate.ok() && !absl::IsInvalidArgument(estimate.status())) {
    std::fprintf(stderr, "lmhead estimate: %s\n", std::string(estimate.status().message()).c_str());
    return kExitFailure;
  }
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
