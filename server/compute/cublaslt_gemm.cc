#include "server/compute/cublaslt_gemm.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/fill_rows.h"
#include "server/compute/cuda_status.h"

namespace lmhead {
namespace {

constexpr int kCandidatesMax = 8;

// bfloat16 elements of 16 bytes.
constexpr int64_t kAlignedElements = 8;

// Trials have two parts. All candidates run in turn a few times; then cuBLASLt's first choice and
// the best of the others run for long enough that the chip's power limit tells, as it will.
constexpr int kRounds = 3;
constexpr int kFinalists = 3;
constexpr int kFinalRounds = 2;
constexpr int kRunsInARow = 8;

// Another algorithm replaces cuBLASLt's first choice only when it is clearly faster, so that noise
// does not change the choice, and with it the bits of the results, from one start to the next.
constexpr float kClearlyFaster = 0.99f;

cudaDataType_t CudaType(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kFloat32:
      break;
  }
  return CUDA_R_32F;
}

// The largest power of two, at most 256, that divides the address.
uint32_t Alignment(const void* pointer) {
  return static_cast<uint32_t>(std::min<uintptr_t>(
      256, uintptr_t{1} << std::countr_zero(reinterpret_cast<uintptr_t>(pointer) | 256)));
}

// cuBLASLt's view is column-major: D [m, n] = op(A) [m, k] op(B) [k, n]. A row-major [rows, cols]
// matrix is a column-major [cols, rows] one.
struct Operand {
  const void* data;
  cudaDataType_t type;
  int64_t rows;  // Column-major, as stored.
  int64_t cols;
  int64_t stride;
  cublasOperation_t operation = CUBLAS_OP_N;
};
struct Operands {
  Operand a, b, d;
};

}  // namespace

// What cuBLASLt wants to know of a call; freed together.
struct HeadGemm::Descriptors {
  explicit Descriptors(const CublasLtLibrary* library) : lt(library) {}
  ~Descriptors() {
    if (preference != nullptr) lt->MatmulPreferenceDestroy(preference);
    for (cublasLtMatrixLayout_t layout : {a, b, d}) {
      if (layout != nullptr) lt->MatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) lt->MatmulDescDestroy(operation);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  const CublasLtLibrary* const lt;
  Operands operands{};
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t d = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
};

// What cuBLASLt offers for a call, its own preference first.
struct HeadGemm::Candidates {
  std::array<cublasLtMatmulHeuristicResult_t, kCandidatesMax> results{};
  std::array<float, kCandidatesMax> milliseconds{};  // Best of a trial.
  int count = 0;
};

namespace {

Operands OperandsOf(const HeadProductCall& call, const HeadGemm::Options& options) {
  const cudaDataType_t type = CudaType(options.dtype);
  const int64_t width = options.hidden_size;
  const Operand hidden = {call.hidden, type, width, call.rows, width};
  const Operand weight = {call.weight, type, width, call.cols, width};
  const Operand logits = {call.logits, type, call.cols, call.rows, options.logits_stride};
  Operands operands{};
  switch (call.product) {
    case HeadProduct::kLogits:
      operands = {weight, hidden, logits};
      operands.a.operation = CUBLAS_OP_T;
      break;
    case HeadProduct::kGradHidden:
      operands = {weight,
                  logits,
                  {call.grad, CudaType(options.grad_hidden_dtype), width, call.rows, width}};
      break;
    case HeadProduct::kGradWeight:
      operands = {hidden, logits, {call.grad, CUDA_R_32F, width, call.cols, width}};
      operands.b.operation = CUBLAS_OP_T;
      break;
    case HeadProduct::kTeacherLogits: {
      const TeacherProduct& teacher = call.teacher;
      const cudaDataType_t teacher_type = CudaType(teacher.dtype);
      const int64_t size = teacher.hidden_size;
      operands = {{call.weight, teacher_type, size, call.cols, size},
                  {call.hidden, teacher_type, size, call.rows, size},
                  {call.logits, CudaType(teacher.logits_dtype), call.cols, call.rows,
                   teacher.logits_stride}};
      operands.a.operation = CUBLAS_OP_T;
      break;
    }
  }
  return operands;
}

const char* ProductName(HeadProduct product) {
  switch (product) {
    case HeadProduct::kLogits:
      return "logits";
    case HeadProduct::kGradHidden:
      return "grad_hidden";
    case HeadProduct::kGradWeight:
      return "grad_weight";
    case HeadProduct::kTeacherLogits:
      return "teacher_logits";
  }
  return "unknown product";
}

}  // namespace

absl::StatusOr<std::unique_ptr<HeadGemm>> HeadGemm::Create(const Options& options) {
  absl::StatusOr<const CublasLtLibrary*> library = CublasLtLibrary::Get();
  if (!library.ok()) return library.status();
  cublasLtHandle_t handle = nullptr;
  LMHEAD_RETURN_IF_ERROR((*library)->ToStatus((*library)->Create(&handle), "cublasLtCreate"));
  return std::unique_ptr<HeadGemm>(new HeadGemm(options, *library, handle));
}

HeadGemm::~HeadGemm() { lt_->Destroy(handle_); }

int64_t HeadGemm::Bucket(int64_t rows) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
}

absl::Status HeadGemm::Describe(const HeadProductCall& call, Descriptors* out) const {
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const auto attempt = [&status](cublasStatus_t next) {
    if (status == CUBLAS_STATUS_SUCCESS) status = next;
  };
  const auto layout = [&](const Operand& operand, cublasLtMatrixLayout_t* to) {
    attempt(lt_->MatrixLayoutCreate(to, operand.type, static_cast<uint64_t>(operand.rows),
                                    static_cast<uint64_t>(operand.cols), operand.stride));
  };
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    attempt(lt_->MatmulPreferenceSetAttribute(out->preference, attribute, &value, sizeof(value)));
  };
  out->operands = OperandsOf(call, options_);
  const Operands& operands = out->operands;
  attempt(lt_->MatmulDescCreate(&out->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  attempt(lt_->MatmulDescSetAttribute(out->operation, CUBLASLT_MATMUL_DESC_TRANSA,
                                      &operands.a.operation, sizeof(operands.a.operation)));
  attempt(lt_->MatmulDescSetAttribute(out->operation, CUBLASLT_MATMUL_DESC_TRANSB,
                                      &operands.b.operation, sizeof(operands.b.operation)));
  if (call.bias != nullptr) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    attempt(lt_->MatmulDescSetAttribute(out->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                        sizeof(epilogue)));
    attempt(lt_->MatmulDescSetAttribute(out->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                        &call.bias, sizeof(call.bias)));
  }
  layout(operands.a, &out->a);
  layout(operands.b, &out->b);
  layout(operands.d, &out->d);
  attempt(lt_->MatmulPreferenceCreate(&out->preference));
  if (status == CUBLAS_STATUS_SUCCESS) {
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
           static_cast<uint64_t>(options_.workspace_bytes));
    // Partial sums are added in float32 and in one order, or not split at all.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Alignment(operands.a.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Alignment(operands.b.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Alignment(operands.d.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Alignment(operands.d.data));
  }
  return lt_->ToStatus(status, "describing a matrix product to cuBLASLt");
}

absl::Status HeadGemm::Find(const HeadProductCall& call, const Descriptors& descriptors,
                            int num_wanted, Candidates* candidates) const {
  const cublasStatus_t status = lt_->MatmulAlgoGetHeuristic(
      handle_, descriptors.operation, descriptors.a, descriptors.b, descriptors.d, descriptors.d,
      descriptors.preference, num_wanted, candidates->results.data(), &candidates->count);
  LMHEAD_RETURN_IF_ERROR(lt_->ToStatus(status, "cublasLtMatmulAlgoGetHeuristic"));
  auto* const results = candidates->results.data();
  const auto unusable = [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; };
  candidates->count =
      static_cast<int>(std::remove_if(results, results + candidates->count, unusable) - results);
  if (candidates->count > 0) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat(
      "cuBLASLt has no algorithm for %s of %d rows, %d columns and hidden_size %d",
      ProductName(call.product), call.rows, call.cols, descriptors.operands.a.rows));
}

absl::Status HeadGemm::Launch(const HeadProductCall& call, const Descriptors& descriptors,
                              const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) const {
  const float alpha = 1.0f;
  void* const d = const_cast<void*>(descriptors.operands.d.data);
  return lt_->ToStatus(
      lt_->Matmul(handle_, descriptors.operation, &alpha, descriptors.operands.a.data,
                  descriptors.a, descriptors.operands.b.data, descriptors.b, &call.beta, d,
                  descriptors.d, d, descriptors.d, &algorithm, options_.workspace,
                  static_cast<size_t>(options_.workspace_bytes), stream),
      ProductName(call.product));
}

// Milliseconds a run of `num_runs` in a row.
absl::StatusOr<float> HeadGemm::Time(const HeadProductCall& call, const Descriptors& descriptors,
                                     const cublasLtMatmulAlgo_t& algorithm, int num_runs,
                                     cudaStream_t stream) const {
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  float milliseconds = 0.0f;
  const auto timed = [&]() -> absl::Status {
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventCreate(&start));
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventCreate(&stop));
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(start, stream));
    for (int run = 0; run < num_runs; ++run) {
      LMHEAD_RETURN_IF_ERROR(Launch(call, descriptors, algorithm, stream));
    }
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(stop, stream));
    LMHEAD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(stop));
    return CudaStatus(cudaEventElapsedTime(&milliseconds, start, stop), "timing a product");
  };
  const absl::Status status = timed();
  if (start != nullptr) cudaEventDestroy(start);
  if (stop != nullptr) cudaEventDestroy(stop);
  if (!status.ok()) return status;
  return milliseconds / static_cast<float>(num_runs);
}

// Times all candidates in turn, after a round that warms up, and sorts those behind the first.
absl::Status HeadGemm::Rank(const HeadProductCall& call, const Descriptors& descriptors,
                            cudaStream_t stream, Candidates* candidates) const {
  for (int round = 0; round <= kRounds; ++round) {
    for (int i = 0; i < candidates->count; ++i) {
      const auto time = Time(call, descriptors, candidates->results[i].algo, 1, stream);
      if (!time.ok()) return time.status();
      float& best = candidates->milliseconds[i];
      best = round <= 1 ? *time : std::min(best, *time);
    }
  }
  std::array<int, kCandidatesMax> order{};
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin() + 1, order.begin() + candidates->count, [&](int a, int b) {
    return candidates->milliseconds[a] < candidates->milliseconds[b];
  });
  const Candidates unsorted = *candidates;
  for (int i = 0; i < candidates->count; ++i) candidates->results[i] = unsorted.results[order[i]];
  return absl::OkStatus();
}

// Times the first few candidates for long and drops the rest.
absl::Status HeadGemm::TimeFinalists(const HeadProductCall& call, const Descriptors& descriptors,
                                     cudaStream_t stream, Candidates* candidates) const {
  candidates->count = std::min(candidates->count, kFinalists);
  for (int round = 0; round < kFinalRounds; ++round) {
    for (int i = 0; i < candidates->count; ++i) {
      const auto time = Time(call, descriptors, candidates->results[i].algo, kRunsInARow, stream);
      if (!time.ok()) return time.status();
      float& best = candidates->milliseconds[i];
      best = round == 0 ? *time : std::min(best, *time);
    }
  }
  return absl::OkStatus();
}

std::string HeadGemm::DescribeAlgorithm(const cublasLtMatmulAlgo_t& algorithm) const {
  const auto attribute = [&](cublasLtMatmulAlgoConfigAttributes_t name) {
    int32_t value = -1;
    size_t written = 0;
    lt_->MatmulAlgoConfigGetAttribute(&algorithm, name, &value, sizeof(value), &written);
    return value;
  };
  return absl::StrCat("algorithm ", attribute(CUBLASLT_ALGO_CONFIG_ID), " tile ",
                      attribute(CUBLASLT_ALGO_CONFIG_TILE_ID), " stages ",
                      attribute(CUBLASLT_ALGO_CONFIG_STAGES_ID), " split ",
                      attribute(CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
}

absl::StatusOr<std::string> HeadGemm::Tune(const HeadProductCall& wanted, cudaStream_t stream) {
  const HeadProductCall call = AddingToBias(wanted);
  Descriptors descriptors(lt_);
  LMHEAD_RETURN_IF_ERROR(Describe(call, &descriptors));
  Candidates candidates;
  LMHEAD_RETURN_IF_ERROR(Find(call, descriptors, kCandidatesMax, &candidates));
  LMHEAD_RETURN_IF_ERROR(Rank(call, descriptors, stream, &candidates));
  LMHEAD_RETURN_IF_ERROR(TimeFinalists(call, descriptors, stream, &candidates));
  const std::array<float, kCandidatesMax>& times = candidates.milliseconds;
  const auto fastest =
      std::min_element(times.begin(), times.begin() + candidates.count) - times.begin();
  const auto best = times[fastest] < kClearlyFaster * times[0] ? fastest : 0;
  const cublasLtMatmulAlgo_t& algorithm = candidates.results[best].algo;
  algorithms_[KeyOf(call)] = algorithm;
  return absl::StrFormat(
      "%s %dx%dx%d: %s, %.3f ms (first choice %.3f ms)", ProductName(call.product), call.rows,
      call.cols, descriptors.operands.a.rows, DescribeAlgorithm(algorithm), times[best], times[0]);
}

// Of bfloat16 logits whose rows or columns are not aligned cuBLASLt offers algorithms that round
// the product first and its sum with the bias again. Those products add to the bias instead.
bool HeadGemm::AddsToBias(const HeadProductCall& call) const {
  const bool of_teacher = call.product == HeadProduct::kTeacherLogits;
  const DType dtype = of_teacher ? call.teacher.logits_dtype : options_.dtype;
  const int64_t width = of_teacher ? call.teacher.hidden_size : options_.hidden_size;
  return call.bias != nullptr && dtype != DType::kFloat32 &&
         (width % kAlignedElements != 0 || call.cols % kAlignedElements != 0);
}

HeadProductCall HeadGemm::AddingToBias(const HeadProductCall& call) const {
  HeadProductCall adding = call;
  if (!AddsToBias(call)) return adding;
  adding.bias = nullptr;
  adding.beta = 1.0f;
  return adding;
}

absl::Status HeadGemm::FillWithBias(const HeadProductCall& call, cudaStream_t stream) const {
  if (!AddsToBias(call)) return absl::OkStatus();
  const bool of_teacher = call.product == HeadProduct::kTeacherLogits;
  const MatrixView logits = {call.logits, call.rows,
                             of_teacher ? call.teacher.logits_stride : options_.logits_stride,
                             of_teacher ? call.teacher.logits_dtype : options_.dtype};
  return CudaStatus(kernels::LaunchFillRows(call.bias, call.cols, logits, stream), "fill_rows");
}

HeadGemm::Key HeadGemm::KeyOf(const HeadProductCall& call) {
  return {call.product, Bucket(call.rows), call.cols, call.teacher};
}

absl::Status HeadGemm::Run(const HeadProductCall& wanted, cudaStream_t stream) {
  LMHEAD_RETURN_IF_ERROR(FillWithBias(wanted, stream));
  const HeadProductCall call = AddingToBias(wanted);
  Descriptors descriptors(lt_);
  LMHEAD_RETURN_IF_ERROR(Describe(call, &descriptors));
  const Key key = KeyOf(call);
  const auto known = algorithms_.find(key);
  if (known != algorithms_.end() && IsUsable(descriptors, known->second)) {
    return Launch(call, descriptors, known->second, stream);
  }
  Candidates candidates;
  LMHEAD_RETURN_IF_ERROR(Find(call, descriptors, 1, &candidates));
  algorithms_.emplace(key, candidates.results[0].algo);  // A tuned one stays.
  return Launch(call, descriptors, candidates.results[0].algo, stream);
}

// An algorithm that was found at other rows of the bucket may want more than there is.
bool HeadGemm::IsUsable(const Descriptors& descriptors,
                        const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t check{};
  const cublasStatus_t status =
      lt_->MatmulAlgoCheck(handle_, descriptors.operation, descriptors.a, descriptors.b,
                           descriptors.d, descriptors.d, &algorithm, &check);
  return status == CUBLAS_STATUS_SUCCESS &&
         check.workspaceSize <= static_cast<size_t>(options_.workspace_bytes);
}

}  // namespace lmhead
