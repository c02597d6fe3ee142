#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/memory/host_block.h"

namespace lmhead {
namespace {

cudaMemoryType TypeOf(const void* data) {
  cudaPointerAttributes attributes{};
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, data), cudaSuccess);
  return attributes.type;
}

TEST(CudaHostBlockTest, IsPinnedAsLongAsItLives) {
  auto block = HostBlock::Map(1 << 20).value();
  const void* const data = block->data();
  EXPECT_EQ(TypeOf(data), cudaMemoryTypeUnregistered);
  ASSERT_TRUE(block->Pin(/*device=*/0).ok());
  EXPECT_EQ(TypeOf(data), cudaMemoryTypeHost);
  EXPECT_EQ(TypeOf(block->data() + block->size_bytes() - 1), cudaMemoryTypeHost);
  block = nullptr;
  EXPECT_EQ(TypeOf(data), cudaMemoryTypeUnregistered);
}

TEST(CudaHostBlockTest, ADeviceThatIsNotThereIsNamed) {
  const auto block = HostBlock::Map(4096).value();
  const absl::Status status = block->Pin(/*device=*/99);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), testing::HasSubstr("GPU 99 cannot be used: "));
  EXPECT_EQ(TypeOf(block->data()), cudaMemoryTypeUnregistered);
}

}  // namespace
}  // namespace lmhead
