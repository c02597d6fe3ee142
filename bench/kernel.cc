// lmhead-bench kernel: how near does the head on a GPU come to its bare matrix products?

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/commands.h"
#include "bench/kernel_bench.h"
#include "server/cli/common_flags.h"
#include "server/compute/cuda_backend.h"
#include "spdlog/spdlog.h"

ABSL_FLAG(std::string, kernel_rows, "1024,2048,3072,4096",
          "kernel: rows of a batch, a comma between each.");
ABSL_FLAG(int64_t, kernel_vocab, 131072, "kernel: vocabulary size.");
ABSL_FLAG(int32_t, kernel_repeats, 10, "kernel: measurements, of which the median counts.");
ABSL_FLAG(std::string, kernel_only, "",
          "kernel: measure these rows of the table alone, a comma between each; all when empty.");
ABSL_FLAG(int64_t, kernel_long_tokens, 0,
          "kernel: also train on that many tokens and print the memory before and after.");

namespace lmhead::bench {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitNotRun = 2;
constexpr int64_t kDefaultHidden = 4096;
constexpr int kBatchesInARow = 8;
constexpr int32_t kTopK = 64;
constexpr double kMillisecondsPerSecond = 1e3;
constexpr int64_t kShortTokens = 8192;

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// One line of the table: a head beside its bare products, all in milliseconds a batch.
struct Comparison {
  std::string name;
  int64_t rows = 0;
  double bare = 0.0;
  double compute = 0.0;
  double wall = 0.0;
  // Medians of bare / compute and of plain cross entropy's compute / compute, each pair measured
  // one after the other.
  double ratio = 0.0;
  double to_plain = 0.0;

  double TokensPerSecond(double milliseconds) const {
    return static_cast<double>(rows) * kMillisecondsPerSecond / milliseconds;
  }
};

// What is measured: a head and the loss it computes.
struct Variant {
  std::string name;
  HeadSpec head;
  BatchWork work;
  int num_logits = 1;  // Products of logits among the bare ones.
};

// `plain` is a head under retain without any option.
absl::StatusOr<Comparison> Compare(const Variant& variant, const KernelShape& shape,
                                   BareProducts* bare, TimedHead* plain, TimedHead* head,
                                   int repeats) {
  std::vector<double> bare_times, compute_times, wall_times, ratios, to_plain;
  for (int i = 0; i <= repeats; ++i) {
    const absl::StatusOr<double> bare_time = bare->Time(kBatchesInARow, variant.num_logits);
    if (!bare_time.ok()) return bare_time.status();
    const absl::StatusOr<BatchTimes> times = head->Time(kBatchesInARow, variant.work);
    if (!times.ok()) return times.status();
    const absl::StatusOr<BatchTimes> plain_times = plain->Time(kBatchesInARow, BatchWork());
    if (!plain_times.ok()) return plain_times.status();
    if (i == 0) continue;  // Warms up.
    bare_times.push_back(*bare_time);
    compute_times.push_back(times->compute);
    wall_times.push_back(times->wall);
    ratios.push_back(*bare_time / times->compute);
    to_plain.push_back(plain_times->compute / times->compute);
  }
  return Comparison{.name = variant.name,
                    .rows = shape.rows,
                    .bare = Median(bare_times),
                    .compute = Median(compute_times),
                    .wall = Median(wall_times),
                    .ratio = Median(ratios),
                    .to_plain = Median(to_plain)};
}

std::vector<Variant> Schedules() {
  return {{.name = "retain", .head = {.schedule = Schedule::kRetain}},
          {.name = "recompute", .head = {.schedule = Schedule::kRecompute}, .num_logits = 2}};
}

// Divergences from a teacher of the same width, whose logits are a fourth product.
std::vector<Variant> Divergences(const KernelShape& shape) {
  const HeadSpec head = {.schedule = Schedule::kRetain, .teacher_hidden_size = shape.hidden_size};
  const auto variant = [&](const char* name, Divergence divergence) {
    DistillationSpec spec = {.divergence = divergence,
                             .teacher_head = "teacher",
                             .teacher_hidden_dtype = DType::kBFloat16};
    if (divergence == Divergence::kJsd) spec.jsd_beta = 0.5f;
    Variant made = {.name = name, .head = head, .num_logits = 2};
    made.work.recipe.distillation = spec;
    return made;
  };
  Variant mix = variant("kl_mix", Divergence::kForwardKl);
  mix.work.recipe.distillation->kl_temperature = 2.0f;
  mix.work.recipe.distillation->cross_entropy_weight = 0.5f;
  return {variant("forward_kl", Divergence::kForwardKl),
          variant("reverse_kl", Divergence::kReverseKl), variant("jsd", Divergence::kJsd), mix};
}

// Loss options under retain, measured at the largest number of rows.
std::vector<Variant> LossOptions() {
  const HeadSpec retain = {.schedule = Schedule::kRetain};
  HeadSpec softcap = retain;
  softcap.softcap = 30.0f;
  HeadSpec bias = retain;
  bias.has_bias = true;
  HeadSpec top_k = retain;
  top_k.top_k_max = kTopK;
  DistillationSpec tail = {
      .divergence = Divergence::kTopkForwardKl, .top_k = kTopK, .topk_mass = TopkMass::kTail};
  PolicySpec clipped = {.kind = PolicyKind::kClipped, .clip_low = 0.2f, .clip_high = 0.2f};
  return {{.name = "entropy", .head = retain, .work = {.outputs = {.entropy = true}}},
          {.name = "smoothing", .head = retain, .work = {.recipe = {.label_smoothing = 0.1f}}},
          {.name = "z_loss", .head = retain, .work = {.recipe = {.z_loss = 1e-4f}}},
          {.name = "softcap", .head = softcap},
          {.name = "bias", .head = bias},
          {.name = "policy",
           .head = retain,
           .work = {.recipe = {.policy = PolicySpec{.kind = PolicyKind::kCoefficients}}}},
          {.name = "clipped", .head = retain, .work = {.recipe = {.policy = clipped}}},
          {.name = "topk_tail", .head = top_k, .work = {.recipe = {.distillation = tail}}},
          {.name = "topk_out", .head = top_k, .work = {.outputs = {.top_k = kTopK}}}};
}

bool IsWanted(const std::string& name) {
  const std::vector<std::string> only =
      absl::StrSplit(absl::GetFlag(FLAGS_kernel_only), ',', absl::SkipEmpty());
  return only.empty() || std::find(only.begin(), only.end(), name) != only.end();
}

void PrintHeader() {
  std::printf("%-10s %6s %10s %10s %10s %12s %12s %7s %8s\n", "what", "rows", "bare ms",
              "compute ms", "wall ms", "bare tok/s", "head tok/s", "ratio", "to plain");
}

void Print(const Comparison& c) {
  std::printf("%-10s %6lld %10.3f %10.3f %10.3f %12.0f %12.0f %7.3f %8.3f\n", c.name.c_str(),
              static_cast<long long>(c.rows), c.bare, c.compute, c.wall, c.TokensPerSecond(c.bare),
              c.TokensPerSecond(c.wall), c.ratio, c.to_plain);
  std::fflush(stdout);
}

void PrintMemory(const std::string& when, const HeadMemory& memory) {
  std::printf("memory %s: plan %lld, accounted peak %lld, device %lld bytes\n", when.c_str(),
              static_cast<long long>(memory.plan_bytes),
              static_cast<long long>(memory.account_peak_bytes),
              static_cast<long long>(memory.device_bytes));
}

absl::Status MeasureLongRun(const Variant& variant, const KernelShape& shape, TimedHead* head) {
  const int64_t tokens = absl::GetFlag(FLAGS_kernel_long_tokens);
  if (tokens <= 0) return absl::OkStatus();
  for (const int64_t count : {kShortTokens, tokens}) {
    const auto batches = static_cast<int>(std::max<int64_t>(1, count / shape.rows));
    const auto times = head->Time(batches, variant.work);
    if (!times.ok()) return times.status();
    const absl::StatusOr<HeadMemory> memory = head->Memory();
    if (!memory.ok()) return memory.status();
    PrintMemory(absl::StrCat(variant.name, " after ", batches * shape.rows, " tokens"), *memory);
  }
  return absl::OkStatus();
}

absl::Status MeasureRows(const KernelShape& shape, const std::vector<Variant>& variants,
                         bool long_run, std::vector<Comparison>* comparisons) {
  auto bare = BareProducts::Create(shape);
  if (!bare.ok()) return bare.status();
  auto plain = TimedHead::Create(shape, {.schedule = Schedule::kRetain});
  if (!plain.ok()) return plain.status();
  for (const Variant& variant : variants) {
    if (!IsWanted(variant.name)) continue;
    auto head = TimedHead::Create(shape, variant.head);
    if (!head.ok()) return head.status();
    const auto comparison = Compare(variant, shape, bare->get(), plain->get(), head->get(),
                                    absl::GetFlag(FLAGS_kernel_repeats));
    if (!comparison.ok()) return comparison.status();
    Print(*comparison);
    comparisons->push_back(*comparison);
    if (!long_run) continue;
    const absl::Status status = MeasureLongRun(variant, shape, head->get());
    if (!status.ok()) return status;
  }
  const absl::StatusOr<ProductTimes> each = (*bare)->TimeEach(kBatchesInARow);
  if (!each.ok()) return each.status();
  std::printf("bare products at %lld rows, ms: logits %.3f, grad_hidden %.3f, grad_weight %.3f\n",
              static_cast<long long>(shape.rows), each->logits, each->grad_hidden,
              each->grad_weight);
  return absl::OkStatus();
}

absl::Status Measure(std::vector<Comparison>* comparisons) {
  KernelShape shape = {.hidden_size = absl::GetFlag(FLAGS_hidden),
                       .vocab_size = absl::GetFlag(FLAGS_kernel_vocab)};
  if (shape.hidden_size == 0) shape.hidden_size = kDefaultHidden;
  std::vector<int64_t> all_rows;
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_kernel_rows), ',')) {
    if (!absl::SimpleAtoi(text, &shape.rows) || shape.rows < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--kernel_rows: '", std::string(text), "' is not a number of rows"));
    }
    all_rows.push_back(shape.rows);
  }
  PrintHeader();
  for (const int64_t rows : all_rows) {
    shape.rows = rows;
    std::vector<Variant> variants = Schedules();
    const bool largest = rows == *std::max_element(all_rows.begin(), all_rows.end());
    if (largest) {
      for (Variant& variant : LossOptions()) variants.push_back(std::move(variant));
      for (Variant& variant : Divergences(shape)) variants.push_back(std::move(variant));
    }
    const absl::Status status = MeasureRows(shape, variants, largest, comparisons);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void PrintJson(const std::vector<Comparison>& comparisons) {
  nlohmann::json list = nlohmann::json::array();
  for (const Comparison& c : comparisons) {
    list.push_back({{"name", c.name},
                    {"rows", c.rows},
                    {"bare_ms", c.bare},
                    {"compute_ms", c.compute},
                    {"wall_ms", c.wall},
                    {"tokens_per_second", c.TokensPerSecond(c.wall)},
                    {"ratio", c.ratio},
                    {"to_plain", c.to_plain}});
  }
  std::printf("%s\n", nlohmann::json{{"kernel", list}}.dump().c_str());
}

}  // namespace

int RunKernel(absl::Span<char* const> positional) {
  std::string why_not;
  if (!CudaAvailable(&why_not)) {
    std::fprintf(stderr, "lmhead-bench kernel: %s\n", why_not.c_str());
    return kExitNotRun;
  }
  spdlog::set_level(spdlog::level::warn);  // Standard output is the table's.
  std::vector<Comparison> comparisons;
  const absl::Status status = Measure(&comparisons);
  if (!status.ok()) {
    std::fprintf(stderr, "lmhead-bench kernel: %s\n", status.ToString().c_str());
    return kExitFailed;
  }
  if (absl::GetFlag(FLAGS_json)) PrintJson(comparisons);
  return 0;
}

}  // namespace lmhead::bench
