#include "server/memory/staging_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"

namespace lmhead {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A slot that must be free.
StagingSlot* Take(StagingPool& pool) {
  StagingSlot* taken = nullptr;
  EXPECT_EQ(pool.Acquire([&](StagingSlot* slot) { taken = slot; }), 0u);
  EXPECT_NE(taken, nullptr);
  return taken;
}

TEST(StagingPoolTest, SlotsAreAlignedDisjointAndCounted) {
  const auto pool = StagingPool::Create(3, 100).value();
  EXPECT_EQ(pool->num_slots(), 3);
  EXPECT_EQ(pool->slot_bytes(), 128);
  std::set<std::byte*> starts;
  std::vector<StagingSlot*> slots;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(Take(*pool));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slots.back()->data) % 64, 0u);
    EXPECT_EQ(slots.back()->size_bytes, 128);
    std::memset(slots.back()->data, i, 128);
    starts.insert(slots.back()->data);
    EXPECT_EQ(pool->num_lent(), i + 1);
  }
  EXPECT_EQ(starts.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    for (int at = 0; at < 128; ++at) EXPECT_EQ(slots[i]->data[at], std::byte(i));
    pool->Release(slots[i]);
  }
  EXPECT_EQ(pool->num_lent(), 0);
}

TEST(StagingPoolTest, WaitersAreServedInOrder) {
  const auto pool = StagingPool::Create(1, 64).value();
  StagingSlot* const slot = Take(*pool);
  std::vector<int> served;
  std::set<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    ids.insert(pool->Acquire([&served, i](StagingSlot*) { served.push_back(i); }));
  }
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids.count(0), 0u);
  EXPECT_EQ(pool->num_waiting(), 3);
  EXPECT_THAT(served, IsEmpty());
  for (int i = 0; i < 3; ++i) {
    pool->Release(slot);
    EXPECT_EQ(served.size(), static_cast<size_t>(i + 1));
    EXPECT_EQ(pool->num_lent(), 1);
  }
  EXPECT_THAT(served, ElementsAre(0, 1, 2));
  pool->Release(slot);
}

TEST(StagingPoolTest, ACancelledWaitIsSkipped) {
  const auto pool = StagingPool::Create(1, 64).value();
  StagingSlot* const slot = Take(*pool);
  std::vector<int> served;
  const uint64_t first = pool->Acquire([&](StagingSlot*) { served.push_back(1); });
  const uint64_t second = pool->Acquire([&](StagingSlot*) { served.push_back(2); });
  EXPECT_TRUE(pool->CancelWait(first));
  EXPECT_FALSE(pool->CancelWait(first));
  EXPECT_EQ(pool->num_waiting(), 1);
  pool->Release(slot);
  EXPECT_THAT(served, ElementsAre(2));
  EXPECT_FALSE(pool->CancelWait(second));
  EXPECT_FALSE(pool->CancelWait(0));
  pool->Release(slot);
}

// Callbacks run without the pool's lock: they may call any of its methods.
TEST(StagingPoolTest, CallbacksMayUseThePool) {
  const auto pool = StagingPool::Create(1, 64).value();
  int served = 0;
  StagingSlot* const slot = Take(*pool);
  pool->Acquire([&](StagingSlot* mine) {
    ++served;
    EXPECT_EQ(pool->num_lent(), 1);
    const uint64_t id = pool->Acquire([&](StagingSlot* next) {
      ++served;
      pool->Release(next);
    });
    EXPECT_NE(id, 0u);
    pool->Release(mine);
  });
  pool->Release(slot);
  EXPECT_EQ(served, 2);
  EXPECT_EQ(pool->num_lent(), 0);
  EXPECT_EQ(pool->num_waiting(), 0);
}

// What a cancelled callback holds is let go without the lock, too.
TEST(StagingPoolTest, DestroyingACancelledCallbackMayUseThePool) {
  const auto pool = StagingPool::Create(1, 64).value();
  StagingSlot* const slot = Take(*pool);
  std::shared_ptr<int> guard(new int(0), [&](int* value) {
    delete value;
    EXPECT_EQ(pool->num_waiting(), 0);
  });
  const uint64_t id = pool->Acquire([guard](StagingSlot*) {});
  guard.reset();
  EXPECT_TRUE(pool->CancelWait(id));
  pool->Release(slot);
}

TEST(StagingPoolTest, ManyThreadsNeverShareASlotAndAllAreServed) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 500;
  constexpr int kSlots = 3;
  const auto pool = StagingPool::Create(kSlots, 64).value();
  std::atomic<int> served = 0;
  std::atomic<int> cancelled = 0;
  std::atomic<int> shared = 0;
  absl::BlockingCounter done(kThreads * kRounds);
  const auto use = [&](StagingSlot* slot) {
    auto* const owner = reinterpret_cast<std::atomic<uint32_t>*>(slot->data);
    if (owner->fetch_add(1) != 0) ++shared;
    ++served;
    owner->fetch_sub(1);
    pool->Release(slot);
    done.DecrementCount();
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t id = pool->Acquire(use);
        if (t % 2 == 0 && id != 0 && pool->CancelWait(id)) {
          ++cancelled;
          done.DecrementCount();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done.Wait();
  EXPECT_EQ(shared, 0);
  EXPECT_EQ(served + cancelled, kThreads * kRounds);
  EXPECT_EQ(pool->num_lent(), 0);
  EXPECT_EQ(pool->num_waiting(), 0);
}

TEST(StagingPoolTest, NoRoomIsResourceExhausted) {
  const auto pool = StagingPool::Create(1 << 20, int64_t{1} << 30);
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(StagingPoolDeathTest, MisuseEndsTheProcess) {
  auto pool = StagingPool::Create(2, 64).value();
  StagingSlot* const slot = Take(*pool);
  EXPECT_DEATH(pool.reset(), "1 slots are still lent");
  pool->Release(slot);
  EXPECT_DEATH(pool->Release(slot), "released twice");
  StagingSlot other;
  EXPECT_DEATH(pool->Release(&other), "another pool");
}

}  // namespace
}  // namespace lmhead
