// What a process that moves large messages through gRPC sets up once.

#ifndef LMHEAD_PROTO_WIRE_PROCESS_H_
#define LMHEAD_PROTO_WIRE_PROCESS_H_

#include <cstdint>

namespace lmhead {

// Takes a reference on the gRPC library that is never given back. When the last channel goes away
// gRPC 1.51 otherwise shuts its threads down, and may wait for ever for one of them on machines
// with many cores. The client library and the server call this; calling it again is free.
void KeepGrpcInitialized();

// How bad what gRPC logs is.
enum class GrpcSeverity : uint8_t { kDebug, kInfo, kError };

// Has gRPC hand its log lines to `log`, on any thread, instead of writing them to standard error in
// a format of its own.
void RouteGrpcLog(void (*log)(GrpcSeverity severity, const char* message));

// Keeps memory of received messages in the process. gRPC frees its 64 KiB read slices one by one;
// with glibc's defaults they go back to the system, and a received GiB costs more than 100,000 page
// faults and half the throughput. A choice of the whole process, so main() makes it, before it
// starts threads; libraries do not. No effect where malloc is not glibc's.
void TuneAllocator();

// Lets waiting OpenMP threads sleep. By default they spin for about a millisecond after every
// parallel loop, and take the processor from the threads that move messages: on busy cores a small
// batch then takes ten times as long. The OpenMP library reads OMP_WAIT_POLICY when it is loaded,
// before main(), so unless the variable is set already this sets it and starts the program anew in
// the same process. Call it first thing in main(); it may not return.
void LetOpenMpThreadsSleep(char** argv);

}  // namespace lmhead

#endif  // LMHEAD_PROTO_WIRE_PROCESS_H_
