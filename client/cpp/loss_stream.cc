#include "client/cpp/loss_stream.h"

#include <grpcpp/generic/generic_stub.h>

#include <utility>

#include "client/cpp/step_writer_impl.h"
#include "proto/wire/request_id.h"

namespace lmhead {
namespace {

constexpr char kMethod[] = "/lmhead.v1.LmHeadService/ComputeLoss";

}  // namespace

LossStream::LossStream(std::shared_ptr<StepWriter::Impl> writer, size_t connection,
                       const std::string& request_id)
    : writer_(std::move(writer)),
      connection_(connection),
      context_(std::make_unique<grpc::ClientContext>()) {
  context_->AddMetadata(kRequestIdKey, request_id);
}

void LossStream::Start(std::shared_ptr<grpc::Channel> channel, const grpc::ByteBuffer& open) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(std::move(channel));
  {
    const absl::MutexLock lock(&mu_);
    stub.PrepareBidiStreamingCall(context_.get(), kMethod, {}, this);
  }
  AddHold();
  outgoing_ = open;
  StartWrite(&outgoing_);
  StartRead(&incoming_);
  StartCall();
}

void LossStream::Write(const grpc::ByteBuffer& message) {
  outgoing_ = message;
  StartWrite(&outgoing_);
}

void LossStream::Cancel() {
  const absl::MutexLock lock(&mu_);
  if (context_ != nullptr) context_->TryCancel();
}

void LossStream::OnReadDone(bool ok) {
  if (!ok) {
    writer_->OnReadsOver(connection_);
    return;
  }
  writer_->OnMessage(connection_, &incoming_);
  // Always one read outstanding: a stream that only writes can block both ends.
  incoming_.Clear();
  StartRead(&incoming_);
}

void LossStream::OnWriteDone(bool ok) {
  outgoing_.Clear();
  writer_->OnWriteDone(connection_, ok);
}

void LossStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<StepWriter::Impl> writer = writer_;  // May be the last one.
  {
    const absl::MutexLock lock(&mu_);
    context_.reset();
  }
  writer->OnDone(connection_, status);  // *this may be gone now.
}

}  // namespace lmhead
