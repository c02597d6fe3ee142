// The directory of a server's checkpoints: ROOT/HEAD/NAME/{manifest.json, shard-….safetensors}.
//
// A checkpoint is written under a temporary name beside its place, every file synced, the manifest
// last, and renamed; so a directory with its final name is complete, whenever the process or the
// machine stopped. Only directories with a valid manifest count as checkpoints; leftovers of a save
// that was cut short are removed by the next one. Restoring reads every file once to check it
// before the head is touched.
//
// Tensors of a file: weight, master_weight (float32, of a trainable bfloat16 head), bias, and the
// optimizer's exp_avg, exp_avg_sq (SGD: its momentum is exp_avg), with bias_ in front for the bias.

#ifndef LMHEAD_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
#define LMHEAD_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/checkpoint/manifest.h"
#include "server/head/head.h"

namespace lmhead {

struct SavedCheckpoint {
  std::string name;
  uint64_t step = 0;
  int64_t num_bytes = 0;  // Of its tensor files.
};

// A complete checkpoint that is there.
struct StoredCheckpoint {
  std::string name;
  CheckpointManifest manifest;
};

// Thread-safe; one save or restore at a time.
class CheckpointStore {
 public:
  // Told how each save ended and how long it took, on the thread that saved.
  using SaveListener =
      std::function<void(const std::string& head, const absl::Status&, absl::Duration)>;

  // `keep`: complete checkpoints of a head to keep, newest first; 0 keeps all. `version` goes into
  // manifests.
  CheckpointStore(std::string root, int32_t keep, std::string version,
                  SaveListener on_save = nullptr);

  // OK when the root can be written. Creates it.
  absl::Status Check() const;

  // Saves the head as its last commit left it, in one file for each of its ranks. An empty `name`
  // becomes step-N. The same name and step again: the stored answer. ALREADY_EXISTS: the name is
  // another step's. RESOURCE_EXHAUSTED: the disk is full. After it, old checkpoints beyond `keep`
  // are removed.
  absl::StatusOr<SavedCheckpoint> Save(Head& head, const std::string& name);

  // Finds a checkpoint; an empty `name` means the one with the highest step. NOT_FOUND
  // naming those there are; INVALID_ARGUMENT or DATA_LOSS when it is damaged. Of an empty name,
  // damaged ones are passed over with a warning in the log.
  absl::StatusOr<StoredCheckpoint> Find(const std::string& head, const std::string& name) const;

  // Restores `head` from a checkpoint that Find returned for it. DATA_LOSS naming the file that is
  // not what the manifest says, or has been removed since: the head is untouched. Otherwise what
  // Head::Restore says.
  absl::Status Restore(Head& head, const StoredCheckpoint& checkpoint);

  // Heads that have at least one complete checkpoint.
  std::vector<std::string> Heads() const;

 private:
  absl::StatusOr<SavedCheckpoint> SaveLocked(Head& head, const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string HeadPath(const std::string& head) const { return root_ + "/" + head; }
  absl::StatusOr<CheckpointManifest> Load(const std::string& head, const std::string& name) const;
  std::vector<StoredCheckpoint> Complete(const std::string& head) const;  // By falling step.
  absl::StatusOr<CheckpointManifest> Write(const HeadSnapshot& snapshot, TensorReader read,
                                           const std::string& directory) const;
  absl::Status Publish(const std::string& temporary, const std::string& head,
                       const std::string& name) const;
  void RemoveLeftovers(const std::string& head) const;
  void RemoveOld(const std::string& head) const;

  const std::string root_;
  const int32_t keep_;
  const std::string version_;
  const SaveListener on_save_;
  absl::Mutex mu_;  // Held over whole saves and restores.
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
