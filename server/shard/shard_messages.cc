#include "server/shard/shard_messages.h"

#include <cstring>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/wire/convert.h"
#include "server/memory/memory_plan.h"

namespace lmhead {
namespace {

template <typename T>
std::string Bytes(std::span<const T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

// `count` values, or none.
template <typename T>
absl::Status ReadSpan(const std::string& bytes, int64_t count, const char* name,
                      std::span<const T>* values) {
  if (!bytes.empty() && bytes.size() != static_cast<size_t>(count) * sizeof(T)) {
    return absl::InternalError(absl::StrCat(name, " of a chunk has ", bytes.size(),
                                            " bytes, wanted ", count * sizeof(T), " or none"));
  }
  *values = {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  return absl::OkStatus();
}

// A list of several entries a token.
template <typename T>
absl::Status ReadLists(const std::string& bytes, int64_t num_tokens, const char* name,
                       std::span<const T>* values) {
  const size_t row_bytes = static_cast<size_t>(num_tokens) * sizeof(T);
  if (bytes.size() % row_bytes != 0) {
    return absl::InternalError(absl::StrCat(name, " of a chunk has ", bytes.size(),
                                            " bytes, wanted a multiple of ", row_bytes));
  }
  *values = {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  return absl::OkStatus();
}

// None when it is null.
std::span<const std::byte> BytesOf(const ConstMatrixView& rows) {
  if (rows.data == nullptr) return {};
  return {static_cast<const std::byte*>(rows.data), static_cast<size_t>(rows.size_bytes())};
}

absl::Status CopyOutput(const std::string& bytes, int64_t wanted, const char* name, void* to) {
  if (to == nullptr) return absl::OkStatus();
  if (static_cast<int64_t>(bytes.size()) != wanted) {
    return absl::InternalError(absl::StrCat("a follower answered ", bytes.size(), " bytes of ",
                                            name, ", wanted ", wanted));
  }
  std::memcpy(to, bytes.data(), bytes.size());
  return absl::OkStatus();
}

}  // namespace

absl::Status StatusFromReply(const v1::CommandReply& reply) {
  return {static_cast<absl::StatusCode>(reply.code()), reply.message()};
}

void StatusToReply(const absl::Status& status, v1::CommandReply* reply) {
  reply->set_code(static_cast<int32_t>(status.code()));
  reply->set_message(std::string(status.message()));
}

v1::ShardChunk ShardChunkToProto(const ChunkRows& rows) {
  v1::ShardChunk proto;
  proto.set_num_tokens(rows.hidden_states.rows);
  proto.set_hidden_dtype(DTypeToProto(rows.hidden_states.dtype));
  proto.set_hidden_size(rows.hidden_states.cols);
  if (rows.teacher_hidden_states.rows > 0) {
    proto.set_teacher_hidden_dtype(DTypeToProto(rows.teacher_hidden_states.dtype));
    proto.set_teacher_hidden_size(rows.teacher_hidden_states.cols);
  }
  proto.set_grad_scale(rows.grad_scale);
  proto.set_targets(Bytes(rows.targets));
  proto.set_token_weights(Bytes(rows.token_weights));
  proto.set_token_temperature(Bytes(rows.token_temperature));
  proto.set_logprob_grad(Bytes(rows.logprob_grad));
  proto.set_entropy_grad(Bytes(rows.entropy_grad));
  proto.set_old_logprob(Bytes(rows.old_logprob));
  proto.set_advantage(Bytes(rows.advantage));
  proto.set_reference_logprob(Bytes(rows.reference_logprob));
  proto.set_teacher_topk_ids(Bytes(rows.teacher_topk_ids));
  proto.set_teacher_topk_logprobs(Bytes(rows.teacher_topk_logprobs));
  return proto;
}

absl::StatusOr<ChunkRows> ShardChunkFromProto(const v1::ShardChunk& proto) {
  const int64_t n = proto.num_tokens();
  if (n <= 0 || proto.hidden_size() <= 0) {
    return absl::InternalError(
        absl::StrCat("a chunk has ", n, " rows of ", proto.hidden_size(), " hidden states"));
  }
  ChunkRows rows;
  absl::StatusOr<DType> dtype = DTypeFromProto(proto.hidden_dtype(), "hidden_dtype");
  if (!dtype.ok()) return dtype.status();
  rows.hidden_states = {nullptr, n, proto.hidden_size(), *dtype};
  if (proto.teacher_hidden_size() > 0) {
    dtype = DTypeFromProto(proto.teacher_hidden_dtype(), "teacher_hidden_dtype");
    if (!dtype.ok()) return dtype.status();
    rows.teacher_hidden_states = {nullptr, n, proto.teacher_hidden_size(), *dtype};
  }
  rows.grad_scale = proto.grad_scale();
  absl::Status status = ReadSpan(proto.targets(), n, "targets", &rows.targets);
  status.Update(ReadSpan(proto.token_weights(), n, "token_weights", &rows.token_weights));
  status.Update(
      ReadSpan(proto.token_temperature(), n, "token_temperature", &rows.token_temperature));
  status.Update(ReadSpan(proto.logprob_grad(), n, "logprob_grad", &rows.logprob_grad));
  status.Update(ReadSpan(proto.entropy_grad(), n, "entropy_grad", &rows.entropy_grad));
  status.Update(ReadSpan(proto.old_logprob(), n, "old_logprob", &rows.old_logprob));
  status.Update(ReadSpan(proto.advantage(), n, "advantage", &rows.advantage));
  status.Update(
      ReadSpan(proto.reference_logprob(), n, "reference_logprob", &rows.reference_logprob));
  status.Update(ReadLists(proto.teacher_topk_ids(), n, "teacher_topk_ids", &rows.teacher_topk_ids));
  status.Update(ReadLists(proto.teacher_topk_logprobs(), n, "teacher_topk_logprobs",
                          &rows.teacher_topk_logprobs));
  if (!status.ok()) return status;
  return rows;
}

void AddOutputs(const OutputSpec& spec, v1::ShardChunkResult* result, ChunkRows* rows) {
  const int64_t n = rows->hidden_states.rows;
  const auto room = [](bool wanted, int64_t num_bytes, std::string* bytes) -> void* {
    if (!wanted) return nullptr;
    bytes->resize(static_cast<size_t>(num_bytes));
    return bytes->data();
  };
  const auto floats = [&](bool wanted, int64_t count, std::string* bytes) {
    return static_cast<float*>(room(wanted, count * 4, bytes));
  };
  rows->token_loss = floats(spec.token_loss, n, result->mutable_token_loss());
  rows->logprob = floats(spec.logprob, n, result->mutable_logprob());
  rows->lse = floats(spec.lse, n, result->mutable_lse());
  rows->entropy = floats(spec.entropy, n, result->mutable_entropy());
  rows->argmax = static_cast<int32_t*>(room(spec.argmax, n * 4, result->mutable_argmax()));
  const bool top_k = spec.top_k > 0;
  rows->topk_ids =
      static_cast<int32_t*>(room(top_k, n * spec.top_k * 4, result->mutable_topk_ids()));
  rows->topk_logprobs = floats(top_k, n * spec.top_k, result->mutable_topk_logprobs());
}

Lanes::Arrays HiddenStatesOf(std::span<const ChunkRows> chunks) {
  Lanes::Arrays arrays;
  for (const ChunkRows& chunk : chunks) {
    arrays.push_back(BytesOf(chunk.hidden_states));
    arrays.push_back(BytesOf(chunk.teacher_hidden_states));
  }
  return arrays;
}

Lanes::Places GradientsOf(std::span<const ChunkRows> chunks) {
  Lanes::Places places;
  for (const ChunkRows& chunk : chunks) {
    const MatrixView& grad = chunk.grad_hidden_states;
    const int64_t bytes = grad.data == nullptr ? 0 : grad.size_bytes();
    places.emplace_back(static_cast<std::byte*>(grad.data), static_cast<size_t>(bytes));
    places.emplace_back();
  }
  return places;
}

absl::StatusOr<BatchOutput> ReadBatchResult(const v1::ShardBatchResult& result,
                                            const OutputSpec& spec,
                                            std::span<const ChunkRows> chunks) {
  if (result.chunks_size() != static_cast<int>(chunks.size())) {
    return absl::InternalError(
        absl::StrCat("a follower answered ", result.chunks_size(), " chunks of ", chunks.size()));
  }
  BatchOutput output = {.timings = StageTimingsFromProto(result.timings())};
  for (int i = 0; i < result.chunks_size(); ++i) {
    const v1::ShardChunkResult& from = result.chunks(i);
    const ChunkRows& to = chunks[i];
    const int64_t n = to.hidden_states.rows;
    const int64_t list_bytes = n * spec.top_k * 4;
    absl::Status status = CopyOutput(from.token_loss(), n * 4, "token_loss", to.token_loss);
    status.Update(CopyOutput(from.logprob(), n * 4, "logprob", to.logprob));
    status.Update(CopyOutput(from.lse(), n * 4, "lse", to.lse));
    status.Update(CopyOutput(from.entropy(), n * 4, "entropy", to.entropy));
    status.Update(CopyOutput(from.argmax(), n * 4, "argmax", to.argmax));
    status.Update(CopyOutput(from.topk_ids(), list_bytes, "topk_ids", to.topk_ids));
    status.Update(CopyOutput(from.topk_logprobs(), list_bytes, "topk_logprobs", to.topk_logprobs));
    if (!status.ok()) return status;
    output.sums.push_back(LossSumsFromProto(from.sums()));
  }
  return output;
}

v1::RowBlock RowBlockToProto(const ConstMatrixView& rows, bool with_data) {
  v1::RowBlock proto;
  proto.set_num_rows(rows.rows);
  proto.set_num_columns(rows.cols);
  proto.set_dtype(DTypeToProto(rows.dtype));
  if (with_data) proto.set_data(rows.data, static_cast<size_t>(rows.size_bytes()));
  return proto;
}

absl::StatusOr<ConstMatrixView> RowBlockFromProto(const v1::RowBlock& proto) {
  absl::StatusOr<DType> dtype = DTypeFromProto(proto.dtype(), "dtype");
  if (!dtype.ok()) return dtype.status();
  const ConstMatrixView rows = {proto.data().data(), proto.num_rows(), proto.num_columns(), *dtype};
  if (rows.rows < 0 || rows.cols < 0 ||
      (!proto.data().empty() && static_cast<int64_t>(proto.data().size()) != rows.size_bytes())) {
    return absl::InternalError(absl::StrCat("a block of ", rows.rows, " x ", rows.cols,
                                            " elements has ", proto.data().size(), " bytes"));
  }
  return rows;
}

absl::StatusOr<BackwardMode> BackwardModeFromNumber(int32_t number) {
  if (number >= 0 && number <= static_cast<int32_t>(BackwardMode::kHiddenAndWeight)) {
    return static_cast<BackwardMode>(number);
  }
  return absl::InternalError(absl::StrCat("there is no backward mode ", number));
}

absl::StatusOr<TensorKind> TensorKindFromNumber(int32_t number) {
  if (number >= static_cast<int32_t>(TensorKind::kWeight) &&
      number <= static_cast<int32_t>(TensorKind::kBiasExpAvgSq)) {
    return static_cast<TensorKind>(number);
  }
  return absl::InternalError(absl::StrCat("there is no kind of tensor ", number));
}

v1::MemoryReport MemoryToProto(const RankMemory& memory) {
  v1::MemoryReport proto;
  for (const RankMemory::Category& category : memory.categories) {
    v1::CategoryUse* const use = proto.add_categories();
    use->set_category(static_cast<v1::MemoryCategory>(proto.categories_size()));
    use->set_live_bytes(category.live_bytes);
    use->set_peak_process_bytes(category.peak_process_bytes);
    use->set_peak_step_bytes(category.peak_step_bytes);
  }
  proto.set_live_bytes(memory.live_bytes);
  proto.set_peak_process_bytes(memory.peak_process_bytes);
  proto.set_peak_step_bytes(memory.peak_step_bytes);
  proto.set_device_used_bytes(memory.device_used_bytes);
  proto.set_device_peak_bytes(memory.device_peak_bytes);
  return proto;
}

RankMemory MemoryFromProto(const v1::MemoryReport& proto, int32_t rank) {
  RankMemory memory = {.rank = rank,
                       .live_bytes = proto.live_bytes(),
                       .peak_process_bytes = proto.peak_process_bytes(),
                       .peak_step_bytes = proto.peak_step_bytes(),
                       .device_used_bytes = proto.device_used_bytes(),
                       .device_peak_bytes = proto.device_peak_bytes()};
  for (int i = 0; i < kNumMemoryCategories && i < proto.categories_size(); ++i) {
    const v1::CategoryUse& use = proto.categories(i);
    memory.categories.push_back({.name = MemoryCategoryName(static_cast<MemoryCategory>(i)),
                                 .live_bytes = use.live_bytes(),
                                 .peak_process_bytes = use.peak_process_bytes(),
                                 .peak_step_bytes = use.peak_step_bytes()});
  }
  return memory;
}

}  // namespace lmhead
