#include "server/cli/common_flags.h"

#include "absl/flags/flag.h"

ABSL_FLAG(std::string, address, "",
          "Service to talk to, host:port or unix:/path. demo and lmhead-bench start one of their "
          "own when empty.");
ABSL_FLAG(std::string, backend, "auto",
          "What computes: cpu, cuda, or auto for the GPU when there is one. (estimate: auto plans "
          "for the GPU.)");
ABSL_FLAG(int64_t, batch_tokens, 0,
          "Most rows one launch computes, for heads that do not say. 0: 1024 on the CPU, 4096 on "
          "the GPU.");
ABSL_FLAG(std::string, dtype, "",
          "Of the weight and the hidden states: float32 (fp32) or bfloat16 (bf16). Default: bf16, "
          "for lmhead-bench golden fp32.");
ABSL_FLAG(int64_t, hidden, 0,
          "Hidden size, columns of the weight. Default of demo: 128; of lmhead-bench service: 256, "
          "on a GPU 4096, as of kernel.");
ABSL_FLAG(bool, json, false, "Print one JSON object for machines to read.");
ABSL_FLAG(int64_t, memory_limit_bytes, 0,
          "Bytes that all heads together may take. 0: serve takes 80% of what the machine or "
          "container has; estimate takes no bound.");
ABSL_FLAG(int64_t, vocab, 0,
          "Vocabulary size, rows of the weight. Default of lmhead-bench service: 8192, on a GPU "
          "131072.");
