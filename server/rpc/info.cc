#include "server/rpc/info.h"

#include "proto/wire/convert.h"

namespace lmhead {
namespace {

// The domain's categories are those of the wire, less the unspecified one.
v1::MemoryCategory CategoryToProto(int category) {
  return static_cast<v1::MemoryCategory>(category + 1);
}
static_assert(static_cast<int>(MemoryCategory::kWeight) + 1 == v1::MEMORY_CATEGORY_WEIGHT);
static_assert(static_cast<int>(MemoryCategory::kLibraryWorkspace) + 1 ==
              v1::MEMORY_CATEGORY_LIBRARY_WORKSPACE);

}  // namespace

v1::MemoryPlan MemoryPlanToProto(const MemoryPlan& plan) {
  v1::MemoryPlan proto;
  proto.set_schedule(ScheduleToProto(plan.schedule));
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    v1::CategoryBytes* category = proto.add_categories();
    category->set_category(CategoryToProto(i));
    category->set_bytes(plan.bytes[i]);
  }
  proto.set_total_bytes(plan.TotalBytes());
  proto.set_batch_tokens(plan.batch_tokens);
  proto.set_vocab_tile(plan.vocab_tile);
  return proto;
}

v1::HeadInfo HeadStatusToProto(const HeadStatus& status) {
  v1::HeadInfo info;
  *info.mutable_spec() = HeadSpecToProto(status.spec);
  info.set_schedule(ScheduleToProto(status.plan.schedule));
  *info.mutable_memory_plan() = MemoryPlanToProto(status.plan);
  info.set_last_committed_step(status.last_committed_step);
  info.set_open_step(status.open_step);
  info.set_weights_loaded(status.weights_loaded);
  info.set_poisoned_by(status.poisoned_by);
  return info;
}

v1::MemoryReport RankMemoryToProto(const RankMemory& memory, int64_t staging_bytes) {
  v1::MemoryReport report;
  for (const RankMemory::Category& category : memory.categories) {
    v1::CategoryUse* use = report.add_categories();
    use->set_category(CategoryToProto(report.categories_size() - 1));
    use->set_live_bytes(category.live_bytes);
    use->set_peak_process_bytes(category.peak_process_bytes);
    use->set_peak_step_bytes(category.peak_step_bytes);
  }
  report.set_live_bytes(memory.live_bytes);
  report.set_peak_process_bytes(memory.peak_process_bytes);
  report.set_peak_step_bytes(memory.peak_step_bytes);
  report.set_limit_bytes(memory.limit_bytes);
  report.set_reserved_bytes(memory.reserved_bytes);
  report.set_staging_bytes(staging_bytes);
  report.set_device_used_bytes(memory.device_used_bytes);
  report.set_device_peak_bytes(memory.device_peak_bytes);
  return report;
}

}  // namespace lmhead
