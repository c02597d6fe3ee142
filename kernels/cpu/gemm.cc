#include "kernels/cpu/gemm.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <map>
#include <new>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dnnl.hpp"

namespace lmhead::cpu {
namespace {

using dnnl::memory;

constexpr int64_t kRowMultiple = 8;

// Without AVX-512, oneDNN packs operands into buffers of its own that grow with the columns of the
// result; in pieces of this width they stay below 1 MiB a thread.
constexpr int64_t kPieceColumns = 1024;

// result [m, n] (+)= left [m, k] right [k, n], where either operand may be stored transposed.
struct Problem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool left_transposed = false;
  bool right_transposed = false;
  bool accumulate = false;

  auto Key() const { return std::tie(m, n, k, left_transposed, right_transposed, accumulate); }
  bool operator<(const Problem& other) const { return Key() < other.Key(); }
};

// Columns [start, start + cols) of the result.
struct Piece {
  dnnl::matmul primitive;
  memory left;
  memory right;
  memory result;
  memory scratch;
  int64_t right_offset = 0;
  int64_t result_offset = 0;
};

memory::dims Strides(int64_t rows, int64_t cols, bool transposed) {
  return transposed ? memory::dims{1, rows} : memory::dims{cols, 1};
}

// Restores the number of OpenMP threads of the calling thread.
class ScopedThreads {
 public:
  ScopedThreads() : saved_(omp_get_max_threads()) {}
  ~ScopedThreads() { omp_set_num_threads(saved_); }

 private:
  const int saved_;
};

}  // namespace

int64_t PaddedRows(int64_t rows, int64_t max_rows) {
  const auto quarter = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows))) / 4;
  const int64_t multiple = std::max(kRowMultiple, quarter);
  return std::min((rows + multiple - 1) / multiple * multiple, max_rows);
}

struct Gemm::Impl {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::byte* scratch = nullptr;
  int64_t scratch_bytes = 0;
  std::map<Problem, std::vector<Piece>> products;

  dnnl::matmul::primitive_desc Describe(const Problem& problem, int64_t cols) const;
  Piece Prepare(const Problem& problem, int64_t start,
                const dnnl::matmul::primitive_desc& description) const;
  std::vector<Piece> Prepare(const Problem& problem) const;
  absl::Status Run(const Problem& problem, const float* left, const float* right, float* result);
};

// The product of `cols` columns, for as many threads as the scratch serves.
dnnl::matmul::primitive_desc Gemm::Impl::Describe(const Problem& problem, int64_t cols) const {
  const auto f32 = memory::data_type::f32;
  const memory::desc left({problem.m, problem.k}, f32,
                          Strides(problem.m, problem.k, problem.left_transposed));
  const memory::desc right({problem.k, cols}, f32,
                           Strides(problem.k, problem.n, problem.right_transposed));
  const memory::desc result({problem.m, cols}, f32, Strides(problem.m, problem.n, false));
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (problem.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const ScopedThreads restore;
  for (int threads = omp_get_max_threads();; threads = threads * 3 / 4) {
    omp_set_num_threads(threads);
#if DNNL_VERSION_MAJOR >= 3  // Ubuntu 24.04; Debian 12 has version 2.
    dnnl::matmul::primitive_desc description(engine, left, right, result, attributes);
#else
    dnnl::matmul::primitive_desc description({left, right, result}, attributes, engine);
#endif
    const auto bytes = static_cast<int64_t>(description.scratchpad_desc().get_size());
    if (bytes <= scratch_bytes) return description;
    if (threads == 1) throw dnnl::error(dnnl_out_of_memory, "the planned scratch is too small");
  }
}

Piece Gemm::Impl::Prepare(const Problem& problem, int64_t start,
                          const dnnl::matmul::primitive_desc& description) const {
  return {.primitive = dnnl::matmul(description),
          .left = memory(description.src_desc(), engine, DNNL_MEMORY_NONE),
          .right = memory(description.weights_desc(), engine, DNNL_MEMORY_NONE),
          .result = memory(description.dst_desc(), engine, DNNL_MEMORY_NONE),
          .scratch = memory(description.scratchpad_desc(), engine, scratch),
          .right_offset = problem.right_transposed ? start * problem.k : start,
          .result_offset = start};
}

std::vector<Piece> Gemm::Impl::Prepare(const Problem& problem) const {
  std::vector<Piece> pieces;
  const dnnl::matmul::primitive_desc whole = Describe(problem, problem.n);
  const bool uses_scratch = std::string_view(whole.impl_info_str()).starts_with("brg");
  if (uses_scratch || problem.n <= kPieceColumns) {
    pieces.push_back(Prepare(problem, 0, whole));
    return pieces;
  }
  for (int64_t start = 0; start < problem.n; start += kPieceColumns) {
    const int64_t cols = std::min(kPieceColumns, problem.n - start);
    pieces.push_back(Prepare(problem, start, Describe(problem, cols)));
  }
  return pieces;
}

absl::Status Gemm::Impl::Run(const Problem& problem, const float* left, const float* right,
                             float* result) {
  const auto handle = [](const float* data) { return const_cast<float*>(data); };
  try {
    auto found = products.find(problem);
    if (found == products.end()) found = products.emplace(problem, Prepare(problem)).first;
    for (Piece& piece : found->second) {
      piece.left.set_data_handle(handle(left));
      piece.right.set_data_handle(handle(right + piece.right_offset));
      piece.result.set_data_handle(result + piece.result_offset);
      piece.primitive.execute(stream, {{DNNL_ARG_SRC, piece.left},
                                       {DNNL_ARG_WEIGHTS, piece.right},
                                       {DNNL_ARG_DST, piece.result},
                                       {DNNL_ARG_SCRATCHPAD, piece.scratch}});
    }
    stream.wait();
    return absl::OkStatus();
  } catch (const std::exception& error) {  // dnnl::error or std::bad_alloc.
    return absl::InternalError(absl::StrCat("oneDNN: matrix product of [", problem.m, ", ",
                                            problem.k, "] and [", problem.k, ", ", problem.n,
                                            "]: ", error.what()));
  }
}

Gemm::Gemm(std::byte* scratch, int64_t scratch_bytes) : impl_(std::make_unique<Impl>()) {
  impl_->scratch = scratch;
  impl_->scratch_bytes = scratch_bytes;
}

Gemm::~Gemm() = default;

absl::Status Gemm::Logits(const Shape& shape, const float* hidden, const float* weight,
                          float* logits) {
  return impl_->Run(
      {.m = shape.rows, .n = shape.cols, .k = shape.hidden_size, .right_transposed = true}, hidden,
      weight, logits);
}

absl::Status Gemm::AddGradHidden(const Shape& shape, const float* grad_logits, const float* weight,
                                 float* grad_hidden) {
  return impl_->Run({.m = shape.rows, .n = shape.hidden_size, .k = shape.cols, .accumulate = true},
                    grad_logits, weight, grad_hidden);
}

absl::Status Gemm::AddGradWeight(const Shape& shape, const float* grad_logits, const float* hidden,
                                 float* grad_weight) {
  return impl_->Run({.m = shape.cols,
                     .n = shape.hidden_size,
                     .k = shape.rows,
                     .left_transposed = true,
                     .accumulate = true},
                    grad_logits, hidden, grad_weight);
}

}  // namespace lmhead::cpu
