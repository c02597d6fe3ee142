#include "tests/conformance/rig.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/reference/plain_dense.h"
#include "proto/types/check.h"
#include "server/compute/local_rank.h"
#include "server/compute/rank_pool.h"
#include "server/compute/shard_group.h"

namespace lmhead {
namespace {

// The ranks of a backend, and the memory of each.
struct Group {
  std::vector<std::unique_ptr<MemoryAccount>> accounts;
  std::unique_ptr<RankPool> pool;
};

std::unique_ptr<Collective> MakeCollective(const BackendUnderTest& backend, int32_t rank,
                                           int32_t size, int32_t number_of_all) {
  if (size == 1) return nullptr;
  auto collective = backend.create_collective(rank, size, number_of_all);
  LMHEAD_CHECK(collective.ok(), collective.status().ToString());
  return *std::move(collective);
}

std::unique_ptr<Group> MakeGroup(const BackendUnderTest& backend) {
  auto group = std::make_unique<Group>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t number = 0; number < backend.num_ranks * backend.num_replicas; ++number) {
    const int32_t rank = number % backend.num_ranks;
    const int32_t replica = number / backend.num_ranks;
    group->accounts.push_back(std::make_unique<MemoryAccount>());
    ranks.push_back(std::make_unique<LocalRank>(
        LocalRank::Collectives{
            .shards = MakeCollective(backend, rank, backend.num_ranks, number),
            .peers = MakeCollective(backend, replica, backend.num_replicas, number)},
        [create = backend.create, account = group->accounts.back().get()](
            const HeadSpec& spec, const MemoryPlan& plan, const RankContext& context) {
          return create(spec, plan, account, context);
        }));
  }
  group->pool = std::make_unique<RankPool>(std::move(ranks),
                                           RankPool::Options{.num_replicas = backend.num_replicas});
  return group;
}

// Connecting takes longer than most tests, so a group lives as long as the process.
Group& GroupOf(const BackendUnderTest& backend) {
  static auto* const groups = new std::map<std::string, std::unique_ptr<Group>>;
  auto& group =
      (*groups)[absl::StrCat(backend.name, "/", backend.num_ranks, "/", backend.num_replicas)];
  if (group == nullptr) group = MakeGroup(backend);
  return *group;
}

PlanOptions OptionsOf(const BackendUnderTest& backend) {
  return {.backend = backend.kind,
          .num_ranks = backend.num_ranks,
          .num_replicas = backend.num_replicas};
}

absl::StatusOr<std::unique_ptr<ComputeBackend>> Create(const BackendUnderTest& backend,
                                                       const HeadSpec& spec, const MemoryPlan& plan,
                                                       MemoryAccount* account) {
  if (!backend.is_group()) return backend.create(spec, plan, account, RankContext());
  return ShardGroup::Create(GroupOf(backend).pool.get(), spec, plan);
}

// A chunk in memory, as a staging slot would hold it, with room for every output.
struct Slot {
  std::vector<std::byte> hidden_states;
  std::vector<std::byte> teacher_hidden_states;
  std::vector<std::byte> grad_hidden_states;
  ChunkAnswer answer;

  void AddOutputs(const OutputSpec& outputs, bool in_place, ChunkRows* rows) {
    const auto& [data, num_tokens, hidden_size, dtype] = rows->hidden_states;
    if (outputs.grad_hidden_states) {
      grad_hidden_states.resize(hidden_states.size());
      auto* const grad = in_place ? hidden_states.data() : grad_hidden_states.data();
      rows->grad_hidden_states = {grad, num_tokens, hidden_size, dtype};
    }
    const auto room = [&](auto* values, int64_t size) {
      values->resize(size);
      return values->empty() ? nullptr : values->data();
    };
    rows->token_loss = room(&answer.token_loss, num_tokens);
    rows->logprob = room(&answer.logprob, num_tokens);
    rows->lse = room(&answer.lse, num_tokens);
    rows->entropy = room(&answer.entropy, num_tokens);
    rows->argmax = room(&answer.argmax, num_tokens);
    rows->topk_ids = room(&answer.topk_ids, num_tokens * outputs.top_k);
    rows->topk_logprobs = room(&answer.topk_logprobs, num_tokens * outputs.top_k);
  }
};

ChunkRows InputsOf(const ChunkData& chunk) {
  return {.targets = chunk.targets,
          .token_weights = chunk.token_weights,
          .token_temperature = chunk.token_temperature,
          .grad_scale = chunk.grad_scale,
          .logprob_grad = chunk.logprob_grad,
          .entropy_grad = chunk.entropy_grad,
          .old_logprob = chunk.old_logprob,
          .advantage = chunk.advantage,
          .reference_logprob = chunk.reference_logprob,
          .teacher_topk_ids = chunk.teacher_topk_ids,
          .teacher_topk_logprobs = chunk.teacher_topk_logprobs};
}

std::vector<double> ToDouble(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

// --- HeadUnderTest -----------------------------------------------------------------------------

HeadUnderTest::HeadUnderTest(const BackendUnderTest& backend, const HeadSpec& spec)
    : under_test_(backend),
      spec_(spec),
      plan_(PlanForSchedule(spec, spec.schedule, OptionsOf(backend))) {
  auto created = Create(backend, spec, plan_, &account_);
  LMHEAD_CHECK(created.ok(), created.status().ToString());
  backend_ = *std::move(created);
}

MemoryAccount& HeadUnderTest::account(int32_t rank) {
  return under_test_.is_group() ? *GroupOf(under_test_).accounts[rank] : account_;
}

DType HeadUnderTest::DTypeOf(TensorKind kind) const {
  return kind == TensorKind::kWeight ? spec_.weight_dtype : DType::kFloat32;
}

void HeadUnderTest::Write(TensorKind kind, const std::vector<float>& values) {
  const int64_t cols = static_cast<int64_t>(values.size()) / spec_.vocab_size;
  const absl::Status status =
      backend_->WriteRows(kind, 0, {values.data(), spec_.vocab_size, cols, DType::kFloat32});
  LMHEAD_CHECK(status.ok(), status.ToString());
}

std::vector<float> HeadUnderTest::Read(TensorKind kind) {
  const bool of_bias = kind == TensorKind::kBias || kind == TensorKind::kGradBias;
  const int64_t cols = of_bias ? 1 : spec_.hidden_size;
  const DType dtype = DTypeOf(kind);
  std::vector<std::byte> bytes(spec_.vocab_size * cols * BytesPerElement(dtype));
  const absl::Status status =
      backend_->ReadRows(kind, 0, {bytes.data(), spec_.vocab_size, cols, dtype});
  LMHEAD_CHECK(status.ok(), status.ToString());
  return Unpack(bytes, dtype);
}

reference::Head HeadUnderTest::ToReference() {
  reference::Head head{.vocab_size = spec_.vocab_size,
                       .hidden_size = spec_.hidden_size,
                       .weight = ToDouble(Read(TensorKind::kWeight)),
                       .logit_scale = spec_.logit_scale,
                       .softcap = spec_.softcap};
  if (spec_.has_bias) head.bias = ToDouble(Read(TensorKind::kBias));
  return head;
}

// --- Rig ---------------------------------------------------------------------------------------

Rig::Rig(const BackendUnderTest& backend, const HeadSpec& spec, DType hidden_dtype)
    : under_test_(backend), hidden_dtype_(hidden_dtype), head_(backend, spec) {}

HeadUnderTest& Rig::AddTeacher(const HeadSpec& spec) {
  teacher_ = std::make_unique<HeadUnderTest>(under_test_, spec);
  return *teacher_;
}

absl::StatusOr<std::vector<ChunkAnswer>> Rig::Run(const LossRecipe& recipe, BackwardMode mode,
                                                  const std::vector<ChunkData>& chunks) {
  const OutputSpec outputs{.grad_hidden_states = mode != BackwardMode::kNone,
                           .token_loss = true,
                           .logprob = true,
                           .lse = true,
                           .entropy = true,
                           .argmax = true,
                           .top_k = top_k_};
  std::vector<Slot> slots(chunks.size());
  std::vector<ChunkRows> rows;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkData& chunk = chunks[i];
    const int64_t num_tokens = chunk.num_tokens();
    LMHEAD_CHECK(
        static_cast<int64_t>(chunk.hidden_states.size()) == num_tokens * spec().hidden_size,
        "hidden_states and targets");
    rows.push_back(InputsOf(chunk));
    slots[i].hidden_states = Pack(chunk.hidden_states, hidden_dtype_);
    rows[i].hidden_states = {slots[i].hidden_states.data(), num_tokens, spec().hidden_size,
                             hidden_dtype_};
    if (!chunk.teacher_hidden_states.empty()) {
      const DType dtype = recipe.distillation->teacher_hidden_dtype;
      slots[i].teacher_hidden_states = Pack(chunk.teacher_hidden_states, dtype);
      rows[i].teacher_hidden_states = {slots[i].teacher_hidden_states.data(), num_tokens,
                                       teacher_->spec().hidden_size, dtype};
    }
    slots[i].AddOutputs(outputs, in_place_, &rows[i]);
  }
  const BatchInput input{
      .recipe = &recipe,
      .mode = mode,
      .chunks = rows,
      .outputs = outputs,
      .teacher = recipe.has_teacher_head() && teacher_ != nullptr ? &teacher_->backend() : nullptr};
  absl::StatusOr<BatchOutput> output;
  absl::Notification done;
  backend().ComputeBatch(input, [&](absl::StatusOr<BatchOutput> result) {
    output = std::move(result);
    done.Notify();
  });
  done.WaitForNotification();
  if (!output.ok()) return output.status();
  LMHEAD_CHECK(output->sums.size() == chunks.size(), "one sum a chunk");
  std::vector<ChunkAnswer> answers;
  for (size_t i = 0; i < chunks.size(); ++i) {
    slots[i].answer.sums = output->sums[i];
    const bool moved = in_place_ && outputs.grad_hidden_states;
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

std::optional<reference::Head> Rig::TeacherOf(const LossRecipe& recipe) {
  if (!recipe.has_teacher_head()) return std::nullopt;
  return teacher_->ToReference();
}

reference::Result Rig::Expected(const LossRecipe& recipe, const ChunkData& chunk) {
  const std::optional<reference::Head> teacher = TeacherOf(recipe);
  return reference::ComputeLoss(head_.ToReference(), reference::Recipe(recipe), TokensOf(chunk),
                                teacher.has_value() ? &*teacher : nullptr, top_k_);
}

reference::Result Rig::PlainDense(const LossRecipe& recipe, const ChunkData& chunk,
                                  DType logits_dtype) {
  const std::optional<reference::Head> teacher = TeacherOf(recipe);
  return reference::ComputePlainDense(head_.ToReference(), reference::Recipe(recipe),
                                      TokensOf(chunk), logits_dtype,
                                      teacher.has_value() ? &*teacher : nullptr, top_k_);
}

std::vector<double> Rig::ExpectedLogProbs(const LossRecipe& recipe, const ChunkData& chunk,
                                          const std::vector<int32_t>& ids) {
  return AtIds(
      reference::AllLogProbs(head_.ToReference(), reference::Recipe(recipe), TokensOf(chunk)),
      chunk, ids);
}

BackwardMode Rig::mode() const {
  switch (head_.spec().schedule) {
    case Schedule::kEval:
      return BackwardMode::kNone;
    case Schedule::kFrozen:
      return BackwardMode::kHidden;
    default:
      return BackwardMode::kHiddenAndWeight;
  }
}

}  // namespace lmhead
