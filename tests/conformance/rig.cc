#include "tests/conformance/rig.h"

#include <cstring>
#include <utility>

#include "absl/synchronization/notification.h"
#include "kernels/reference/plain_dense.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

// A chunk in memory, as a staging slot would hold it, with room for every output.
struct Slot {
  std::vector<std::byte> hidden_states;
  std::vector<std::byte> grad_hidden_states;
  ChunkAnswer answer;

  ChunkRows Rows(const ChunkData& chunk, int64_t hidden_size, DType dtype, bool wants_grad,
                 bool in_place) {
    const auto num_tokens = static_cast<int64_t>(chunk.targets.size());
    LMHEAD_CHECK(static_cast<int64_t>(chunk.hidden_states.size()) == num_tokens * hidden_size,
                 "hidden_states and targets");
    hidden_states = Pack(chunk.hidden_states, dtype);
    ChunkRows rows{.hidden_states = {hidden_states.data(), num_tokens, hidden_size, dtype},
                   .targets = chunk.targets,
                   .token_weights = chunk.token_weights,
                   .token_temperature = chunk.token_temperature,
                   .grad_scale = chunk.grad_scale};
    if (wants_grad) {
      grad_hidden_states.resize(hidden_states.size());
      auto* const data = in_place ? hidden_states.data() : grad_hidden_states.data();
      rows.grad_hidden_states = {data, num_tokens, hidden_size, dtype};
    }
    const auto room = [&](auto* values) {
      values->resize(num_tokens);
      return values->data();
    };
    rows.token_loss = room(&answer.token_loss);
    rows.logprob = room(&answer.logprob);
    rows.lse = room(&answer.lse);
    rows.entropy = room(&answer.entropy);
    rows.argmax = room(&answer.argmax);
    return rows;
  }
};

PlanOptions OptionsOf(const BackendUnderTest& backend) { return {.backend = backend.kind}; }

std::vector<double> ToDouble(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

reference::Tokens TokensOf(const ChunkData& chunk) {
  return {.hidden_states = ToDouble(chunk.hidden_states),
          .targets = chunk.targets,
          .token_weights = ToDouble(chunk.token_weights),
          .token_temperature = ToDouble(chunk.token_temperature),
          .grad_scale = chunk.grad_scale};
}

}  // namespace

std::vector<std::byte> Pack(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * BytesPerElement(dtype));
  if (dtype == DType::kFloat32) {
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  auto* halves = reinterpret_cast<uint16_t*>(bytes.data());
  for (size_t i = 0; i < values.size(); ++i) {
    halves[i] = dtype == DType::kBFloat16 ? FloatToBFloat16(values[i]) : FloatToFloat16(values[i]);
  }
  return bytes;
}

std::vector<float> Unpack(const std::vector<std::byte>& bytes, DType dtype) {
  const auto rows = static_cast<int64_t>(bytes.size()) / BytesPerElement(dtype);
  const std::vector<double> values = reference::Upcast({bytes.data(), rows, 1, dtype});
  return {values.begin(), values.end()};
}

std::vector<float> RoundedTo(DType dtype, const std::vector<float>& values) {
  return Unpack(Pack(values, dtype), dtype);
}

Rig::Rig(const BackendUnderTest& backend, const HeadSpec& spec, DType hidden_dtype)
    : spec_(spec),
      hidden_dtype_(hidden_dtype),
      plan_(PlanForSchedule(spec, spec.schedule, OptionsOf(backend))) {
  absl::StatusOr<std::unique_ptr<ComputeBackend>> created = backend.create(spec, plan_, &account_);
  LMHEAD_CHECK(created.ok(), created.status().ToString());
  backend_ = *std::move(created);
}

Rig::~Rig() = default;

absl::StatusOr<std::vector<ChunkAnswer>> Rig::Run(const LossRecipe& recipe, BackwardMode mode,
                                                  const std::vector<ChunkData>& chunks) {
  const bool wants_grad = mode != BackwardMode::kNone;
  std::vector<Slot> slots(chunks.size());
  std::vector<ChunkRows> rows;
  for (size_t i = 0; i < chunks.size(); ++i) {
    rows.push_back(
        slots[i].Rows(chunks[i], spec_.hidden_size, hidden_dtype_, wants_grad, in_place_));
  }
  absl::StatusOr<BatchOutput> output;
  absl::Notification done;
  backend_->ComputeBatch({&recipe, mode, rows}, [&](absl::StatusOr<BatchOutput> result) {
    output = std::move(result);
    done.Notify();
  });
  done.WaitForNotification();
  if (!output.ok()) return output.status();
  LMHEAD_CHECK(output->sums.size() == chunks.size(), "one sum a chunk");
  std::vector<ChunkAnswer> answers;
  for (size_t i = 0; i < chunks.size(); ++i) {
    slots[i].answer.sums = output->sums[i];
    const bool moved = in_place_ && wants_grad;
    slots[i].answer.grad_hidden_states =
        Unpack(moved ? slots[i].hidden_states : slots[i].grad_hidden_states, hidden_dtype_);
    answers.push_back(std::move(slots[i].answer));
  }
  return answers;
}

std::vector<ChunkAnswer> Rig::Run(const LossRecipe& recipe, const std::vector<ChunkData>& chunks) {
  absl::StatusOr<std::vector<ChunkAnswer>> answers = Run(recipe, mode(), chunks);
  LMHEAD_CHECK(answers.ok(), answers.status().ToString());
  return *std::move(answers);
}

DType Rig::DTypeOf(TensorKind kind) const {
  return kind == TensorKind::kWeight ? spec_.weight_dtype : DType::kFloat32;
}

void Rig::Write(TensorKind kind, const std::vector<float>& values) {
  const int64_t cols = static_cast<int64_t>(values.size()) / spec_.vocab_size;
  const absl::Status status =
      backend_->WriteRows(kind, 0, {values.data(), spec_.vocab_size, cols, DType::kFloat32});
  LMHEAD_CHECK(status.ok(), status.ToString());
}

std::vector<float> Rig::Read(TensorKind kind) {
  const bool of_bias = kind == TensorKind::kBias || kind == TensorKind::kGradBias;
  const int64_t cols = of_bias ? 1 : spec_.hidden_size;
  const DType dtype = DTypeOf(kind);
  std::vector<std::byte> bytes(spec_.vocab_size * cols * BytesPerElement(dtype));
  const absl::Status status =
      backend_->ReadRows(kind, 0, {bytes.data(), spec_.vocab_size, cols, dtype});
  LMHEAD_CHECK(status.ok(), status.ToString());
  return Unpack(bytes, dtype);
}

reference::Head Rig::Head() {
  reference::Head head{.vocab_size = spec_.vocab_size,
                       .hidden_size = spec_.hidden_size,
                       .weight = ToDouble(Read(TensorKind::kWeight)),
                       .logit_scale = spec_.logit_scale,
                       .softcap = spec_.softcap};
  if (spec_.has_bias) head.bias = ToDouble(Read(TensorKind::kBias));
  return head;
}

reference::Result Rig::Expected(const LossRecipe& recipe, const ChunkData& chunk) {
  return reference::ComputeLoss(Head(), reference::Recipe(recipe), TokensOf(chunk));
}

reference::Result Rig::PlainDense(const LossRecipe& recipe, const ChunkData& chunk,
                                  DType logits_dtype) {
  return reference::ComputePlainDense(Head(), reference::Recipe(recipe), TokensOf(chunk),
                                      logits_dtype);
}

BackwardMode Rig::mode() const {
  switch (spec_.schedule) {
    case Schedule::kEval:
      return BackwardMode::kNone;
    case Schedule::kFrozen:
      return BackwardMode::kHidden;
    default:
      return BackwardMode::kHiddenAndWeight;
  }
}

}  // namespace lmhead
