// gRPC's own log lines, in the format and among the lines of the process.

#ifndef LMHEAD_SERVER_CLI_GRPC_LOG_H_
#define LMHEAD_SERVER_CLI_GRPC_LOG_H_

namespace lmhead {

// Has gRPC's lines logged as `gRPC: …`. A line that comes again within 10 seconds is counted
// instead: whoever reaches a port causes one by each connection that fails. Call it after
// SetUpLogging().
void TakeGrpcLogIn();

// Has gRPC write nothing, for commands whose own error has the reason. With GRPC_VERBOSITY set, it
// writes all the same.
void SilenceGrpcLog();

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CLI_GRPC_LOG_H_
