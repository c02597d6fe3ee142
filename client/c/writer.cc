// The step writer's part of lmhead.h.

#include <cmath>
#include <span>
#include <utility>

#include "client/c/handles.h"
#include "client/c/lmhead.h"
#include "client/cpp/json_call.h"
#include "proto/types/limits.h"

namespace {

using lmhead::CheckGiven;
using lmhead::Guarded;

// Sizes of the structs in version 1.0.
constexpr size_t kWriterOptionsFirstSize = sizeof(size_t) + 32;
constexpr size_t kLossRowsFirstSize =
    offsetof(lmhead_loss_rows, topk_logprobs) + sizeof(lmhead_loss_rows::topk_logprobs);
constexpr size_t kLossResultFirstSize =
    offsetof(lmhead_loss_result, download_seconds) + sizeof(lmhead_loss_result::download_seconds);

absl::StatusOr<lmhead::DType> DTypeOf(int32_t dtype, const char* name) {
  if (dtype >= LMHEAD_FLOAT32 && dtype <= LMHEAD_FLOAT16) return static_cast<lmhead::DType>(dtype);
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s is %d, want LMHEAD_FLOAT32 (1), _BFLOAT16 (2) or _FLOAT16 (3)", name, dtype));
}

absl::StatusOr<lmhead::WriterSpec> SpecOf(const char* open_json,
                                          const lmhead_writer_options* given) {
  lmhead::v1::StreamOpen open;
  if (absl::Status status = lmhead::MessageFromJson(open_json, &open); !status.ok()) return status;
  const lmhead_writer_options defaults = LMHEAD_WRITER_OPTIONS_INIT;
  const auto options = lmhead::TakeStruct(given == nullptr ? &defaults : given, defaults,
                                          kWriterOptionsFirstSize, "options");
  if (!options.ok()) return options.status();
  const auto dtype = DTypeOf(open.hidden_dtype(), "hidden_dtype");
  if (!dtype.ok()) return dtype.status();
  if (open.stream_index() != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "stream_index is %d, want 0: the writer numbers its own streams", open.stream_index()));
  }
  return lmhead::WriterSpec{
      .head = open.head(),
      .step = open.step(),
      .worker = open.worker(),
      .incarnation = open.incarnation(),
      .hidden_dtype = *dtype,
      .recipe = open.recipe(),
      .outputs = open.outputs(),
      .teacher_side = open.teacher_side(),
      .num_connections = options->num_connections,
      .max_inflight_chunks = options->max_inflight_chunks,
      .chunk_bytes = options->chunk_bytes,
      .chunk_tokens = options->chunk_tokens,
      .send_checksums = options->send_checksums != 0,
  };
}

template <typename T>
std::span<const T> Span(const T* data, int64_t size) {
  if (data == nullptr) return {};
  return {data, static_cast<size_t>(size)};
}

absl::Status CheckSizes(const lmhead_loss_rows& rows) {
  if (rows.num_tokens < 1 || rows.num_tokens > INT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrFormat("num_tokens is %d, want 1 to %d", rows.num_tokens, INT32_MAX));
  }
  const auto check = [](const void* data, int64_t columns, int64_t most, const char* name) {
    if (data == nullptr || (columns >= 1 && columns <= most)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is %d, want 1 to %d", name, columns, most));
  };
  for (const absl::Status& status :
       {check(rows.hidden_states, rows.hidden_size, lmhead::kHiddenSizeMax, "hidden_size"),
        check(rows.teacher_hidden_states, rows.teacher_hidden_size, lmhead::kHiddenSizeMax,
              "teacher_hidden_size"),
        check(rows.teacher_topk_ids, rows.teacher_top_k, lmhead::kTopKMax, "teacher_top_k"),
        check(rows.teacher_topk_logprobs, rows.teacher_top_k, lmhead::kTopKMax, "teacher_top_k")}) {
    if (!status.ok()) return status;
  }
  if (std::isfinite(rows.grad_scale)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("grad_scale is %g, want a finite number", rows.grad_scale));
}

// A matrix that may not be there.
absl::Status SetMatrix(const void* data, int64_t rows, int64_t columns, int32_t dtype,
                       const char* name, lmhead::ConstMatrixView* matrix) {
  if (data == nullptr) return absl::OkStatus();
  const auto known = DTypeOf(dtype, name);
  if (!known.ok()) return known.status();
  *matrix = {data, rows, columns, *known};
  return absl::OkStatus();
}

absl::StatusOr<lmhead::LossRows> RowsOf(const lmhead_loss_rows* given) {
  const lmhead_loss_rows defaults = LMHEAD_LOSS_ROWS_INIT;
  const auto rows = lmhead::TakeStruct(given, defaults, kLossRowsFirstSize, "rows");
  if (!rows.ok()) return rows.status();
  if (absl::Status status = CheckSizes(*rows); !status.ok()) return status;
  const int64_t n = rows->num_tokens;
  lmhead::LossRows taken = {
      .targets = Span(rows->targets, n),
      .token_weights = Span(rows->token_weights, n),
      .token_temperature = Span(rows->token_temperature, n),
      .grad_scale = rows->grad_scale,
      .logprob_grad = Span(rows->logprob_grad, n),
      .entropy_grad = Span(rows->entropy_grad, n),
      .old_logprob = Span(rows->old_logprob, n),
      .advantage = Span(rows->advantage, n),
      .reference_logprob = Span(rows->reference_logprob, n),
      .teacher_topk_ids = Span(rows->teacher_topk_ids, n * rows->teacher_top_k),
      .teacher_topk_logprobs = Span(rows->teacher_topk_logprobs, n * rows->teacher_top_k),
      .token_loss = rows->token_loss,
      .logprob = rows->logprob,
      .lse = rows->lse,
      .entropy = rows->entropy,
      .argmax = rows->argmax,
      .topk_ids = rows->topk_ids,
      .topk_logprobs = rows->topk_logprobs,
  };
  for (const absl::Status& status :
       {SetMatrix(rows->hidden_states, n, rows->hidden_size, rows->hidden_dtype, "hidden_dtype",
                  &taken.hidden_states),
        SetMatrix(rows->teacher_hidden_states, n, rows->teacher_hidden_size,
                  rows->teacher_hidden_dtype, "teacher_hidden_dtype",
                  &taken.teacher_hidden_states)}) {
    if (!status.ok()) return status;
  }
  if (rows->grad_hidden_states != nullptr) {
    taken.grad_hidden_states = {rows->grad_hidden_states, n, rows->hidden_size,
                                taken.hidden_states.dtype};
  }
  return taken;
}

absl::Status GiveResult(const lmhead::LossResult& from, lmhead_loss_result* to) {
  if (to == nullptr) return absl::OkStatus();
  const lmhead::LossSums& sums = from.sums;
  return lmhead::GiveStruct(
      lmhead_loss_result{
          .struct_size = 0,
          .loss_sum = sums.loss_sum,
          .num_tokens = sums.num_tokens,
          .num_valid_tokens = sums.num_valid_tokens,
          .num_nonfinite_rows = sums.num_nonfinite_rows,
          .num_correct = sums.num_correct,
          .weight_sum = sums.weight_sum,
          .cross_entropy_sum = sums.cross_entropy_sum,
          .z_loss_sum = sums.z_loss_sum,
          .divergence_sum = sums.divergence_sum,
          .entropy_sum = sums.entropy_sum,
          .policy_sum = sums.policy_sum,
          .dropped_teacher_mass_sum = sums.dropped_teacher_mass_sum,
          .num_clipped = sums.num_clipped,
          .old_policy_kl_sum = sums.old_policy_kl_sum,
          .num_chunks = from.num_chunks,
          .num_duplicates = from.num_duplicates,
          .queue_seconds = from.timings.queue_seconds,
          .upload_seconds = from.timings.upload_seconds,
          .compute_seconds = from.timings.compute_seconds,
          .download_seconds = from.timings.download_seconds,
      },
      kLossResultFirstSize, "result", to);
}

// Before any work is done for it.
absl::Status CheckResult(const lmhead_loss_result* result) {
  if (result == nullptr || result->struct_size >= kLossResultFirstSize) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("result.struct_size is %d, want at least %d: set it to sizeof",
                      result->struct_size, kLossResultFirstSize));
}

}  // namespace

lmhead_status lmhead_writer_open(lmhead_client* client, const char* open_json,
                                 const lmhead_writer_options* options, lmhead_writer** writer,
                                 lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    for (const absl::Status& status :
         {CheckGiven(client, "client"), CheckGiven(open_json, "open_json"),
          CheckGiven(writer, "writer")}) {
      if (!status.ok()) return status;
    }
    const auto spec = SpecOf(open_json, options);
    if (!spec.ok()) return spec.status();
    auto opened = client->client->OpenWriter(*spec);
    if (!opened.ok()) return opened.status();
    *writer = new lmhead_writer{*std::move(opened)};
    return absl::OkStatus();
  });
}

lmhead_status lmhead_writer_submit(lmhead_writer* writer, const lmhead_loss_rows* rows,
                                   uint64_t* ticket, lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    for (const absl::Status& status :
         {CheckGiven(writer, "writer"), CheckGiven(ticket, "ticket")}) {
      if (!status.ok()) return status;
    }
    const auto taken = RowsOf(rows);
    if (!taken.ok()) return taken.status();
    const auto submitted = writer->writer->Submit(*taken);
    if (!submitted.ok()) return submitted.status();
    *ticket = *submitted;
    return absl::OkStatus();
  });
}

lmhead_status lmhead_writer_wait(lmhead_writer* writer, uint64_t ticket, lmhead_loss_result* result,
                                 lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    for (const absl::Status& status : {CheckGiven(writer, "writer"), CheckResult(result)}) {
      if (!status.ok()) return status;
    }
    const auto waited = writer->writer->Wait(ticket);
    if (!waited.ok()) return waited.status();
    return GiveResult(*waited, result);
  });
}

lmhead_status lmhead_writer_compute(lmhead_writer* writer, const lmhead_loss_rows* rows,
                                    lmhead_loss_result* result, lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    for (const absl::Status& status : {CheckGiven(writer, "writer"), CheckResult(result)}) {
      if (!status.ok()) return status;
    }
    const auto taken = RowsOf(rows);
    if (!taken.ok()) return taken.status();
    const auto computed = writer->writer->Compute(*taken);
    if (!computed.ok()) return computed.status();
    return GiveResult(*computed, result);
  });
}

lmhead_status lmhead_writer_finish(lmhead_writer* writer, uint64_t* num_chunks,
                                   lmhead_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    if (absl::Status status = CheckGiven(writer, "writer"); !status.ok()) return status;
    const auto finished = writer->writer->Finish();
    if (!finished.ok()) return finished.status();
    if (num_chunks != nullptr) *num_chunks = *finished;
    return absl::OkStatus();
  });
}

void lmhead_writer_cancel(lmhead_writer* writer) {
  if (writer == nullptr) return;
  Guarded(nullptr, [&] {
    writer->writer->Cancel();
    return absl::OkStatus();
  });
}

void lmhead_writer_close(lmhead_writer* writer) {
  Guarded(nullptr, [&] {
    delete writer;
    return absl::OkStatus();
  });
}
