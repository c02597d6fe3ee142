// lmhead-bench golden as a process, with a real service as its child.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"
#include "tests/util/temporary_folder.h"

namespace lmhead::bench {
namespace {

using ::testing::HasSubstr;

// Flips the sign of the first element, a double, of a tensor of a case file.
void FlipFirstSign(const std::string& tensor, std::string* bytes) {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes->data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(bytes->substr(sizeof header_bytes, header_bytes));
  const uint64_t offset = header[tensor]["data_offsets"][0];
  (*bytes)[sizeof header_bytes + header_bytes + offset + 7] ^= static_cast<char>(0x80);
}

class GoldenCommandTest : public ::testing::Test {
 protected:
  // Runs it; exit code into exit_code_, standard output is returned, errors with it when asked for.
  std::string Run(const std::string& arguments, bool with_errors = false) {
    const CommandResult result = RunCommand(absl::StrCat(
        "'", PathBesideTest("lmhead-bench"), "' golden ", arguments, with_errors ? " 2>&1" : ""));
    exit_code_ = result.exit_code;
    return result.output;
  }

  // Copies a case, with `change` applied to the bytes of the file.
  void CopyCase(
      const std::string& name,
      const std::function<void(std::string*)>& change = [](std::string*) {}) {
    std::ifstream in(GoldenFolder() + "/" + name + ".safetensors", std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    change(&bytes);
    std::ofstream(directory_.Path(name + ".safetensors"), std::ios::binary) << bytes;
  }

  const TemporaryFolder directory_;
  int exit_code_ = -1;
};

TEST_F(GoldenCommandTest, EveryCasePassesInEverySchedule) {
  const std::string output = Run(GoldenFolder() + " --backend cpu --json");
  EXPECT_EQ(exit_code_, 0) << output;
  const auto json = nlohmann::json::parse(output, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << output;
  EXPECT_EQ(json["passed"], 31);
  EXPECT_EQ(json["failed"], 0);
  EXPECT_EQ(json["not_yet"], 0);
  for (const auto& entry : json["cases"]) {
    EXPECT_EQ(entry["status"], "passed") << entry;
    EXPECT_TRUE(entry["outputs"].contains("grad_weight")) << entry;
  }
}

TEST_F(GoldenCommandTest, BFloat16StaysWithinTwiceThePlainError) {
  const std::string output = Run(GoldenFolder() + " --backend cpu --dtype bf16");
  EXPECT_EQ(exit_code_, 0) << output;
  EXPECT_THAT(output, HasSubstr("31 passed, 0 failed, 0 not yet"));
}

TEST_F(GoldenCommandTest, EveryCasePassesOnShards) {
  for (const int shards : {2, 3}) {
    const std::string output =
        Run(absl::StrCat(GoldenFolder(), " --backend cpu --shards=", shards));
    EXPECT_EQ(exit_code_, 0) << output;
    EXPECT_THAT(output, HasSubstr("31 passed, 0 failed, 0 not yet"));
  }
}

// Wrong results must not widen the bounds that are derived from them.
TEST_F(GoldenCommandTest, ACaseWithAWrongResultFails) {
  CopyCase("ce_plain");
  CopyCase("ce_smoothing", [](std::string* bytes) { FlipFirstSign("out.grad_weight", bytes); });
  const std::string output = Run(directory_.path() + " --backend cpu --schedule retain");
  EXPECT_EQ(exit_code_, 1) << output;
  EXPECT_THAT(output, HasSubstr("FAIL: the file's grad_weight is not that of its inputs"));
  EXPECT_THAT(output, HasSubstr("1 passed, 1 failed, 0 not yet"));
}

TEST_F(GoldenCommandTest, ABrokenFileFailsAndTheOthersStillRun) {
  CopyCase("ce_plain");
  CopyCase("ce_smoothing", [](std::string* bytes) { bytes->resize(bytes->size() / 2); });
  const std::string output = Run(directory_.path() + " --backend cpu --schedule eval");
  EXPECT_EQ(exit_code_, 1) << output;
  EXPECT_THAT(output, HasSubstr("truncated"));
  EXPECT_THAT(output, HasSubstr("1 passed, 1 failed, 0 not yet"));
}

TEST_F(GoldenCommandTest, WithoutCasesOrServiceNothingPasses) {
  EXPECT_THAT(Run(directory_.path(), true), HasSubstr("no case files"));
  EXPECT_EQ(exit_code_, 2);
  EXPECT_THAT(Run(directory_.Path("missing"), true), HasSubstr("missing"));
  EXPECT_EQ(exit_code_, 2);
  EXPECT_THAT(Run("", true), HasSubstr("one folder"));
  EXPECT_EQ(exit_code_, 2);
  CopyCase("ce_plain");
  EXPECT_THAT(Run(directory_.path() + " --shards=0", true),
              HasSubstr("--shards is 0; wanted 1 to"));
  EXPECT_EQ(exit_code_, 2);
  EXPECT_THAT(Run(directory_.path() + " --shards=2 --address=localhost:1", true),
              HasSubstr("--shards belongs to the service"));
  EXPECT_EQ(exit_code_, 2);
  EXPECT_THAT(Run(directory_.path() + " --schedule fused", true),
              HasSubstr("--schedule is 'fused'"));
  EXPECT_EQ(exit_code_, 2);
  EXPECT_THAT(Run(directory_.path() + " --server_binary " + directory_.Path("nothing"), true),
              HasSubstr("nothing"));
  EXPECT_EQ(exit_code_, 2);
}

}  // namespace
}  // namespace lmhead::bench
