// lmhead-bench: measures and checks a running service. Dispatch only.

#include <cstdio>
#include <string_view>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/types/span.h"
#include "bench/commands.h"
#include "proto/wire/process.h"

namespace {

constexpr char kUsage[] =
    "Checks and measures a service.\n\n"
    "  lmhead-bench golden DIR   every golden case of a folder through a real service: the worst\n"
    "                            error of each output of each case. Exit code 1 when one fails.\n"
    "  lmhead-bench kernel       the head on the first GPU beside its bare matrix products, in this\n"
    "                            process: tokens/s, their ratio, and the memory.\n\n"
    "lmhead-bench --help shows the flags.";

constexpr int kExitUsage = 2;

}  // namespace

int main(int argc, char** argv) {
  lmhead::TuneAllocator();
  lmhead::KeepGrpcInitialized();
  absl::SetProgramUsageMessage(kUsage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  const std::string_view command = arguments.size() > 1 ? arguments[1] : "";
  if (command == "golden") {
    return lmhead::bench::RunGolden(absl::MakeConstSpan(arguments).subspan(2));
  }
  if (command == "kernel") {
    return lmhead::bench::RunKernel(absl::MakeConstSpan(arguments).subspan(2));
  }
  std::fprintf(stderr, "lmhead-bench: %s\n\n%s\n",
               command.empty() ? "which benchmark?"
                               : ("there is no benchmark '" + std::string(command) + "'").c_str(),
               kUsage);
  return kExitUsage;
}
