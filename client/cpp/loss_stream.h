// One ComputeLoss call of a StepWriter: moves bytes between gRPC and the writer.
//
// An attempt: when it breaks, the writer starts another. gRPC's callbacks only hand over to the
// writer, which decides. Owned by the writer, and keeps the writer's state alive until OnDone.

#ifndef LMHEAD_CLIENT_CPP_LOSS_STREAM_H_
#define LMHEAD_CLIENT_CPP_LOSS_STREAM_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/step_writer.h"

namespace lmhead {

class LossStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  LossStream(std::shared_ptr<StepWriter::Impl> writer, size_t connection,
             const std::string& request_id);

  // Starts the call with `open` as its first message, and the first read. A hold keeps the call
  // from being done until LetGo().
  void Start(std::shared_ptr<grpc::Channel> channel, const grpc::ByteBuffer& open);

  // Sends one message. REQUIRES: no other is being sent, LetGo() has not been called.
  void Write(const grpc::ByteBuffer& message);

  // Sends nothing more. REQUIRES: as Write(); called once.
  void HalfClose() { StartWritesDone(); }

  // No Write or HalfClose will follow: the call is done when its operations are. Called once.
  void LetGo() { RemoveHold(); }

  // Ends the call, if it has not ended; its callbacks still come.
  void Cancel();

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  const std::shared_ptr<StepWriter::Impl> writer_;
  const size_t connection_;
  absl::Mutex mu_;
  // Holds the call, and with it messages that were not sent; dropped when the call is done.
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mu_);
  grpc::ByteBuffer outgoing_;  // Held until OnWriteDone.
  grpc::ByteBuffer incoming_;
};

}  // namespace lmhead

#endif  // LMHEAD_CLIENT_CPP_LOSS_STREAM_H_
