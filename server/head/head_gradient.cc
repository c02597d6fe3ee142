#include <cmath>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/head/head.h"

namespace lmhead {

absl::StatusOr<std::vector<float>> Head::CheckPiece(const GradientPiece& piece) const {
  const auto wrong = [&](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("gradient piece ", piece.index, " of worker ",
                                                   piece.worker, " for head ", spec_.name, ": ",
                                                   parts...));
  };
  const int64_t row_bytes = spec_.hidden_size * BytesPerElement(DType::kFloat32);
  const auto size = static_cast<int64_t>(piece.rows.size());
  if (size == 0 || size % row_bytes != 0) {
    return wrong("rows has ", size, " bytes, wanted a multiple of ", row_bytes,
                 ": float32 rows of ", spec_.hidden_size, " columns");
  }
  const int64_t num_rows = size / row_bytes;
  if (piece.row_ids.empty()) {
    if (piece.row_start < 0 || num_rows > spec_.vocab_size ||
        piece.row_start > spec_.vocab_size - num_rows) {
      return wrong("got ", num_rows, " rows from row ", piece.row_start,
                   ", wanted them within the ", spec_.vocab_size, " rows of the weight");
    }
  } else if (static_cast<int64_t>(piece.row_ids.size()) != num_rows) {
    return wrong("got ", piece.row_ids.size(), " row_ids for ", num_rows, " rows");
  }
  absl::flat_hash_set<int32_t> seen;
  for (const int32_t id : piece.row_ids) {
    if (id < 0 || id >= spec_.vocab_size) {
      return wrong("row id ", id, ", wanted 0 to ", spec_.vocab_size - 1);
    }
    if (!seen.insert(id).second) return wrong("row id ", id, " is there twice; sum its rows first");
  }
  std::vector<float> values(static_cast<size_t>(num_rows * spec_.hidden_size));
  std::memcpy(values.data(), piece.rows.data(), piece.rows.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return wrong("row ", static_cast<int64_t>(i) / spec_.hidden_size,
                   " of the piece has a NaN or an infinity");
    }
  }
  return values;
}

absl::StatusOr<bool> Head::AccumulateGradient(uint64_t number, uint64_t incarnation,
                                              const GradientPiece& piece) {
  if (!spec_.trainable) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", spec_.name, " is not trainable, so it accumulates no gradient"));
  }
  absl::StatusOr<std::vector<float>> values = CheckPiece(piece);
  if (!values.ok()) return values.status();
  absl::MutexLock control(&control_mu_);
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  if (absl::Status status = CheckIncarnation(incarnation); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Step>> step = steps_.FindOpen(number);
  if (!step.ok()) return step.status();
  absl::StatusOr<ChunkVerdict> verdict =
      (*step)->AcceptPiece(piece.worker, piece.index, piece.checksum);
  if (!verdict.ok()) return verdict.status();
  if (*verdict == ChunkVerdict::kDuplicate) return true;
  const ConstMatrixView rows = {values->data(),
                                static_cast<int64_t>(values->size()) / spec_.hidden_size,
                                spec_.hidden_size, DType::kFloat32};
  absl::Status status = RunOnBackend([&](ComputeBackend& backend) {
    return backend.AddGradRows(piece.row_ids, piece.row_start, rows);
  });
  if (!status.ok()) {
    (*step)->Poison(status);
    return (*step)->failure();
  }
  (*step)->PieceAccumulated(piece.worker, piece.index, piece.checksum);
  return false;
}

}  // namespace lmhead
