// Nothing large is allocated while data flows: the server process is watched by a preloaded library
// that counts allocations of a MiB and more.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/e2e/count_allocations.h"
#include "tests/e2e/service_fixture.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::e2e {
namespace {

// A server with the library in it.
class WatchedServer {
 public:
  WatchedServer() {
    const std::string path = folder_.Path("counts");
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    EXPECT_EQ(ftruncate(fd, sizeof(AllocationCounts)), 0);
    counts_ = static_cast<AllocationCounts*>(
        mmap(nullptr, sizeof(AllocationCounts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    setenv(kAllocationCountsVariable, path.c_str(), 1);
    setenv("LD_PRELOAD", PathBesideTest("liblmhead_count_allocations.so").c_str(), 1);
    server_ = StartServer({"--chunk_bytes_max=4194304", "--staging_slots=8"});
    unsetenv("LD_PRELOAD");
    unsetenv(kAllocationCountsVariable);
  }
  ~WatchedServer() {
    server_.reset();
    munmap(counts_, sizeof(AllocationCounts));
  }

  AllocationCounts& counts() { return *counts_; }
  const LocalServer& server() const { return *server_; }

 private:
  const TemporaryFolder folder_;
  AllocationCounts* counts_ = nullptr;
  std::unique_ptr<LocalServer> server_;
};

class AllocationTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef LMHEAD_SANITIZED
    GTEST_SKIP() << "a sanitizer brings its own allocator";
#endif
    watched_ = std::make_unique<WatchedServer>();
    client_ = ConnectTo(watched_->server().address());
    ASSERT_EQ(watched_->counts().attached.load(), 1u) << "the library is not in the server";
  }

  // Steps whose chunks have 2 MiB of hidden states each.
  void Train(const HeadShape& shape, uint64_t first_step, uint64_t last_step) {
    Client* const workers[] = {client_.get(), client_.get()};
    std::vector<Rows> rows = {MakeRows(shape, 4096, 1, 0), MakeRows(shape, 4096, 1, 1)};
    for (uint64_t step = first_step; step <= last_step; ++step) {
      LMHEAD_ASSERT_OK(RunStep(client_.get(), workers, shape, step, {.chunk_tokens = 1024}, &rows));
    }
  }

  std::unique_ptr<WatchedServer> watched_;
  std::unique_ptr<Client> client_;
};

constexpr uint64_t kWarmUpSteps = 3;

TEST_F(AllocationTest, NoLargeAllocationOnTheDataPath) {
  for (const auto schedule : {v1::SCHEDULE_RETAIN, v1::SCHEDULE_RECOMPUTE}) {
    const HeadShape shape{.name = schedule == v1::SCHEDULE_RETAIN ? "retain" : "recompute",
                          .vocab_size = 257,
                          .hidden_size = 512,
                          .schedule = schedule};
    SCOPED_TRACE(shape.name);
    LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
    Train(shape, 1, kWarmUpSteps);
    const uint64_t before = watched_->counts().num_large.load();
    watched_->counts().largest_bytes = 0;
    watched_->counts().print_stacks = 1;
    Train(shape, kWarmUpSteps + 1, kWarmUpSteps + 4);
    watched_->counts().print_stacks = 0;
    EXPECT_EQ(watched_->counts().num_large.load() - before, 0u)
        << "largest: " << watched_->counts().largest_bytes.load() << " bytes; server's log:\n"
        << watched_->server().Log();
  }
}

TEST_F(AllocationTest, TheCounterSeesALargeAllocation) {
  const HeadShape shape;
  LMHEAD_ASSERT_OK(CreateHead(client_.get(), shape));
  // By malloc: the server parses a million class weights.
  uint64_t before = watched_->counts().num_large.load();
  WriterSpec spec{.head = shape.name};
  spec.recipe.mutable_class_weights()->Resize(1 << 20, 1.0f);
  EXPECT_FALSE(client_->OpenWriter(spec).ok());
  EXPECT_GT(watched_->counts().num_large.load(), before);

  // By mmap: the arena of a head.
  before = watched_->counts().num_large.load();
  HeadShape large = shape;
  large.name = "large";
  large.vocab_size = 20000;
  LMHEAD_ASSERT_OK(client_->CreateHead(MakeSpec(large)));
  EXPECT_GT(watched_->counts().num_large.load(), before);
}

}  // namespace
}  // namespace lmhead::e2e
