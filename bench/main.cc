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
    "              error of each output of each case. Exit code 1 when a case fails.\n";

// The other flags of the executable are those of lmhead's commands.
constexpr const char* kFlags[] = {"address", "backend",  "dtype",
                                  "json",    "schedule", "server_binary"};

std::string Help() {
  std::string text = std::string(kUsage) + "\n";
  for (const char* name : kFlags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
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
  std::fprintf(stderr, "lmhead-bench: %s\n\n%s",
               name.empty() ? "which benchmark?" : ("there is no benchmark '" + name + "'").c_str(),
               kUsage);
  return kExitUsage;
}
