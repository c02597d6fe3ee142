#include "tests/client/fake_service.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <thread>

#include "proto/types/limits.h"

namespace lmhead {

// Writes answers from a thread of its own, so that reading goes on while they are held back.
class FakeService::Answers {
 public:
  Answers(FakeService* service, Stream* stream)
      : service_(service), stream_(stream), thread_([this] { Run(); }) {}
  ~Answers() { Close(); }

  void Push(v1::ComputeLossResponse response) {
    const absl::MutexLock lock(&service_->mu_);
    queue_.push_back(std::move(response));
    service_->most_unanswered_ =
        std::max(service_->most_unanswered_, static_cast<int>(queue_.size()));
  }

  // Waits until everything pushed is written; an abandoned stream's held answers are dropped.
  void Close(bool drop_held = false) {
    if (!thread_.joinable()) return;
    {
      const absl::MutexLock lock(&service_->mu_);
      closed_ = true;
      if (drop_held) queue_.clear();
    }
    thread_.join();
  }

 private:
  std::optional<v1::ComputeLossResponse> Next() {
    const auto ready = [this] {
      service_->mu_.AssertHeld();
      return (!queue_.empty() && service_->num_chunks_ >= service_->hold_until) ||
             (queue_.empty() && closed_);
    };
    service_->mu_.LockWhen(absl::Condition(&ready));
    std::optional<v1::ComputeLossResponse> next;
    if (!queue_.empty()) {
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    service_->mu_.Unlock();
    return next;
  }

  void Run() {
    while (std::optional<v1::ComputeLossResponse> response = Next()) {
      if (!service_->filter || service_->filter(&*response)) stream_->Write(*response);
    }
  }

  FakeService* const service_;
  Stream* const stream_;
  std::deque<v1::ComputeLossResponse> queue_;
  bool closed_ = false;
  std::thread thread_;
};

grpc::Status FakeService::ComputeLoss(grpc::ServerContext* context, Stream* stream) {
  v1::ComputeLossRequest request;
  if (!stream->Read(&request) || !request.has_open()) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "the first message is not `open`");
  }
  const v1::StreamOpen open = request.open();
  {
    const absl::MutexLock lock(&mu_);
    opens_.push_back(open);
  }
  if (check_open) {
    if (grpc::Status status = check_open(open); !status.ok()) return status;
  }
  v1::ComputeLossResponse opened;
  opened.mutable_opened()->set_incarnation(incarnation);
  opened.mutable_opened()->set_max_chunk_tokens(max_chunk_tokens);
  opened.mutable_opened()->set_max_inflight_chunks(max_inflight_chunks);
  if (!filter || filter(&opened)) stream->Write(opened);
  Answers answers(this, stream);
  const grpc::Status status = Serve(open, stream, answers);
  answers.Close(/*drop_held=*/!status.ok() || context->IsCancelled());
  return status;
}

grpc::Status FakeService::Serve(const v1::StreamOpen& open, Stream* stream, Answers& answers) {
  v1::ComputeLossRequest request;
  while (stream->Read(&request)) {
    if (request.has_end()) {
      v1::ComputeLossResponse ended;
      {
        const absl::MutexLock lock(&mu_);
        ended.mutable_ended()->set_num_chunks_counted(ledger_[open.worker()].size());
      }
      answers.Push(ended);
      continue;
    }
    if (request.has_received()) {
      const absl::MutexLock lock(&mu_);
      received_.push_back(request.received().chunk_index());
      continue;
    }
    if (check_chunk) {
      if (grpc::Status status = check_chunk(request.chunk()); !status.ok()) return status;
    }
    answers.Push(Answer(open, request.chunk()));
    const absl::MutexLock lock(&mu_);
    ++num_chunks_;
  }
  return grpc::Status::OK;
}

v1::ComputeLossResponse FakeService::Answer(const v1::StreamOpen& open, const v1::Chunk& chunk) {
  v1::ComputeLossResponse response;
  v1::ChunkResult& result = *response.mutable_result();
  result.set_chunk_index(chunk.chunk_index());
  result.set_num_tokens(chunk.num_tokens());
  result.mutable_sums()->set_num_tokens(chunk.num_tokens());
  result.mutable_timings()->set_compute_seconds(1.0);
  double loss_sum = 0.0;
  for (const int32_t target : chunk.targets()) {
    loss_sum += FakeTokenLoss(target);
    if (open.outputs().token_loss()) result.add_token_loss(FakeTokenLoss(target));
    if (open.outputs().logprob()) result.add_logprob(FakeLogprob(target));
    if (open.outputs().lse()) result.add_lse(FakeLse(target));
    if (open.outputs().entropy()) result.add_entropy(FakeEntropy(target));
    if (open.outputs().argmax()) result.add_argmax(FakeArgmax(target));
    for (int32_t k = 0; k < open.outputs().top_k(); ++k) {
      result.add_topk_ids(FakeTopkId(target, k));
      result.add_topk_logprobs(FakeTopkLogprob(target, k));
    }
  }
  result.mutable_sums()->set_loss_sum(loss_sum);
  if (open.outputs().grad_hidden_states()) {
    std::string grad = chunk.hidden_states();
    std::transform(grad.begin(), grad.end(), grad.begin(), FakeGradByte);
    result.set_grad_hidden_states(std::move(grad));
  }
  const absl::MutexLock lock(&mu_);
  result.set_duplicate(!ledger_[open.worker()].insert(chunk.chunk_index()).second);
  chunk_rows_.push_back(chunk.num_tokens());
  ++chunks_by_stream_[open.stream_index()];
  return response;
}

grpc::Status FakeService::TakeUnavailable() {
  if (unavailable_calls.load() <= 0) return grpc::Status::OK;
  --unavailable_calls;
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now");
}

grpc::Status FakeService::GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                                        v1::GetServerInfoResponse* response) {
  response->set_version("fake");
  response->set_incarnation(incarnation);
  return TakeUnavailable();
}

grpc::Status FakeService::DeleteHead(grpc::ServerContext*, const v1::DeleteHeadRequest*,
                                     v1::DeleteHeadResponse*) {
  ++num_delete_calls_;
  return TakeUnavailable();
}

grpc::Status FakeService::PrepareStep(grpc::ServerContext* context, const v1::PrepareStepRequest*,
                                      v1::PrepareStepResponse* response) {
  // Answers how many whole seconds the caller grants, for tests of deadlines.
  const auto left = context->deadline() - std::chrono::system_clock::now();
  response->set_num_chunks(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(left).count()));
  return TakeUnavailable();
}

grpc::Status FakeService::LoadWeights(grpc::ServerContext*,
                                      grpc::ServerReader<v1::LoadWeightsRequest>* reader,
                                      v1::LoadWeightsResponse* response) {
  if (grpc::Status status = TakeUnavailable(); !status.ok()) return status;
  v1::LoadWeightsRequest request;
  int64_t num_rows = 0;
  const absl::MutexLock lock(&mu_);
  while (reader->Read(&request)) {
    if (request.dtype() != v1::DTYPE_UNSPECIFIED) weight_dtype_ = request.dtype();
    const v1::TensorRows& rows = request.rows();
    const size_t row_bytes = rows.data().size() / static_cast<size_t>(rows.num_rows());
    for (int64_t i = 0; i < rows.num_rows(); ++i) {
      weight_rows_[rows.row_start() + i] =
          rows.data().substr(static_cast<size_t>(i) * row_bytes, row_bytes);
    }
    num_rows += rows.num_rows();
  }
  response->set_num_rows(num_rows);
  return grpc::Status::OK;
}

grpc::Status FakeService::ReadWeights(grpc::ServerContext*, const v1::ReadWeightsRequest* request,
                                      grpc::ServerWriter<v1::ReadWeightsResponse>* writer) {
  if (grpc::Status status = TakeUnavailable(); !status.ok()) return status;
  const absl::MutexLock lock(&mu_);
  for (int64_t i = 0; i < request->num_rows(); ++i) {
    v1::ReadWeightsResponse response;
    response.set_dtype(weight_dtype_);
    response.mutable_rows()->set_row_start(request->row_start() + i);
    response.mutable_rows()->set_num_rows(1);
    response.mutable_rows()->set_data(weight_rows_[request->row_start() + i]);
    writer->Write(response);
  }
  return grpc::Status::OK;
}

std::map<std::string, std::set<uint64_t>> FakeService::ledger() const {
  const absl::MutexLock lock(&mu_);
  return ledger_;
}

std::vector<v1::StreamOpen> FakeService::opens() const {
  const absl::MutexLock lock(&mu_);
  return opens_;
}

std::vector<int64_t> FakeService::chunk_rows() const {
  const absl::MutexLock lock(&mu_);
  return chunk_rows_;
}

std::vector<uint64_t> FakeService::received() const {
  const absl::MutexLock lock(&mu_);
  return received_;
}

std::map<uint32_t, int> FakeService::chunks_by_stream() const {
  const absl::MutexLock lock(&mu_);
  return chunks_by_stream_;
}

int FakeService::most_unanswered() const {
  const absl::MutexLock lock(&mu_);
  return most_unanswered_;
}

// A Unix socket keeps its address over a restart; a port could be taken by another process.
FakeServer::FakeServer(FakeService* service)
    : service_(service), address_("unix:" + directory_.Path("socket")) {
  Start();
}

FakeServer::~FakeServer() { Stop(); }

void FakeServer::Start() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(static_cast<int>(64 * kMiB));
  builder.RegisterService(service_);
  server_ = builder.BuildAndStart();
}

void FakeServer::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

}  // namespace lmhead
