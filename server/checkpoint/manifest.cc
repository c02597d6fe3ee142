#include "server/checkpoint/manifest.h"

#include <google/protobuf/util/json_util.h>

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "lmhead/v1/types.pb.h"
#include "proto/types/check.h"
#include "proto/wire/convert.h"

namespace lmhead {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "lmhead-checkpoint";
constexpr int kFormatVersion = 1;

// 64-bit numbers without a place in a double go as text.
std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

Json SpecToJson(const HeadSpec& spec) {
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(HeadSpecToProto(spec), &text);
  LMHEAD_CHECK(status.ok(), spec.name);
  return Json::parse(text);
}

Json CommitToJson(const CommitRecord& record) {
  return {{"incarnation", Hex(record.incarnation)},
          {"learning_rate", record.parameters.learning_rate},
          {"grad_multiplier", record.parameters.grad_multiplier},
          {"allow_nonfinite_rows", record.parameters.allow_nonfinite_rows},
          {"step", record.result.step},
          {"num_updates", record.result.num_updates},
          {"grad_norm", record.result.grad_norm}};
}

// Reads the fields of an object, each once; what is wrong is said with the path to it.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) Fail("is not an object");
  }

  template <typename T>
  void Read(const char* name, T* value) {
    const Json* field = Find(name);
    if (field == nullptr) return;
    bool fits = false;
    if constexpr (std::is_same_v<T, std::string>) {
      fits = field->is_string();
    } else if constexpr (std::is_same_v<T, bool>) {
      fits = field->is_boolean();
    } else if constexpr (std::is_floating_point_v<T>) {
      fits = field->is_number();
    } else {
      fits = field->is_number_integer() && (field->is_number_unsigned() || std::is_signed_v<T>);
    }
    if (!fits)
      return Fail(absl::StrCat(name, " has the wrong type: ", field->dump().substr(0, 60)));
    *value = field->get<T>();
  }

  void ReadHex(const char* name, uint64_t* value) {
    std::string text;
    Read(name, &text);
    if (!status_.ok()) return;
    if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
      return Fail(absl::StrCat(name, " is ", text, ", wanted 16 hexadecimal digits"));
    }
    *value = std::stoull(text, nullptr, 16);
  }

  const Json* Find(const char* name) {
    if (!status_.ok()) return nullptr;
    seen_.insert(name);
    const auto it = object_.find(name);
    if (it == object_.end()) {
      Fail(absl::StrCat(name, " is missing"));
      return nullptr;
    }
    return &*it;
  }

  void Fail(const std::string& what) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": ", what));
  }

  // OK when everything was there and nothing else is.
  absl::Status Done() {
    for (auto it = object_.begin(); status_.ok() && it != object_.end(); ++it) {
      if (!seen_.contains(it.key())) Fail(absl::StrCat("unknown field ", it.key()));
    }
    return status_;
  }

 private:
  const Json& object_;
  const std::string where_;
  std::set<std::string> seen_;
  absl::Status status_;
};

absl::StatusOr<HeadSpec> SpecFromJson(const Json& json, const std::string& where) {
  v1::HeadSpec proto;
  const auto parsed = google::protobuf::util::JsonStringToMessage(json.dump(), &proto);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": spec is not a HeadSpec: ", std::string(parsed.message())));
  }
  return HeadSpecFromProto(proto);
}

absl::StatusOr<CommitRecord> CommitFromJson(const Json& json, const std::string& where) {
  Fields fields(json, absl::StrCat(where, ": last_commit"));
  CommitRecord record;
  fields.ReadHex("incarnation", &record.incarnation);
  fields.Read("learning_rate", &record.parameters.learning_rate);
  fields.Read("grad_multiplier", &record.parameters.grad_multiplier);
  fields.Read("allow_nonfinite_rows", &record.parameters.allow_nonfinite_rows);
  fields.Read("step", &record.result.step);
  fields.Read("num_updates", &record.result.num_updates);
  fields.Read("grad_norm", &record.result.grad_norm);
  if (absl::Status status = fields.Done(); !status.ok()) return status;
  return record;
}

absl::StatusOr<CheckpointShard> ShardFromJson(const Json& json, const std::string& where) {
  Fields fields(json, absl::StrCat(where, ": shards"));
  CheckpointShard shard;
  fields.Read("file", &shard.file);
  fields.Read("row_start", &shard.row_start);
  fields.Read("row_stop", &shard.row_stop);
  fields.Read("size_bytes", &shard.digest.size_bytes);
  fields.ReadHex("xxh3", &shard.digest.xxh3);
  if (shard.file.empty() || shard.file.find('/') != std::string::npos || shard.file[0] == '.') {
    fields.Fail(absl::StrCat("file is \"", shard.file, "\", wanted a name within the directory"));
  }
  if (absl::Status status = fields.Done(); !status.ok()) return status;
  return shard;
}

absl::Status CheckCover(const CheckpointManifest& manifest, const std::string& where) {
  int64_t next = 0;
  for (const CheckpointShard& shard : manifest.shards) {
    if (shard.row_start != next || shard.row_stop < shard.row_start) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": ", shard.file, " has rows [",
                                                     shard.row_start, ", ", shard.row_stop,
                                                     "), wanted rows from ", next, " on"));
    }
    next = shard.row_stop;
  }
  if (next == manifest.snapshot.spec.vocab_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": its shards have ", next, " rows, wanted the ",
                   manifest.snapshot.spec.vocab_size, " of the head"));
}

}  // namespace

int64_t CheckpointManifest::TotalBytes() const {
  int64_t total = 0;
  for (const CheckpointShard& shard : shards) total += shard.digest.size_bytes;
  return total;
}

std::string ManifestToJson(const CheckpointManifest& manifest) {
  const HeadSnapshot& snapshot = manifest.snapshot;
  Json json = {{"format", kFormat},
               {"format_version", kFormatVersion},
               {"lmhead_version", manifest.version},
               {"created_at", manifest.created_at},
               {"spec", SpecToJson(snapshot.spec)},
               {"last_committed_step", snapshot.last_committed_step},
               {"num_updates", snapshot.num_updates},
               {"num_ranks", snapshot.num_ranks},
               {"last_commit", nullptr},
               {"shards", Json::array()}};
  if (snapshot.last_commit.has_value()) json["last_commit"] = CommitToJson(*snapshot.last_commit);
  for (const CheckpointShard& shard : manifest.shards) {
    json["shards"].push_back({{"file", shard.file},
                              {"row_start", shard.row_start},
                              {"row_stop", shard.row_stop},
                              {"size_bytes", shard.digest.size_bytes},
                              {"xxh3", Hex(shard.digest.xxh3)}});
  }
  return json.dump(2) + "\n";
}

absl::StatusOr<CheckpointManifest> ManifestFromJson(std::string_view text, std::string_view path) {
  const std::string where(path);
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat(where, " is not JSON"));
  }
  Fields fields(json, where);
  std::string format;
  int64_t version = 0;
  CheckpointManifest manifest;
  HeadSnapshot& snapshot = manifest.snapshot;
  fields.Read("format", &format);
  fields.Read("format_version", &version);
  if (format != kFormat || version != kFormatVersion) {
    fields.Fail(absl::StrCat("format is ", format, " version ", version, ", wanted ", kFormat,
                             " version ", kFormatVersion));
  }
  fields.Read("lmhead_version", &manifest.version);
  fields.Read("created_at", &manifest.created_at);
  fields.Read("last_committed_step", &snapshot.last_committed_step);
  fields.Read("num_updates", &snapshot.num_updates);
  fields.Read("num_ranks", &snapshot.num_ranks);
  const Json* const spec = fields.Find("spec");
  const Json* const commit = fields.Find("last_commit");
  const Json* const shards = fields.Find("shards");
  if (shards != nullptr && !shards->is_array()) fields.Fail("shards is not an array");
  if (absl::Status status = fields.Done(); !status.ok()) return status;

  absl::StatusOr<HeadSpec> parsed_spec = SpecFromJson(*spec, where);
  if (!parsed_spec.ok()) return parsed_spec.status();
  snapshot.spec = *std::move(parsed_spec);
  if (!commit->is_null()) {
    absl::StatusOr<CommitRecord> record = CommitFromJson(*commit, where);
    if (!record.ok()) return record.status();
    snapshot.last_commit = *record;
  }
  for (const Json& entry : *shards) {
    absl::StatusOr<CheckpointShard> shard = ShardFromJson(entry, where);
    if (!shard.ok()) return shard.status();
    manifest.shards.push_back(*std::move(shard));
  }
  if (absl::Status status = CheckCover(manifest, where); !status.ok()) return status;
  return manifest;
}

}  // namespace lmhead
