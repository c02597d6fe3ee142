// manifest.json: what makes a directory of files a checkpoint.
//
// It is written last, so a checkpoint with a manifest has all its files; it names them with their
// sizes and hashes, so that a torn or swapped one is found before anything is restored.

#ifndef LMHEAD_SERVER_CHECKPOINT_MANIFEST_H_
#define LMHEAD_SERVER_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/checkpoint/safetensors_writer.h"
#include "server/head/head_snapshot.h"

namespace lmhead {

inline constexpr char kManifestName[] = "manifest.json";

// Rows [row_start, row_stop) of every tensor of the head.
struct CheckpointShard {
  std::string file;  // A name within the checkpoint's directory.
  int64_t row_start = 0;
  int64_t row_stop = 0;
  FileDigest digest;
};

struct CheckpointManifest {
  HeadSnapshot snapshot;
  std::string version;     // Of the lmhead that wrote it.
  std::string created_at;  // RFC 3339, UTC.
  std::vector<CheckpointShard> shards;

  int64_t TotalBytes() const;
};

std::string ManifestToJson(const CheckpointManifest& manifest);

// INVALID_ARGUMENT naming `path` and the field: not JSON, of another format version, a field that
// is missing, unknown or of the wrong type, a file outside the directory, shards that do not cover
// the vocabulary exactly once.
absl::StatusOr<CheckpointManifest> ManifestFromJson(std::string_view json, std::string_view path);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_CHECKPOINT_MANIFEST_H_
