// NCCL between the GPUs there are: alone on one, with one rank each on more.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "server/compute/nccl_collective.h"
#include "server/compute/rendezvous.h"

namespace lmhead {
namespace {

int NumDevices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// A rank with its device, a stream and a buffer.
struct GpuRank {
  std::unique_ptr<Collective> collective;
  cudaStream_t stream = nullptr;
  float* data = nullptr;
};

constexpr int64_t kCount = 300'000;

class NcclCollectiveTest : public testing::Test {
 protected:
  void Make(int32_t size, int32_t num_ranks, absl::Duration timeout = absl::Seconds(30)) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      absl::StatusOr<std::unique_ptr<Collective>> collective =
          CreateNcclCollective(rank, size, {.device = rank, .timeout = timeout, .times = &times_});
      ASSERT_TRUE(collective.ok()) << collective.status();
      GpuRank made = {.collective = *std::move(collective)};
      ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
      ASSERT_EQ(cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking), cudaSuccess);
      ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&made.data), kCount * sizeof(float)),
                cudaSuccess);
      ranks_.push_back(std::move(made));
    }
  }
  ~NcclCollectiveTest() override {
    for (GpuRank& rank : ranks_) {
      rank.collective.reset();
      cudaFree(rank.data);
      cudaStreamDestroy(rank.stream);
    }
  }

  void OnEach(const std::function<void(GpuRank&)>& work) {
    std::vector<std::thread> threads;
    for (GpuRank& rank : ranks_) {
      threads.emplace_back([&work, &rank] {
        cudaSetDevice(rank.collective->rank());
        work(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void ConnectAll() {
    InProcessStore store;
    OnEach([&](GpuRank& rank) {
      const absl::Status status = rank.collective->Connect(&store);
      EXPECT_TRUE(status.ok()) << status;
    });
  }

  static void Fill(GpuRank& rank, float value) {
    const std::vector<float> values(kCount, value);
    ASSERT_EQ(cudaMemcpyAsync(rank.data, values.data(), kCount * sizeof(float),
                              cudaMemcpyHostToDevice, rank.stream),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
  }
  static void ExpectAll(GpuRank& rank, float value) {
    std::vector<float> values(kCount);
    ASSERT_EQ(cudaMemcpyAsync(values.data(), rank.data, kCount * sizeof(float),
                              cudaMemcpyDeviceToHost, rank.stream),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
    EXPECT_EQ(values, std::vector<float>(kCount, value));
  }

  CollectiveTimes times_;  // Of all ranks together.
  std::vector<GpuRank> ranks_;
};

TEST_F(NcclCollectiveTest, ComputesWhatTheSeamSays) {
  const int32_t size = NumDevices();
  ASSERT_GT(size, 0);
  Make(size, size);
  ConnectAll();
  OnEach([size](GpuRank& rank) {
    const auto own = static_cast<float>(rank.collective->rank() + 1);
    const auto total = 0.5f * static_cast<float>(size * (size + 1));
    Fill(rank, own);
    ASSERT_TRUE(rank.collective->AllReduce(rank.data, kCount, rank.stream).ok());
    ExpectAll(rank, total);
    Fill(rank, own);
    ASSERT_TRUE(rank.collective->Reduce(rank.data, kCount, 0, rank.stream).ok());
    if (rank.collective->rank() == 0) ExpectAll(rank, total);
    Fill(rank, own);
    ASSERT_TRUE(
        rank.collective->Broadcast(rank.data, kCount * sizeof(float), size - 1, rank.stream).ok());
    ExpectAll(rank, static_cast<float>(size));
    const int64_t share = kCount / size;
    Fill(rank, own);
    ASSERT_TRUE(rank.collective
                    ->AllGather(rank.data + rank.collective->rank() * share, rank.data,
                                share * sizeof(float), rank.stream)
                    .ok());
    std::vector<float> gathered(share * size);
    ASSERT_EQ(cudaMemcpyAsync(gathered.data(), rank.data, gathered.size() * sizeof(float),
                              cudaMemcpyDeviceToHost, rank.stream),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
    for (int32_t from = 0; from < size; ++from) {
      EXPECT_EQ(gathered[from * share], static_cast<float>(from + 1));
    }
    EXPECT_TRUE(rank.collective->Check().ok());
  });
}

TEST_F(NcclCollectiveTest, CallsAreTimedOnceDone) {
  const int32_t size = NumDevices();
  ASSERT_GT(size, 0);
  Make(size, size);
  ConnectAll();
  OnEach([](GpuRank& rank) {
    Fill(rank, 1.0f);
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(rank.collective->Reduce(rank.data, kCount, 0, rank.stream).ok());
    }
    ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
  });
  const auto reduce = static_cast<size_t>(CollectiveOp::kReduce);
  const absl::Time end = absl::Now() + absl::Seconds(30);
  while (times_.calls[reduce] < 3 * size && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(times_.calls[reduce], 3 * size);
  EXPECT_GT(times_.nanoseconds[reduce], 0);
  EXPECT_LT(times_.nanoseconds[reduce], absl::ToInt64Nanoseconds(absl::Seconds(60) * size));
  EXPECT_EQ(times_.calls[static_cast<size_t>(CollectiveOp::kAllReduce)], 0);
}

TEST_F(NcclCollectiveTest, AnAbortedGroupConnectsAnew) {
  const int32_t size = NumDevices();
  ASSERT_GT(size, 0);
  Make(size, size);
  float value = 0.0f;
  for (int round = 0; round < 3; ++round) {
    ConnectAll();
    OnEach([size](GpuRank& rank) {
      Fill(rank, 1.0f);
      ASSERT_TRUE(rank.collective->AllReduce(rank.data, kCount, rank.stream).ok());
      ExpectAll(rank, static_cast<float>(size));
    });
    for (GpuRank& rank : ranks_) rank.collective->Abort(absl::AbortedError("the next round"));
    EXPECT_EQ(ranks_[0].collective->AllReduce(&value, 1, ranks_[0].stream),
              absl::AbortedError("the next round"));
  }
}

TEST_F(NcclCollectiveTest, ARankThatDoesNotConnectIsNamed) {
  ASSERT_GT(NumDevices(), 0);
  Make(/*size=*/2, /*num_ranks=*/1, absl::Seconds(1));
  InProcessStore store;
  const absl::Status status = ranks_[0].collective->Connect(&store);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("rank 1 did not connect"), std::string::npos) << status;
}

// The stream of the rank that waits is free again: what hangs on the device ends, too.
TEST_F(NcclCollectiveTest, ARankThatDoesNotTakePartEndsTheWait) {
  if (NumDevices() < 2) GTEST_SKIP() << "needs two GPUs";
  Make(2, 2, absl::Seconds(15));  // NCCL's own connecting takes seconds on a busy machine.
  ConnectAll();
  GpuRank& waiting = ranks_[0];
  cudaSetDevice(0);
  absl::Status status = waiting.collective->AllReduce(waiting.data, kCount, waiting.stream);
  for (const absl::Time end = absl::Now() + absl::Seconds(60); status.ok() && absl::Now() < end;) {
    status = waiting.collective->Check();
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(cudaStreamSynchronize(waiting.stream), cudaSuccess);
  ranks_[1].collective->Abort(status);
}

}  // namespace
}  // namespace lmhead
