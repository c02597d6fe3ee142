// lmhead-bench: dispatch to the benchmarks, and their help. Nothing else.

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/types/span.h"
#include "bench/commands.h"
#include "proto/wire/process.h"

namespace {

constexpr int kExitUsage = 2;

constexpr char kUsage[] =
    "usage: lmhead-bench BENCHMARK [flags]\n\n"
    "  golden DIR  Sends every golden case of a folder through a real service and prints the "
    "worst\n"
    "              error of each output of each case. Exit code 1 when a case fails.\n"
    "  kernel      Times the head on the first GPU beside its bare matrix products, in this\n"
    "              process.\n"
    "  service     Times steps of several workers through a real service, beside what its backend\n"
    "              does alone and beside the same head in this process.\n";

// The other flags of the executable are those of lmhead's commands; a build without CUDA has none
// of the kernel benchmark's.
constexpr const char* kFlags[] = {"address",         "backend",
                                  "batch_tokens",    "chunk_bytes",
                                  "connections",     "compare_inprocess",
                                  "dtype",           "hidden",
                                  "inflight",        "json",
                                  "kernel_rows",     "kernel_vocab",
                                  "kernel_repeats",  "kernel_long_tokens",
                                  "metrics_address", "repeats",
                                  "schedule",        "server_binary",
                                  "shards",          "tls_ca_file",
                                  "tls_cert_file",   "tls_key_file",
                                  "tls_server_name", "token_file",
                                  "tokens",          "vocab",
                                  "workers"};

std::string Help() {
  std::string text = std::string(kUsage) + "\n";
  for (const char* name : kFlags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    if (flag == nullptr) continue;
    const std::string value = flag->DefaultValue();
    text += "  --" + std::string(name) + "  (default: " + (value.empty() ? "\"\"" : value) +
            ")\n      " + flag->Help() + "\n";
  }
  return text;
}

bool AsksForHelp(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](std::string_view argument) {
    return argument == "--help" || argument == "-help" || argument == "-h";
  });
}

}  // namespace

int main(int argc, char** argv) {
  lmhead::LetOpenMpThreadsSleep(argv);
  lmhead::TuneAllocator();
  lmhead::KeepGrpcInitialized();
  if (AsksForHelp(argc, argv)) {
    std::fputs(Help().c_str(), stdout);
    return 0;
  }
  absl::SetProgramUsageMessage(kUsage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  const std::string name = arguments.size() > 1 ? arguments[1] : "";
  if (name == "golden") {
    return lmhead::bench::RunGolden(absl::MakeConstSpan(arguments).subspan(2));
  }
  if (name == "kernel") {
    return lmhead::bench::RunKernel(absl::MakeConstSpan(arguments).subspan(2));
  }
  if (name == "service") {
    return lmhead::bench::RunService(absl::MakeConstSpan(arguments).subspan(2));
  }
  std::fprintf(stderr, "lmhead-bench: %s\n\n%s",
               name.empty() ? "which benchmark?" : ("there is no benchmark '" + name + "'").c_str(),
               kUsage);
  return kExitUsage;
}
