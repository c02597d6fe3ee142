#include "server/memory/system_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/util/temporary_folder.h"

namespace lmhead {
namespace {

// A root directory with the files of /proc and /sys that matter.
class SystemMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Write("proc/meminfo", "MemTotal:       16384 kB\nMemFree:        1 kB\n");
  }

  void Write(const std::string& path, const std::string& contents) {
    const std::filesystem::path whole = root_.Path(path);
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << contents;
  }
  int64_t Bytes() { return ReadSystemMemoryBytes(root_.path()).value(); }

  const TemporaryFolder root_;
};

constexpr int64_t kMachine = 16384 * 1024;

TEST_F(SystemMemoryTest, WithoutControlGroupsItIsTheMachine) { EXPECT_EQ(Bytes(), kMachine); }

TEST_F(SystemMemoryTest, Version2TakesTheSmallestLimitOnTheWayUp) {
  Write("proc/self/cgroup", "0::/pod/container\n");
  Write("sys/fs/cgroup/pod/container/memory.max", "max\n");
  EXPECT_EQ(Bytes(), kMachine);
  Write("sys/fs/cgroup/pod/memory.max", "1000000\n");
  EXPECT_EQ(Bytes(), 1'000'000);
  Write("sys/fs/cgroup/pod/container/memory.max", "500000\n");
  EXPECT_EQ(Bytes(), 500'000);
}

// In a container the path may be the host's, which does not exist here.
TEST_F(SystemMemoryTest, Version2FallsBackToTheMountPoint) {
  Write("proc/self/cgroup", "0::/kubepods/abc\n");
  Write("sys/fs/cgroup/memory.max", "4096\n");
  EXPECT_EQ(Bytes(), 4096);
}

TEST_F(SystemMemoryTest, Version1ReadsTheMemoryController) {
  Write("proc/self/cgroup", "8:cpu,cpuacct:/a\n7:memory:/docker/b\n");
  Write("sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Bytes(), kMachine);
  Write("sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes", "2048\n");
  EXPECT_EQ(Bytes(), 2048);
}

TEST_F(SystemMemoryTest, SaysWhatIsMissing) {
  std::filesystem::remove(root_.Path("proc/meminfo"));
  EXPECT_EQ(ReadSystemMemoryBytes(root_.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadProcessMemory(root_.path()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SystemMemoryTest, DefaultLimitIsFourFifths) {
  EXPECT_EQ(DefaultMemoryLimitBytes(1000), 800);
}

TEST(ProcessMemoryTest, GrowsWithTouchedMemoryAndKeepsItsPeak) {
  constexpr int64_t kBytes = 64 << 20;
  const ProcessMemory before = ReadProcessMemory().value();
  EXPECT_GT(before.resident_bytes, 0);
  ProcessMemory during;
  {
    // Not from the allocator, which may have pages that were touched before.
    void* const block =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(block, MAP_FAILED);
    std::memset(block, 1, kBytes);
    during = ReadProcessMemory().value();
    munmap(block, kBytes);
  }
  EXPECT_GT(during.resident_bytes, before.resident_bytes + kBytes / 2);
  EXPECT_GE(ReadProcessMemory().value().peak_resident_bytes, during.resident_bytes - (1 << 20));
}

TEST(ProcessMemoryTest, TheRealSystemHasMemory) {
  EXPECT_GT(ReadSystemMemoryBytes().value(), 64 << 20);
}

}  // namespace
}  // namespace lmhead
