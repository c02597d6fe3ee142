// The subcommands of lmhead. main() has parsed the flags; each gets what is left of the command
// line after its name and returns the exit code of the process: 0, 1 when it failed, 2 when it was
// called wrongly.

#ifndef LMHEAD_SERVER_CLI_COMMANDS_H_
#define LMHEAD_SERVER_CLI_COMMANDS_H_

#include "absl/types/span.h"

namespace lmhead {

// Serves until SIGTERM or SIGINT.
int RunServe(absl::Span<char* const> positional);

// Trains a small language model on real text with its head in a service.
int RunDemo(absl::Span<char* const> positional);

// Prints what dense logits would take beside the service's memory plans.
int RunEstimate(absl::Span<char* const> positional);

// Checks the machine and the files that serve would use, and says how to mend what is wrong.
int RunDoctor(absl::Span<char* const> positional);

// Loads the LM head of a Hugging Face checkpoint into a service.
int RunImport(absl::Span<char* const> positional);

// Copies a Hugging Face checkpoint with the service's head in it.
int RunExport(absl::Span<char* const> positional);

// Holds ranks of a server elsewhere.
int RunFollow(absl::Span<char* const> positional);

// Prints what a service is, holds and does.
int RunStatus(absl::Span<char* const> positional);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_COMMANDS_H_
