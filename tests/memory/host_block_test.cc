#include "server/memory/host_block.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace lmhead {
namespace {

TEST(HostBlockTest, IsOfZerosAndAlignedToAPage) {
  constexpr int64_t kBytes = 100'000;
  const auto block = HostBlock::Map(kBytes).value();
  ASSERT_EQ(block->size_bytes(), kBytes);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(block->data()) % page, 0u);
  EXPECT_EQ(std::count(block->data(), block->data() + kBytes, std::byte{0}), kBytes);
  std::fill_n(block->data(), kBytes, std::byte{1});
}

TEST(HostBlockTest, NoRoomSaysHowMuchWasAskedFor) {
  const auto block = HostBlock::Map(int64_t{1} << 50);
  ASSERT_EQ(block.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(block.status().message(),
            "the system gave no memory for 1125899906842624 bytes (Cannot allocate memory)");
}

}  // namespace
}  // namespace lmhead
