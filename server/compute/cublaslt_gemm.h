// The matrix products of a head on cuBLASLt, with algorithms chosen by trial.
//
// Thread-compatible. Launches only; the caller owns memory and streams. No algorithm that adds with
// atomics is taken, so that a product gives the same bits in every run of the process.

#ifndef LMHEAD_SERVER_COMPUTE_CUBLASLT_GEMM_H_
#define LMHEAD_SERVER_COMPUTE_CUBLASLT_GEMM_H_

#include <cuda_runtime_api.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/dtype.h"
#include "server/compute/cublaslt_library.h"

namespace lmhead {

// Row-major: hidden [rows, hidden_size], weight [cols, hidden_size], logits [rows, cols] with a
// stride; cols are the vocabulary columns of one tile.
enum class HeadProduct : uint8_t {
  kLogits,         // logits = hidden weight^T + bias
  kGradHidden,     // grad_hidden = grad_logits weight + beta grad_hidden
  kGradWeight,     // grad_weight = grad_logits^T hidden + beta grad_weight
  kTeacherLogits,  // As kLogits, of a teacher's hidden states and weight.
};

// What a teacher's product does not share with those of the head.
struct TeacherProduct {
  int64_t hidden_size = 0;
  DType dtype = DType::kBFloat16;         // Of hidden states and weight.
  DType logits_dtype = DType::kBFloat16;  // float32 for a float32 teacher.
  int64_t logits_stride = 0;

  friend auto operator<=>(const TeacherProduct&, const TeacherProduct&) = default;
};

// One product to run.
struct HeadProductCall {
  HeadProduct product = HeadProduct::kLogits;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* hidden = nullptr;  // kLogits, kGradWeight; the head's dtype like the next two.
  const void* weight = nullptr;  // kLogits, kGradHidden
  void* logits = nullptr;        // Read by all but kLogits.
  const void* bias = nullptr;    // Logits': [cols] of the logits' dtype, or null.
  void* grad = nullptr;          // kGradHidden, kGradWeight
  float beta = 0.0f;
  TeacherProduct teacher;  // kTeacherLogits
};

class HeadGemm {
 public:
  struct Options {
    DType dtype = DType::kBFloat16;             // Of hidden states, weight and logits.
    DType grad_hidden_dtype = DType::kFloat32;  // grad_weight is always float32.
    int64_t hidden_size = 0;
    int64_t logits_stride = 0;
    void* workspace = nullptr;  // Device memory; products that share it share a stream.
    int64_t workspace_bytes = 0;
  };

  // UNAVAILABLE when cuBLASLt cannot be opened.
  static absl::StatusOr<std::unique_ptr<HeadGemm>> Create(const Options& options);
  ~HeadGemm();
  HeadGemm(const HeadGemm&) = delete;
  HeadGemm& operator=(const HeadGemm&) = delete;

  // Times the candidate algorithms of `wanted` and keeps the best for all calls of this product and
  // cols whose rows lie in the same bucket (below). Overwrites the output; waits for the stream.
  // Returns a line that says what was chosen.
  absl::StatusOr<std::string> Tune(const HeadProductCall& wanted, cudaStream_t stream);

  // Launches a product, with the tuned algorithm of its bucket, or else with what was cuBLASLt's
  // first choice at the first call of the bucket.
  // The sum of product and bias is rounded once.
  absl::Status Run(const HeadProductCall& wanted, cudaStream_t stream);

  // Buckets are the powers of two: (2^(k-1), 2^k] rows share an algorithm, tuned at 2^k rows or at
  // the most rows there are.
  static int64_t Bucket(int64_t rows);

 private:
  struct Descriptors;
  struct Candidates;
  // Product, bucket of rows, cols.
  using Key = std::tuple<HeadProduct, int64_t, int64_t, TeacherProduct>;
  static Key KeyOf(const HeadProductCall& call);

  HeadGemm(const Options& options, const CublasLtLibrary* library, cublasLtHandle_t handle)
      : options_(options), lt_(library), handle_(handle) {}

  bool AddsToBias(const HeadProductCall& call) const;
  HeadProductCall AddingToBias(const HeadProductCall& call) const;
  absl::Status FillWithBias(const HeadProductCall& call, cudaStream_t stream) const;
  absl::Status Describe(const HeadProductCall& call, Descriptors* descriptors) const;
  absl::Status Find(const HeadProductCall& call, const Descriptors& descriptors, int num_wanted,
                    Candidates* candidates) const;
  bool IsUsable(const Descriptors& descriptors, const cublasLtMatmulAlgo_t& algorithm) const;
  absl::Status Launch(const HeadProductCall& call, const Descriptors& descriptors,
                      const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) const;
  absl::StatusOr<float> Time(const HeadProductCall& call, const Descriptors& descriptors,
                             const cublasLtMatmulAlgo_t& algorithm, int num_runs,
                             cudaStream_t stream) const;
  absl::Status Rank(const HeadProductCall& call, const Descriptors& descriptors,
                    cudaStream_t stream, Candidates* candidates) const;
  absl::Status TimeFinalists(const HeadProductCall& call, const Descriptors& descriptors,
                             cudaStream_t stream, Candidates* candidates) const;
  std::string DescribeAlgorithm(const cublasLtMatmulAlgo_t& algorithm) const;

  const Options options_;
  const CublasLtLibrary* const lt_;
  const cublasLtHandle_t handle_;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUBLASLT_GEMM_H_
