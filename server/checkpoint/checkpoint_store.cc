#include "server/checkpoint/checkpoint_store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/vocab_range.h"
#include "proto/wire/convert.h"
#include "server/checkpoint/durable_files.h"
#include "server/optimizer/optimizer.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

namespace fs = std::filesystem;

// Names that start with it are saves under way; a checkpoint's name cannot (ValidateName).
constexpr char kTemporaryPrefix[] = "~";

// Names become directories, so the two that mean others are none.
absl::Status CheckName(std::string_view what, const std::string& name) {
  if (name == "." || name == "..") {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(what), " is ", name, ", wanted a name of a directory of its own"));
  }
  return ValidateName(what, name);
}

// Rows go to the disk and back in blocks of about this size.
constexpr int64_t kBlockBytes = int64_t{16} << 20;

struct SavedTensor {
  TensorKind kind;
  std::string name;
  int64_t cols = 0;
  DType dtype = DType::kFloat32;
};

// What a head's files hold, in their order.
std::vector<SavedTensor> TensorsOf(const HeadSpec& spec) {
  std::vector<SavedTensor> tensors = {
      {TensorKind::kWeight, "weight", spec.hidden_size, spec.weight_dtype}};
  const int32_t num_states = spec.trainable ? NumStateArrays(spec.optimizer) : 0;
  if (spec.trainable && spec.weight_dtype != DType::kFloat32) {
    tensors.push_back({TensorKind::kMasterWeight, "master_weight", spec.hidden_size});
  }
  if (num_states >= 1) tensors.push_back({TensorKind::kWeightExpAvg, "exp_avg", spec.hidden_size});
  if (num_states >= 2)
    tensors.push_back({TensorKind::kWeightExpAvgSq, "exp_avg_sq", spec.hidden_size});
  if (!spec.has_bias) return tensors;
  tensors.push_back({TensorKind::kBias, "bias", 1});
  if (num_states >= 1) tensors.push_back({TensorKind::kBiasExpAvg, "bias_exp_avg", 1});
  if (num_states >= 2) tensors.push_back({TensorKind::kBiasExpAvgSq, "bias_exp_avg_sq", 1});
  return tensors;
}

SafetensorsDType FileDType(DType dtype) {
  return dtype == DType::kBFloat16 ? SafetensorsDType::kBF16 : SafetensorsDType::kF32;
}

// Calls work(row_start, num_rows) for blocks of rows [start, stop).
template <typename Work>
absl::Status ForBlocks(int64_t start, int64_t stop, int64_t row_bytes, Work work) {
  const int64_t block_rows = std::max<int64_t>(1, kBlockBytes / row_bytes);
  for (int64_t row = start; row < stop; row += block_rows) {
    if (absl::Status status = work(row, std::min(block_rows, stop - row)); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<FileDigest> WriteShard(const std::string& path, const HeadSpec& spec,
                                      const VocabRange& range, TensorReader read) {
  const std::vector<SavedTensor> tensors = TensorsOf(spec);
  std::vector<SafetensorsWriter::Tensor> declared;
  for (const SavedTensor& tensor : tensors) {
    declared.push_back({tensor.name, FileDType(tensor.dtype), {range.size(), tensor.cols}});
  }
  auto writer = SafetensorsWriter::Create(
      path, declared, {{"format", "lmhead-checkpoint"}, {"row_start", absl::StrCat(range.start)}});
  if (!writer.ok()) return writer.status();
  std::vector<std::byte> block;
  for (const SavedTensor& tensor : tensors) {
    const int64_t row_bytes = tensor.cols * BytesPerElement(tensor.dtype);
    absl::Status status =
        ForBlocks(range.start, range.stop, row_bytes, [&](int64_t row, int64_t rows) {
          block.resize(static_cast<size_t>(rows * row_bytes));
          absl::Status got =
              read(tensor.kind, row, {block.data(), rows, tensor.cols, tensor.dtype});
          return got.ok() ? (*writer)->Append(block) : got;
        });
    if (!status.ok()) return status;
  }
  return (*writer)->Finish();
}

absl::Status ReadShard(const std::string& path, const HeadSpec& spec, const CheckpointShard& shard,
                       TensorWriter write) {
  absl::StatusOr<std::unique_ptr<SafetensorsReader>> reader = SafetensorsReader::Open(path);
  if (!reader.ok()) return reader.status();
  std::vector<std::byte> block;
  for (const SavedTensor& tensor : TensorsOf(spec)) {
    absl::StatusOr<const SafetensorsTensor*> found = (*reader)->Find(tensor.name);
    if (!found.ok()) return found.status();
    const std::vector<int64_t> wanted = {shard.row_stop - shard.row_start, tensor.cols};
    if ((*found)->dtype != FileDType(tensor.dtype) || (*found)->shape != wanted) {
      return absl::DataLossError(
          absl::StrCat(path, ": tensor ", tensor.name, " is ",
                       std::string(SafetensorsDTypeName((*found)->dtype)), " [",
                       absl::StrJoin((*found)->shape, ", "), "], wanted ",
                       std::string(SafetensorsDTypeName(FileDType(tensor.dtype))), " [",
                       absl::StrJoin(wanted, ", "), "]"));
    }
    const int64_t row_bytes = tensor.cols * BytesPerElement(tensor.dtype);
    absl::Status status =
        ForBlocks(shard.row_start, shard.row_stop, row_bytes, [&](int64_t row, int64_t rows) {
          block.resize(static_cast<size_t>(rows * row_bytes));
          absl::Status got = (*reader)->Read(**found, (row - shard.row_start) * row_bytes, block);
          if (!got.ok()) return got;
          return write(tensor.kind, row, {block.data(), rows, tensor.cols, tensor.dtype});
        });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckShardFile(const std::string& path, const FileDigest& wanted) {
  absl::StatusOr<FileDigest> got = DigestFile(path);
  if (!got.ok()) return absl::DataLossError(got.status().message());
  if (got->size_bytes != wanted.size_bytes) {
    return absl::DataLossError(absl::StrCat(path, " has ", got->size_bytes, " bytes, wanted ",
                                            wanted.size_bytes,
                                            ": it is torn; restore another one"));
  }
  if (got->xxh3 == wanted.xxh3) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "%s has XXH3 %016x, wanted %016x: its contents have changed; restore another checkpoint",
      path, got->xxh3, wanted.xxh3));
}

absl::Status MakeDirectory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  return error ? FileError("creating", path, error.value()) : absl::OkStatus();
}

// What the directory holds; nothing when it is not there.
std::vector<std::string> Names(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void RemoveTree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) spdlog::warn("checkpoints: {} could not be removed: {}", path, error.message());
}

}  // namespace

CheckpointStore::CheckpointStore(std::string root, int32_t keep, std::string version,
                                 SaveListener on_save)
    : root_(std::move(root)),
      keep_(keep),
      version_(std::move(version)),
      on_save_(std::move(on_save)) {}

absl::Status CheckpointStore::Check() const {
  if (absl::Status status = MakeDirectory(root_); !status.ok()) return status;
  if (access(root_.c_str(), R_OK | W_OK | X_OK) == 0) return absl::OkStatus();
  return FileError("writing to", root_, errno);
}

// --- Saving ---

absl::StatusOr<SavedCheckpoint> CheckpointStore::Save(Head& head, const std::string& name) {
  absl::MutexLock lock(&mu_);
  const absl::Time start = absl::Now();
  absl::StatusOr<SavedCheckpoint> saved = SaveLocked(head, name);
  if (on_save_) on_save_(head.spec().name, saved.status(), absl::Now() - start);
  return saved;
}

absl::StatusOr<SavedCheckpoint> CheckpointStore::SaveLocked(Head& head, const std::string& name) {
  if (!name.empty()) {
    if (absl::Status status = CheckName("checkpoint name", name); !status.ok()) return status;
  }
  const std::string& head_name = head.spec().name;
  if (absl::Status status = CheckName("head name", head_name); !status.ok()) return status;
  SavedCheckpoint saved;
  absl::Status status = head.Snapshot([&](const HeadSnapshot& snapshot, TensorReader read) {
    saved.step = snapshot.last_committed_step;
    saved.name = name.empty() ? absl::StrFormat("step-%012d", saved.step) : name;
    if (const auto there = Load(head_name, saved.name); there.ok()) {
      if (there->snapshot.last_committed_step != saved.step) {
        return absl::AlreadyExistsError(absl::StrCat(
            "checkpoint ", saved.name, " of head ", head_name, " is there, of step ",
            there->snapshot.last_committed_step, "; the head is at step ", saved.step));
      }
      saved.num_bytes = there->TotalBytes();
      return absl::OkStatus();
    }
    RemoveLeftovers(head_name);
    const std::string temporary =
        absl::StrCat(HeadPath(head_name), "/", kTemporaryPrefix, saved.name);
    if (absl::Status made = MakeDirectory(temporary); !made.ok()) return made;
    absl::StatusOr<CheckpointManifest> manifest = Write(snapshot, read, temporary);
    if (!manifest.ok()) {
      RemoveTree(temporary);
      return manifest.status();
    }
    saved.num_bytes = manifest->TotalBytes();
    return Publish(temporary, head_name, saved.name);
  });
  if (!status.ok()) return status;
  RemoveOld(head_name);
  return saved;
}

absl::StatusOr<CheckpointManifest> CheckpointStore::Write(const HeadSnapshot& snapshot,
                                                          TensorReader read,
                                                          const std::string& directory) const {
  CheckpointManifest manifest = {
      .snapshot = snapshot,
      .version = version_,
      .created_at = absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone())};
  for (int32_t rank = 0; rank < snapshot.num_ranks; ++rank) {
    const VocabRange range = ShardRange(snapshot.spec, snapshot.num_ranks, rank);
    CheckpointShard shard = {
        .file = absl::StrFormat("shard-%05d-of-%05d.safetensors", rank, snapshot.num_ranks),
        .row_start = range.start,
        .row_stop = range.stop};
    absl::StatusOr<FileDigest> digest =
        WriteShard(absl::StrCat(directory, "/", shard.file), snapshot.spec, range, read);
    if (!digest.ok()) return digest.status();
    shard.digest = *digest;
    manifest.shards.push_back(std::move(shard));
  }
  absl::Status status =
      WriteFileDurably(absl::StrCat(directory, "/", kManifestName), ManifestToJson(manifest));
  if (!status.ok()) return status;
  if (status = SyncDirectory(directory); !status.ok()) return status;
  return manifest;
}

absl::Status CheckpointStore::Publish(const std::string& temporary, const std::string& head,
                                      const std::string& name) const {
  const std::string place = absl::StrCat(HeadPath(head), "/", name);
  // What is there has no valid manifest: Load said so.
  RemoveTree(place);
  if (rename(temporary.c_str(), place.c_str()) != 0) return FileError("renaming to", place, errno);
  if (absl::Status status = SyncDirectory(HeadPath(head)); !status.ok()) return status;
  return SyncDirectory(root_);
}

void CheckpointStore::RemoveLeftovers(const std::string& head) const {
  for (const std::string& name : Names(HeadPath(head))) {
    if (absl::StartsWith(name, kTemporaryPrefix)) RemoveTree(HeadPath(head) + "/" + name);
  }
}

void CheckpointStore::RemoveOld(const std::string& head) const {
  if (keep_ == 0) return;
  const std::vector<StoredCheckpoint> complete = Complete(head);
  for (size_t i = static_cast<size_t>(keep_); i < complete.size(); ++i) {
    // Its manifest first: without it the rest is no checkpoint, whenever the removal stops.
    const std::string directory = absl::StrCat(HeadPath(head), "/", complete[i].name);
    unlink(absl::StrCat(directory, "/", kManifestName).c_str());
    RemoveTree(directory);
    spdlog::info("checkpoints: removed {} of head {}, {} newer ones are kept", complete[i].name,
                 head, keep_);
  }
}

// --- Finding ---

absl::StatusOr<CheckpointManifest> CheckpointStore::Load(const std::string& head,
                                                         const std::string& name) const {
  const std::string path = absl::StrCat(HeadPath(head), "/", name, "/", kManifestName);
  absl::StatusOr<std::string> json = ReadFile(path);
  if (!json.ok()) return json.status();
  absl::StatusOr<CheckpointManifest> manifest = ManifestFromJson(*json, path);
  if (manifest.ok() && manifest->snapshot.spec.name != head) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is of head ", manifest->snapshot.spec.name, ", wanted ", head));
  }
  return manifest;
}

std::vector<StoredCheckpoint> CheckpointStore::Complete(const std::string& head) const {
  std::vector<StoredCheckpoint> complete;
  for (const std::string& name : Names(HeadPath(head))) {
    if (absl::StartsWith(name, kTemporaryPrefix)) continue;
    absl::StatusOr<CheckpointManifest> manifest = Load(head, name);
    if (manifest.ok()) {
      complete.push_back({name, *std::move(manifest)});
    } else {
      spdlog::warn("checkpoints: {} of head {} is passed over: {}", name, head,
                   std::string(manifest.status().message()));
    }
  }
  std::stable_sort(
      complete.begin(), complete.end(), [](const StoredCheckpoint& a, const StoredCheckpoint& b) {
        return a.manifest.snapshot.last_committed_step > b.manifest.snapshot.last_committed_step;
      });
  return complete;
}

absl::StatusOr<StoredCheckpoint> CheckpointStore::Find(const std::string& head,
                                                       const std::string& name) const {
  if (absl::Status status = CheckName("head name", head); !status.ok()) return status;
  if (!name.empty()) {
    if (absl::Status status = CheckName("checkpoint name", name); !status.ok()) return status;
    absl::StatusOr<CheckpointManifest> manifest = Load(head, name);
    if (manifest.ok()) return StoredCheckpoint{name, *std::move(manifest)};
    if (!absl::IsNotFound(manifest.status())) return manifest.status();
  }
  std::vector<StoredCheckpoint> complete = Complete(head);
  if (name.empty() && !complete.empty()) return std::move(complete.front());
  const std::string there =
      complete.empty()
          ? "none"
          : absl::StrJoin(complete, ", ", [](std::string* out, const StoredCheckpoint& found) {
              absl::StrAppend(out, found.name);
            });
  return absl::NotFoundError(absl::StrCat("no checkpoint ",
                                          name.empty() ? "" : absl::StrCat(name, " "), "of head ",
                                          head, " in ", root_, "; complete ones: ", there));
}

std::vector<std::string> CheckpointStore::Heads() const {
  std::vector<std::string> heads;
  for (const std::string& head : Names(root_)) {
    if (!CheckName("head name", head).ok()) continue;
    if (!Complete(head).empty()) heads.push_back(head);
  }
  return heads;
}

// --- Restoring ---

absl::Status CheckpointStore::Restore(Head& head, const StoredCheckpoint& checkpoint) {
  absl::MutexLock lock(&mu_);
  const CheckpointManifest& manifest = checkpoint.manifest;
  const std::string directory = absl::StrCat(HeadPath(head.spec().name), "/", checkpoint.name);
  for (const CheckpointShard& shard : manifest.shards) {
    absl::Status status = CheckShardFile(absl::StrCat(directory, "/", shard.file), shard.digest);
    if (!status.ok()) return status;
  }
  return head.Restore(manifest.snapshot, [&](TensorWriter write) {
    for (const CheckpointShard& shard : manifest.shards) {
      absl::Status status =
          ReadShard(absl::StrCat(directory, "/", shard.file), manifest.snapshot.spec, shard, write);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  });
}

}  // namespace lmhead
