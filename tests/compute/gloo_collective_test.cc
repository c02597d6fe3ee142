// Gloo's collective between threads: what it computes, that sums have one order, and how it ends.

#include "server/compute/gloo_collective.h"

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "server/compute/rendezvous.h"

namespace lmhead {
namespace {

using Ends = std::vector<std::unique_ptr<Collective>>;

Ends MakeEnds(int32_t size, absl::Duration timeout = absl::Seconds(30)) {
  Ends ends;
  for (int32_t rank = 0; rank < size; ++rank) {
    absl::StatusOr<std::unique_ptr<Collective>> end =
        CreateGlooCollective(rank, size, {.timeout = timeout});
    EXPECT_TRUE(end.ok()) << end.status();
    ends.push_back(*std::move(end));
  }
  return ends;
}

// Runs `work` for the end of every rank of [first, ends.size()) at once.
void OnEach(const Ends& ends, const std::function<void(Collective&)>& work, size_t first = 0) {
  std::vector<std::thread> threads;
  for (size_t rank = first; rank < ends.size(); ++rank) {
    threads.emplace_back([&, rank] { work(*ends[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

void ConnectAll(const Ends& ends) {
  InProcessStore store;
  OnEach(ends, [&](Collective& end) {
    const absl::Status status = end.Connect(&store);
    EXPECT_TRUE(status.ok()) << status;
  });
}

class GlooCollectiveTest : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooCollectiveTest, testing::Values(2, 3, 4, 7));

TEST_P(GlooCollectiveTest, AllGatherBringsEveryRanksBytesToAll) {
  const Ends ends = MakeEnds(GetParam());
  ConnectAll(ends);
  for (const int64_t bytes : {int64_t{1}, int64_t{1000}, int64_t{3} << 20}) {
    OnEach(ends, [&](Collective& end) {
      const std::string own(bytes, static_cast<char>('a' + end.rank()));
      std::string all(bytes * end.size(), ' ');
      ASSERT_TRUE(end.AllGather(own.data(), all.data(), bytes, nullptr).ok());
      for (int32_t rank = 0; rank < end.size(); ++rank) {
        EXPECT_EQ(all.substr(rank * bytes, bytes),
                  std::string(bytes, static_cast<char>('a' + rank)));
      }
    });
  }
}

TEST_P(GlooCollectiveTest, AllGatherTakesTheRanksOwnPlaceAsItsInput) {
  const Ends ends = MakeEnds(GetParam());
  ConnectAll(ends);
  OnEach(ends, [&](Collective& end) {
    std::vector<int32_t> all(end.size(), -1);
    all[end.rank()] = end.rank();
    ASSERT_TRUE(end.AllGather(&all[end.rank()], all.data(), sizeof(int32_t), nullptr).ok());
    for (int32_t rank = 0; rank < end.size(); ++rank) EXPECT_EQ(all[rank], rank);
  });
}

TEST_P(GlooCollectiveTest, BroadcastBringsTheRootsBytesToAll) {
  const Ends ends = MakeEnds(GetParam());
  ConnectAll(ends);
  for (int32_t root = 0; root < GetParam(); ++root) {
    OnEach(ends, [&](Collective& end) {
      std::string data(1 << 20, static_cast<char>('a' + end.rank()));
      ASSERT_TRUE(end.Broadcast(data.data(), 1 << 20, root, nullptr).ok());
      EXPECT_EQ(data, std::string(1 << 20, static_cast<char>('a' + root)));
    });
  }
}

// Values whose sum depends on the order of the additions.
float Value(int32_t rank, int64_t i) {
  return (rank % 2 == 0 ? 1.0f : -1.0f) * (1e7f + static_cast<float>(i % 97)) * (1 + rank) + 0.1f;
}

float SumInRankOrder(int32_t size, int64_t i) {
  float sum = Value(0, i);
  for (int32_t rank = 1; rank < size; ++rank) sum += Value(rank, i);
  return sum;
}

// Counts below and above the number of ranks, and of more than one block.
TEST_P(GlooCollectiveTest, SumsAddTheRanksInTheirOrderWhateverTheCount) {
  const Ends ends = MakeEnds(GetParam());
  ConnectAll(ends);
  for (const int64_t count :
       {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{1000}, int64_t{600'001}}) {
    OnEach(ends, [&](Collective& end) {
      std::vector<float> data(count);
      for (int64_t i = 0; i < count; ++i) data[i] = Value(end.rank(), i);
      std::vector<float> reduced = data;
      ASSERT_TRUE(end.AllReduce(data.data(), count, nullptr).ok());
      const int32_t root = end.size() - 1;
      ASSERT_TRUE(end.Reduce(reduced.data(), count, root, nullptr).ok());
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(data[i], SumInRankOrder(end.size(), i)) << i;
        if (end.rank() == root) {
          ASSERT_EQ(reduced[i], data[i]) << i;
        }
      }
    });
  }
}

TEST_P(GlooCollectiveTest, SumsDoubles) {
  const Ends ends = MakeEnds(GetParam());
  ConnectAll(ends);
  OnEach(ends, [&](Collective& end) {
    double value = 1.0 + 1e-12 * end.rank();
    ASSERT_TRUE(end.AllReduce(&value, 1, nullptr).ok());
    double expected = 1.0;
    for (int32_t rank = 1; rank < end.size(); ++rank) expected += 1.0 + 1e-12 * rank;
    EXPECT_EQ(value, expected);
  });
}

TEST(GlooCollectiveEndTest, NothingWorksBeforeTheRanksAreConnected) {
  const Ends ends = MakeEnds(2);
  float value = 0.0f;
  EXPECT_EQ(ends[0]->AllReduce(&value, 1, nullptr).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(ends[0]->Check().ok());
}

TEST(GlooCollectiveEndTest, ARankThatDoesNotConnectIsNamed) {
  const Ends ends = MakeEnds(3, absl::Milliseconds(300));
  InProcessStore store;
  OnEach(
      ends,
      [&](Collective& end) {
        const absl::Status status = end.Connect(&store);
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
        EXPECT_NE(status.message().find("rank 0 did not connect"), std::string::npos) << status;
      },
      /*first=*/1);
}

TEST(GlooCollectiveEndTest, ARankThatDoesNotAnswerIsNamed) {
  const Ends ends = MakeEnds(2, absl::Milliseconds(300));
  ConnectAll(ends);
  float value = 0.0f;
  const absl::Status status = ends[0]->AllReduce(&value, 1, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("rank 1 has not answered"), std::string::npos) << status;
  EXPECT_EQ(ends[0]->AllReduce(&value, 1, nullptr), status) << "the first failure stays";
  EXPECT_EQ(ends[0]->Check(), status);
}

TEST(GlooCollectiveEndTest, ARankThatIsGoneIsNamed) {
  Ends ends = MakeEnds(2);
  ConnectAll(ends);
  ends.pop_back();
  std::vector<float> data(1 << 20);
  const absl::Status status = ends[0]->AllReduce(data.data(), 1 << 20, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find("rank 1 was lost"), std::string::npos) << status;
}

TEST(GlooCollectiveEndTest, AbortEndsAPendingCallWithTheReason) {
  const Ends ends = MakeEnds(2);
  ConnectAll(ends);
  std::thread abort([&] {
    absl::SleepFor(absl::Milliseconds(50));
    ends[0]->Abort(absl::AbortedError("rank 1: out of paper"));
    ends[0]->Abort(absl::AbortedError("a later reason"));
  });
  std::vector<float> data(1 << 20);
  const absl::Status status = ends[0]->AllReduce(data.data(), 1 << 20, nullptr);
  abort.join();
  EXPECT_EQ(status, absl::AbortedError("rank 1: out of paper"));
  EXPECT_EQ(ends[0]->Broadcast(data.data(), 8, 0, nullptr), status);
  // The other end finds its connection closed.
  EXPECT_EQ(ends[1]->AllReduce(data.data(), 1 << 20, nullptr).code(),
            absl::StatusCode::kUnavailable);
}

TEST(GlooCollectiveEndTest, AbortEndsConnecting) {
  const Ends ends = MakeEnds(2);
  InProcessStore store;
  std::thread abort([&] {
    absl::SleepFor(absl::Milliseconds(50));
    store.Close(absl::AbortedError("given up"));
    ends[0]->Abort(absl::AbortedError("given up"));
  });
  EXPECT_EQ(ends[0]->Connect(&store), absl::AbortedError("given up"));
  abort.join();
}

TEST(GlooCollectiveEndTest, AnAbortedGroupConnectsAnewAndAgain) {
  const Ends ends = MakeEnds(3);
  for (int round = 0; round < 5; ++round) {
    ConnectAll(ends);
    std::barrier all_summed(3);  // An abort may take what others have not received yet.
    OnEach(ends, [&](Collective& end) {
      std::vector<float> data(100'000, 1.0f);
      EXPECT_TRUE(end.AllReduce(data.data(), 100'000, nullptr).ok());
      EXPECT_EQ(data.back(), 3.0f);
      all_summed.arrive_and_wait();
      if (end.rank() != round % 3) {
        EXPECT_FALSE(end.AllReduce(data.data(), 100'000, nullptr).ok());
      }
      end.Abort(absl::AbortedError("the next round"));
    });
  }
}

TEST(GlooCollectiveEndTest, AnAddressOfAnotherMachineIsRefused) {
  const auto end = CreateGlooCollective(0, 2, {.host = "192.0.2.1"});
  EXPECT_EQ(end.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(end.status().message().find("192.0.2.1"), std::string::npos) << end.status();
}

}  // namespace
}  // namespace lmhead
