// The subcommands of lmhead-bench. Each parses nothing: flags have been parsed by main().

#ifndef LMHEAD_BENCH_COMMANDS_H_
#define LMHEAD_BENCH_COMMANDS_H_

#include "absl/types/span.h"

namespace lmhead::bench {

// lmhead-bench golden DIR: every case file of a folder through a real service. 0 when no case
// fails, 1 when one does, 2 when nothing could be run.
int RunGolden(absl::Span<char* const> positional);

// lmhead-bench kernel: a head on the first GPU beside its bare matrix products, in this process.
// 0 when it was measured, 2 without a GPU.
int RunKernel(absl::Span<char* const> positional);

// lmhead-bench service: steps of several workers through a real service, beside what its backend
// does alone and beside the same head in this process. 0 when it was measured, 1 when a step failed
// or was counted wrongly, 2 when nothing could be run.
int RunService(absl::Span<char* const> positional);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_COMMANDS_H_
