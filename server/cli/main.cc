// lmhead: dispatch to the subcommands, and their help. Nothing else.

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/types/span.h"
#include "proto/wire/process.h"
#include "server/cli/commands.h"
#include "server/cli/grpc_log.h"
#include "server/server.h"

namespace {

constexpr int kExitUsage = 2;

struct Command {
  std::string_view name;
  int (*run)(absl::Span<char* const> positional);
  std::string_view arguments;
  std::string_view summary;
  std::string_view source;                     // Its own flags are defined there.
  std::vector<std::string_view> shared_flags;  // Of common_flags.cc.
};

const std::vector<Command>& Commands() {
  static const auto& commands = *new std::vector<Command>{
      {"serve",
       lmhead::RunServe,
       "",
       "Serves heads until SIGTERM or SIGINT.",
       "server/cli/serve_flags.cc",
       {"backend", "batch_tokens", "memory_limit_bytes", "ranks", "replicas", "auth_policy_file",
        "auth_token_file", "insecure", "tls_cert_file", "tls_client_ca_file", "tls_key_file"}},
      {"follow",
       lmhead::RunFollow,
       "",
       "Holds ranks of a server elsewhere, until SIGTERM or SIGINT.",
       "server/cli/follow.cc",
       {"backend", "collective_host", "devices", "local_ranks", "log_format", "log_level",
        "ready_file", "tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name",
        "token_file"}},
      {"demo",
       lmhead::RunDemo,
       "",
       "Trains a small language model on real text with its head in a service.",
       "server/cli/demo.cc",
       {"address", "backend", "dtype", "hidden", "json", "tls_ca_file", "tls_cert_file",
        "tls_key_file", "tls_server_name", "token_file"}},
      {"estimate",
       lmhead::RunEstimate,
       "",
       "Prints what dense logits would take beside the service's memory plans.",
       "server/cli/estimate.cc",
       {"address", "backend", "batch_tokens", "dtype", "hidden", "json", "memory_limit_bytes",
        "ranks", "replicas", "tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name",
        "token_file", "vocab"}},
      {"status",
       lmhead::RunStatus,
       "",
       "Prints what a running service is, holds and does.",
       "server/cli/status.cc",
       {"address", "json", "tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name",
        "token_file"}},
      {"import",
       lmhead::RunImport,
       " CHECKPOINT",
       "Loads the LM head of a Hugging Face checkpoint into a service.",
       "server/cli/import.cc",
       {"address", "head", "tensor", "tls_ca_file", "tls_cert_file", "tls_key_file",
        "tls_server_name", "token_file"}},
      {"export",
       lmhead::RunExport,
       " NEW_CHECKPOINT",
       "Copies a Hugging Face checkpoint with the service's head in it.",
       "server/cli/export.cc",
       {"address", "head", "tensor", "tls_ca_file", "tls_cert_file", "tls_key_file",
        "tls_server_name", "token_file"}},
      {"doctor",
       lmhead::RunDoctor,
       "",
       "Checks the machine and the files that serve would use; takes the flags of serve.",
       "server/cli/serve_flags.cc",
       {"backend", "batch_tokens", "memory_limit_bytes", "ranks", "replicas", "auth_policy_file",
        "auth_token_file", "insecure", "json", "tls_ca_file", "tls_cert_file", "tls_client_ca_file",
        "tls_key_file"}},
  };
  return commands;
}

std::string Overview() {
  std::string text = "usage: lmhead COMMAND [flags]\n\n";
  for (const Command& command : Commands()) {
    text += "  " + std::string(command.name) + std::string(10 - command.name.size(), ' ') +
            std::string(command.summary) + "\n";
  }
  return text + "\nlmhead COMMAND --help, or lmhead help COMMAND, shows a command's flags.\n";
}

const Command* FindCommand(std::string_view name) {
  for (const Command& command : Commands()) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

bool IsFlagOf(const Command& command, std::string_view name, const std::string& filename) {
  const size_t length = command.source.size();
  if (filename.size() >= length &&
      filename.compare(filename.size() - length, length, command.source) == 0) {
    return true;
  }
  const auto& shared = command.shared_flags;
  return std::find(shared.begin(), shared.end(), name) != shared.end();
}

std::string Help(const Command& command) {
  std::map<std::string, const absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    const std::string text(name);
    if (IsFlagOf(command, text, flag->Filename())) flags.emplace(text, flag);
  }
  std::string text = "usage: lmhead " + std::string(command.name) + " [flags]" +
                     std::string(command.arguments) + "\n\n" + std::string(command.summary) +
                     "\n\n";
  for (const auto& [name, flag] : flags) {
    const std::string value = flag->DefaultValue();
    text += "  --" + name + "  (default: " + (value.empty() ? "\"\"" : value) + ")\n      " +
            flag->Help() + "\n";
  }
  return text;
}

// Abseil's own --help would list the flags of every command.
bool AsksForHelp(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](std::string_view argument) {
    return argument == "--help" || argument == "-help" || argument == "-h";
  });
}

}  // namespace

int main(int argc, char** argv) {
  lmhead::LetOpenMpThreadsSleep(argv);
  lmhead::TuneAllocator();
  lmhead::SilenceGrpcLog();  // serve and follow take it into their log.
  const bool asked_first = argc > 1 && std::string_view(argv[1]) == "help";
  const std::string about = argc > 1 + asked_first ? argv[1 + asked_first] : "";
  const Command* named = FindCommand(about);
  const bool answerable = named != nullptr || about.empty();
  if (AsksForHelp(argc, argv) || (asked_first && answerable)) {
    std::fputs((named != nullptr ? Help(*named) : Overview()).c_str(), stdout);
    return 0;
  }
  absl::SetProgramUsageMessage(Overview());
  absl::FlagsUsageConfig usage;
  usage.version_string = [] { return std::string("lmhead ") + lmhead::kVersion + "\n"; };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  const std::string name = asked_first ? about : arguments.size() > 1 ? arguments[1] : "";
  const Command* command = FindCommand(name);
  if (command != nullptr) return command->run(absl::MakeConstSpan(arguments).subspan(2));
  std::fprintf(stderr, "lmhead: %s\n\n%s",
               name.empty() ? "which command?" : ("there is no command '" + name + "'").c_str(),
               Overview().c_str());
  return kExitUsage;
}
