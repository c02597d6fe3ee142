#include "bench/kernel_bench.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "kernels/fill_noise.h"
#include "proto/types/dtype.h"
#include "server/compute/cublaslt_gemm.h"
#include "server/compute/cuda_backend.h"
#include "server/compute/cuda_status.h"
#include "server/memory/device_arena.h"
#include "server/memory/host_block.h"

namespace lmhead::bench {
namespace {

constexpr int kDevice = 0;
constexpr float kNoiseScale = 0.05f;
constexpr double kMillisecondsPerSecond = 1e3;

// Standard normal times `std` as bfloat16: the first `count` of a sequence that is the same each
// time.
std::vector<uint16_t> RandomBFloat16(int64_t count, float std) {
  std::minstd_rand random(1);
  std::normal_distribution<float> normal(0.0f, std);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = FloatToBFloat16(normal(random));
  return values;
}

std::unique_ptr<HostBlock> RandomHiddenStates(const KernelShape& shape) {
  const std::vector<uint16_t> values = RandomBFloat16(shape.rows * shape.hidden_size, 1.0f);
  const size_t num_bytes = values.size() * sizeof(uint16_t);
  auto block = HostBlock::Map(static_cast<int64_t>(num_bytes)).value();
  std::memcpy(block->data(), values.data(), num_bytes);
  return block;
}

}  // namespace

// --- Bare products -----------------------------------------------------------------------------

struct BareProducts::Impl {
  ~Impl() {
    if (start != nullptr) cudaEventDestroy(start);
    if (stop != nullptr) cudaEventDestroy(stop);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  absl::Status Init();
  absl::Status Run(HeadProduct product);
  absl::StatusOr<double> TimeRuns(int num_runs, const std::vector<HeadProduct>& products);

  KernelShape shape;
  MemoryAccount account;
  std::unique_ptr<DeviceArena> arena;
  std::unique_ptr<HeadGemm> gemm;
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  void* hidden = nullptr;
  void* weight = nullptr;
  void* logits = nullptr;
  void* grad_hidden = nullptr;
  void* grad_weight = nullptr;
};

absl::Status BareProducts::Impl::Init() {
  const int64_t logits_stride = (shape.vocab_size + 63) / 64 * 64;
  const int64_t half = BytesPerElement(DType::kBFloat16);
  const int64_t row_bytes = shape.rows * shape.hidden_size * half;
  const int64_t weight_elements = shape.vocab_size * shape.hidden_size;
  MemoryPlan plan;
  plan.bytes[static_cast<size_t>(MemoryCategory::kLibraryWorkspace)] =
      2 * row_bytes + weight_elements * (half + BytesPerElement(DType::kFloat32)) +
      shape.rows * logits_stride * half + kCudaWorkspaceBytes + 6 * kDeviceAlignment;
  auto created = DeviceArena::Create(plan, &account, kDevice);
  if (!created.ok()) return created.status();
  arena = *std::move(created);
  const auto carve = [this](int64_t bytes) {
    return arena->Carve(MemoryCategory::kLibraryWorkspace, bytes);
  };
  hidden = carve(row_bytes);
  grad_hidden = carve(row_bytes);
  weight = carve(weight_elements * half);
  grad_weight = carve(weight_elements * BytesPerElement(DType::kFloat32));
  logits = carve(shape.rows * logits_stride * half);
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventCreate(&start));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventCreate(&stop));
  auto made = HeadGemm::Create({.dtype = DType::kBFloat16,
                                .grad_hidden_dtype = DType::kBFloat16,
                                .hidden_size = shape.hidden_size,
                                .logits_stride = logits_stride,
                                .workspace = carve(kCudaWorkspaceBytes),
                                .workspace_bytes = kCudaWorkspaceBytes});
  if (!made.ok()) return made.status();
  gemm = *std::move(made);
  const MatrixView noisy[] = {{hidden, shape.rows, shape.hidden_size, DType::kBFloat16},
                              {weight, shape.vocab_size, shape.hidden_size, DType::kBFloat16}};
  for (const MatrixView& matrix : noisy) {
    LMHEAD_RETURN_IF_CUDA_ERROR(kernels::LaunchFillNoise(matrix, kNoiseScale, 1, stream));
  }
  for (const HeadProduct product :
       {HeadProduct::kLogits, HeadProduct::kGradHidden, HeadProduct::kGradWeight}) {
    HeadProductCall call = {product, shape.rows, shape.vocab_size, hidden, weight, logits};
    call.grad = product == HeadProduct::kGradHidden ? grad_hidden : grad_weight;
    call.beta = product == HeadProduct::kGradWeight ? 1.0f : 0.0f;
    LMHEAD_RETURN_IF_ERROR(gemm->Tune(call, stream).status());
  }
  return absl::OkStatus();
}

absl::Status BareProducts::Impl::Run(HeadProduct product) {
  HeadProductCall call = {product, shape.rows, shape.vocab_size, hidden, weight, logits};
  call.grad = product == HeadProduct::kGradHidden ? grad_hidden : grad_weight;
  call.beta = product == HeadProduct::kGradWeight ? 1.0f : 0.0f;
  return gemm->Run(call, stream);
}

absl::StatusOr<double> BareProducts::Impl::TimeRuns(int num_runs,
                                                    const std::vector<HeadProduct>& products) {
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(start, stream));
  for (int run = 0; run < num_runs; ++run) {
    for (const HeadProduct product : products) LMHEAD_RETURN_IF_ERROR(Run(product));
  }
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(stop, stream));
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(stop));
  float milliseconds = 0.0f;
  LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, start, stop));
  return milliseconds / num_runs;
}

BareProducts::BareProducts(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BareProducts::~BareProducts() = default;

absl::StatusOr<std::unique_ptr<BareProducts>> BareProducts::Create(const KernelShape& shape) {
  auto impl = std::make_unique<Impl>();
  impl->shape = shape;
  LMHEAD_RETURN_IF_ERROR(impl->Init());
  return std::unique_ptr<BareProducts>(new BareProducts(std::move(impl)));
}

absl::StatusOr<double> BareProducts::Time(int num_batches, int num_logits) {
  std::vector<HeadProduct> products(static_cast<size_t>(num_logits), HeadProduct::kLogits);
  products.insert(products.end(), {HeadProduct::kGradHidden, HeadProduct::kGradWeight});
  return impl_->TimeRuns(num_batches, products);
}

absl::StatusOr<ProductTimes> BareProducts::TimeEach(int num_runs) {
  ProductTimes times;
  const auto time = [&](HeadProduct product, double* milliseconds) -> absl::Status {
    absl::StatusOr<double> measured = impl_->TimeRuns(num_runs, {product});
    if (!measured.ok()) return measured.status();
    *milliseconds = *measured;
    return absl::OkStatus();
  };
  LMHEAD_RETURN_IF_ERROR(time(HeadProduct::kLogits, &times.logits));
  LMHEAD_RETURN_IF_ERROR(time(HeadProduct::kGradHidden, &times.grad_hidden));
  LMHEAD_RETURN_IF_ERROR(time(HeadProduct::kGradWeight, &times.grad_weight));
  return times;
}

// --- The head ----------------------------------------------------------------------------------

// Rows of one batch in flight, as a staging slot would hold them, with everything that a recipe may
// ask for. All arrays are of the same numbers in every run.
struct StagedRows {
  StagedRows(const KernelShape& shape, int32_t top_k)
      : hidden(RandomHiddenStates(shape)),
        teacher_hidden(RandomHiddenStates(shape)),
        targets(static_cast<size_t>(shape.rows)),
        ones(static_cast<size_t>(shape.rows), 1.0f),
        logprobs(static_cast<size_t>(shape.rows), -12.0f),
        outputs(static_cast<size_t>(shape.rows)),
        topk_ids(static_cast<size_t>(shape.rows * top_k)),
        topk_logprobs(static_cast<size_t>(shape.rows * top_k)) {
    std::minstd_rand random(2);
    const auto id = [&] {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(shape.vocab_size));
    };
    for (int32_t& target : targets) target = id();
    for (size_t i = 0; i < topk_ids.size(); ++i) {  // Distinct in a row.
      const auto k = static_cast<int64_t>(i) % top_k;
      topk_ids[i] = static_cast<int32_t>((k * shape.vocab_size + id()) / top_k % shape.vocab_size);
      topk_logprobs[i] = -std::log(static_cast<float>(top_k) + 1.0f);
    }
  }
  absl::Status Pin() {
    LMHEAD_RETURN_IF_ERROR(hidden->Pin(kDevice));
    return teacher_hidden->Pin(kDevice);
  }

  const std::unique_ptr<HostBlock> hidden;  // bfloat16.
  const std::unique_ptr<HostBlock> teacher_hidden;
  std::vector<int32_t> targets;
  std::vector<float> ones;
  std::vector<float> logprobs;
  std::vector<float> outputs;
  std::vector<int32_t> topk_ids;
  std::vector<float> topk_logprobs;
};

struct TimedHead::Impl {
  absl::Status Init(const HeadSpec& options);
  absl::StatusOr<std::unique_ptr<ComputeBackend>> MakeHead(const HeadSpec& spec,
                                                           const MemoryPlan& plan);
  ChunkRows ChunkOf(const BatchWork& work) const;

  KernelShape shape;
  int64_t device_bytes_before = 0;
  MemoryPlan plan;
  MemoryAccount account;
  std::unique_ptr<StagedRows> rows;
  std::unique_ptr<StagedRows> answers;
  std::unique_ptr<ComputeBackend> teacher;
  std::unique_ptr<ComputeBackend> backend;  // Before what its batches touch.
};

// Its weight is one random block of rows, over and over.
absl::StatusOr<std::unique_ptr<ComputeBackend>> TimedHead::Impl::MakeHead(
    const HeadSpec& spec, const MemoryPlan& head_plan) {
  auto head = CreateCudaBackend(spec, head_plan, &account, kDevice);
  if (!head.ok()) return head;
  const std::vector<uint16_t> block = RandomBFloat16(shape.rows * shape.hidden_size, 0.02f);
  for (int64_t start = 0; start < shape.vocab_size; start += shape.rows) {
    const int64_t count = std::min(shape.rows, shape.vocab_size - start);
    LMHEAD_RETURN_IF_ERROR((*head)->WriteRows(
        TensorKind::kWeight, start, {block.data(), count, shape.hidden_size, DType::kBFloat16}));
  }
  return head;
}

absl::Status TimedHead::Impl::Init(const HeadSpec& options) {
  HeadSpec spec = options;
  spec.name = "bench";
  spec.vocab_size = shape.vocab_size;
  spec.hidden_size = shape.hidden_size;
  spec.weight_dtype = DType::kBFloat16;
  spec.trainable = true;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.batch_tokens = shape.rows;
  plan = PlanForSchedule(spec, spec.schedule, {.backend = BackendKind::kCuda});
  rows = std::make_unique<StagedRows>(shape, std::max(1, spec.top_k_max));
  answers = std::make_unique<StagedRows>(shape, std::max(1, spec.top_k_max));
  LMHEAD_RETURN_IF_ERROR(rows->Pin());
  LMHEAD_RETURN_IF_ERROR(answers->Pin());
  absl::StatusOr<CudaDevice> before = DescribeCudaDevice(kDevice);
  if (!before.ok()) return before.status();
  device_bytes_before = before->used_bytes;
  auto made = MakeHead(spec, plan);
  if (!made.ok()) return made.status();
  backend = *std::move(made);
  if (spec.teacher_hidden_size == 0) return absl::OkStatus();
  spec.name = "teacher";
  spec.trainable = false;
  spec.optimizer.kind = OptimizerKind::kNone;
  spec.schedule = Schedule::kEval;
  spec.teacher_hidden_size = 0;
  auto teacher_made =
      MakeHead(spec, PlanForSchedule(spec, spec.schedule, {.backend = BackendKind::kCuda}));
  if (!teacher_made.ok()) return teacher_made.status();
  teacher = *std::move(teacher_made);
  return absl::OkStatus();
}

ChunkRows TimedHead::Impl::ChunkOf(const BatchWork& work) const {
  const LossRecipe& recipe = work.recipe;
  ChunkRows chunk = {
      .hidden_states = {rows->hidden->data(), shape.rows, shape.hidden_size, DType::kBFloat16},
      .targets = rows->targets,
      .grad_hidden_states = {answers->hidden->data(), shape.rows, shape.hidden_size,
                             DType::kBFloat16}};
  if (recipe.has_teacher_head()) {
    chunk.teacher_hidden_states = {rows->teacher_hidden->data(), shape.rows, shape.hidden_size,
                                   DType::kBFloat16};
  }
  const auto entries = static_cast<size_t>(shape.rows * recipe.teacher_top_k());
  chunk.teacher_topk_ids = std::span(rows->topk_ids).first(entries);
  chunk.teacher_topk_logprobs = std::span(rows->topk_logprobs).first(entries);
  if (recipe.policy.has_value() && recipe.policy->kind == PolicyKind::kCoefficients) {
    chunk.logprob_grad = rows->ones;
    chunk.entropy_grad = rows->ones;
  }
  if (recipe.policy.has_value() && recipe.policy->kind == PolicyKind::kClipped) {
    chunk.old_logprob = rows->logprobs;
    chunk.advantage = rows->ones;
  }
  if (work.outputs.entropy) chunk.entropy = answers->outputs.data();
  if (work.outputs.top_k > 0) {
    chunk.topk_ids = answers->topk_ids.data();
    chunk.topk_logprobs = answers->topk_logprobs.data();
  }
  return chunk;
}

TimedHead::TimedHead(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TimedHead::~TimedHead() = default;

absl::StatusOr<std::unique_ptr<TimedHead>> TimedHead::Create(const KernelShape& shape,
                                                             const HeadSpec& options) {
  auto impl = std::make_unique<Impl>();
  impl->shape = shape;
  LMHEAD_RETURN_IF_ERROR(impl->Init(options));
  return std::unique_ptr<TimedHead>(new TimedHead(std::move(impl)));
}

absl::StatusOr<BatchTimes> TimedHead::Time(int num_batches, const BatchWork& work) {
  const ChunkRows chunk = impl_->ChunkOf(work);
  BatchInput input = {.recipe = &work.recipe,
                      .mode = BackwardMode::kHiddenAndWeight,
                      .chunks = {&chunk, 1},
                      .outputs = work.outputs};
  input.outputs.grad_hidden_states = true;
  if (work.recipe.has_teacher_head()) input.teacher = impl_->teacher.get();
  absl::Mutex mu;
  int num_done = 0;
  BatchTimes times;
  absl::Status failure;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < num_batches; ++i) {
    impl_->backend->ComputeBatch(input, [&](absl::StatusOr<BatchOutput> output) {
      absl::MutexLock lock(&mu);
      ++num_done;
      failure.Update(output.status());
      if (!output.ok()) return;
      times.compute += output->timings.compute_seconds;
    });
  }
  const auto all_done = [&] { return num_done == num_batches; };
  absl::MutexLock lock(&mu);
  mu.Await(absl::Condition(&all_done));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (!failure.ok()) return failure;
  times.compute *= kMillisecondsPerSecond / num_batches;
  times.wall = seconds.count() * kMillisecondsPerSecond / num_batches;
  return times;
}

absl::StatusOr<HeadMemory> TimedHead::Memory() const {
  const absl::StatusOr<CudaDevice> device = DescribeCudaDevice(kDevice);
  if (!device.ok()) return device.status();
  return HeadMemory{.plan_bytes = impl_->plan.TotalBytes(),
                    .account_peak_bytes = impl_->account.Read().total.peak_process_bytes,
                    .device_bytes = device->used_bytes - impl_->device_bytes_before};
}

}  // namespace lmhead::bench
