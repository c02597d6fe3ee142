#include "client/cpp/step_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/channels.h"
#include "client/cpp/loss_stream.h"
#include "client/cpp/step_writer_impl.h"
#include "lmhead/v1/service.grpc.pb.h"
#include "proto/types/limits.h"
#include "proto/wire/convert.h"
#include "proto/wire/request_id.h"
#include "proto/wire/status.h"

namespace lmhead {
namespace {

// --- Checks of the caller's rows ----------------------------------------------------------------

absl::Status CheckLength(const char* field, size_t length, bool wanted, int64_t num_tokens,
                         int64_t per_token = 1) {
  const size_t want = wanted ? static_cast<size_t>(num_tokens * per_token) : 0;
  if (length == want) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s has %d elements, want %d for %d rows and this recipe", field, length, want, num_tokens));
}

absl::Status CheckAsked(const char* output, bool given, bool asked) {
  if (given == asked) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("a place for %s is %s, but outputs.%s is %s",
                                                    output, given ? "given" : "not given", output,
                                                    asked ? "true" : "false"));
}

absl::Status CheckAskedTopK(const char* output, bool given, int32_t top_k) {
  if (given == (top_k > 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("a place for %s is %s, but outputs.top_k is %d",
                                                    output, given ? "given" : "not given", top_k));
}

std::string Shape(const ConstMatrixView& view) {
  const std::string_view dtype = DTypeName(view.dtype);
  return absl::StrFormat("[%d, %d] %s", view.rows, view.cols, dtype);
}

bool Overlap(const ConstMatrixView& a, const ConstMatrixView& b) {
  const auto* a_start = static_cast<const std::byte*>(a.data);
  const auto* b_start = static_cast<const std::byte*>(b.data);
  return a_start < b_start + b.size_bytes() && b_start < a_start + a.size_bytes();
}

absl::Status CheckGrad(const ConstMatrixView& hidden, const ConstMatrixView& grad, bool asked) {
  if (absl::Status status = CheckAsked("grad_hidden_states", grad.data != nullptr, asked);
      !status.ok() || !asked) {
    return status;
  }
  if (grad.rows != hidden.rows || grad.cols != hidden.cols || grad.dtype != hidden.dtype) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "grad_hidden_states is %s, want %s like hidden_states", Shape(grad), Shape(hidden)));
  }
  if (Overlap(hidden, grad)) {
    return absl::InvalidArgumentError("grad_hidden_states overlaps hidden_states");
  }
  return absl::OkStatus();
}

absl::Status CheckHidden(const char* field, const ConstMatrixView& hidden, const char* dtype_field,
                         DType dtype) {
  if (hidden.dtype != dtype) {
    const std::string_view got = DTypeName(hidden.dtype);
    const std::string_view want = DTypeName(dtype);
    return absl::InvalidArgumentError(absl::StrFormat("%s is %s, the writer was opened with %s %s",
                                                      field, got, dtype_field, want));
  }
  if (hidden.data == nullptr || hidden.rows < 1 || hidden.cols < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %s%s, want at least one row and one column", field, Shape(hidden),
                        hidden.data == nullptr ? " at a null address" : ""));
  }
  return absl::OkStatus();
}

// What of the recipe decides which arrays come with the rows.
struct WantedArrays {
  explicit WantedArrays(const v1::LossRecipe& recipe)
      : coefficients(recipe.policy().kind() == v1::PolicySpec::KIND_COEFFICIENTS),
        clipped(recipe.policy().kind() == v1::PolicySpec::KIND_CLIPPED),
        reference(clipped && recipe.policy().reference_kl_coefficient() != 0.0f),
        top_k(recipe.distillation().top_k()),
        paired(recipe.distillation().paired_stream()),
        teacher_hidden(recipe.has_distillation() && top_k == 0 && !paired) {}

  bool coefficients, clipped, reference;
  int32_t top_k;
  bool paired;
  bool teacher_hidden;  // In the same chunk.
};

absl::Status CheckTeacherHidden(const LossRows& rows, const WriterSpec& spec, bool wanted) {
  const ConstMatrixView& teacher = rows.teacher_hidden_states;
  if (!wanted) {
    if (teacher.data == nullptr) return absl::OkStatus();
    return absl::InvalidArgumentError(
        spec.recipe.distillation().paired_stream()
            ? "teacher_hidden_states is given, but of a paired stream they come on the teacher's "
              "side"
            : "teacher_hidden_states is given, but the recipe names no teacher_head");
  }
  absl::Status status =
      CheckHidden("teacher_hidden_states", teacher, "distillation.teacher_hidden_dtype",
                  static_cast<DType>(spec.recipe.distillation().teacher_hidden_dtype()));
  if (!status.ok() || spec.teacher_side || teacher.rows == rows.hidden_states.rows) return status;
  return absl::InvalidArgumentError(
      absl::StrFormat("teacher_hidden_states is %s, want %d rows like "
                      "hidden_states",
                      Shape(teacher), rows.hidden_states.rows));
}

// The teacher's side carries teacher_hidden_states and nothing else.
absl::Status CheckTeacherSide(const LossRows& rows, const WriterSpec& spec) {
  const bool others =
      rows.hidden_states.data != nullptr || !rows.targets.empty() || !rows.token_weights.empty() ||
      !rows.token_temperature.empty() || rows.grad_scale != 1.0f || !rows.logprob_grad.empty() ||
      !rows.entropy_grad.empty() || !rows.old_logprob.empty() || !rows.advantage.empty() ||
      !rows.reference_logprob.empty() || !rows.teacher_topk_ids.empty() ||
      !rows.teacher_topk_logprobs.empty() || rows.grad_hidden_states.data != nullptr ||
      rows.token_loss != nullptr || rows.logprob != nullptr || rows.lse != nullptr ||
      rows.entropy != nullptr || rows.argmax != nullptr || rows.topk_ids != nullptr ||
      rows.topk_logprobs != nullptr;
  if (others) {
    return absl::InvalidArgumentError(
        "rows of the teacher's side have more than teacher_hidden_states: the rest belongs to the "
        "student's side");
  }
  return CheckTeacherHidden(rows, spec, true);
}

absl::Status CheckInputs(const LossRows& rows, const WriterSpec& spec) {
  const int64_t num_tokens = rows.hidden_states.rows;
  const WantedArrays wanted(spec.recipe);
  for (const absl::Status& status :
       {CheckHidden("hidden_states", rows.hidden_states, "hidden_dtype", spec.hidden_dtype),
        CheckLength("targets", rows.targets.size(), true, num_tokens),
        CheckLength("token_weights", rows.token_weights.size(), spec.recipe.token_weights(),
                    num_tokens),
        CheckLength("token_temperature", rows.token_temperature.size(),
                    spec.recipe.per_token_temperature(), num_tokens),
        CheckLength("logprob_grad", rows.logprob_grad.size(), wanted.coefficients, num_tokens),
        CheckLength("entropy_grad", rows.entropy_grad.size(), wanted.coefficients, num_tokens),
        CheckLength("old_logprob", rows.old_logprob.size(), wanted.clipped, num_tokens),
        CheckLength("advantage", rows.advantage.size(), wanted.clipped, num_tokens),
        CheckLength("reference_logprob", rows.reference_logprob.size(), wanted.reference,
                    num_tokens),
        CheckLength("teacher_topk_ids", rows.teacher_topk_ids.size(), wanted.top_k > 0, num_tokens,
                    wanted.top_k),
        CheckLength("teacher_topk_logprobs", rows.teacher_topk_logprobs.size(), wanted.top_k > 0,
                    num_tokens, wanted.top_k),
        CheckTeacherHidden(rows, spec, wanted.teacher_hidden)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckRows(const LossRows& rows, const WriterSpec& spec) {
  if (spec.teacher_side) return CheckTeacherSide(rows, spec);
  const v1::OutputSpec& outputs = spec.outputs;
  for (const absl::Status& status :
       {CheckInputs(rows, spec),
        CheckGrad(rows.hidden_states, rows.grad_hidden_states, outputs.grad_hidden_states()),
        CheckAsked("token_loss", rows.token_loss != nullptr, outputs.token_loss()),
        CheckAsked("logprob", rows.logprob != nullptr, outputs.logprob()),
        CheckAsked("lse", rows.lse != nullptr, outputs.lse()),
        CheckAsked("entropy", rows.entropy != nullptr, outputs.entropy()),
        CheckAsked("argmax", rows.argmax != nullptr, outputs.argmax()),
        CheckAskedTopK("topk_ids", rows.topk_ids != nullptr, outputs.top_k()),
        CheckAskedTopK("topk_logprobs", rows.topk_logprobs != nullptr, outputs.top_k())}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// --- Pieces of the caller's rows ----------------------------------------------------------------

// Rows [start, start + count) of an array of per_token elements a row.
template <typename T>
std::span<const T> Piece(std::span<const T> all, int64_t start, int64_t count,
                         int64_t per_token = 1) {
  if (all.empty()) return {};
  return all.subspan(static_cast<size_t>(start * per_token),
                     static_cast<size_t>(count * per_token));
}

std::span<const std::byte> Piece(const ConstMatrixView& all, int64_t start, int64_t count) {
  if (all.data == nullptr) return {};
  const int64_t row_bytes = all.cols * BytesPerElement(all.dtype);
  return {static_cast<const std::byte*>(all.data) + start * row_bytes,
          static_cast<size_t>(count * row_bytes)};
}

template <typename T>
T* At(T* all, int64_t start) {
  return all == nullptr ? nullptr : all + start;
}

ResultDestination DestinationOf(const LossRows& rows, int64_t start, int64_t count, int32_t top_k) {
  ResultDestination to{.token_loss = At(rows.token_loss, start),
                       .logprob = At(rows.logprob, start),
                       .lse = At(rows.lse, start),
                       .entropy = At(rows.entropy, start),
                       .argmax = At(rows.argmax, start),
                       .topk_ids = At(rows.topk_ids, start * top_k),
                       .topk_logprobs = At(rows.topk_logprobs, start * top_k),
                       .top_k = top_k};
  const MatrixView& grad = rows.grad_hidden_states;
  if (grad.data != nullptr) {
    const int64_t row_bytes = grad.cols * BytesPerElement(grad.dtype);
    to.grad_hidden_states = {static_cast<std::byte*>(grad.data) + start * row_bytes,
                             static_cast<size_t>(count * row_bytes)};
  }
  return to;
}

void AddTimings(const StageTimings& from, StageTimings& to) {
  to.queue_seconds += from.queue_seconds;
  to.upload_seconds += from.upload_seconds;
  to.compute_seconds += from.compute_seconds;
  to.download_seconds += from.download_seconds;
}

}  // namespace

// --- LoanCount ----------------------------------------------------------------------------------

void LoanCount::Lend() {
  const absl::MutexLock lock(&mu_);
  ++loans_;
}

void LoanCount::Return() {
  const absl::MutexLock lock(&mu_);
  --loans_;
}

void LoanCount::AwaitZero() {
  mu_.LockWhen(absl::Condition(
      +[](int64_t* loans) { return *loans == 0; }, &loans_));
  mu_.Unlock();
}

// --- Callers' threads ---------------------------------------------------------------------------

StepWriter::Impl::Impl(std::string address, std::shared_ptr<ChannelPool> channels,
                       const ClientOptions& options, const WriterSpec& spec)
    : address_(std::move(address)),
      options_(options),
      spec_(spec),
      request_id_(options.request_id.empty() ? MakeRequestId() : options.request_id),
      message_bytes_max_(
          std::max(kControlMessageBytesMax, spec.chunk_bytes + kMessageHeaderBytesMax)),
      channels_(std::move(channels)),
      connections_(static_cast<size_t>(spec.num_connections)),
      incarnation_(spec.incarnation),
      max_chunk_tokens_(kChunkTokensMax) {
  for (Connection& connection : connections_) {
    connection.channel = channels_->Take(message_bytes_max_);
  }
}

absl::Status StepWriter::Impl::Open() {
  opener_ = std::thread([this] { OpenConnections(); });
  const absl::Time deadline = absl::Now() + options_.connect_timeout + options_.call_timeout;
  const absl::MutexLock lock(&mu_);
  const auto all_open = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return std::all_of(connections_.begin(), connections_.end(),
                       [](const Connection& c) { return c.state == State::kOpen; });
  };
  while (error_.ok() && !all_open()) {
    if (!changed_.WaitWithDeadline(&mu_, deadline) || all_open()) continue;
    Fail(absl::DeadlineExceededError(
        absl::StrCat(address_, ": the server did not answer `open` in time")));
  }
  return error_;
}

absl::StatusOr<uint64_t> StepWriter::Impl::Submit(const LossRows& rows) {
  if (absl::Status status = CheckRows(rows, spec_); !status.ok()) return status;
  auto ticket = std::make_shared<Ticket>();
  ticket->rows = rows;
  uint64_t ticket_id = 0;
  int64_t rows_per_chunk = 0;
  {
    const absl::MutexLock lock(&mu_);
    if (!error_.ok()) return error_;
    if (finishing_) return absl::FailedPreconditionError("Submit after Finish: open a new writer");
    absl::StatusOr<int64_t> fitting = RowsPerChunk(rows);
    if (!fitting.ok()) return fitting.status();
    rows_per_chunk = *fitting;
    ticket->num_unanswered = (rows.num_tokens() + rows_per_chunk - 1) / rows_per_chunk;
    ticket_id = next_ticket_++;
    tickets_[ticket_id] = ticket;
    ++num_submitting_;
  }
  absl::Status status = SubmitChunks(ticket, rows_per_chunk);
  std::vector<PlannedWrite> writes;
  {
    const absl::MutexLock lock(&mu_);
    --num_submitting_;
    if (!status.ok()) tickets_.erase(ticket_id);
    writes = PlanWrites();  // The last Submit may be what Finish waited for.
  }
  Send(writes);
  if (status.ok()) return ticket_id;
  AwaitIdle(*ticket);
  return status;
}

absl::StatusOr<int64_t> StepWriter::Impl::RowsPerChunk(const LossRows& rows) const {
  constexpr int64_t kTopkEntryBytes = 8;  // An id and a log-probability.
  int64_t row_bytes =
      (spec_.recipe.distillation().top_k() + spec_.outputs.top_k()) * kTopkEntryBytes;
  for (const ConstMatrixView& matrix : {rows.hidden_states, rows.teacher_hidden_states}) {
    row_bytes += matrix.cols * BytesPerElement(matrix.dtype);
  }
  const int64_t fitting = std::max<int64_t>(1, spec_.chunk_bytes / row_bytes);
  if (spec_.chunk_tokens == 0) return std::min(fitting, max_chunk_tokens_);
  if (spec_.chunk_tokens > fitting) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk_tokens is %d, but chunk_bytes (%d) holds %d rows of %d bytes: raise "
                        "chunk_bytes, or lower chunk_tokens",
                        spec_.chunk_tokens, spec_.chunk_bytes, fitting, row_bytes));
  }
  return std::min(spec_.chunk_tokens, max_chunk_tokens_);
}

absl::Status StepWriter::Impl::SubmitChunks(const std::shared_ptr<Ticket>& ticket,
                                            int64_t rows_per_chunk) {
  const int64_t num_rows = ticket->rows.num_tokens();
  for (int64_t start = 0; start < num_rows; start += rows_per_chunk) {
    Chunk chunk{.ticket = ticket,
                .row_start = start,
                .num_rows = std::min(rows_per_chunk, num_rows - start)};
    if (spec_.send_checksums) chunk.checksum = ChunkChecksum(ViewOf(chunk));
    if (absl::Status status = SubmitChunk(std::move(chunk)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status StepWriter::Impl::SubmitChunk(Chunk chunk) {
  std::vector<PlannedWrite> writes;
  {
    const absl::MutexLock lock(&mu_);
    while (error_.ok() && NumUnanswered() >= Window()) changed_.Wait(&mu_);
    if (!error_.ok()) return error_;
    chunk.index = next_chunk_++;
    pending_.push_back(std::move(chunk));
    writes = PlanWrites();
  }
  Send(writes);
  return absl::OkStatus();
}

ChunkView StepWriter::Impl::ViewOf(const Chunk& chunk) const {
  const LossRows& rows = chunk.ticket->rows;
  const auto piece = [&chunk](const auto& all, int64_t per_token = 1) {
    return Piece(all, chunk.row_start, chunk.num_rows, per_token);
  };
  const int32_t top_k = spec_.recipe.distillation().top_k();
  ChunkView view;
  view.chunk_index = chunk.index;
  view.num_tokens = chunk.num_rows;
  if (rows.grad_scale != 1.0f) view.grad_scale = rows.grad_scale;
  view.checksum = chunk.checksum;
  view.targets = piece(rows.targets);
  view.token_weights = piece(rows.token_weights);
  view.token_temperature = piece(rows.token_temperature);
  view.logprob_grad = piece(rows.logprob_grad);
  view.entropy_grad = piece(rows.entropy_grad);
  view.old_logprob = piece(rows.old_logprob);
  view.advantage = piece(rows.advantage);
  view.topk_ids = piece(rows.teacher_topk_ids, top_k);
  view.topk_logprobs = piece(rows.teacher_topk_logprobs, top_k);
  view.reference_logprob = piece(rows.reference_logprob);
  view.teacher_hidden_states = Piece(rows.teacher_hidden_states, chunk.row_start, chunk.num_rows);
  view.hidden_states = Piece(rows.hidden_states, chunk.row_start, chunk.num_rows);
  return view;
}

absl::StatusOr<LossResult> StepWriter::Impl::Wait(uint64_t ticket_id) {
  std::shared_ptr<Ticket> ticket;
  absl::Status status;
  {
    const absl::MutexLock lock(&mu_);
    const auto found = tickets_.find(ticket_id);
    if (found == tickets_.end()) {
      if (!error_.ok()) return error_;
      return absl::InvalidArgumentError(absl::StrFormat(
          "ticket %d is not one of this writer, or has been waited for", ticket_id));
    }
    ticket = found->second;
    tickets_.erase(found);
    while (error_.ok() && ticket->num_unanswered > 0) changed_.Wait(&mu_);
    status = error_;
  }
  AwaitIdle(*ticket);
  if (!status.ok()) return status;
  return ticket->result;
}

void StepWriter::Impl::AwaitIdle(Ticket& ticket) {
  {
    const absl::MutexLock lock(&mu_);
    while (ticket.num_gathers > 0) changed_.Wait(&mu_);
  }
  ticket.loans.AwaitZero();
}

void StepWriter::Impl::AwaitAllIdle() {
  std::map<uint64_t, std::shared_ptr<Ticket>> tickets;
  {
    const absl::MutexLock lock(&mu_);
    tickets = tickets_;
  }
  for (const auto& [id, ticket] : tickets) AwaitIdle(*ticket);
}

absl::StatusOr<uint64_t> StepWriter::Impl::Finish() {
  std::vector<PlannedWrite> writes;
  {
    const absl::MutexLock lock(&mu_);
    finishing_ = true;
    writes = PlanWrites();
  }
  Send(writes);
  absl::Status status;
  uint64_t num_chunks = 0;
  {
    const absl::MutexLock lock(&mu_);
    while (error_.ok() && !AllFinished()) changed_.Wait(&mu_);
    status = error_;
    num_chunks = next_chunk_;
  }
  AwaitAllIdle();
  if (!status.ok()) return status;
  return num_chunks;
}

void StepWriter::Impl::Cancel() {
  {
    const absl::MutexLock lock(&mu_);
    if (!AllFinished()) {
      Fail(absl::CancelledError(absl::StrCat(address_, ": the step writer was cancelled")));
    }
    const auto any_call = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return std::any_of(connections_.begin(), connections_.end(),
                         [](const Connection& c) { return c.stream != nullptr; });
    };
    while (any_call()) changed_.Wait(&mu_);
  }
  AwaitAllIdle();
}

void StepWriter::Impl::Shutdown() {
  Cancel();
  {
    const absl::MutexLock lock(&mu_);
    shut_down_ = true;
    changed_.SignalAll();
  }
  if (opener_.joinable()) opener_.join();
  std::shared_ptr<ChannelPool> channels;  // Let go on this thread, like the channels.
  {
    const absl::MutexLock lock(&mu_);
    channels = std::move(channels_);
    for (Connection& connection : connections_) {
      channels->Give(message_bytes_max_, std::move(connection.channel));
    }
  }
}

// --- Sending ------------------------------------------------------------------------------------

StepWriter::Impl::Connection* StepWriter::Impl::LeastLoaded() {
  Connection* least = nullptr;
  for (Connection& connection : connections_) {
    const bool takes_chunks = connection.state == State::kOpen && !connection.writing &&
                              !connection.let_go &&
                              connection.sent.size() < static_cast<size_t>(connection.window);
    if (!takes_chunks) continue;
    if (least == nullptr || connection.sent.size() < least->sent.size()) least = &connection;
  }
  return least;
}

std::vector<StepWriter::Impl::PlannedWrite> StepWriter::Impl::PlanWrites() {
  std::vector<PlannedWrite> writes;
  if (!error_.ok()) return writes;
  PlanReceived(writes);
  while (!pending_.empty()) {
    Connection* connection = LeastLoaded();
    if (connection == nullptr) return writes;
    connection->sent.push_back(std::move(pending_.front()));
    pending_.pop_front();
    connection->sent.back().num_told = connection->told.size();
    connection->writing = true;
    connection->sent.back().ticket->loans.Lend();
    writes.push_back({.stream = connection->stream.get(), .chunk = connection->sent.back()});
  }
  if (finishing_ && num_submitting_ == 0 && NumUnanswered() == 0) PlanEnds(writes);
  return writes;
}

// Before any chunk: the server may hold back the teacher's side, and with it our next results,
// until it knows.
void StepWriter::Impl::PlanReceived(std::vector<PlannedWrite>& writes) {
  for (Connection& connection : connections_) {
    if (connection.state != State::kOpen || connection.writing || connection.let_go ||
        connection.received.empty()) {
      continue;
    }
    connection.writing = true;
    writes.push_back({.stream = connection.stream.get(), .received = connection.received.front()});
    connection.told.push_back(connection.received.front());
    connection.received.pop_front();
  }
}

// The server reads in order: with the answer to a chunk it has read what was written before it.
void StepWriter::Impl::ForgetTold(Connection& connection, size_t num_read) {
  connection.told.erase(connection.told.begin(), connection.told.begin() + num_read);
  for (Chunk& chunk : connection.sent) chunk.num_told -= std::min(chunk.num_told, num_read);
}

void StepWriter::Impl::PlanEnds(std::vector<PlannedWrite>& writes) {
  for (Connection& connection : connections_) {
    if (connection.state != State::kOpen || connection.writing || connection.let_go) continue;
    connection.state = State::kEnding;
    connection.writing = true;
    writes.push_back({.stream = connection.stream.get(), .num_chunks = next_chunk_});
  }
}

void StepWriter::Impl::Send(const std::vector<PlannedWrite>& writes) {
  for (const PlannedWrite& write : writes) {
    if (write.chunk.has_value()) {
      // The ticket is kept alive by its loan; its rows by whoever waits for the loan to end.
      write.stream->Write(EncodeRequest(
          ViewOf(*write.chunk), [ticket = write.chunk->ticket] { ticket->loans.Return(); }));
    } else if (write.received.has_value()) {
      v1::ResultReceived received;
      received.set_chunk_index(*write.received);
      write.stream->Write(EncodeRequest(received));
    } else {
      v1::StreamEnd end;
      end.set_num_chunks(write.num_chunks);
      write.stream->Write(EncodeRequest(end));
    }
  }
}

// --- gRPC's threads -----------------------------------------------------------------------------

void StepWriter::Impl::OnMessage(size_t index, grpc::ByteBuffer* message) {
  std::shared_ptr<Ticket> gathering;
  const auto decoded = DecodeResponse(message, [&](uint64_t chunk_index, int64_t num_tokens) {
    const absl::MutexLock lock(&mu_);
    return PlaceFor(connections_[index], chunk_index, num_tokens, &gathering);
  });
  std::vector<PlannedWrite> writes;
  {
    const absl::MutexLock lock(&mu_);
    if (gathering != nullptr) --gathering->num_gathers;
    Connection& connection = connections_[index];
    absl::Status status = decoded.status();
    if (status.ok() && error_.ok()) {
      if (const auto* result = std::get_if<DecodedResult>(&*decoded)) {
        status = OnResult(connection, *result);
      } else if (const auto* opened = std::get_if<v1::StreamOpened>(&*decoded)) {
        status = OnOpened(connection, *opened);
      } else {
        status = OnEnded(connection, std::get<v1::StreamEnded>(*decoded));
      }
    }
    if (!status.ok()) Fail(AtAddress(address_, status));
    writes = PlanWrites();
    changed_.SignalAll();
  }
  Send(writes);
}

std::deque<StepWriter::Impl::Chunk>::iterator StepWriter::Impl::FindSent(Connection& connection,
                                                                         uint64_t chunk_index) {
  return std::find_if(connection.sent.begin(), connection.sent.end(),
                      [chunk_index](const Chunk& chunk) { return chunk.index == chunk_index; });
}

absl::StatusOr<ResultDestination> StepWriter::Impl::PlaceFor(Connection& connection,
                                                             uint64_t chunk_index,
                                                             int64_t num_tokens,
                                                             std::shared_ptr<Ticket>* gathering) {
  if (!error_.ok()) return error_;
  const auto chunk = FindSent(connection, chunk_index);
  if (chunk == connection.sent.end()) {
    return absl::InternalError(absl::StrFormat(
        "the server sent a result for chunk %d, but this stream does not wait for it",
        chunk_index));
  }
  if (num_tokens != chunk->num_rows) {
    return absl::InternalError(
        absl::StrFormat("the server sent a result of %d rows for chunk %d, which has %d",
                        num_tokens, chunk_index, chunk->num_rows));
  }
  if (*gathering == nullptr) {
    *gathering = chunk->ticket;
    ++chunk->ticket->num_gathers;
  }
  return DestinationOf(chunk->ticket->rows, chunk->row_start, chunk->num_rows,
                       spec_.outputs.top_k());
}

absl::Status StepWriter::Impl::OnOpened(Connection& connection, const v1::StreamOpened& opened) {
  if (connection.state != State::kOpening) {
    return absl::InternalError("the server sent `opened` a second time");
  }
  if (absl::Status status = CheckIncarnation(opened.incarnation()); !status.ok()) return status;
  if (opened.max_chunk_tokens() < 1 || opened.max_inflight_chunks() < 1) {
    return absl::InternalError(absl::StrFormat(
        "the server opened a stream with max_chunk_tokens %d and max_inflight_chunks %d",
        opened.max_chunk_tokens(), opened.max_inflight_chunks()));
  }
  connection.state = State::kOpen;
  connection.opened_once = true;
  connection.window = std::min(spec_.max_inflight_chunks, opened.max_inflight_chunks());
  max_chunk_tokens_ = std::min(max_chunk_tokens_, opened.max_chunk_tokens());
  return absl::OkStatus();
}

absl::Status StepWriter::Impl::OnResult(Connection& connection, const DecodedResult& result) {
  const auto chunk = FindSent(connection, result.chunk_index);
  Ticket& ticket = *chunk->ticket;
  ticket.result.sums += result.sums;
  ticket.result.num_chunks += 1;
  ticket.result.num_duplicates += result.duplicate ? 1 : 0;
  AddTimings(result.timings, ticket.result.timings);
  ticket.num_unanswered -= 1;
  if (spec_.recipe.distillation().paired_stream() && !spec_.teacher_side) {
    connection.received.push_back(result.chunk_index);
  }
  ForgetTold(connection, chunk->num_told);
  connection.sent.erase(chunk);
  connection.num_failures = 0;
  return absl::OkStatus();
}

absl::Status StepWriter::Impl::OnEnded(Connection& connection, const v1::StreamEnded& ended) {
  if (connection.state != State::kEnding) {
    return absl::InternalError("the server sent `ended` before this stream's end");
  }
  const uint64_t counted = ended.num_chunks_counted();
  if (spec_.step != 0 && counted < next_chunk_) {
    return absl::InternalError(
        absl::StrFormat("the server answered %d chunks of worker %s in step %d, but has counted %d",
                        next_chunk_, spec_.worker, spec_.step, counted));
  }
  if (spec_.step != 0 && counted > next_chunk_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the server has counted %d chunks of worker %s in step %d, this writer sent %d: another "
        "writer of the same worker sent the rest; abort the step and begin it again",
        counted, spec_.worker, spec_.step, next_chunk_));
  }
  connection.state = State::kEnded;
  if (!connection.writing) CloseEnded(connection);
  return absl::OkStatus();
}

void StepWriter::Impl::CloseEnded(Connection& connection) {
  if (!connection.held) return;
  connection.stream->HalfClose();
  LetGo(connection);
}

void StepWriter::Impl::OnReadsOver(size_t index) {
  const absl::MutexLock lock(&mu_);
  LetGo(connections_[index]);
}

void StepWriter::Impl::OnWriteDone(size_t index, bool ok) {
  std::vector<PlannedWrite> writes;
  {
    const absl::MutexLock lock(&mu_);
    Connection& connection = connections_[index];
    connection.writing = false;
    if (!ok || connection.let_go) {
      LetGo(connection);
    } else if (connection.state == State::kEnded) {
      CloseEnded(connection);
    }
    writes = PlanWrites();
  }
  Send(writes);
}

void StepWriter::Impl::OnDone(size_t index, const grpc::Status& grpc_status) {
  const absl::Status status = AtAddress(address_, FromGrpcStatus(grpc_status));
  std::shared_ptr<LossStream> over;  // Destroyed after the lock is released.
  std::vector<PlannedWrite> writes;
  {
    const absl::MutexLock lock(&mu_);
    Connection& connection = connections_[index];
    over = std::move(connection.stream);
    connection.stream = nullptr;
    // Another stream of ours with the same index may still be there, until the server notices that
    // its connection is gone.
    const bool retryable =
        absl::IsUnavailable(status) || (connection.opened_once && absl::IsAlreadyExists(status));
    if (!error_.ok() ||
        (connection.state == State::kEnded && (status.ok() || absl::IsUnavailable(status)))) {
      connection.state = State::kFinished;
    } else if (retryable) {
      Reschedule(connection, status);
    } else {
      Fail(status.ok() ? absl::InternalError(absl::StrCat(
                             address_, ": the server closed the stream before its end"))
                       : status);
    }
    writes = PlanWrites();
    changed_.SignalAll();
  }
  Send(writes);
}

// --- State --------------------------------------------------------------------------------------

void StepWriter::Impl::Fail(const absl::Status& error) {
  if (!error_.ok()) return;
  error_ = error;
  pending_.clear();
  for (Connection& connection : connections_) {
    if (connection.stream == nullptr) {
      connection.state = State::kFinished;
      continue;
    }
    connection.stream->Cancel();
    LetGo(connection);
  }
  if (control_call_ != nullptr) control_call_->TryCancel();
  changed_.SignalAll();
}

void StepWriter::Impl::LetGo(Connection& connection) {
  connection.let_go = true;
  if (!connection.held || connection.writing) return;
  connection.held = false;
  connection.stream->LetGo();
}

void StepWriter::Impl::Reschedule(Connection& connection, const absl::Status& error) {
  pending_.insert(pending_.begin(), connection.sent.begin(), connection.sent.end());
  // Oldest first, so that both sides of a paired stream always want the same chunks.
  std::sort(pending_.begin(), pending_.end(),
            [](const Chunk& a, const Chunk& b) { return a.index < b.index; });
  connection.sent.clear();
  connection.received.insert(connection.received.begin(), connection.told.begin(),
                             connection.told.end());
  connection.told.clear();
  connection.num_failures += 1;
  if (connection.num_failures >= options_.max_attempts) {
    Fail(absl::Status(error.code(),
                      absl::StrFormat("%s (gave up after %d attempts)",
                                      std::string(error.message()), connection.num_failures)));
    return;
  }
  connection.state = State::kBroken;
  connection.retry_at = absl::Now() + RetryDelay(connection.num_failures);
}

size_t StepWriter::Impl::NumUnanswered() const {
  size_t count = pending_.size();
  for (const Connection& connection : connections_) count += connection.sent.size();
  return count;
}

size_t StepWriter::Impl::Window() const {
  size_t window = 0;
  for (const Connection& connection : connections_) {
    window += static_cast<size_t>(connection.window);
  }
  return window;
}

bool StepWriter::Impl::AllFinished() const {
  return std::all_of(connections_.begin(), connections_.end(),
                     [](const Connection& c) { return c.state == State::kFinished; });
}

// --- The writer's own thread --------------------------------------------------------------------

void StepWriter::Impl::OpenConnections() {
  while (const std::optional<size_t> index = AwaitDue()) OpenConnection(*index);
}

std::optional<size_t> StepWriter::Impl::AwaitDue() {
  const absl::MutexLock lock(&mu_);
  while (error_.ok() && !shut_down_) {
    const auto soonest = std::min_element(
        connections_.begin(), connections_.end(), [](const Connection& a, const Connection& b) {
          const bool a_broken = a.state == State::kBroken;
          const bool b_broken = b.state == State::kBroken;
          return a_broken != b_broken ? a_broken : a.retry_at < b.retry_at;
        });
    if (soonest->state != State::kBroken) {
      changed_.Wait(&mu_);
    } else if (soonest->retry_at > absl::Now()) {
      changed_.WaitWithDeadline(&mu_, soonest->retry_at);
    } else {
      return static_cast<size_t>(soonest - connections_.begin());
    }
  }
  return std::nullopt;
}

void StepWriter::Impl::OpenConnection(size_t index) {
  std::shared_ptr<grpc::Channel> channel;
  bool opened_once = false;
  {
    const absl::MutexLock lock(&mu_);
    channel = connections_[index].channel;
    opened_once = connections_[index].opened_once;
  }
  const auto stop = [this] {
    const absl::MutexLock lock(&mu_);
    return !error_.ok();
  };
  absl::Status status = WaitForConnection(*channel, address_, options_.connect_timeout, stop);
  if (!status.ok()) {
    const absl::MutexLock lock(&mu_);
    Fail(status);
    return;
  }
  if (opened_once) status = CheckServer(channel);
  if (status.ok()) {
    StartStream(index);
    return;
  }
  const absl::MutexLock lock(&mu_);
  if (!error_.ok()) return;
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
    Reschedule(connections_[index], status);
  } else {
    Fail(status);
  }
}

absl::Status StepWriter::Impl::CheckServer(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options_.connect_timeout));
  context.AddMetadata(kRequestIdKey, request_id_);
  {
    const absl::MutexLock lock(&mu_);
    if (!error_.ok()) return error_;
    control_call_ = &context;
  }
  v1::GetServerInfoResponse info;
  const grpc::Status status =
      v1::LmHeadService::NewStub(channel)->GetServerInfo(&context, {}, &info);
  const absl::MutexLock lock(&mu_);
  control_call_ = nullptr;
  if (!status.ok()) return AtAddress(address_, FromGrpcStatus(status));
  return AtAddress(address_, CheckIncarnation(info.incarnation()));
}

absl::Status StepWriter::Impl::CheckIncarnation(uint64_t incarnation) {
  if (incarnation_ == 0) incarnation_ = incarnation;
  if (incarnation == incarnation_) return absl::OkStatus();
  return absl::AbortedError(absl::StrFormat(
      "the server has restarted: its incarnation is %016x, this writer began with %016x. What the "
      "step had counted is gone; begin it again",
      incarnation, incarnation_));
}

void StepWriter::Impl::StartStream(size_t index) {
  v1::StreamOpen open;
  open.set_head(spec_.head);
  open.set_step(spec_.step);
  open.set_worker(spec_.worker);
  open.set_incarnation(spec_.incarnation);
  open.set_stream_index(static_cast<uint32_t>(index));
  open.set_hidden_dtype(DTypeToProto(spec_.hidden_dtype));
  *open.mutable_recipe() = spec_.recipe;
  *open.mutable_outputs() = spec_.outputs;
  open.set_teacher_side(spec_.teacher_side);
  const grpc::ByteBuffer message = EncodeRequest(open);
  std::shared_ptr<grpc::Channel> channel;
  auto stream = std::make_shared<LossStream>(shared_from_this(), index, request_id_);
  {
    const absl::MutexLock lock(&mu_);
    if (!error_.ok()) return;
    Connection& connection = connections_[index];
    connection.stream = stream;
    connection.state = State::kOpening;
    connection.writing = true;  // `open` itself.
    connection.held = true;
    connection.let_go = false;
    channel = connection.channel;
  }
  stream->Start(channel, message);
}

// --- StepWriter ---------------------------------------------------------------------------------

StepWriter::StepWriter(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

StepWriter::~StepWriter() { impl_->Shutdown(); }

absl::StatusOr<uint64_t> StepWriter::Submit(const LossRows& rows) { return impl_->Submit(rows); }

absl::StatusOr<LossResult> StepWriter::Wait(uint64_t ticket) { return impl_->Wait(ticket); }

absl::StatusOr<LossResult> StepWriter::Compute(const LossRows& rows) {
  const absl::StatusOr<uint64_t> ticket = Submit(rows);
  if (!ticket.ok()) return ticket.status();
  return Wait(*ticket);
}

absl::StatusOr<uint64_t> StepWriter::Finish() { return impl_->Finish(); }

void StepWriter::Cancel() { impl_->Cancel(); }

}  // namespace lmhead
