// What goes up before a batch is computed, and down after.

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_TRANSFERS_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_TRANSFERS_H_

#include <vector>

#include "absl/status/status.h"
#include "server/compute/cuda_head.h"
#include "server/compute/cuda_pass.h"

namespace lmhead {

class CudaTransfers {
 public:
  // `head` must outlive this.
  explicit CudaTransfers(CudaHead* head) : head_(*head) {}

  // Queues the uploads of the batch and makes the compute stream wait for them. Sets
  // pass->class_weights and pass->policy_entropy.
  absl::Status Upload(CudaPass* pass);

  // Queues the downloads of the batch, behind its grads_ready.
  absl::Status Download(const CudaPass& pass);

 private:
  absl::Status UploadHiddenStates(const CudaPass& pass);
  absl::Status BroadcastHiddenStates(const CudaPass& pass);
  absl::Status UploadRowInputs(const CudaPass& pass);
  absl::Status UploadRowPolicies(CudaPass* pass);
  absl::Status UploadTopkTeacher(const CudaPass& pass);
  absl::Status UploadClassWeights(CudaPass* pass);
  absl::Status DownloadTopk(const CudaPass& pass);

  CudaHead& head_;
  std::vector<float> class_weights_;  // What buffers.class_weights holds.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_TRANSFERS_H_
