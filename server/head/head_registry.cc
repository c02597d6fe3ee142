#include "server/head/head_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/limits.h"
#include "spdlog/spdlog.h"

namespace lmhead {
namespace {

// The first field in which two specifications of the same name differ.
const char* DifferingField(const HeadSpec& a, const HeadSpec& b) {
  if (a.vocab_size != b.vocab_size) return "vocab_size";
  if (a.hidden_size != b.hidden_size) return "hidden_size";
  if (a.weight_dtype != b.weight_dtype) return "weight_dtype";
  if (a.has_bias != b.has_bias) return "has_bias";
  if (a.logit_scale != b.logit_scale) return "logit_scale";
  if (a.softcap != b.softcap) return "softcap";
  if (a.trainable != b.trainable) return "trainable";
  if (!(a.optimizer == b.optimizer)) return "optimizer";
  if (a.schedule != b.schedule) return "schedule";
  if (a.batch_tokens != b.batch_tokens) return "batch_tokens";
  if (a.teacher_hidden_size != b.teacher_hidden_size) return "teacher_hidden_size";
  if (a.top_k_max != b.top_k_max) return "top_k_max";
  if (a.partition_vocab_size != b.partition_vocab_size) return "partition_vocab_size";
  return "weight_init";
}

void LogCreated(const Head& head) {
  const HeadSpec& spec = head.spec();
  spdlog::info("head {}: created [{}, {}] {}, {}, schedule {}, {} bytes reserved", spec.name,
               spec.vocab_size, spec.hidden_size, std::string(DTypeName(spec.weight_dtype)),
               spec.trainable ? "trainable" : "frozen",
               std::string(ScheduleName(head.plan().schedule)), head.plan().TotalBytes());
}

}  // namespace

HeadRegistry::HeadRegistry(MemoryBudget* budget, const PlanOptions& plan_options,
                           BackendFactory make_backend, const HeadEnvironment& environment)
    : budget_(budget),
      plan_options_(plan_options),
      make_backend_(std::move(make_backend)),
      environment_(environment) {}

HeadRegistry::~HeadRegistry() {
  for (const std::shared_ptr<Head>& head : List()) head->Close();
}

absl::StatusOr<std::shared_ptr<Head>> HeadRegistry::Create(const HeadSpec& spec) {
  absl::MutexLock change(&change_mu_);
  if (absl::StatusOr<std::shared_ptr<Head>> found = Find(spec.name); found.ok()) {
    HeadSpec wanted = spec;
    if (wanted.batch_tokens == 0) wanted.batch_tokens = (*found)->plan().batch_tokens;
    if (wanted == (*found)->spec()) return found;
    return absl::AlreadyExistsError(absl::StrCat("head ", spec.name, " exists with another ",
                                                 DifferingField(wanted, (*found)->spec()),
                                                 "; delete it first, or use another name"));
  }
  absl::StatusOr<MemoryPlan> plan = budget_->Reserve(spec, plan_options_);
  if (!plan.ok()) return plan.status();
  absl::StatusOr<std::shared_ptr<Head>> head =
      Head::Create(spec, *plan, make_backend_, environment_);
  if (!head.ok()) {
    budget_->Release(spec.name);
    return head.status();
  }
  LogCreated(**head);
  absl::MutexLock lock(&mu_);
  heads_.emplace(spec.name, *head);
  return head;
}

absl::StatusOr<std::shared_ptr<Head>> HeadRegistry::Find(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  if (const auto it = heads_.find(name); it != heads_.end()) return it->second;
  std::string known;
  for (const auto& [other, head] : heads_)
    absl::StrAppend(&known, known.empty() ? "" : ", ", other);
  return absl::NotFoundError(
      absl::StrCat("no head is named '", name.substr(0, kNameLengthMax), "'; ",
                   known.empty() ? "this server has none" : absl::StrCat("there is ", known)));
}

std::vector<std::shared_ptr<Head>> HeadRegistry::List() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Head>> heads;
  for (const auto& [name, head] : heads_) heads.push_back(head);
  return heads;
}

absl::Status HeadRegistry::Delete(const std::string& name, bool force) {
  absl::MutexLock change(&change_mu_);
  absl::StatusOr<std::shared_ptr<Head>> found = Find(name);
  if (!found.ok()) return found.status();
  const HeadStatus status = (*found)->Status();
  if (status.open_step != 0 && !force && status.poisoned_by.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("head ", name, ": step ", status.open_step,
                     " is open; commit or abort it, or delete the head with force"));
  }
  return TakeOut(*found, force);
}

absl::Status HeadRegistry::Delete(const Head& head) {
  absl::MutexLock change(&change_mu_);
  absl::StatusOr<std::shared_ptr<Head>> found = Find(head.spec().name);
  if (!found.ok() || found->get() != &head) return absl::OkStatus();
  return TakeOut(*found, /*force=*/true);
}

absl::Status HeadRegistry::TakeOut(const std::shared_ptr<Head>& head, bool force) {
  const std::string& name = head->spec().name;
  if (absl::Status taught = head->StopTeaching(force); !taught.ok()) return taught;
  {
    absl::MutexLock lock(&mu_);
    heads_.erase(heads_.find(name));
  }
  head->Close();
  budget_->Release(name);
  spdlog::info("head {}: deleted", name);
  return absl::OkStatus();
}

}  // namespace lmhead
