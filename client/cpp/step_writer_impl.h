// The state behind a StepWriter: tickets, chunks and connections under one lock.
//
//   Submit --cuts--> pending --least loaded connection--> sent --result--> done
//                       ^----------- connection broke -----'
//
// Who does what: callers' threads cut, encode and write; gRPC's threads decode results, write the
// next chunk, and never wait; one thread of the writer's own opens connections, again after a
// break.
//
// Lifetime of the caller's rows. gRPC may hold borrowed memory after a write is done, after a
// cancellation and after the call is over: until the connection has written or dropped it. Each
// ticket counts these loans, and the gathers that write results into its outputs. No call gives
// rows back to the caller before both are zero.
//
// Locks: mu_, then LoanCount's own. gRPC may drop a loan within any call into it, so that a loan's
// end takes only the latter.

#ifndef LMHEAD_CLIENT_CPP_STEP_WRITER_IMPL_H_
#define LMHEAD_CLIENT_CPP_STEP_WRITER_IMPL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/channels.h"
#include "client/cpp/client.h"
#include "client/cpp/step_writer.h"
#include "proto/wire/chunk_codec.h"

namespace lmhead {

class LossStream;

// How many messages still borrow a ticket's rows. Thread-safe.
class LoanCount {
 public:
  void Lend();
  void Return();
  void AwaitZero();

 private:
  absl::Mutex mu_;
  int64_t loans_ ABSL_GUARDED_BY(mu_) = 0;
};

class StepWriter::Impl : public std::enable_shared_from_this<StepWriter::Impl> {
 public:
  Impl(std::string address, std::shared_ptr<ChannelPool> channels, const ClientOptions& options,
       const WriterSpec& spec);

  // Opens every stream. Called once, before anything else.
  absl::Status Open();

  // What StepWriter says of them.
  absl::StatusOr<uint64_t> Submit(const LossRows& rows);
  absl::StatusOr<LossResult> Wait(uint64_t ticket_id);
  absl::StatusOr<uint64_t> Finish();
  void Cancel();

  // Cancel(), waits for the writer's own thread and gives the channels back. Called once, last.
  void Shutdown();

  // Called by LossStream, on gRPC's threads.
  void OnMessage(size_t connection, grpc::ByteBuffer* message);
  void OnReadsOver(size_t connection);
  void OnWriteDone(size_t connection, bool ok);
  void OnDone(size_t connection, const grpc::Status& status);

 private:
  // What one Submit sends.
  struct Ticket {
    LossRows rows;
    LossResult result;
    int64_t num_unanswered = 0;  // Chunks.
    int num_gathers = 0;         // Results being written into rows' outputs.
    LoanCount loans;
  };

  struct Chunk {
    uint64_t index = 0;
    std::shared_ptr<Ticket> ticket;
    int64_t row_start = 0;
    int64_t num_rows = 0;
    std::optional<uint64_t> checksum;
    size_t num_told = 0;  // How many of Connection::told were written before this chunk.
  };

  enum class State {
    kBroken,    // To be opened (again) at retry_at.
    kOpening,   // Waiting for `opened`.
    kOpen,      // Takes chunks.
    kEnding,    // `end` is sent.
    kEnded,     // `ended` came, the call is closing.
    kFinished,  // Nothing more will happen.
  };

  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    std::shared_ptr<LossStream> stream;  // The current call; null between calls.
    State state = State::kBroken;
    bool writing = false;      // A message is being sent, or about to be.
    bool held = false;         // The call's hold has not been let go.
    bool let_go = false;       // Let go as soon as nothing is being written.
    bool opened_once = false;  // A break from now on may mean that the server restarted.
    int window = 0;            // Chunks without a result that it may have.
    std::deque<Chunk> sent;    // Without a result, in the order they were sent.
    // Results that the server is to be told we have (lmhead.v1.ResultReceived), and those it was
    // told of, but which a break may lose, since it has not answered a chunk sent later: it is told
    // again.
    std::deque<uint64_t> received;
    std::deque<uint64_t> told;
    int num_failures = 0;  // Breaks since the last result.
    absl::Time retry_at = absl::InfinitePast();
  };

  // A message to send once the lock is released: a chunk, `received`, or `end`.
  struct PlannedWrite {
    LossStream* stream = nullptr;  // In a call at least until this is written.
    std::optional<Chunk> chunk;
    std::optional<uint64_t> received;
    uint64_t num_chunks = 0;
  };

  absl::StatusOr<int64_t> RowsPerChunk(const LossRows& rows) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sends every chunk of a ticket.
  absl::Status SubmitChunks(const std::shared_ptr<Ticket>& ticket, int64_t rows_per_chunk);
  absl::Status SubmitChunk(Chunk chunk);
  ChunkView ViewOf(const Chunk& chunk) const;

  // Blocks until nothing uses the rows of the ticket (of all tickets) any more.
  void AwaitIdle(Ticket& ticket);
  void AwaitAllIdle();

  // Chooses what to send, and marks it as being sent.
  std::vector<PlannedWrite> PlanWrites() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PlanReceived(std::vector<PlannedWrite>& writes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetTold(Connection& connection, size_t num_read) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PlanEnds(std::vector<PlannedWrite>& writes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Connection* LeastLoaded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Send(const std::vector<PlannedWrite>& writes);

  std::deque<Chunk>::iterator FindSent(Connection& connection, uint64_t chunk_index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Where a result goes; notes in *gathering that it is being written.
  absl::StatusOr<ResultDestination> PlaceFor(Connection& connection, uint64_t chunk_index,
                                             int64_t num_tokens, std::shared_ptr<Ticket>* gathering)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status OnOpened(Connection& connection, const v1::StreamOpened& opened)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status OnResult(Connection& connection, const DecodedResult& result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status OnEnded(Connection& connection, const v1::StreamEnded& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Half-closes a call whose `ended` came. REQUIRES: nothing is being written.
  void CloseEnded(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Keeps the first error, and ends every call.
  void Fail(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LetGo(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reschedule(Connection& connection, const absl::Status& error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  size_t NumUnanswered() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  size_t Window() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // Of all connections.
  bool AllFinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The writer's own thread: opens connections as they are due.
  void OpenConnections();
  std::optional<size_t> AwaitDue();
  void OpenConnection(size_t index);
  absl::Status CheckServer(const std::shared_ptr<grpc::Channel>& channel);
  absl::Status CheckIncarnation(uint64_t incarnation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartStream(size_t index);

  const std::string address_;
  const ClientOptions options_;
  const WriterSpec spec_;
  const std::string request_id_;  // Of all its streams and attempts.
  const int64_t message_bytes_max_;

  mutable absl::Mutex mu_;
  absl::CondVar changed_;
  std::shared_ptr<ChannelPool> channels_ ABSL_GUARDED_BY(mu_);
  absl::Status error_ ABSL_GUARDED_BY(mu_);  // The first one.
  std::vector<Connection> connections_ ABSL_GUARDED_BY(mu_);
  std::deque<Chunk> pending_ ABSL_GUARDED_BY(mu_);  // Not sent, or to be sent again.
  std::map<uint64_t, std::shared_ptr<Ticket>> tickets_ ABSL_GUARDED_BY(mu_);
  uint64_t next_ticket_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_chunk_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t incarnation_ ABSL_GUARDED_BY(mu_);  // 0 until known.
  int64_t max_chunk_tokens_ ABSL_GUARDED_BY(mu_);
  int num_submitting_ ABSL_GUARDED_BY(mu_) = 0;  // Submit calls under way.
  bool finishing_ ABSL_GUARDED_BY(mu_) = false;
  bool shut_down_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ClientContext* control_call_ ABSL_GUARDED_BY(mu_) = nullptr;  // Of CheckServer.
  std::thread opener_;
};

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_STEP_WRITER_IMPL_H_
